"""What is gathered when: units that FSDP2 opens and closes, and those that Ithaca opens beside it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ithaca
from ithaca.base.tiles import Tiles
from ithaca.model.decoder import Unit
from ithaca.parallel.sharding import opened
from ithaca.schedule.costs import Traffic
from tests.models import make_model, save
from tests.schedule.steps import random_batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {name: save(make_model(name), top / name) for name in ("llama3", "smollm2")}  # untied, tied


def is_gathered(unit: Unit) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in unit.parameters())


def gathered_tables(folder: Path, options: dict) -> tuple[set[bool], bool]:
    """Whether the embedding table is there while attention runs, both ways, and in its own backward pass; and after."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(**options), ithaca.mesh())
    kernel, seen = model.kernel, set()

    class Watching:
        name = kernel.name

        def forward(self, *args):
            seen.add(is_gathered(model.decoder.embedding))
            return kernel.forward(*args)

        def backward(self, *args):
            seen.add(is_gathered(model.decoder.embedding))
            return kernel.backward(*args)

    def watched_tiles(*args: int) -> Tiles:
        seen.add(is_gathered(model.decoder.embedding))
        return Tiles(*args)

    model.kernel = Watching()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.schedule.embedding.Tiles", watched_tiles)  # which its own backward pass makes
        model(model.shard(*random_batch(2, 19, documents=False, ignored=0.0, seed=0))).backward()
    return seen, is_gathered(model.decoder.embedding)


@pytest.mark.parametrize("options", [{"recipe": "sweep"}, {"recipe": "dense"}])
@pytest.mark.parametrize("world", [1, 2])
def test_an_untied_table_is_there_only_while_tokens_are_looked_up(ranks, folders, options: dict, world: int) -> None:
    assert ranks(world).run(gathered_tables, folders["llama3"], options) == [({False}, False)] * world
    assert ranks(world).run(gathered_tables, folders["smollm2"], options) == [({True}, False)] * world


def open_beside(folder: Path) -> None:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(), ithaca.mesh())
    block, others = model.decoder.blocks[1], (model.decoder.blocks[0], model.decoder.embedding)
    wanted = {name: parameter.full_tensor() for name, parameter in block.named_parameters()}
    with opened(block) as weights:
        assert not any(is_gathered(other) for other in others)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        with opened(block):
            pass
        assert is_gathered(block), "who finds a unit open leaves it open"
    assert not is_gathered(block)


@pytest.mark.parametrize("world", [1, 2])
def test_opened(ranks, folders, world: int) -> None:
    ranks(world).run(open_beside, folders["llama3"])


LAYERS, PASSES = 3, 3
Sent = dict[tuple[str, str], Traffic]  # (pass, collective) -> how many, and the bytes of all ranks' parts


def fsdp_traffic(folder: Path, options: dict, zero: int) -> tuple[list[Sent], int, int]:
    """What FSDP2 sends in each pass of a step; and the bytes of all weights, and of the embedding table."""
    plan = ithaca.Plan(**options, zero=zero)
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh())
    # A parameter's rows are padded to a multiple of the two ranks
    sizes = {
        name: (weight.shape[0] + weight.shape[0] % 2) * math.prod(weight.shape[1:]) * weight.element_size()
        for name, weight in model.decoder.named_parameters()
    }
    batch = model.shard(*random_batch(2, 19, documents=False, ignored=0.0, seed=0))
    found: list[Sent] = [{} for _ in range(PASSES)]

    def counted(name: str, kind: str, whole: int) -> Callable[..., Any]:
        """A collective of (target, source, …) that counts; tensor `whole` of the two has the parts of all ranks."""
        begin = getattr(dist, name)

        def count(*args: Any, **more: Any) -> Any:
            names = ("output_tensor", "input_tensor") if "output_tensor" in more else ("output", "input")
            tensor = (args or tuple(more[name] for name in names))[whole]
            found[number][way, kind] = found[number].get((way, kind), Traffic(0, 0)) + Traffic(1, tensor.nbytes)
            return begin(*args, **more)

        return count

    with pytest.MonkeyPatch.context() as patch:
        # torch 2.13 renames both, and FSDP2 calls them by their new names
        for kind, names, whole in (
            ("gather", ("all_gather_single", "all_gather_into_tensor"), 0),
            ("reduce", ("reduce_scatter_single", "reduce_scatter_tensor"), 1),
        ):
            name = next(name for name in names if hasattr(dist, name))
            patch.setattr(dist, name, counted(name, kind, whole))
        for number in range(PASSES):
            way = "forward"
            loss = model(batch, valid_tokens=PASSES * batch.valid_tokens, last=number == PASSES - 1)
            way = "backward"
            loss.backward()
    assert not any(is_gathered(unit) for unit in model.decoder.blocks)
    return found, sum(sizes.values()), sizes["embedding.weight"]


@pytest.mark.parametrize("options", [{"recipe": "dense"}, {"recipe": "sweep", "chunk": 8}])
@pytest.mark.parametrize(("name", "tied"), [("llama3", False), ("smollm2", True)])
def test_what_fsdp_sends_in_each_pass_of_a_step(ranks, folders, name: str, tied: bool, options: dict) -> None:
    """ZeRO-3 gathers twice a pass, ZeRO-2 once a step; ZeRO-1 also reduces once a step, in its last pass."""
    for zero in (1, 2, 3):
        for found, weights, table in ranks(2).run(fsdp_traffic, folders[name], options, zero):
            units = LAYERS + (1 if tied else 2)  # a tied table, the final norm and the head are one
            all_units = Traffic(units, weights)
            # The gradient of an untied table needs no table
            again = all_units if tied else Traffic(units - 1, weights - table)
            gather: Sent = {("forward", "gather"): all_units}
            reduce: Sent = {("backward", "reduce"): all_units}
            every = gather | {("backward", "gather"): again} | reduce
            assert found == {1: [gather, {}, reduce], 2: [gather | reduce, reduce, reduce], 3: [every] * 3}[zero]
