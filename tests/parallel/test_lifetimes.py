"""Nothing of a model outlives it: no cache keeps its tensors."""

import gc

import pytest
import torch

import ithaca


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def step(options: dict, axes: dict[str, int]) -> None:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(**options), ithaca.mesh(**axes))
    tokens = torch.arange(144).view(3, -1)
    model(model.shard(tokens, tokens)).backward()


def left_over(options: dict, axes: dict[str, int]) -> int:
    """Tensors that are there after a model has gone which were not there before it came."""
    step({}, {})  # torch keeps some of its own from its first use
    before = live_tensors()
    step(options, axes)
    return live_tensors() - before


@pytest.mark.parametrize(
    ("world", "options", "axes"),
    [
        (1, {}, {}),
        (1, {"recipe": "sweep", "chunk": 16}, {}),
        (3, {"recipe": "untied", "heads": 3}, {"ulysses": 3}),  # rounds whose heads do not follow each other
        (3, {"recipe": "sweep", "chunk": 16}, {"ulysses": 3}),
    ],
)
def test_no_tensor_outlives_its_model(ranks, world: int, options: dict, axes: dict[str, int]) -> None:
    assert ranks(world).run(left_over, options, axes) == [0] * world
