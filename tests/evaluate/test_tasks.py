"""Tasks of a long context: what samples are, scores that equal those of `transformers`, and the command."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

import ithaca
from ithaca.base.errors import ConfigError, ModelError
from ithaca.evaluate.check import check_samples
from ithaca.evaluate.language import ASK, FACT, IS, SET, English, Language, Synthetic, read_language
from ithaca.evaluate.long_context import TaskOptions, choose_lengths, effective_length, measure_tasks, table
from ithaca.evaluate.score import Scored, score
from ithaca.evaluate.tasks import CANDIDATES, DEPTHS, TASKS, Sample, chances, least_tokens, make_sample
from ithaca.train.evaluation import command
from tests.models import make_model, save, save_tokenizer
from tests.nursery import Nursery
from tests.sampling import sampled

BYTES = English("bytes", lambda text: [*text.encode()], lambda ids: bytes(ids).decode(errors="replace"), [])
VOCAB = 97


def with_begin(folder: Path) -> Path:
    """A tokenizer of words that puts a token before a document."""
    vocab = {"<s>": 0, "?": 1, "magic": 2, "numbers": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Language]:
    top = tmp_path_factory.mktemp("languages")
    file = str(save_tokenizer(top) / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(file)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(file)
    return {"synthetic": Synthetic(VOCAB), "bytes": BYTES, "tokenizer": read_language(top, 256)}


@pytest.mark.parametrize("name", ["synthetic", "bytes", "tokenizer"])
@pytest.mark.parametrize("task", TASKS)
def test_samples(languages, name: str, task: str) -> None:
    words = languages[name]
    least = least_tokens(task, words, 1999, 0, 6)
    for length in (2 * least, 2 * least + 1, 1999):
        for number in range(6):
            sample = make_sample(task, words, length, 0, number)
            assert len(sample.prompt) + len(sample.answer) == length
            assert len(sample.candidates) == CANDIDATES
            assert sample.candidates.count(sample.answer) == 1
            assert sample.share_found(sample.answer) == 1
            assert sample.share_found(sample.candidates[(sample.right + 1) % CANDIDATES]) < 1
            again = make_sample(task, words, length, 0, number)
            assert np.array_equal(again.prompt, sample.prompt)
            assert again.candidates == sample.candidates
    one, other = (make_sample(task, words, length, 0, 7) for _ in range(2))
    assert np.array_equal(one.prompt, other.prompt)
    different = [(1, 1999, 7), (0, 2001, 7), (0, 1999, 8)]
    for seed, size, number in different:
        assert make_sample(task, words, size, seed, number).prompt.tolist()[-60:] != one.prompt.tolist()[-60:]


def test_a_prompt_begins_as_documents_do(tmp_path: Path) -> None:
    words = read_language(with_begin(tmp_path / "begin"), 300)
    sample = make_sample("needle", words, 99, 0, 2)
    assert sample.prompt[0] == 0
    assert (sample.prompt == 0).sum() == 1
    assert len(sample.prompt) + len(sample.answer) == 99


@pytest.mark.parametrize("name", ["synthetic", "bytes"])
def test_a_needle_is_at_its_depth(languages, name: str) -> None:
    words = languages[name]
    for number, depth in enumerate(DEPTHS):
        sample = make_sample("needle", words, 3000, 0, number)
        assert sample.depth == depth
        text, value = sample.prompt.tolist(), words.answer(sample.items)
        at = next(place for place in range(len(text)) if text[place : place + len(value)] == value)
        assert abs(at / len(text) - depth) < 0.06


def test_facts_of_a_synthetic_sample() -> None:
    words = Synthetic(VOCAB)
    text = make_sample("keys", words, 300, 0, 1)
    facts = {text.prompt[at + 1]: text.prompt[at + 3] for at in range(299) if text.prompt[at] == FACT}
    assert len(facts) == 4
    assert text.prompt[-3:].tolist() == [ASK, text.prompt[-2], IS]
    assert facts[text.prompt[-2]] == text.answer[0]
    text = make_sample("values", words, 300, 0, 1)
    assert [text.prompt[at + 3] for at in range(296) if text.prompt[at] == FACT] == text.answer
    text = make_sample("repeat", words, 301, 0, 1)
    whole = [*text.prompt.tolist(), *text.answer]
    assert whole[1:151] == whole[151:]


def test_the_chain_that_tracking_asks_for() -> None:
    """Where a chain begins and which places its variables have says nothing about which chain is asked for."""
    words, first, places = Synthetic(VOCAB), 0, set[tuple[int, ...]]()
    for number in range(100):
        text = make_sample("tracking", words, 300, 0, number)
        said = [(text.prompt[at + 1], text.prompt[at + 3]) for at in range(296) if text.prompt[at] == SET]
        chain, value = [], text.prompt[-2]
        for name, to in said:
            if to == value or to in chain:
                chain.append(name)
        assert chain == text.answer
        assert len(said) == 8
        first += said[0][0] in chain
        places.add(tuple(place for place, (name, _) in enumerate(said) if name in chain))
    assert 35 < first < 65
    assert len(places) > 40  # of the 70 that there are


def test_what_is_too_short() -> None:
    def check(task: str, words: Language, length: int, count: int = 1) -> None:
        check_samples(TaskOptions(tasks=(task,), count=count), words, [length], 256, "--tokens has")

    with pytest.raises(ConfigError, match=r"--tokens has 300, and task 'values' needs \d+ tokens"):
        check("values", BYTES, 300)
    check("repeat", Synthetic(VOCAB), 32)
    with pytest.raises(ConfigError, match=r"--tokens has 31, and task 'repeat' needs 32 tokens .*: 32 leaves room"):
        check("repeat", Synthetic(VOCAB), 31)
    with pytest.raises(ModelError, match=r"a vocabulary of 71 ids and no tokenizer\.json"):
        Synthetic(71)


@pytest.mark.parametrize("task", TASKS)
def test_every_sample_has_room(task: str) -> None:
    """At the shortest length that passes, all can be made, and one token less does not pass."""
    options = TaskOptions(tasks=(task,), count=50)
    for length in range(20, 700):
        least = least_tokens(task, BYTES, length, 0, 50)
        if least <= length:
            check_samples(options, BYTES, [length], 256, "--tokens has")
            assert all(make_sample(task, BYTES, length, 0, number).prompt.size for number in range(50))
        elif least == length + 1:
            with pytest.raises(ConfigError, match=f"evaluate.tokens has {length}, and task '{task}' needs {least} "):
                check_samples(options, BYTES, [64000, length], 256, "evaluate.tokens has")


def saved(folder: Path, inner: tokenizers.Tokenizer) -> Path:
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_that_the_model_does_not_know(languages) -> None:
    """The 256 bytes of this tokenizer have more ids than the text has; a task may use fewer than another."""
    words, tasks = languages["tokenizer"], TaskOptions(tasks=("needle", "repeat"), count=3)
    check_samples(tasks, words, [2000], 256, "--tokens has")
    largest = max(make_sample("needle", words, 2000, 0, number).prompt.max() for number in range(3))
    check_samples(TaskOptions(tasks=("needle",), count=3), words, [2000], largest + 1, "--tokens has")
    with pytest.raises(ModelError, match=f"task 'needle' has token {largest} .* a vocabulary of {largest} ids"):
        check_samples(tasks, words, [2000], largest, "--tokens has")


def test_answers_that_a_tokenizer_does_not_give_back(tmp_path: Path) -> None:
    """One without a decoder of its bytes, and one that splits at hyphens and does not join them again."""
    (tmp_path / "bytes").mkdir()
    words = read_language(save_tokenizer(tmp_path / "bytes"), 256)
    sentence = r"the right answer of task '{}' would score \d+%, not 100%, because tokenizer\.json does not decode"
    for task in ("needle", "values", "tracking", "copy"):
        with pytest.raises(ModelError, match=sentence.format(task)):
            check_samples(TaskOptions(tasks=("repeat", task)), words, [4000], 256, "--tokens has")
    letters = [chr(code) for code in range(33, 127)]
    vocab = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: number for number, word in enumerate(vocab)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer, inner.decoder = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.decoders.WordPiece()
    words = read_language(saved(tmp_path / "pieces", inner), 256)
    check_samples(TaskOptions(tasks=("needle", "keys", "values", "copy")), words, [4000], 256, "--tokens has")
    with pytest.raises(ModelError, match=sentence.format("tracking")):
        check_samples(TaskOptions(tasks=("tracking",)), words, [4000], 256, "--tokens has")


def test_the_language_of_a_model(tmp_path: Path) -> None:
    assert read_language(tmp_path, 97).name == "synthetic tokens, 97 ids"
    assert read_language(tmp_path, 256).name == "English, byte by byte"
    assert read_language(save_tokenizer(tmp_path), 97).name == "English, by tokenizer.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ithaca.IthacaError, match=r"tokenizer\.json"):
        read_language(tmp_path, 97)


def test_lengths() -> None:
    words = Synthetic(VOCAB)
    options = TaskOptions(tasks=("needle", "tracking"))
    assert choose_lengths(options, 2048, words) == (128, 256, 512, 1024, 2048)
    assert choose_lengths(options, 100, words) == (100,)  # 50 would leave too little noise
    assert choose_lengths(TaskOptions(tasks=("needle",), lengths=(512, 64, 512)), 512, words) == (64, 512)


def test_the_effective_length() -> None:
    def rows(*scores: float) -> list[dict[str, Any]]:
        return [{"tokens": 2**power, "greedy": score} for power, score in enumerate(scores)]

    assert effective_length(rows(1.0, 0.85, 0.9)) == 4
    assert effective_length(rows(1.0, 0.84, 0.9)) == 1  # a longer one that passes does not count
    assert effective_length(rows(0.5, 1.0)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 512}
    return save(make_model("llama3", **keys), tmp_path_factory.mktemp("tasks") / "model")


SAMPLES = [
    make_sample(task, Synthetic(VOCAB), length, 0, number)
    for task, length in (("needle", 65), ("keys", 130), ("values", 90), ("tracking", 101), ("copy", 77), ("repeat", 79))
    for number in range(3)
]


def scores(folder: Path, options: dict[str, Any], sizes: dict[str, int], longest: int) -> list[Scored]:
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**options), ithaca.mesh(**sizes))
    found = []
    for first in range(0, len(SAMPLES), 3):
        found += score(model, SAMPLES[first : first + 3], longest, 2)
    return found


def direct(folder: Path, samples: list[Sample]) -> list[tuple[list[float], list[int]]]:
    """Log-probabilities of all candidates and greedy tokens, each by a whole pass of `transformers`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    options = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    found = []
    for sample in samples:
        prompt = torch.from_numpy(sample.prompt)[None]
        likelihoods = []
        for ids in sample.candidates:
            text = torch.cat((prompt, torch.tensor([ids])), 1)
            with torch.no_grad():
                log_p = model(text).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
            likelihoods.append(log_p.gather(1, torch.tensor(ids)[:, None]).sum().item())
        options.max_new_tokens = len(sample.answer) + 2
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options)
        found.append((likelihoods, answer[0, prompt.shape[1] :].tolist()))
    return found


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[list[float], list[int]]]:
    return direct(folder, SAMPLES)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("recipe", ["dense", "ulysses", "sweep"])
