"""What a step must not do over and over: each of these operations once took a share of a small model's step."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ithaca
from ithaca.optimizer.adamw import clip
from ithaca.plans.plan import Plan

TOKENS = 40
PLANS = {
    "sweep": Plan(recipe="sweep"),
    "sweep, all on the device": Plan(recipe="sweep", x="device", o="device", residual="device"),
    "none": Plan(checkpoint="none"),
    "selective": Plan(checkpoint="selective"),
}


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(plan: Plan) -> tuple[Counter[str], int]:
    """Those of a step with clipping and optimizer, the second step; and the number of layers."""
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), plan)
    optimizer, row = ithaca.make_optimizer(model, learning_rate=1e-3), torch.arange(TOKENS)
    for _ in range(2):
        batch = model.shard(row, row)
        with Operations() as seen:
            model(batch).backward()
            clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return seen.found, model.spec.layers


@pytest.mark.parametrize("name", PLANS)
def test_the_host_waits_for_nothing(name: str) -> None:
    """A number that is read from a tensor on a GPU makes the host wait for all that is queued there."""
    found, _ = operations(PLANS[name])
    assert not found.keys() & {"_local_scalar_dense", "nonzero", "masked_select", "unique"}


@pytest.mark.parametrize("name", PLANS)
def test_one_table_of_angles(name: str) -> None:
    found, _ = operations(PLANS[name])
    assert found["cos"] == found["sin"] == 1


@pytest.mark.parametrize("name", PLANS)
def test_no_gradient_is_copied_into_zeros(name: str) -> None:
    """As autograd does for a slice of a weight, though it be all of it."""
    found, layers = operations(PLANS[name])
    assert found["slice_backward"] == 0
    made = found["zeros"] + found["zeros_like"] + found["new_zeros"] + found["zero_"] + found["full"]
    assert made <= 2 * layers + 6  # a block's sums, and its last product; the loss and the embedding have some
