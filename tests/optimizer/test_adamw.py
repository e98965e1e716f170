"""AdamW with its moments on the host gives the bits of torch's own; what it takes there is counted, and given back.

Copies are made by threads that are late at random, through slots that turn to NaN as soon as they are free.
"""

import copy
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor

import ithaca
from ithaca.base.errors import InputError, PlanError
from ithaca.optimizer import host_adamw
from ithaca.optimizer.adamw import _refuse_states
from ithaca.optimizer.host_adamw import MOMENTS, HostAdamW
from ithaca.tape.engine import ThreadEngine
from ithaca.tape.slab import Slab
from tests.models import make_model, save

OPTIONS = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
HOST = ithaca.Plan(optimizer="host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of two elements, which leave some of four ranks without any."""
    return save(make_model("qwen3", head_dim=2, num_hidden_layers=2), tmp_path_factory.mktemp("model") / "in")


def make(folder: Path, plan: ithaca.Plan, dtype: str = "float32", replicate: int | None = 1) -> ithaca.Model:
    """A model over this job's ranks; of this process alone when nothing is replicated."""
    mesh = ithaca.mesh(replicate=replicate) if replicate else None
    return ithaca.apply(ithaca.load_model(folder, dtype), plan, mesh)


def give_gradients(model: ithaca.Model, step: int) -> None:
    """Random ones; some parameter has none in some steps, and another is never learned."""
    generator = torch.Generator().manual_seed(step)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        gradient = torch.zeros_like(parameter)
        gradient.to_local().copy_(torch.randn(gradient.to_local().shape, generator=generator, dtype=gradient.dtype))
        parameter.grad = gradient if parameter.requires_grad and (number + step) % 5 else None


def make_late(model: ithaca.Model, seed: int = 0) -> None:
    chance = random.Random(seed)
    model.engine.poison = True
    model.engine.before_copy = lambda: time.sleep(chance.choice((0, 0, 0, 0, 0.002)))


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Parameters and states, bit for bit."""
    pairs = [
        zip(mine["params"], other["params"], strict=True)
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True)
    ]
    for mine, other in (pair for pairs_of_group in pairs for pair in pairs_of_group):
        assert torch.equal(mine.to_local(), other.to_local())
        assert ours.state[mine].keys() == theirs.state[other].keys()
        assert torch.equal(ours.state[mine]["step"], theirs.state[other]["step"])
        for name in MOMENTS:
            found, wanted = ours.state[mine][name], theirs.state[other][name]
            assert (found.shape, found.placements, found.device.type) == (wanted.shape, wanted.placements, "cpu")
            assert torch.equal(found.to_local(), wanted.to_local())


def compare(folder: Path, dtype: str, replicate: int, tile: int | None) -> tuple[int, int]:
    """Five steps of both; gives the number of shards without elements, and of tiles in all."""
    hosted, plain = (make(folder, plan, dtype, replicate) for plan in (HOST, ithaca.Plan()))
    for model in (hosted, plain):
        model.decoder.blocks[0].get_parameter("mlp.up_proj.weight").requires_grad_(False)
    make_late(hosted)
    theirs = ithaca.make_optimizer(plain, **OPTIONS)
    assert isinstance(theirs, torch.optim.AdamW)
    if tile is None:
        ours = ithaca.make_optimizer(hosted, **OPTIONS)
        assert isinstance(ours, HostAdamW)
    else:
        own = dict(zip(plain.parameters(), hosted.parameters(), strict=True))
        groups = [{**group, "params": [own[p] for p in group["params"]]} for group in theirs.param_groups]
        ours = HostAdamW(groups, hosted.engine, learning_rate=1e-2, betas=(0.9, 0.95), tile=tile)
    for step in range(5):
        for model, optimizer in ((hosted, ours), (plain, theirs)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            give_gradients(model, step)
            optimizer.step()
        assert_same(ours, theirs)
    learned = [parameter for group in ours.param_groups for parameter in group["params"]]
    counts = {int(ours.state[parameter]["step"]) for parameter in learned}
    assert counts == {4}
    empty = sum(parameter.to_local().numel() == 0 for parameter in learned)
    return empty, sum(tapes[0].tiles.count for tapes in ours._tapes.values())


@pytest.mark.parametrize(
    ("world", "replicate", "dtype", "tile"),
    [
        (1, 1, "float32", 240),
        (1, 1, "float64", 1008),
        (1, 1, "float32", None),
        (2, 1, "float32", 176),
        (2, 1, "float64", None),
        (2, 2, "float32", 2000),
        (4, 1, "float32", 112),
    ],
)
def test_the_bits_of_the_optimizer_on_the_device(ranks, folder, world, replicate, dtype, tile) -> None:
    for rank, (empty, tiles) in enumerate(ranks(world).run(compare, folder, dtype, replicate, tile)):
        assert (empty > 0) == (world == 4 and rank >= 2)
        assert tiles > 30 if tile else tiles > 10


def alone(folder: Path, plan: ithaca.Plan = HOST) -> tuple[ithaca.Model, HostAdamW]:
    model = make(folder, plan, replicate=None)
    optimizer = ithaca.make_optimizer(model, **OPTIONS)
    assert isinstance(optimizer, HostAdamW if plan is HOST else torch.optim.AdamW)
    return model, optimizer  # pyrefly: ignore


def test_the_next_tile_is_fetched_while_one_is_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over the border of two parameters."""
    model, optimizer = alone(folder)
    fused, ahead = host_adamw.update, []

    def watched(*args: object) -> None:
        ahead.append(sum(len(tape._arriving) for tapes in optimizer._tapes.values() for tape in tapes))
        fused(*args)  # pyrefly: ignore

    monkeypatch.setattr(host_adamw, "update", watched)
    give_gradients(model, 0)
    optimizer.step()
    assert ahead == [2] * (len(ahead) - 1) + [0]
    assert len(ahead) > 10


def test_moments_are_there_when_a_step_returns(folder: Path) -> None:
    model, optimizer = alone(folder)
    model.engine.before_copy = lambda: time.sleep(0.05 if threading.current_thread().name == "copy-out" else 0)
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].to_local().all()
    assert optimizer.state[parameter]["exp_avg_sq"].to_local().all()