def test_scores_equal_transformers(ranks, folder, wanted, world: int, recipe: str) -> None:
    """Answers and the likeliest candidate exactly; three samples are packed in one pass, or fill the data ranks."""
    options: dict[str, Any] = {"recipe": recipe} | ({"chunk": 50, "tile": 20} if recipe == "sweep" else {})
    sizes = {} if recipe == "dense" else {"ulysses": world}
    for found in ranks(world).run(scores, folder, options, sizes, 400 if world == 2 else 1):
        for sample, one, (likelihoods, answer) in zip(SAMPLES, found, wanted, strict=True):
            assert one.answer == answer
            assert one.likeliest == int(np.argmax(likelihoods))
            assert np.allclose(one.likelihoods, likelihoods, atol=1e-4)
            assert one.share == sample.share_found(answer)


def answers_of_two_lengths(folder: Path) -> tuple[list[Scored], list[Scored]]:
    """Samples whose answers, and so whose prompts, differ in length, together and alone."""
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(recipe="dense"), ithaca.mesh())
    samples = [SAMPLES[0], *SAMPLES[6:8], SAMPLES[1]]
    return score(model, samples, 400, 2), [score(model, [sample], 400, 2)[0] for sample in samples]


@pytest.mark.parametrize("world", [1, 2])
def test_answers_of_several_lengths(ranks, folder, world: int) -> None:
    for together, alone in ranks(world).run(answers_of_two_lengths, folder):
        assert [one.answer[:3] for one in together] == [one.answer[:3] for one in alone]
        assert [one.likeliest for one in together] == [one.likeliest for one in alone]


