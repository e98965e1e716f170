"""What is gathered when: units that FSDP2 opens and closes, and those that Ithaca opens beside it."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import ithaca
from ithaca.base.tiles import Tiles
from ithaca.model.decoder import Unit
from ithaca.parallel.sharding import opened
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
        name, bucket = kernel.name, kernel.bucket

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
