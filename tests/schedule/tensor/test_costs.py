"""What the tensor schedule's cost says that a rank sends, against what leaves it: messages and bytes."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.schedule.costs import Traffic
from tests.sampling import pairwise
from tests.schedule.contexts import save_models
from tests.schedule.counting import sent_messages, stated_messages
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
    row = torch.arange(LOCAL * ranks) % 97
    return sent_messages(model, model.shard(row, row)), stated_messages(model, len(row))


@pytest.mark.parametrize(
    ("name", "heads", "world"), pairwise(product(PLANS, ("8/8", "8/2", "14/2", "post-norm"), (2, 3, 4)))
)
def test_what_is_said_is_sent(ranks, folders, name: str, heads: str, world: int) -> None:
    plan = ithaca.Plan(recipe="tensor", **PLANS[name])
    for found, said in ranks(world).run(sent, folders.get(heads), plan):
        assert found == said