class Knowing:
    """In the place of a model: it knows the answers at lengths up to 100."""


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from ithaca.evaluate import long_context

    def known(model: object, samples: list[Sample], *_: object) -> list[Scored]:  # noqa: ARG001
        knows = len(samples[0].prompt) < 100
        right = [sample.right if knows else (sample.right + 1) % CANDIDATES for sample in samples]
        answers = [sample.candidates[number] for sample, number in zip(samples, right, strict=True)]
        return [
            Scored([], number, answer, sample.share_found(answer))
            for sample, number, answer in zip(samples, right, answers, strict=True)
        ]

    monkeypatch.setattr(long_context, "score", known)
    monkeypatch.setattr(Knowing, "free_tapes", lambda _: None, raising=False)
    options, words = TaskOptions(tasks=("needle", "values"), count=10), Synthetic(VOCAB)
    found = measure_tasks(Knowing(), words, options, (64, 128))  # pyrefly: ignore
    assert found is not None
    assert [task["effective_length"] for task in found] == [64, 64]
    needle, values = found
    assert [(row["likelihood"], row["greedy"]) for row in needle["lengths"]] == [(1, 1), (0, 0)]
    assert [row["greedy"] for row in values["lengths"]] == [1, 0.75]  # three of four values
    assert [cell["samples"] for cell in needle["lengths"][0]["depths"]] == [2] * 5
    assert values["lengths"][0]["depths"] == []
    said = table(found, words.name, 10, 256)
    assert said[0] == "Tasks in synthetic tokens, 97 ids, 10 samples each; trained length 256"
    assert said[3].split() == ["needle", "greedy", "100.0", "%", "0.0", "%", "4.5", "%", "64"]
    assert said[4].split() == ["likelihood", "100.0", "%", "0.0", "%", "12", "%"]