@pytest.mark.parametrize("place", ["device", "host"])
def test_norms_do_not_decay(folder: Path, place: str) -> None:
    """Without a gradient, decay is all that changes a weight."""
    model = make(folder, ithaca.Plan(optimizer=place), replicate=None)
    optimizer = ithaca.make_optimizer(model, **OPTIONS)
    before = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]) == ("norm" in name), name


def test_a_closure_has_gradients(folder: Path) -> None:
    model, optimizer = alone(folder)
    tokens = torch.randint(0, 97, (1, 8))
    before = [parameter.to_local().detach().clone() for parameter in model.parameters()]

    def closure() -> torch.Tensor:
        loss = model(model.shard(tokens, tokens))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, parameter.to_local())


@pytest.mark.parametrize("begun", ["device", "host"])
def test_states_move_by_state_dict(folder: Path, begun: str) -> None:
    first = make(folder, ithaca.Plan(optimizer=begun), replicate=None)
    second = make(folder, HOST, replicate=None)
    theirs, ours = ithaca.make_optimizer(first, **OPTIONS), ithaca.make_optimizer(second, **OPTIONS)
    for step in range(4):
        if step == 2:
            for mine, other in zip(second.parameters(), first.parameters(), strict=True):
                mine.to_local().detach().copy_(other.to_local())
            theirs.param_groups[0]["weight_decay"] = 0.3
            ours.load_state_dict(theirs.state_dict())
            assert_same(ours, theirs)
        give_gradients(first, step)
        theirs.step()
        if step >= 2:
            give_gradients(second, step)
            ours.step()
    assert_same(ours, theirs)


