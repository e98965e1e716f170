"""What the tensor schedule's cost says that a rank sends, against what leaves it: messages and bytes."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.parallel.collectives import Group
from ithaca.schedule.costs import Peers, Traffic, traffic
from tests.sampling import pairwise
from tests.schedule.contexts import LAYERS, save_models
from tests.schedule.tensor.test_tensor import post_norm

LOCAL = 6  # tokens of each rank: no padding
PLANS = {
    "none": {"checkpoint": "none"},
    "selective": {"checkpoint": "selective"},
    "full": {"checkpoint": "full"},
    "tiles": {"checkpoint": "full", "tile": 4},
    "tiles of the loss": {"checkpoint": "selective", "loss_tile": 5},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def sent(folder: Path | None, plan: ithaca.Plan) -> tuple[list[Traffic], list[Traffic]]:
    """Forward and backward, over the tensor ranks: what is sent and what is said."""
    ranks = dist.get_world_size()
    source = ithaca.load_model(folder, "float64") if folder else post_norm()
    model = ithaca.apply(source, plan, ithaca.mesh(tensor=ranks, device="cpu"))
    found, backward = [Traffic(0, 0), Traffic(0, 0)], False
    gather, reduce = Group.all_gather, Group.reduce_scatter

    def gathering(group, target, source):
        found[backward] += Traffic(1, source.nbytes * (ranks - 1))
        return gather(group, target, source)

    def reducing(group, target, source):
        found[backward] += Traffic(1, target.nbytes * (ranks - 1))
        return reduce(group, target, source)

    row = torch.arange(LOCAL * ranks) % 97
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_gather", gathering)
        patch.setattr(Group, "reduce_scatter", reducing)
        batch = model.shard(row, row)
        loss = model(batch)
        backward = True
        loss.backward()
    job = model.reservation.job(len(row))
    peers = Peers.all(ranks, 1, model.mesh.tensor_rank)
    blocks = [job.costs.messages(job, layer) for layer in range(LAYERS)]
    said = [traffic([message for block in blocks for message in block[way]], job, peers) for way in (0, 1)]
    return found, said


@pytest.mark.parametrize(
    ("name", "heads", "world"), pairwise(product(PLANS, ("8/8", "8/2", "14/2", "post-norm"), (2, 3, 4)))
)
def test_what_is_said_is_sent(ranks, folders, name: str, heads: str, world: int) -> None:
    plan = ithaca.Plan(recipe="tensor", **PLANS[name])
    for found, said in ranks(world).run(sent, folders.get(heads), plan):
        assert found == said