def test_chances() -> None:
    words = Synthetic(VOCAB)
    assert chances("needle", words) == (1 / 8, 1 / 22)
    assert chances("repeat", words) == (1 / 8, 1 / 45)


def test_the_command(nursery: Nursery, folder: Path, tmp_path: Path) -> None:
    words = ("evaluate", str(folder), "--task", "needle", "--task", "copy", "--tokens", "64,128", "--count", "6")
    where = ("--ranks", "2", "--set", "train.device=cpu", "--out", "found")
    end = nursery.command(*words, *where, folder=tmp_path)
    assert end.code == 0, end.err
    said = end.out.splitlines()
    assert said[0] == str(folder)
    assert said[1] == "Tasks in synthetic tokens, 97 ids, 6 samples each; trained length 512"
    assert said[-1] == "Written: found/tasks.json, found/tasks.txt, found/tasks.png, found/needle.png"
    assert (tmp_path / "found" / "tasks.txt").read_text().splitlines() == said[:-2]
    for name in ("tasks.png", "needle.png"):
        assert (tmp_path / "found" / name).read_bytes()[:4] == b"\x89PNG"
    end = nursery.command(*words, *where, "--json", folder=tmp_path)
    assert end.code == 0, end.err
    found = json.loads(end.out)
    assert json.loads((tmp_path / "found" / "tasks.json").read_text()) == found
    assert [task["task"] for task in found["tasks"]] == ["needle", "copy"]
    assert (found["trained_length"], found["context"], found["language"]) == (512, 128, "synthetic tokens, 97 ids")
    assert [row["tokens"] for row in found["tasks"][0]["lengths"]] == [64, 128]
    assert "loss" not in found


def unwritten(options: command.Options, how: str) -> None:
    """Evaluate while the disk is full; `how`: of a model with a folder that the user named, or of a run."""

    def full(folder: Path, *_: Any) -> list[Path]:
        raise OSError(28, "No space left on device", str(folder))

    command.write_results = full
    if how == "run":
        command._results_folder = lambda *_: Path("evaluation")
    command.evaluate_ranks(options)


@pytest.mark.parametrize("how", ["named", "run"])
def test_scores_outlive_a_folder_that_cannot_be_written(nursery: Nursery, folder: Path, tmp_path: Path, how: str):
    """They are printed before. A folder that the user named is an error."""
    out = tmp_path / "found" if how == "named" else None
    tasks = TaskOptions(tasks=("needle",), lengths=(64, 128), count=2, out=out)
    options = command.Options(model=folder, tokens=128, tasks=tasks, overrides=("train.device=cpu",))
    (end,) = nursery.job(unwritten, options, how)
    assert "Tasks in synthetic tokens, 97 ids, 2 samples each" in end.out
    assert "Written" not in end.out
    said = f"'{out or 'evaluation'}' could not be written (No space left on device"
    assert said in end.err
    assert (end.code == 0) == (how == "run"), end.err
    assert (f"warning: {said}" in end.err) == (how == "run")


