"""What ranks that share a sequence refuse: all of them, with the same sentence and what would work."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from tests.schedule.contexts import open_model, save_models
from tests.schedule.steps import random_batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def sentence(call: Callable[[], object]) -> str:
    try:
        call()
    except ithaca.IthacaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def opening(folder: Path, options: list[dict], sizes: dict[str, int]) -> str:
    """`options`: one for all ranks, or one for each."""
    plan = ithaca.Plan(**options[dist.get_rank() % len(options)])
    return sentence(lambda: open_model(folder, plan, sizes))


REFUSED = [
    (
        "8/2",
        {"recipe": "untied", "heads": 5},
        {"ulysses": 2},
        "heads=5 is not usable with 8 query heads on 2 Ulysses ranks: 2, 4, 6, 8 are",
    ),
    (
        "14/2",
        {"recipe": "untied", "heads": 14 * 2},
        {"ulysses": 4},
        "heads=28 is not usable with 14 query heads on 4 Ulysses ranks: 4, 8, 12, 14 are",
    ),
    (
        "8/8",
        {"recipe": "untied", "heads": 4},
        {"ulysses": 8},
        "heads=4 is not usable with 8 query heads on 8 Ulysses ranks: 8 is",
    ),
    *(
        (
            "6/3",
            {"recipe": recipe},
            {"ulysses": 8},
            "ulysses=8 is more than the model's 6 query heads: 1 to 6 work, evenly 1, 2, 3, 6",
        )
        for recipe in ("ulysses", "alst", "untied", "sweep")
    ),
    (
        "8/2",
        {"recipe": "dense"},
        {"ulysses": 2},
        "recipe 'dense' has no context parallelism, but the mesh has ulysses 2 × ring 1: "
        "set both to 1 and shard to 2, or use recipe 'sweep'",
    ),
    (
        "8/2",
        {"recipe": "alst"},
        {"ring": 2},
        "recipe 'alst' shares a sequence by heads only, but the mesh has ring 2: "
        "set ring to 1 and ulysses to 2, or use recipe 'sweep'",
    ),
    (
        "8/2",
        {"recipe": "ulysses"},
        {"ring": 2, "ulysses": 2},
        "recipe 'ulysses' shares a sequence by heads only, but the mesh has ring 2: "
        "set ring to 1 and ulysses to 4, or use recipe 'sweep'",
    ),
]


@pytest.mark.parametrize(
    ("heads", "options", "sizes", "wanted"), REFUSED, ids=[f"{row[0]}-{row[1]['recipe']}-{row[2]}" for row in REFUSED]
)
def test_refused(ranks, folders, heads: str, options: dict, sizes: dict[str, int], wanted: str) -> None:
    world = sizes.get("ulysses", 1) * sizes.get("ring", 1)
    assert ranks(world).run(opening, folders[heads], [options], sizes) == [f"PlanError: {wanted}"] * world


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "untied", "heads": 0}, "heads must be a number of heads, e.g. 8; it is 0"),
        ({"recipe": "untied", "heads": "four"}, "heads must be a number of heads, e.g. 8; it is four"),
        ({"recipe": "alst", "heads": 8}, "heads=8 has no effect under recipe 'alst': leave it out, or use recipe 's"),
        ({"recipe": "untied", "checkpoint": "none"}, "checkpoint=none has no effect under recipe 'untied'"),
        ({"recipe": "ulysses", "chunk": 8}, "chunk=8 has no effect under recipe 'ulysses'"),
        ({"recipe": "ulises"}, "recipe 'ulises' does not exist: did you mean 'ulysses'"),
    ],
)
def test_plans_that_mean_nothing(options: dict, sentence: str) -> None:
    with pytest.raises(ithaca.PlanError, match=sentence):
        ithaca.Plan(**options)


def test_ranks_with_other_plans(ranks, folders) -> None:
    for other in ({"recipe": "untied", "heads": 4}, {"recipe": "sweep"}):
        found = ranks(2).run(opening, folders["8/2"], [{"recipe": "untied"}, other], {"ulysses": 2})
        assert (
            found == ["PlanError: rank 1 has another model or Plan than rank 0: every rank must be given the same"] * 2
        )


def reserving(folder: Path, options: dict, rows: list[int], tokens: list[int]) -> tuple[str, str]:
    """What is said of numbers that differ by rank, and of the same ones after that."""
    model, rank = open_model(folder, ithaca.Plan(**options), {"ulysses": 2}), dist.get_rank()
    first = sentence(lambda: model.allocate(rows[rank], tokens[rank]))
    assert first == sentence(lambda: model.check_memory(rows[rank], tokens[rank]))
    return first, sentence(lambda: model.allocate(rows[0], tokens[0]))


@pytest.mark.parametrize(("rows", "tokens"), [([1, 1], [64, 65]), ([1, 2], [64, 64])])
@pytest.mark.parametrize("recipe", ["ulysses", "alst", "untied", "sweep"])
def test_ranks_that_reserve_for_other_numbers(ranks, folders, recipe: str, rows: list[int], tokens: list[int]) -> None:
    text = "PlanError: rank 1 has another number of rows or tokens than rank 0: every rank must be given the same"
    assert ranks(2).run(reserving, folders["8/2"], {"recipe": recipe}, rows, tokens) == [(text, "no error")] * 2


def other_batches(folder: Path, options: dict, which: int) -> str:
    """One of tokens, labels and documents is another on the last rank."""
    model = open_model(folder, ithaca.Plan(**options), {"ulysses": 2})
    batch = list(random_batch(1, 19, documents=True, ignored=0.2, seed=1))
    if dist.get_rank() == 1:
        batch[which] = batch[which].clone()
        batch[which][0, 7] = 96
    return sentence(lambda: model(model.shard(*batch)))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["untied", "sweep"])
def test_ranks_with_other_batches(ranks, folders, recipe: str, which: int) -> None:
    text = "the ranks were given different batches: model.shard needs the same whole batch on every rank"
    assert ranks(2).run(other_batches, folders["8/2"], {"recipe": recipe}, which) == [f"InputError: {text}"] * 2


def other_logits(folder: Path) -> str:
    model = open_model(folder, ithaca.Plan(recipe="sweep"), {"ulysses": 2})
    return sentence(lambda: model.logits(torch.tensor([1, 2, 3 + dist.get_rank()])))


def test_ranks_that_ask_for_other_logits(ranks, folders) -> None:
    assert all("the ranks were given different batches" in text for text in ranks(2).run(other_logits, folders["8/2"]))


def too_long_a_chunk(folder: Path) -> str:
    model = open_model(folder, ithaca.Plan(recipe="sweep", chunk=64), {"ulysses": 2})
    return sentence(lambda: model(model.shard(*random_batch(1, 37, documents=False, ignored=0.0, seed=0))))


def test_a_chunk_is_of_the_whole_sequence(ranks, folders) -> None:
    for found in ranks(2).run(too_long_a_chunk, folders["8/2"]):
        assert found.startswith("PlanError: chunk=64 is longer than the 37 tokens of a sequence: use chunk=37")


def batch_of_another(folder: Path, cut_by: dict, taken_by: dict) -> str:
    batch = open_model(folder, ithaca.Plan(**cut_by), {"ulysses": 2}).shard(*random_batch(1, 37, True, 0.2, seed=0))
    return sentence(lambda: open_model(folder, ithaca.Plan(**taken_by), {"ulysses": 2})(batch))


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_that_was_cut_for_another_plan(ranks, folders, order: int) -> None:
    plans = [{"recipe": "sweep", "chunk": 8}, {"recipe": "ulysses"}][::order]
    text = "InputError: the batch was cut for another Plan or mesh: let the `shard` of this model cut it"
    assert ranks(2).run(batch_of_another, folders["8/2"], *plans) == [text] * 2


def shared_batch(folder: Path) -> list[float]:
    """Losses of one batch by models that cut it otherwise; alone, a rank has all tokens in order."""
    plans = [ithaca.Plan(), ithaca.Plan(recipe="sweep", chunk=8), ithaca.Plan(recipe="sweep", chunk=5)]
    models = [ithaca.apply(ithaca.load_model(folder, "float64"), plan) for plan in plans]
    batch = models[1].shard(*random_batch(1, 37, True, 0.2, seed=0))
    return [model(batch).item() for model in models]


def test_one_rank_takes_any_batch(ranks, folders) -> None:
    (found,) = ranks(1).run(shared_batch, folders["8/2"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def some_without_gradients(folder: Path) -> str:
    model = open_model(folder, ithaca.Plan(recipe="sweep"), {"ulysses": 2})
    batch = model.shard(*random_batch(1, 37, True, 0.2, seed=0))
    with torch.set_grad_enabled(dist.get_rank() == 0):
        return sentence(lambda: model(batch))


def test_ranks_with_and_without_gradients(ranks, folders) -> None:
    for found in ranks(2).run(some_without_gradients, folders["8/2"]):
        assert found.startswith("InputError: some ranks want gradients of this pass and others do not")


def room_for(folder: Path) -> tuple[str, str]:
    """What is said of a sequence that is too long, and of the length that it names."""
    plan = ithaca.Plan(recipe="sweep", chunk=16, host_memory=10**6)
    model = open_model(folder, plan, {"ulysses": 2})
    first = sentence(lambda: model.check_memory(1, 2000))
    fitting = int(first.rpartition(" tokens would fit")[0].rpartition(" ")[2])
    assert 200 < fitting < 2000
    return first, sentence(lambda: model.check_memory(1, fitting - fitting % 2))


def test_tokens_that_fit_are_those_of_the_sequence(ranks, folders) -> None:
    for first, second in ranks(2).run(room_for, folders["8/2"]):
        assert first.startswith("PlanError: tapes for 2000 tokens need")
        assert second == "no error"
