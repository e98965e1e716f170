"""Ring ranks, alone and with Ulysses ranks, against the naive twin in float64: ring, hybrid, and the sweep on C × R."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.attention.merge import merge
from ithaca.schedule import reference as naive
from ithaca.schedule.costs import Traffic
from tests.models import make_model, relative, save
from tests.sampling import sampled
from tests.schedule.contexts import LAYERS, MODELS, Options, context_step, open_model, packed, save_models, sized
from tests.schedule.counting import sent_messages, stated_messages
from tests.schedule.steps import EXACT, Rows, assert_same, naive_step, random_batch, read_weights

SHAPES = ((1, 2), (1, 4), (2, 2), (2, 3), (4, 2))  # Ulysses × ring ranks
RECIPES: dict[str, Options] = {
    "ring": {"recipe": "ring"},
    "ring-gather": {"recipe": "ring", "travel": "gather", "checkpoint": "selective"},
    "hybrid": {"recipe": "hybrid"},
    "hybrid-none": {"recipe": "hybrid", "checkpoint": "none"},
    "hybrid-selective": {"recipe": "hybrid", "checkpoint": "selective", "x": "host"},
    "hybrid-gather": {"recipe": "hybrid", "travel": "gather"},
    "untied": {"recipe": "untied"},
    "untied-gather": {"recipe": "untied", "travel": "gather", "x": "device, host"},
    "sweep": {"recipe": "sweep"},
    "sweep-recompute": {"recipe": "sweep", "o": "recompute"},
    "sweep-rebuild": {"recipe": "sweep", "x": "rebuild, host, rebuild"},
    "sweep-all-on-host": {"recipe": "sweep", "kv": "host", "lse": "host", "residual": "host"},
    "fpdt": {"recipe": "fpdt"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def usable(recipe: str, shape: tuple[int, int]) -> bool:
    return not recipe.startswith("ring") or shape[0] == 1


def matrix() -> Iterator[object]:
    for place, (ulysses, ring) in enumerate(SHAPES):
        for row, heads in enumerate(MODELS):
            for number, recipe in enumerate(RECIPES):
                if not usable(recipe, (ulysses, ring)):
                    continue
                # Two ranks with every recipe, four with some, six and eight with a few; head counts in turn
                every = {2: 1, 4: 3, 6: 8, 8: 7}[ulysses * ring]
                sampled = (number + place) % every == 0 and row == (number + place) % len(MODELS)
                marks = () if sampled else (pytest.mark.full,)
                yield pytest.param(ulysses, ring, heads, recipe, id=f"{ulysses}x{ring}-{heads}-{recipe}", marks=marks)


@pytest.mark.parametrize(("ulysses", "ring", "heads", "recipe"), list(matrix()))
def test_equals_naive(ranks, folders, ulysses: int, ring: int, heads: str, recipe: str) -> None:
    chance = random.Random(f"{ulysses} {ring} {heads} {recipe}")
    batches = [
        packed(chance.choice((37, 41, 53)), chance.choice((1, 2, 5, 20)), chance),
        random_batch(2, 23, documents=False, ignored=0.8, seed=chance.randrange(10**6)),
    ]
    wanted, plan = naive_step(folders[heads], batches), sized(RECIPES[recipe], chance, 37)
    late, mesh = chance.choice((None, chance.randrange(10**6))), {"ulysses": ulysses, "ring": ring}
    for outcome in ranks(ulysses * ring).run(context_step, folders[heads], plan, mesh, batches, late):
        assert_same(outcome, wanted)


KEPT: dict[str, Options] = {"all": {}, "recompute": {"o": "recompute"}, "rebuild": {"x": "host, rebuild*2"}}


@pytest.mark.parametrize(
    ("ulysses", "ring", "kept"),
    sampled(
        [(ulysses, 2, kept) for ulysses in (1, 2) for kept in KEPT],
        lambda ulysses, _, kept: (ulysses == 2) == (kept == "rebuild"),
    ),
)
def test_many_chunks_under_way(ranks, folders, ulysses: int, ring: int, kept: str) -> None:
    """Everything on the host, so that each chunk that is under way has its slots; also where documents end early."""
    mesh, chance = {"ulysses": ulysses, "ring": ring}, random.Random(kept)
    batches = [packed(46, 1, chance), packed(46, 6, chance)]
    plan = ithaca.Plan(**RECIPES["sweep-all-on-host"], **KEPT[kept], chunk=5, tile=2)
    wanted = naive_step(folders["8/2"], batches)
    for outcome in ranks(ulysses * ring).run(context_step, folders["8/2"], plan, mesh, batches, 3):
        assert_same(outcome, wanted)


@pytest.mark.parametrize("recipe", ["ring", "hybrid-gather", "untied", "sweep"])
def test_more_ranks_than_query_heads(ranks, tmp_path: Path, recipe: str) -> None:
    two = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_size": 16}
    folder = save(make_model("qwen3", torch.float64, num_hidden_layers=2, **two), tmp_path / "two")
    batches, mesh = [packed(41, 3, random.Random(recipe))], {"ring": 4}
    if recipe != "ring":
        mesh = {"ulysses": 2, "ring": 2}
    plan = sized(RECIPES[recipe], random.Random(recipe), 41)
    assert_same(ranks(4).run(context_step, folder, plan, mesh, batches)[0], naive_step(folder, batches))


@pytest.mark.parametrize("recipe", ["hybrid", "sweep"])
@pytest.mark.parametrize("tokens", [3, 5])
def test_hardly_any_tokens(ranks, folders, tokens: int, recipe: str) -> None:
    numbers = torch.arange(1, tokens + 1)[None]
    batches = [(numbers, numbers, torch.zeros_like(numbers))]
    plan = sized(RECIPES[recipe], random.Random(recipe), tokens)
    found = ranks(4).run(context_step, folders["8/2"], plan, {"ulysses": 2, "ring": 2}, batches)
    assert_same(found[0], naive_step(folders["8/2"], batches))


@pytest.mark.parametrize("recipe", ["hybrid", pytest.param("sweep", marks=pytest.mark.full)])
def test_beside_data_ranks(ranks, folders, recipe: str) -> None:
    """Two sequences of different lengths, each shared by four ranks."""
    batches = [random_batch(3, 17, documents=True, ignored=0.5, seed=4)]
    plan, mesh = sized(RECIPES[recipe], random.Random(recipe), 17), {"shard": 2, "ulysses": 2, "ring": 2}
    assert_same(ranks(8).run(context_step, folders["6/3"], plan, mesh, batches)[0], naive_step(folders["6/3"], batches))


def logits_of(folder: Path, options: Options, rows: Tensor, ids: Tensor) -> Tensor:
    return open_model(folder, ithaca.Plan(**options), {"ulysses": 2, "ring": 2}).logits(rows, ids)


@pytest.mark.parametrize("recipe", ["hybrid", "sweep"])
def test_logits(ranks, folders, recipe: str) -> None:
    rows, _, ids = random_batch(2, 19, documents=True, ignored=0.0, seed=3)
    spec, weights = read_weights(folders["8/2"])
    wanted = torch.stack([naive.logits(spec, weights, row, own) for row, own in zip(rows, ids, strict=True)])
    options = RECIPES[recipe] | ({"chunk": 7} if recipe == "sweep" else {})
    for found in ranks(4).run(logits_of, folders["8/2"], options, rows, ids):
        assert relative(found, wanted) <= EXACT


def merging_step(folder: Path, plan: ithaca.Plan, batches: list[Rows]) -> int:
    """How often partial results were merged, each as the fused kernel of GPUs wants it."""
    merges = 0

    def strict(*tensors: Tensor) -> None:
        nonlocal merges
        merges += 1
        assert all(tensor.stride(-1) == 1 for tensor in tensors)
        merge(*tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.parallel.ring.merge", strict)
        context_step(folder, plan, {"ring": 2}, batches)
    return merges


def test_what_is_merged_is_dense(ranks, folders) -> None:
    plan, batches = ithaca.Plan(recipe="sweep", chunk=12), [random_batch(1, 36, False, 0.0, seed=1)]
    assert ranks(2).run(merging_step, folders["8/2"], plan, batches) == [3 * LAYERS] * 2


def refusal(folder: Path, options: Options, mesh: dict[str, int]) -> str:
    with pytest.raises(ithaca.PlanError) as refused:
        open_model(folder, ithaca.Plan(**options), mesh)
    return str(refused.value)


def test_refused(ranks, folders, tmp_path: Path) -> None:
    two = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_size": 16}
    folder = save(make_model("qwen3", torch.float64, num_hidden_layers=1, **two), tmp_path / "two")
    (text, *_) = ranks(4).run(refusal, folder, {"recipe": "ulysses"}, {"ring": 4})
    assert text == "recipe 'ulysses' shares a sequence by heads only, but the mesh has ring 4: use recipe 'sweep'"
    (text, _) = ranks(2).run(refusal, folders["8/2"], {"recipe": "ring"}, {"ulysses": 2})
    assert text == (
        "recipe 'ring' shares a sequence over ring ranks only, but the mesh has ulysses 2: "
        "set ulysses to 1 and ring to 2, or use recipe 'hybrid'"
    )


def sent(folder: Path, plan: ithaca.Plan, mesh: dict[str, int], tokens: int) -> tuple[list[Traffic], list[Traffic]]:
    """Forward and backward: collectives, and the bytes that leave this rank; and what is said of them."""
    model, row = open_model(folder, plan, mesh), torch.arange(tokens) % 97
    batch = model.shard(row, row)
    assert batch.layout.padded == tokens
    return sent_messages(model, batch), stated_messages(model, tokens)


def traffic_cases() -> Iterator[object]:
    for shape in SHAPES[:4]:
        for recipe in RECIPES:
            if usable(recipe, shape):
                marks = () if shape == (2, 2) and recipe != "sweep-rebuild" else (pytest.mark.full,)
                yield pytest.param(shape, recipe, id=f"{shape[0]}x{shape[1]}-{recipe}", marks=marks)


@pytest.mark.parametrize(("shape", "recipe"), list(traffic_cases()))
def test_what_is_said_is_sent(ranks, folders, shape: tuple[int, int], recipe: str) -> None:
    ulysses, ring = shape
    sweeps = recipe.startswith(("sweep", "fpdt"))
    options = RECIPES[recipe] | ({"chunk": 4 * ulysses * ring, "tile": 2} if sweeps else {})
    mesh, tokens = {"ulysses": ulysses, "ring": ring}, 20 * ulysses * ring
    for found, said in ranks(ulysses * ring).run(sent, folders["14/2"], ithaca.Plan(**options), mesh, tokens):
        assert found == said


def test_a_rank_without_heads_in_a_round_sends_nothing_around(ranks, folders) -> None:
    """Of 14 query heads over three ranks the third has 7, so that the first two have none in the last rounds."""
    for found, said in ranks(6).run(sent, folders["14/2"], ithaca.Plan(recipe="untied"), {"ulysses": 3, "ring": 2}, 24):
        assert found == said


def test_a_sweep_sends_no_more_for_later_chunks(ranks, folders) -> None:
    """Twice the chunks, twice the bytes."""
    mesh, plan = {"ulysses": 2, "ring": 2}, ithaca.Plan(recipe="sweep", chunk=16, tile=2)
    few, many = (ranks(4).run(sent, folders["8/2"], plan, mesh, 16 * chunks)[0][0] for chunks in (2, 4))
    assert [way.bytes for way in many] == [2 * way.bytes for way in few]