WRONG = {
    "no data": ([], "nothing says what to evaluate on"),
    "no such task": (["--task", "needles"], "'needles' is not a task: needle, keys"),
    "too short": (["--task", "needle", "--tokens", "7"], "--tokens has 7, and task 'needle' needs 8 tokens"),
    "no length": (["--task", "needle", "--tokens", "64,1MB"], "--tokens: '1MB' is not a number of tokens"),
    "no limit": (["t.tokens", "--limit", "some"], "--limit: 'some' is not a number of tokens"),
    "no samples": (["--task", "needle", "--count", "0"], "--count is 0: 1 or more samples"),
    "several lengths of a loss": (["t.tokens", "--tokens", "64,128"], "--tokens has 2 lengths"),
    "a limit of nothing": (["--task", "needle", "--limit", "9"], "--limit is about a token file"),
    "a folder that is a file": (
        ["--task", "needle", "--tokens", "64", "--count", "1", "--out", "file"],
        "--out file cannot be a folder, because 'file' is none",
    ),
    "a folder in a file": (["--task", "needle", "--out", "file/a/b"], "--out file/a/b cannot be a folder, because '"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(nursery: Nursery, folder: Path, tmp_path: Path, name: str) -> None:
    words, said = WRONG[name]
    (tmp_path / "file").write_text("")
    end = nursery.command("evaluate", str(folder), *words, "--ranks", "1", "--set", "train.device=cpu", folder=tmp_path)
    assert end.code in (1, 2)
    assert said in end.err
    assert end.err.count("\n") == 1


EDGES = (0, 1024, 2048, 3500)


@pytest.fixture(scope="module")
def by_position(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[int]]:
    """A folder with a model and a token file; the mean losses and the labels by position, by `transformers`."""
    import transformers

    from ithaca.data.preparation.prepare import prepare
    from ithaca.data.reader import open_tokens

    top = tmp_path_factory.mktemp("positions")
    save(make_model("llama3", vocab_size=256, num_hidden_layers=2), top / "model")
    (top / "a.txt").write_text("sing in me, muse, " * 180)
    (top / "b.txt").write_text("and through me tell the story " * 40)
    prepare([top / "a.txt", top / "b.txt"], top / "t.tokens")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        top / "model", dtype=torch.float32, attn_implementation="eager"
    )
    file, sums, counts = open_tokens(top / "t.tokens"), [0.0] * 3, [0] * 3
    for start, stop in pairwise(file.bounds().tolist()):
        ids = torch.from_numpy(file.read(start, stop).tokens.astype(np.int64))[None]
        with torch.no_grad():
            losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for bucket, (low, high) in enumerate(pairwise(EDGES)):
            part = losses[max(low - 1, 0) : high - 1]  # label i + 1 has seen i + 1 tokens
            sums[bucket] += part.double().sum().item()
            counts[bucket] += len(part)
    return top, [total / count for total, count in zip(sums, counts, strict=True)], counts


@pytest.mark.parametrize(
    ("recipe", "world"),
    sampled(
        [(recipe, world) for recipe in ("dense", "ulysses", "sweep") for world in (1, 2, 4)],
        lambda *case: case in {("dense", 1), ("sweep", 2), ("ulysses", 4)},
    ),
)
def test_losses_by_position_equal_transformers(nursery: Nursery, by_position, recipe: str, world: int) -> None:
    """In float32, to 1e-5, bucket by bucket, under Plans and ranks."""
    folder, wanted, counts = by_position
    options = ["train.device=cpu", "model.dtype=float32", f"plan.recipe={recipe}"]
    options += ["plan.chunk=1000"] if recipe == "sweep" else []
    options += [] if recipe == "dense" else [f"mesh.ulysses={world}"]
    words = [word for option in options for word in ("--set", option)]
    end = nursery.command(
        "evaluate", "model", "t.tokens", "--ranks", str(world), "--tokens", "3500", "--json", *words, folder=folder
    )
    assert end.code == 0, end.err
    rows = json.loads(end.out)["positions"]
    assert [row["labels"] for row in rows] == counts
    assert [row["loss"] for row in rows] == pytest.approx(wanted, abs=1e-5)