def test_no_parameters_can_be_added(folder: Path) -> None:
    model, optimizer = alone(folder)
    with pytest.raises(InputError, match="make a new one"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    give_gradients(model, 0)
    optimizer.step()


def test_a_step_that_breaks_off_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile that was fetched ahead is taken for the memory that has changed since, and no slot is lost."""
    (hosted, ours), (plain, theirs) = (alone(folder, plan) for plan in (HOST, ithaca.Plan()))
    saved = [parameter.to_local().clone() for parameter in plain.parameters()]
    states = copy.deepcopy(theirs.state_dict())
    fused = host_adamw.update
    for broken in (1, 2, 3, 9, 9, 9):  # more often than there are slots
        calls = itertools.count(1)

        def break_off(*args, broken=broken, calls=calls) -> None:
            if next(calls) == broken:
                raise RuntimeError("out of memory")
            fused(*args)

        give_gradients(hosted, 0)
        monkeypatch.setattr(host_adamw, "update", break_off)
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.step()
    monkeypatch.setattr(host_adamw, "update", fused)
    with torch.no_grad():
        for parameter, value in zip(hosted.parameters(), saved, strict=True):
            parameter.to_local().copy_(value)
    ours.load_state_dict(states)
    for step in range(2):
        for model, optimizer in ((hosted, ours), (plain, theirs)):
            give_gradients(model, step)
            optimizer.step()
    assert_same(ours, theirs)


def test_states_can_be_copied_and_saved(folder: Path, tmp_path: Path) -> None:
    """Each by itself: not the slab that it lies in."""
    model, optimizer = alone(folder)
    give_gradients(model, 0)
    optimizer.step()
    torch.save(copy.deepcopy(optimizer.state_dict()), tmp_path / "states.pt")
    size = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert (tmp_path / "states.pt").stat().st_size < 6 * size


def test_state_dicts_go_either_way(folder: Path) -> None:
    """On a CPU; their options with them, so that the next step is the same."""
    (hosted, ours), (plain, theirs) = (alone(folder, plan) for plan in (HOST, ithaca.Plan()))
    for step in range(3):
        for model, optimizer in ((hosted, ours), (plain, theirs)):
            give_gradients(model, step)
            optimizer.step()
        mine, others = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
        ours.load_state_dict(others)
        theirs.load_state_dict(mine)
        assert_same(ours, theirs)
    assert all(group["fused"] for group in theirs.param_groups)


def test_state_dicts_that_do_not_fit(folder: Path) -> None:
    model, optimizer = alone(folder)
    give_gradients(model, 0)
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())

    def changed(change: Callable[[dict], object]) -> dict:
        state = copy.deepcopy(good)
        change(state)
        return state

    for wrong, sentence in (
        (
            changed(lambda state: state["param_groups"][0].update(maximize=True)),
            "maximize=True: states in host memory support only False",
        ),
        (changed(lambda state: state["state"][0].update(exp_avg=torch.zeros(1))), r"exp_avg of shape \(1,\) where"),
    ):
        with pytest.raises(InputError, match=sentence):
            optimizer.load_state_dict(wrong)
        found = optimizer.state_dict()["state"][0]["exp_avg"].to_local()
        assert torch.equal(found, good["state"][0]["exp_avg"].to_local()), "nothing is half done"
    optimizer.load_state_dict(changed(lambda state: state["state"].pop(0)))  # as of one that never had a gradient
    first = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert first["step"] == 0
    assert not first["exp_avg"].to_local().any()


def test_its_memory_goes_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python looking for cycles, and after the last copy."""
    model, optimizer = alone(folder)
    give_gradients(model, 0)
    optimizer.step()
    done: list[str] = []
    settle, close = ThreadEngine.settle, Slab.close
    monkeypatch.setattr(ThreadEngine, "settle", lambda engine: (done.append("settled"), settle(engine)))
    monkeypatch.setattr(Slab, "close", lambda slab: (done.append("closed"), close(slab)))
    gc.disable()
    try:
        del optimizer
        assert done == ["settled", "closed"]
    finally:
        gc.enable()


def frozen_all(folder: Path) -> ithaca.Model:
    model = make(folder, HOST, replicate=None)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0: a number of 0 or more"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\): two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, "two numbers"),
    ],
)
def test_options_that_cannot_be(folder: Path, options: dict, sentence: str) -> None:
    for place in ("device", "host"):
        with pytest.raises(InputError, match=sentence):
            ithaca.make_optimizer(make(folder, ithaca.Plan(optimizer=place), replicate=None), **OPTIONS | options)
    with pytest.raises(InputError, match="every parameter of the model is frozen"):
        ithaca.make_optimizer(frozen_all(folder), **OPTIONS)


