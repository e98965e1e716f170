"""The loss on held-out data: against `transformers` under every recipe, its memory, and the best checkpoint."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ithaca
from ithaca.base.errors import ConfigError, DataError
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import in_memory
from ithaca.data.windows import Windows
from ithaca.rehearsal.memory_meter import Meter, mark_gradients
from ithaca.train import measurements, validation
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from ithaca.train.validation import Losses, bucket_edges, measure
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.sampling import sampled

LENGTH, VOCAB = 48, 97
DOCUMENTS = [60, 1, 7, 30, 2, 47, 48, 49, 145, 5, 5, 90, 20]  # shorter than a row, as long, longer, and of one token
FIRST = 8  # where the first bucket of positions ends here

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, bounds, mask


def documents() -> Arrays:
    generator, total = np.random.default_rng(0), sum(DOCUMENTS)
    bounds = np.append(0, np.cumsum(DOCUMENTS))
    return generator.integers(0, VOCAB, total), bounds, generator.random(total) < 0.8


def pieces(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask of every document, cut as docs/evaluating.md says: one token overlaps."""
    tokens, bounds, learned = arrays
    found = []
    for start, stop in pairwise(bounds.tolist()):
        for first in range(start, max(stop - 1, start + 1), LENGTH - 1):
            part = slice(first, min(first + LENGTH, stop))
            found.append((tokens[part], learned[part]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3", torch.float64, num_hidden_layers=2), tmp_path_factory.mktemp("model") / "in")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Losses:
    """Float64 cross-entropy of the logits of `transformers`, piece by piece."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    edges = (0, 8, 16, 32, LENGTH)
    sums, counts = [0.0] * 4, [0] * 4
    for tokens, learned in pieces(documents()):
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for place, loss in enumerate(losses.tolist(), start=1):
            if learned[place]:
                bucket = sum(place >= edge for edge in edges[1:])
                sums[bucket], counts[bucket] = sums[bucket] + loss, counts[bucket] + 1
    assert sum(counts) > 300
    return Losses(edges, tuple(sums), tuple(counts))


WORDS: dict[str, dict[str, Any]] = {
    "dense": {"recipe": "dense"},
    "ulysses": {"recipe": "ulysses", "checkpoint": "selective"},
    "untied": {"recipe": "untied", "tile": 7},
    "ring": {"recipe": "ring"},
    "hybrid": {"recipe": "hybrid", "travel": "gather"},
    "tensor": {"recipe": "tensor", "loss_tile": 9},
    "alst": {"recipe": "alst", "tile": 5},
    "fpdt": {"recipe": "fpdt", "chunks": 3},
    "sweep": {"recipe": "sweep", "chunk": 20, "x": "host, rebuild", "loss_tile": 9},
}


def axes(recipe: str, ranks: int) -> dict[str, int]:
    """Ranks that share a sequence, and data ranks beside them where there are four."""
    if recipe == "dense":
        return {}
    if recipe == "ring":
        return {"ring": ranks}
    if recipe == "hybrid":
        return {"ring": min(ranks, 2), "ulysses": max(ranks // 2, 1)}
    if recipe == "tensor":
        return {"tensor": ranks}
    return {"ulysses": min(ranks, 2) if recipe == "alst" else ranks}


def measured(folder: Path, recipe: str, ranks: int, rows: int, dtype: str) -> Losses | None:
    model = ithaca.apply(
        ithaca.load_model(folder, dtype), ithaca.Plan(**WORDS[recipe]), ithaca.mesh(**axes(recipe, ranks))
    )
    tokens, bounds, learned = documents()
    windows = Windows(in_memory(tokens, bounds, learned, vocab=VOCAB), LENGTH)
    with mock.patch.object(validation, "FIRST", FIRST):
        return measure(model, windows, rows * model.mesh.data_ranks)


KEPT = {
    ("dense", 4),
    ("ulysses", 2),
    ("untied", 1),
    ("ring", 2),
    ("hybrid", 4),
    ("alst", 4),
    ("tensor", 2),
    ("sweep", 1),
    ("sweep", 4),
}


@pytest.mark.parametrize(
    ("recipe", "world"),
    sampled([(recipe, world) for recipe in WORDS for world in (1, 2, 4)], lambda *case: case in KEPT),
)
def test_the_loss_is_that_of_transformers(ranks, folder: Path, oracle: Losses, recipe: str, world: int) -> None:
    """By bucket, too; rows do not divide by ranks, labels are missing, and documents are cut."""
    found = ranks(world).run(measured, folder, recipe, world, 1 + world % 2, "float64")
    assert all(losses == found[0] for losses in found)
    assert found[0].counts == oracle.counts
    assert found[0].sums == pytest.approx(oracle.sums, rel=1e-7)  # transformers has rotary angles in fp32
    assert abs(found[0].loss - oracle.loss) < 1e-6
    assert sum(found[0].sums) / found[0].labels == found[0].loss


def test_buckets() -> None:
    assert bucket_edges(512) == (0, 512)
    assert bucket_edges(1024) == (0, 1024)
    assert bucket_edges(1025) == (0, 1024, 1025)
    assert bucket_edges(5000) == (0, 1024, 2048, 4096, 5000)


def peaks(folder: Path, recipe: str, ranks: int) -> tuple[int, int, int]:
    """The most bytes of tensors in a training step and in a validation between two of them, and those in between."""
    tokens, bounds, learned = documents()
    data = in_memory(tokens, bounds, learned, vocab=VOCAB)
    grid = ithaca.mesh(**axes(recipe, ranks))
    with Meter(torch.device("cpu"), torch.float32) as meter:
        model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**WORDS[recipe]), grid)
        mark_gradients(model.decoder)
        optimizer = ithaca.make_optimizer(model, learning_rate=1e-3)
        model.allocate(2 * grid.data_ranks, LENGTH)

        def step() -> int:
            meter.restart()
            rows = torch.from_numpy(tokens[: 2 * grid.data_ranks * LENGTH].reshape(-1, LENGTH))
            model(model.shard(rows, rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return sum(meter.peak.values())

        step()  # AdamW's moments come with the first
        training = step()
        before = sum(meter.now.values())
        meter.restart()
        measure(model, Windows(data, LENGTH), 2 * grid.data_ranks)
        return training, sum(meter.peak.values()), sum(meter.now.values()) - before


@pytest.mark.parametrize(
    ("recipe", "world"),
    sampled(
        [(recipe, world) for recipe in WORDS for world in (1, 2)],
        lambda *case: case in {("dense", 2), ("alst", 1), ("sweep", 2), ("ring", 2)},
    ),
)
def test_it_takes_no_more_memory_than_training(ranks, tmp_path: Path, recipe: str, world: int) -> None:
    """Counted tensor by tensor; nothing is left afterwards, but for the sums that gloo's thread may still hold."""
    folder = save(make_model("qwen3", num_hidden_layers=2), tmp_path / "model")
    for training, validating, left in ranks(world).run(peaks, folder, recipe, world):
        assert 0 < validating < training
        assert left <= 16


# From here on whole runs
@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of two documents."""
    folder = tmp_path_factory.mktemp("held")
    for name, text in (("a", "sing, o muse, of the man of many turns " * 5), ("b", "who wandered far " * 2)):
        (folder / f"{name}.txt").write_text(text)
    prepare([folder], folder / "held.tokens")
    return folder / "held.tokens"


def configured(config: Config, source: str = "", steps: int = 8, **run: Any) -> Config:
    return replace(
        config,
        data=replace(config.data, validation=source),
        train=replace(config.train, steps=steps, batch=2, learning_rate=1e-2),
        run=replace(config.run, **{"checkpoint_every": 4} | run),
    )


def done(ends: Sequence[Any]) -> str:
    for end in ends:
        assert end.code == 0, end.err
    return ends[0].out


def test_a_run_says_what_it_reaches(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """Before the first step, every two, and at the end; training is, bit for bit, that of a run without validation."""
    config = configured(small_config, str(held), 5, validate_every=2)
    said = done(nursery.job(train, config, tmp_path / "run", ranks=2))
    plain = done(nursery.job(train, configured(small_config, "", 5), tmp_path / "plain", ranks=2))
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "plain")
    same = ("step", "loss", "gradient_norm", "learning_rate")
    assert [[line[name] for name in same] for line in run.read_metrics()] == [
        [line[name] for name in same] for line in other.read_metrics()
    ]
    assert other.read_validations() == []
    assert "alidation" not in plain
    found = {line["step"]: line["validation_loss"] for line in run.read_validations()}
    assert [*found] == [0, 2, 4, 5]
    assert found[5] < found[0] - 1
    assert {line["validation_labels"] for line in run.read_validations()} == {195 + 34 - 2}
    for text in (said, run.log.read_text()):
        assert "Validation: 227 labels in 229 tokens of" in text
        assert f"Validation after step 0: loss {found[0]:.4f}\n" in text
        assert f"Validation after step 2: loss {found[2]:.4f}, the lowest so far\n" in text
        assert f"Validation loss: {found[0]:.3f} at step 0 -> {found[5]:.3f} at step 5; lowest" in text
    assert f"validation {found[2]:.3f}" in next(line for line in said.splitlines() if line.startswith("Step 3/5"))


def test_a_share_is_never_trained_on(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """A tenth of the documents; another share, none or a file instead would change the data, and is refused."""
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} " * 9)
    prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "all.tokens")
    config = configured(small_config, "0.1", 4, validate_every=0)
    config = replace(config, data=replace(config.data, source=str(tmp_path / "all.tokens")))
    said = done(nursery.job(train, config, tmp_path / "run"))
    assert "2 documents in" in said
    assert [line["step"] for line in RunFolder(tmp_path / "run").read_validations()] == [0, 4]
    manifest = CheckpointFolder(RunFolder(tmp_path / "run").checkpoints).manifest(4) or {}
    assert (manifest["data"]["documents"], manifest["validation"]["data"]["documents"]) == (18, 2)
    for share in ("0.2", "", str(tmp_path / "all.tokens")):
        changed = replace(config, data=replace(config.data, validation=share))
        with pytest.raises(ConfigError, match=r"its checkpoints have '0\.1': --set data\.validation=0\.1 continues it"):
            RunFolder(tmp_path / "run").check(changed)
    # And if a checkpoint's record said nothing of the share: the documents are not those that it was trained on
    training = config.toml().replace('validation = "0.1"', 'validation = "0.3"')
    end = nursery.job(forged, config, tmp_path / "run", training)[0]
    assert "the data have changed since the checkpoint of step 4" in end.err


def forged(config: Config, path: Path, toml: str) -> None:
    """Continue with another share, past the comparison of configurations."""
    RunFolder.check = lambda *_: None  # pyrefly: ignore
    Config.conflict = lambda *_: None  # pyrefly: ignore
    train(replace(config, data=replace(config.data, validation=toml.partition('validation = "')[2][:3])), path)


def scripted(config: Config, path: Path, losses: dict[int, float], dies: int | None = None) -> None:
    """Train with these validation losses, by step; a rank kills itself in a step."""
    here: list[TrainingRun] = []
    step, allocate = TrainingRun._step, TrainingRun._allocate

    def watched(run: TrainingRun) -> dict[str, Any]:
        if run.done + 1 == dies:
            run.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(run)

    def allocated(run: TrainingRun) -> None:
        here[:] = [run]
        allocate(run)

    TrainingRun._step, TrainingRun._allocate = watched, allocated
    measurements.measure = lambda *_: Losses((0, 1), (losses[here[0].done],), (1,))
    train(config, path)


def kept(path: Path) -> list[int]:
    return CheckpointFolder(RunFolder(path).checkpoints).steps()


def test_the_best_checkpoint_stays(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """It is written when it is reached, between two others as well, and outlives kills, restarts and run.keep."""
    config, path = configured(small_config, str(held), 12, validate_every=3, keep=1), tmp_path / "run"
    losses = {0: 1.0, 3: 5.0, 6: 3.0, 9: 4.0, 12: 3.5}
    (end,) = nursery.job(scripted, config, path, losses, 8)
    assert end.code < 0
    assert kept(path) == [6]  # of step 4 and 6, the newest; it is the best
    assert CheckpointFolder(RunFolder(path).checkpoints).best() == (6, 3.0)
    said = done(nursery.job(scripted, config, path, losses))
    assert kept(path) == [6, 12]
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0, 3, 6, 9, 12]
    assert "no step is better than the start" in said
    done(nursery.job(scripted, replace(config, train=replace(config.train, steps=14)), path, {14: 2.5}))
    assert kept(path) == [14]
    manifest = CheckpointFolder(RunFolder(path).checkpoints).manifest(14) or {}
    assert manifest["validation"]["start"] == [0, 1.0]
    assert manifest["validation"]["last"] == [14, 2.5]


def test_a_best_checkpoint_without_its_manifest(nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """The next best is taken, and it is said."""
    config, path = configured(small_config, str(held), 4, validate_every=2), tmp_path / "run"
    done(nursery.job(scripted, config, path, {0: 9.0, 2: 1.0, 4: 2.0}))
    (path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    (end,) = nursery.job(export, path, tmp_path / "best", None, True)
    assert end.code == 0
    assert "The manifest of step 2 is damaged, so its validation loss is not known" in end.err


def test_a_run_without_validation_keeps_the_best_it_has(nursery, small_config: Config, held, tmp_path: Path) -> None:
    config, path = configured(small_config, str(held), 4, validate_every=2, keep=1), tmp_path / "run"
    done(nursery.job(scripted, config, path, {0: 9.0, 2: 1.0, 4: 2.0}))
    assert kept(path) == [2, 4]
    assert nursery.job(export, path, tmp_path / "best", None, True)[0].code == 0
    done(nursery.job(train, configured(small_config, "", 8, keep=1), path))
    assert kept(path) == [2, 8]
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0, 2, 4]


def test_validation_data_that_change(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """They may, and it is said; losses on others are not compared."""
    config, path = configured(small_config, str(held), 4, validate_every=2), tmp_path / "run"
    done(nursery.job(scripted, config, path, {0: 1.0, 2: 0.5, 4: 2.0}))
    fewer = configured(small_config, str(held), 6, validate_every=2, validation_tokens=100)
    said = done(nursery.job(scripted, fewer, path, {4: 7.0, 6: 6.0}))
    assert "the validation data have changed since the checkpoint of step 4" in said
    assert "run.validation_tokens leaves out the other 129 tokens" in said
    assert "Validation after step 6: loss 6.0000, the lowest so far" in said
    assert CheckpointFolder(RunFolder(path).checkpoints).best() == (6, 6.0)


def test_a_kill_before_the_first_checkpoint(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """The validations of steps that are done again are cut off."""
    config, path = configured(small_config, str(held), 4, validate_every=1), tmp_path / "run"
    rising = {step: 1.0 + step for step in range(5)}
    config = replace(config, run=replace(config.run, checkpoint_every=0))
    nursery.job(scripted, config, path, rising, 1)
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0]
    done(nursery.job(scripted, config, path, rising))
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0, 1, 2, 3, 4]


def test_the_best_could_not_be_written(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """Then a later one, worse than it, is the best that there is."""
    config, path = configured(small_config, str(held), 6, validate_every=2, checkpoint_every=0), tmp_path / "run"
    said = done(nursery.job(failing, config, path, {0: 9.0, 2: 1.0, 4: 3.0, 6: 2.0}))
    assert "the checkpoint of step 2 could not be written" in said
    assert "Validation after step 4: loss 3.0000, the lowest so far" in said
    assert CheckpointFolder(RunFolder(path).checkpoints).best() == (6, 2.0)


def failing(config: Config, path: Path, losses: dict[int, float]) -> None:
    """Train as `scripted` does; the checkpoint of step 2 fails before step 3."""
    complete, step = CheckpointFolder.complete, TrainingRun._step

    def refuse(files: CheckpointFolder, partial: Path, number: int, manifest: dict[str, Any]) -> str | None:
        if number == 2:
            raise OSError(5, "Input/output error")
        return complete(files, partial, number, manifest)

    def after_writing(run: TrainingRun) -> dict[str, Any]:
        run.checkpoints.wait()
        return step(run)

    CheckpointFolder.complete, TrainingRun._step = refuse, after_writing
    scripted(config, path, losses)


def stopping(config: Config, path: Path, when: int) -> None:
    """Train; a user asks to stop in a step."""
    step = TrainingRun._step

    def asked(run: TrainingRun) -> dict[str, Any]:
        if run.done + 1 == when:
            run.stop.ask()
        return step(run)

    TrainingRun._step = asked
    train(config, path)


def test_a_stop_does_not_wait_for_a_validation(nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    config, path = configured(small_config, str(held), 4, validate_every=2), tmp_path / "run"
    said = done(nursery.job(stopping, config, path, 2, ranks=2))
    assert "Stopped after step 2" in said
    assert "Validation loss" not in said
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0]
    done(nursery.job(train, config, path, ranks=2))
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0, 2, 4]


def test_a_stop_in_the_first_validation(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """No step is done after it, and the run that continues measures its start."""
    config, path = configured(small_config, str(held), 4, validate_every=2), tmp_path / "run"
    for _ in range(2):
        said = done(nursery.job(stopping_at_once, config, path, ranks=2))
        assert "Stopped after step 0" in said
        assert kept(path) == []
    done(nursery.job(train, config, path, ranks=2))
    assert [line["step"] for line in RunFolder(path).read_validations()] == [0, 2, 4]


def stopping_at_once(config: Config, path: Path) -> None:
    """Train; a user asks to stop before the first validation has ended."""
    allocate = TrainingRun._allocate

    def asked(run: TrainingRun) -> None:
        allocate(run)
        run.stop.ask()

    TrainingRun._allocate = asked
    train(config, path)


def test_a_validation_that_was_broken_off_can_be_the_best(nursery, small_config: Config, held, tmp_path: Path) -> None:
    """It is made again when the run continues, and the checkpoint that is there has its loss from then on."""
    config, path = configured(small_config, str(held), 4, validate_every=2, keep=1), tmp_path / "run"
    done(nursery.job(stopping, config, path, 2))
    files = CheckpointFolder(RunFolder(path).checkpoints)
    assert (files.steps(), files.best()) == ([2], None)
    said = done(nursery.job(scripted, config, path, {2: 1.0, 4: 3.0}, ranks=2))
    assert "Validation after step 2: loss 1.0000, the lowest so far" in said
    assert (files.steps(), files.best()) == ([2, 4], (2, 1.0))
    assert files.damage(2, {}) is None
    assert nursery.job(export, path, tmp_path / "best", None, True)[0].code == 0


def test_a_write_that_fails_is_noticed_rank_by_rank(nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    """The thread of one rank may end a step later than that of another; they agree all the same."""
    config, path = configured(small_config, str(held), 6, validate_every=2, checkpoint_every=0), tmp_path / "run"
    said = done(nursery.job(noticing_late, config, path, {0: 9.0, 2: 1.0, 4: 3.0, 6: 2.0}, ranks=2))
    assert "the checkpoint of step 2 could not be written" in said
    assert CheckpointFolder(RunFolder(path).checkpoints).best() == (6, 2.0)


def noticing_late(config: Config, path: Path, losses: dict[int, float]) -> None:
    """Train as `failing` does; all ranks but the first hear of it two steps later."""
    problem, asked = Checkpoints.problem, iter(range(9))

    def late(checkpoints: Checkpoints) -> tuple[int, str, bool] | None:
        return problem(checkpoints) if dist.get_rank() == 0 or next(asked) > 3 else None

    Checkpoints.problem = late
    failing(replace(config, run=replace(config.run, timeout=20.0)), path, losses)


def test_a_loss_that_is_no_number(nursery: Nursery, small_config: Config, held: Path, tmp_path: Path) -> None:
    (end,) = nursery.job(scripted, configured(small_config, str(held)), tmp_path / "run", {0: float("nan")})
    assert "the validation loss after step 0 is nan: there is no checkpoint yet" in end.err


def test_manifests_that_say_nonsense_of_validation(small_config: Config, tmp_path: Path) -> None:
    from ithaca.checkpoint.files import MANIFEST, text_sha256

    files = CheckpointFolder(tmp_path)
    sound = {"data": {}, "start": [0, 1.0], "last": [4, 0.5]}
    for noted, fine in [(sound, True), ([], False), ({"data": {}}, False), (sound | {"last": "4"}, False)]:
        files.path(4).mkdir(exist_ok=True)
        manifest = {"step": 4, "tensors": {}, "files": {}, "random": [], "config": small_config.toml()}
        manifest |= {"data": {"tokens": 1, "documents": 1, "sha256": ""}, "validation": noted}
        (files.path(4) / MANIFEST).write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))
        assert (files.best() == (4, 0.5)) is fine
        assert (files.manifest(4) is not None) is fine


@pytest.mark.parametrize("share", ["0.5", "held"])
def test_nothing_to_validate_on(nursery: Nursery, small_config: Config, tmp_path: Path, share: str) -> None:
    """Documents of one token have no label: one sentence, and no run folder."""
    data = tmp_path / "ones.tokens"
    np.save(tmp_path / "ids.npy", np.array([[1]] * 3))
    (tmp_path / "long.txt").write_text("a" * 400)
    prepare([tmp_path / "ids.npy"], data)
    config = configured(small_config, share if share != "held" else str(data))
    if share != "held":
        config = replace(config, data=replace(config.data, source=str(data)))
    (end,) = nursery.job(refused, config, tmp_path / "run")
    assert "has 0 labels" in end.out
    assert not (tmp_path / "run").exists()


def refused(config: Config, path: Path) -> None:
    try:
        train(config, path)
    except DataError as error:
        print(error)


@pytest.mark.parametrize("kind", ["source", "mix", "long_share"])
def test_the_data_to_train_on_are_none_to_validate_on(
    nursery: Nursery, small_config: Config, tmp_path: Path, kind: str
) -> None:
    """Under any name, and also where a run draws long and short ones apart."""
    for name, word in (("a", "sea "), ("b", "wine "), ("again", "sea ")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": word * n}) + "\n" for n in (10, 90)))
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    options: dict[str, Any] = {"mix": {b: 1.0, a: 3.0}} if kind == "mix" else {"source": a}
    options |= {"long_share": 0.5, "long": 100} if kind == "long_share" else {}
    config = configured(small_config, str(tmp_path / "again"))
    config = replace(config, data=replace(config.data, **options))
    (end,) = nursery.job(refused, config, tmp_path / "run")
    name = f"'{a}' of data.mix" if kind == "mix" else "data.source"
    assert f"data.validation and {name} hold the same documents: data.validation=2% holds some out" in end.out
    assert not (tmp_path / "run").exists()


def test_an_epoch_is_what_is_left_to_train_on(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("a" * 128)
    prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "all.tokens")
    config = configured(small_config, "0.4", 1, validate_every=0)
    options = replace(config.train, steps=None, epochs=1, tokens=64)
    data = replace(config.data, source=str(tmp_path / "all.tokens"))
    said = done(nursery.job(train, replace(config, train=options, data=data), tmp_path / "run"))
    assert "Each epoch: 768 tokens, 12 sequences, 6 steps; the run is 1 epoch" in said
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 6


def test_a_share_of_a_mixture(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """Each file gives its share, and the loss is over what all of them gave."""
    for name, count in (("a", 10), ("b", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name}{number} " * 30)
        prepare([tmp_path / name], tmp_path / f"{name}.tokens")
    config = configured(small_config, "0.2", 2, validate_every=0)
    mix = {str(tmp_path / "a.tokens"): 0.7, str(tmp_path / "b.tokens"): 0.3}
    config = replace(config, data=replace(config.data, mix=mix))
    said = done(nursery.job(train, config, tmp_path / "run", ranks=2))
    assert "Validation: 267 labels in 270 tokens of what data.validation=0.2 holds out, 3 documents" in said
    manifest = CheckpointFolder(RunFolder(tmp_path / "run").checkpoints).manifest(2) or {}
    assert [source["documents"] for source in manifest["data"]["mix"]] == [8, 4]
    assert manifest["validation"]["data"]["documents"] == 3
