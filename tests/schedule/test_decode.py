"""Greedy decoding under Plans: the tokens of `transformers` for every recipe, number of ranks, document and place."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.errors import InputError, PlanError
from ithaca.parallel.layout import Layout
from ithaca.schedule import memory_check
from ithaca.schedule.decode_cost import cache_tapes
from ithaca.schedule.kv_cache import local_range
from tests.models import make_model, save
from tests.schedule.contexts import random_delays

NEW = 9
# Grouped and single K/V heads, tied and untied, with and without rotary layers
FAMILIES = {
    "gqa-untied": ("llama3", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}),
    "gqa-tied": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "one-kv-head": ("smollm3", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 6}),
}
SWEEP = {"recipe": "sweep", "chunk": 16, "tile": 7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("decode")
    return {
        name: save(make_model(family, seed=seed, **keys), top / name)
        for seed, (name, (family, keys)) in enumerate(FAMILIES.items())
    }


def prompts(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def generated(folder: Path, rows: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tokens of `transformers.generate`, row by row."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = [
        model.generate(row[None], attention_mask=torch.ones_like(row[None]), generation_config=options)[0, len(row) :]
        for row in rows
    ]
    return torch.stack(found)


def decoded(
    folder: Path,
    options: dict[str, Any],
    sizes: dict[str, int],
    tokens: torch.Tensor,
    documents: torch.Tensor | None = None,
    place: str | None = None,
    twice: bool = False,
) -> torch.Tensor:
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**options), ithaca.mesh(**sizes))
    model.engine.poison = True
    if place:
        model.reservation._cache_place = lambda _: place  # pyrefly: ignore
        model.engine.before_copy = random_delays(model.mesh.rank)
    if twice:  # other prompts first, in the same memory
        model.greedy_decode(tokens.flip(-1), 3, documents)
    return model.greedy_decode(tokens, NEW, documents)


PLANS = {
    "dense": ({"recipe": "dense"}, {}),
    "dense-tiles": ({"recipe": "dense", "checkpoint": "full", "tile": 10}, {}),
    "ulysses": ({"recipe": "ulysses"}, {"ulysses": -1}),
    "untied": ({"recipe": "untied", "tile": 11}, {"ulysses": -1}),
    "sweep": (SWEEP, {"ulysses": -1}),
    "sweep-host": ({**SWEEP, "kv": "host", "residual": "host"}, {"ulysses": -1}),
    "sweep-ring": (SWEEP, {"ring": -1}),
    "sweep-zero-2": ({**SWEEP, "zero": 2}, {"ulysses": -1}),
    "ring": ({"recipe": "ring"}, {"ring": -1}),
}


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Prompts for each family, and what `transformers` continues them by."""
    rows = [prompts(4, length, seed) for seed, length in enumerate((37, 61, 50))]
    return {name: (tokens, generated(folders[name], list(tokens))) for name, tokens in zip(folders, rows, strict=True)}


ALWAYS = {1: ("dense", "sweep"), 2: tuple(PLANS), 4: ("ulysses", "sweep-ring")}  # the others in the full suite


def matrix() -> list[Any]:
    return [
        pytest.param(world, name, marks=() if name in always else (pytest.mark.full,))
        for world, always in ALWAYS.items()
        for name in PLANS
    ]


@pytest.mark.parametrize(("world", "name"), matrix())
def test_equals_transformers(ranks, folders, wanted, world: int, name: str) -> None:
    options, axes = PLANS[name]
    sizes = dict.fromkeys(axes, world)
    for family, folder in folders.items():
        for rank in ranks(world).run(decoded, folder, options, sizes, wanted[family][0]):
            assert torch.equal(rank, wanted[family][1]), family


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", ["dense-tiles", "sweep", "sweep-ring"])
def test_places_and_memory_that_is_used_again(ranks, folders, name: str, place: str) -> None:
    """K and V on the device or in host memory, with copies that are late; the second prompts overwrite the first."""
    options, axes = PLANS[name]
    tokens = prompts(2, 45, seed=5)
    wanted = generated(folders["gqa-untied"], list(tokens))
    sizes = dict.fromkeys(axes, 2)
    for rank in ranks(2).run(decoded, folders["gqa-untied"], options, sizes, tokens, None, place, True):
        assert torch.equal(rank, wanted)


@pytest.mark.parametrize(("world", "axis"), [(1, "ring"), (3, "ulysses"), (4, "ring")])
@pytest.mark.parametrize("start", [0, 1, 20, 36])
def test_a_new_token_sees_the_last_document(ranks, folders, world: int, axis: str, start: int) -> None:
    tokens, documents = prompts(2, 37, seed=start), torch.zeros(2, 37, dtype=torch.int64)
    documents[0, start:] = 1
    documents[1, 7:] = 1
    documents[1, 30:] = 2
    wanted = generated(folders["gqa-tied"], [tokens[0, start:], tokens[1, 30:]])
    found = ranks(world).run(decoded, folders["gqa-tied"], SWEEP, {axis: world}, tokens, documents)
    assert torch.equal(found[0], wanted)


def test_rows_over_data_ranks_that_share_sequences(ranks, folders) -> None:
    """Three prompts on two pairs of ranks: one pair has two of them."""
    tokens = prompts(3, 33, seed=9)
    wanted = generated(folders["gqa-untied"], list(tokens))
    found = ranks(4).run(decoded, folders["gqa-untied"], SWEEP, {"shard": 2, "ulysses": 2}, tokens)
    assert all(torch.equal(rank, wanted) for rank in found)