# Host memory


def with_free(available: int) -> Callable[[], SimpleNamespace]:
    """A machine of so many free bytes that programs may take."""
    total = 1_000_000
    return lambda: SimpleNamespace(available=available + total // 20, total=total)


def refused(folder: Path, free: list[int], reserved_bytes: int) -> str:
    """What each rank is told, with its own idea of what is free."""
    model = make(folder, HOST)
    whole = psutil.virtual_memory
    psutil.virtual_memory = with_free(free[model.mesh.rank])
    made: list[object] = []
    host_adamw.Slab, slab = (lambda *args: made.append(args)), Slab
    try:
        ithaca.make_optimizer(model, **OPTIONS, reserved_bytes=reserved_bytes)
    except PlanError as problem:
        assert not made
        return str(problem)
    finally:
        psutil.virtual_memory, host_adamw.Slab = whole, slab
    raise AssertionError("it was not refused")


def test_states_that_do_not_fit(ranks, folder: Path) -> None:
    """On any rank: on all, before anything is allocated."""
    first, second = ranks(2).run(refused, folder, [10**9, 1000], 0)
    assert first == f"rank 1: {second}"
    assert second.startswith("optimizer states on the host (plan.optimizer=host) need ")
    assert "for the 2 ranks of this node, and free memory is 1000 B: " in second
    (text,) = ranks(1).run(refused, folder, [900_000], 800_000)
    assert "of tapes, and free memory is 879 KiB: " in text
    assert "; tapes of at most " in text


def test_what_would_fit() -> None:
    giga = 2**30
    _refuse_states(6 * giga, 2, 4 * giga, 10 * giga, "free memory", gpu=True)
    with pytest.raises(PlanError) as problem:
        _refuse_states(8 * giga, 2, 4 * giga, 10 * giga, "free memory", gpu=True)
    assert str(problem.value) == (
        "optimizer states on the host (plan.optimizer=host) need 8 GiB for the 2 ranks of this node, beside 4 GiB "
        "of tapes, and free memory is 10 GiB: 2 GiB are missing; plan.optimizer=device keeps them on the GPU, or "
        "tapes of at most 2 GiB, for fewer tokens, leave room"
    )
    with pytest.raises(PlanError, match="1 GiB are missing; a smaller model or more nodes would fit"):
        _refuse_states(8 * giga, 1, 0, 7 * giga, "free memory", gpu=False)


def taken(folder: Path) -> tuple[int, int]:
    """What tapes are said to take of this node, and the tensors that they are."""
    model = make(folder, ithaca.Plan(recipe="sweep", chunk=32))
    said = model.host_bytes(3, 64)
    model.allocate(3, 64)
    tapes = model.reservation._tapes[True]
    slots = [slot for slots in tapes._slots.values() for slot, _ in slots._free]
    memory = [tape.memory for group in tapes._tapes.values() for tape in group.values()]  # pyrefly: ignore
    return said, sum(tensor.nbytes for tensor in (*slots, *memory))


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_of_tapes(ranks, folder: Path, world: int) -> None:
    found = ranks(world).run(taken, folder)
    assert {said for said, _ in found} == {sum(own for _, own in found)}


def test_moments_are_whole_over_ranks(ranks, folder: Path) -> None:
    for whole in ranks(2).run(gathered, folder):
        assert whole


def gathered(folder: Path) -> bool:
    """The host's tensors are cut over the same ranks: what is put together has everyone's part."""
    model = make(folder, HOST)
    optimizer = ithaca.make_optimizer(model, **OPTIONS)
    give_gradients(model, 1)
    optimizer.step()
    parameter = next(p for p in model.parameters() if p.grad is not None and p.dim() > 1)
    moment = optimizer.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor)
    rows = len(moment.to_local())
    whole = moment.full_tensor()
    mine = whole[-rows:] if model.mesh.rank else whole[:rows]
    return torch.equal(mine, moment.to_local()) and bool(whole.all())
