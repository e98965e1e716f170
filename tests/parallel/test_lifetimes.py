"""Nothing of a model outlives it: no cache keeps its tensors. What is sent lives until it has arrived."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ithaca
from ithaca.parallel.collectives import Group
from ithaca.parallel.exchange import Ulysses
from ithaca.parallel.head_split import split_heads
from ithaca.parallel.ring import Ring
from tests.parallel.test_ring import Watched


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


class Remembering(Watched):
    """Keeps weak references to all that was sent."""

    def __init__(self) -> None:
        super().__init__(2)
        self.sent: list[Any] = []

    def _send(self, *args: Any) -> Any:
        watch = super()._send(*args)
        self.sent.append(watch._sent)
        return watch


SPLIT = split_heads(4, 2, 2)


def travelling_sums(ring: Ring) -> Any:
    sums = ring.kv_gradient_sums(at_once=False)
    sums.begin(0, torch.zeros(2, 4, 2, 3)).fill_(1)
    sums.end()
    return sums


# Nothing but the handle that is returned can keep the tensors
SENDERS: dict[str, Callable[[Group], Any]] = {
    "to heads": lambda group: Ulysses(group).to_heads(SPLIT, (torch.zeros(5, 4, 3),), (torch.zeros(5, 2, 3),)),
    "to tokens": lambda group: Ulysses(group).to_tokens(SPLIT, (torch.zeros(6, 2, 3),)),
    "to tokens, with keys": lambda group: Ulysses(group).to_tokens(
        SPLIT, (torch.zeros(6, 2, 3),), (torch.zeros(6, 1, 3),)
    ),
    "to tokens, in runs": lambda group: Ulysses(group, runs=2).to_tokens(SPLIT, (torch.zeros(8, 2, 3),)),
    "gather": lambda group: Ring(group).gather(torch.zeros(4, 2, 3)),
    "gather several": lambda group: Ring(group).gather(torch.zeros(4, 2, 3), torch.zeros(4, 1, 3)),
    "merge": lambda group: Ring(group).merge(torch.zeros(8, 2, 3), torch.zeros(2, 8)),
    "reduce": lambda group: Ring(group).reduce(torch.zeros(8, 2, 3)),
    "send and receive": lambda group: Ring(group).send_recv(torch.zeros(2, 4, 2, 3)),
    "all_gather": lambda group: Ring(group).all_gather(torch.zeros(2, 4, 2, 3)),
    "reduce_scatter": lambda group: Ring(group).reduce_scatter(torch.zeros(2, 4, 2, 3)),
    "travelling sums": lambda group: travelling_sums(Ring(group)),
}


@pytest.mark.parametrize("sender", SENDERS)
def test_what_is_sent_lives_until_it_has_arrived(sender: str) -> None:
    """On a GPU its memory would otherwise be used for something else. Behind the wait nothing holds it any more."""
    process_group = Remembering()
    handle = SENDERS[sender](Group(process_group))
    assert process_group.sent
    assert all(storage() is not None for storage in process_group.sent)
    handle.wait()
    assert all(storage() is None for storage in process_group.sent)