def test_one_prompt_without_rows_and_one_token(ranks, folders) -> None:
    tokens = prompts(1, 1, seed=3)
    wanted = generated(folders["gqa-tied"], list(tokens))
    (found,) = ranks(1).run(decoded, folders["gqa-tied"], {"recipe": "dense"}, {}, tokens[0])
    assert torch.equal(found, wanted[0])


def scored(folder: Path, sizes: dict[str, int], tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of continuations, [rows, copies, tokens], by steps from the cache."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(**SWEEP), ithaca.mesh(**sizes))
    rows, copies, length = ends.shape
    found = model.read_prompts(tokens)
    found.begin(copies, length)
    flat, feed, terms = ends.flatten(0, 1), tokens[:, -1].repeat_interleave(copies), []
    for at in range(length):
        terms.append(found.step(feed).log_softmax(-1).gather(1, flat[:, at : at + 1])[:, 0])
        feed = flat[:, at]
    return torch.stack(terms, 1).view(rows, copies, length)


def test_several_continuations_of_a_prompt(ranks, folders) -> None:
    """Each has its own new tokens: log-probabilities equal those of the whole text by `transformers`."""
    import transformers

    folder, tokens = folders["gqa-untied"], prompts(2, 29, seed=4)
    ends = prompts(6, 5, seed=5).view(2, 3, 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    for world in (1, 2, 4):
        found = ranks(world).run(scored, folder, {"ulysses": world}, tokens, ends)[0]
        for row in range(2):
            for copy in range(3):
                text = torch.cat((tokens[row], ends[row, copy]))
                with torch.no_grad():
                    wanted = model(text[None]).logits[0, -6:-1].log_softmax(-1).gather(1, ends[row, copy][:, None])
                assert (found[row, copy] - wanted[:, 0]).abs().max() < 1e-6


def after_training(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a model that was changed by a step, and of what it saved."""
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**SWEEP, zero=2), ithaca.mesh(ulysses=2))
    model.greedy_decode(tokens, 2)
    loss = model(model.shard(tokens, tokens))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    model.zero_grad()
    found = model.greedy_decode(tokens, NEW)
    place = folder.parent / "trained"
    ithaca.save_model(model, place)
    return found


def test_weights_of_the_last_step_are_used(ranks, folders) -> None:
    tokens = prompts(2, 40, seed=8)
    found = ranks(2).run(after_training, folders["gqa-untied"], tokens)
    wanted = generated(folders["gqa-untied"].parent / "trained", list(tokens))
    assert not torch.equal(wanted, generated(folders["gqa-untied"], list(tokens)))
    assert all(torch.equal(rank, wanted) for rank in found)


def cache_sizes(folder: Path) -> tuple[int, int, int, int]:
    """Bytes of the cache as its specification has them and as they are, and of tapes with and without gradients."""
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**SWEEP), ithaca.mesh(ulysses=2))
    model.read_prompts(prompts(1, 64, seed=1))
    job = model.reservation.job(64)
    assert model.reservation._cache is not None
    held = sum(tape.memory.nbytes for tape in model.reservation._cache[1]._tapes["cache"].values())  # pyrefly: ignore
    sizes = [
        sum(tape.bytes_of(job.tiles.length) for tape in job.tapes if training or not tape.training)
        for training in (True, False)
    ]
    wanted = cache_tapes(job, "device").bytes_of(job.tiles.length)
    model.free_prompts()
    assert model.reservation._cache is None
    return wanted, held, *sizes  # pyrefly: ignore


def test_memory(ranks, folders) -> None:
    """The cache takes what its specification says; with a pass's own tapes it takes less than training does."""
    for wanted, held, training, without in ranks(2).run(cache_sizes, folders["gqa-untied"]):
        assert wanted == held == 3 * 32 * 2 * 2 * 6 * 4
        assert held + without < training


def test_a_cache_that_does_not_fit(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_budget", lambda: (5000, "free memory"))
    model = ithaca.apply(ithaca.load_model(folders["gqa-untied"], "float32"), ithaca.Plan(recipe="dense"))
    with pytest.raises(PlanError, match=r"64 tokens need 18 KiB, and free memory is 4\.88 KiB: 17 tokens"):
        model.greedy_decode(prompts(1, 64, seed=1), 3)
    assert model.greedy_decode(prompts(1, 17, seed=1), 3).shape == (1, 3)


def test_wrong_inputs(folders) -> None:
    model = ithaca.apply(ithaca.load_model(folders["gqa-untied"], "float32"), ithaca.Plan(recipe="dense"))
    with pytest.raises(InputError, match="count, the number of new tokens, must be 1 or more; it is 0"):
        model.greedy_decode(prompts(1, 8, seed=1), 0)
    with pytest.raises(InputError, match="token id 97 is outside the vocabulary of 97"):
        model.greedy_decode(torch.tensor([1, 97]), 2)


@pytest.mark.parametrize("layout", [Layout(37, 16, 2, 1), Layout(37, 16, 1, 2), Layout(64, 64, 2, 2), Layout(5, 8)])
def test_local_ranges(layout: Layout) -> None:
    for rank in range(layout.ranks):
        places = [place for run in layout.places(rank) for place in run]
        assert places == sorted(places)
        for start in range(0, layout.tokens, 3):
            for stop in range(start, layout.tokens + 1, 4):
                found = local_range(layout, rank, start, stop)
                assert [places[at] for at in found] == [place for place in places if start <= place < stop]
