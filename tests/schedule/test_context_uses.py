"""Ranks that share a sequence in every use of a model: logits, evaluation, transformers' numbers, late copies."""

import itertools
import random
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ithaca
from ithaca.parallel.collectives import Group, Pending
from ithaca.schedule import reference as naive
from ithaca.schedule.sweep.call import SweepCall
from tests.models import make_model, relative, save
from tests.sampling import sampled
from tests.schedule.contexts import RECIPES, context_step, open_model, packed, random_delays, save_models
from tests.schedule.steps import EXACT, Outcome, Rows, assert_same, model_step, random_batch, read_weights

CUT = {
    name: ithaca.Plan(**options, **({"chunk": 11, "tile": 4} if options["recipe"] in ("sweep", "fpdt") else {}))
    for name, options in RECIPES.items()
}
FEW = ["ulysses-none", "alst", "untied", "sweep", "sweep-recompute"]
FAMILIES = {"llama": "llama3", "qwen3": "qwen3"}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


class DoubleTorch:
    """torch for a module that computes some things in float32 whatever its dtype, as transformers' norms do."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor, Outcome]]:
    """Saved models of transformers, a row of tokens, and its loss and gradients as transformers computes them."""
    top, found = tmp_path_factory.mktemp("theirs"), {}
    for name, family in FAMILIES.items():
        model = make_model(family, torch.float64, **EIGHT)
        folder = save(model, top / name)
        tokens = random_batch(1, 43, documents=False, ignored=0.0, seed=2)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[type(model).__module__], "torch", DoubleTorch())
            loss = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:])
            loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found[name] = folder, tokens, (loss.item(), gradients)
    return found


@pytest.mark.parametrize(
    ("name", "family", "world"),
    sampled(
        itertools.product(RECIPES, FAMILIES, (2, 4)),
        lambda *case: case in zip(FEW, cycle(FAMILIES), cycle((2, 4)), strict=False),
    ),
)
def test_transformers(ranks, theirs, name: str, family: str, world: int) -> None:
    folder, tokens, wanted = theirs[family]
    batches = [(tokens, tokens, torch.zeros_like(tokens))]
    for found in ranks(world).run(context_step, folder, CUT[name], {"ulysses": world}, batches):
        assert_same(found, wanted, 1e-6)


def all_logits(
    folder: Path, plan: ithaca.Plan, sizes: dict[str, int], inputs: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    model = open_model(folder, plan, sizes)
    return [model.logits(tokens, ids) for tokens, ids in inputs] + [model.logits(inputs[0][0][0])]


MESHES = {"2": {"ulysses": 2}, "3": {"ulysses": 3}, "4": {"ulysses": 4}, "2x2": {"shard": 2, "ulysses": 2}}


@pytest.mark.parametrize(
    ("name", "mesh"),
    sampled(
        itertools.product(RECIPES, MESHES),
        lambda name, mesh: (mesh == "3" and name in FEW) or (mesh == "2x2" and name == "sweep"),
    ),
)
def test_logits(ranks, folders, name: str, mesh: str) -> None:
    sizes = MESHES[mesh]
    inputs = [(random_batch(rows, 19, documents=True, ignored=0.0, seed=rows)[0::2]) for rows in (1, 3)]
    inputs += [(inputs[0][0][:, :2], inputs[0][1][:, :2])]
    spec, weights = read_weights(folders["14/2"])
    wanted = [torch.stack([naive.logits(spec, weights, *row) for row in zip(*rows, strict=True)]) for rows in inputs]
    first = inputs[0][0][0]
    wanted += [naive.logits(spec, weights, first, torch.zeros_like(first))]
    world = sizes["ulysses"] * sizes.get("shard", 1)
    for found in ranks(world).run(all_logits, folders["14/2"], CUT[name], sizes, inputs):
        for logits, whole in zip(found, wanted, strict=True):
            assert logits.shape == whole.shape
            assert relative(logits, whole) <= EXACT


def losses(folder: Path, plan: ithaca.Plan, batch: Rows) -> list[float]:
    """Of evaluation before, between and after training passes, and of those."""
    model, found = open_model(folder, plan, {"ulysses": torch.distributed.get_world_size()}), []
    model.engine.before_copy = random_delays(model.mesh.rank)
    with torch.no_grad():
        found.append(model(model.shard(*batch)).item())
    training = model(model.shard(*batch))
    with torch.no_grad():  # while that one waits
        found.append(model(model.shard(*batch)).item())
    training.backward()
    with torch.inference_mode():
        found.append(model(model.shard(*batch)).item())
    again = model(model.shard(*batch))
    again.backward()
    return [*found, training.item(), again.item()]


@pytest.mark.parametrize(
    ("name", "world"), sampled(itertools.product(RECIPES, (2, 3)), lambda name, world: name in FEW and world == 2)
)
def test_evaluation(ranks, folders, name: str, world: int) -> None:
    batch = random_batch(2, 23, documents=True, ignored=0.3, seed=3)
    (wanted,) = {tuple(found) for found in ranks(world).run(losses, folders["8/2"], CUT[name], batch)}
    assert all(abs(loss - wanted[0]) <= EXACT * wanted[0] for loss in wanted)
    assert len(set(wanted[:3])) == len(set(wanted[3:])) == 1


class LateGroup(Group):
    """Messages arrive when they want."""

    late = staticmethod(random_delays(7))

    def all_to_all(self, *args) -> Pending:
        return self._later(super().all_to_all(*args))

    def all_gather(self, *args) -> Pending:
        return self._later(super().all_gather(*args))

    def _later(self, coming: Pending) -> Pending:
        def later() -> Tensor:
            self.late()
            return coming.wait()

        return Pending(later)


def late_step(folder: Path, plan: ithaca.Plan, mesh: dict[str, int], batches: list[Rows], seed: int) -> Outcome:
    model = open_model(folder, plan, mesh)
    model.engine.before_copy = random_delays(seed + model.mesh.rank)
    for sender, group in ((model.exchange, model.mesh.ulysses_group), (model.ring, model.mesh.ring_group)):
        if group is not None:
            sender._group = LateGroup(group)  # pyrefly: ignore
    return model_step(model, batches)


def one_after_the_other(folder: Path, plan: ithaca.Plan, mesh: dict[str, int], batches: list[Rows]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SweepCall, "hops", 0)
        return context_step(folder, plan, mesh, batches)


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == wanted[0]
    for name, gradient in found[1].items():
        assert torch.equal(gradient, wanted[1][name]), name


LATE = ["alst", "untied", "fpdt", "sweep", "sweep-recompute", "sweep-rebuild", "sweep-mixed", "sweep-all-on-host"]


@pytest.mark.parametrize(
    ("name", "seed"),
    sampled(
        itertools.product(LATE, range(3)),
        lambda name, seed: (
            seed == 0 and name in ("alst", "sweep-recompute", "sweep-rebuild", "sweep-all-on-host", "fpdt")
        ),
    ),
)
def test_what_is_late_changes_no_bit(ranks, folders, name: str, seed: int) -> None:
    batches = [packed(53, 5, random.Random(name)), random_batch(2, 20, documents=False, ignored=0.1, seed=seed)]
    assert_nothing_depends_on_time(ranks, folders["8/2"], CUT[name], {"ulysses": 2}, batches, seed)


@pytest.mark.parametrize(
    ("ulysses", "ring", "name"),
    sampled(
        [(ulysses, 2, name) for ulysses in (1, 2) for name in ("hybrid", "untied", "sweep-all-on-host", "fpdt")],
        lambda ulysses, _, name: (ulysses == 2) == (name != "hybrid") and name != "fpdt",
    ),
)
def test_what_is_late_in_a_ring_changes_no_bit(ranks, folders, ulysses: int, ring: int, name: str) -> None:
    batches = [packed(53, 5, random.Random(1)), packed(53, 1, random.Random(2))]
    plan = ithaca.Plan(recipe="hybrid") if name == "hybrid" else CUT[name]
    assert_nothing_depends_on_time(ranks, folders["8/2"], plan, {"ulysses": ulysses, "ring": ring}, batches, 3)


def assert_nothing_depends_on_time(
    ranks, folder: Path, plan: ithaca.Plan, mesh: dict[str, int], batches: list[Rows], seed: int
) -> None:
    world = ranks(mesh.get("ulysses", 1) * mesh.get("ring", 1))
    plain = world.run(context_step, folder, plan, mesh, batches)
    others = [world.run(late_step, folder, plan, mesh, batches, seed)]
    if plan.sweeps:
        others.append(world.run(one_after_the_other, folder, plan, mesh, batches))
    for other in others:
        for found, wanted in zip(other, plain, strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_where_tapes_are_changes_no_bit(ranks, folders, world: int) -> None:
    batches = [packed(53, 5, random.Random(world))]
    names = ["sweep", "sweep-rebuild", "sweep-keys-on-host", "sweep-all-on-host", "sweep-all-on-device"]
    names += ["sweep-recompute", "fpdt"]
    first, *others = (
        ranks(world).run(context_step, folders["8/2"], CUT[name], {"ulysses": world}, batches, 5) for name in names
    )
    for other in others:
        for found, wanted in zip(other, first, strict=True):
            assert_same_bits(found, wanted)
