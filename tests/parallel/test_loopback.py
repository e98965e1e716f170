"""A rank that stands for all: each call fills what a real one would, with this rank's own."""

import pytest
import torch

from ithaca.parallel.loopback import Loopback

RANKS = 3


@pytest.fixture
def group() -> Loopback:
    return Loopback(0, RANKS)


def test_every_rank_has_what_this_one_gathers(group: Loopback) -> None:
    source, target = torch.arange(4.0), torch.full((RANKS * 4,), torch.nan)
    group.all_gather_single(target, source).wait()
    assert torch.equal(target, source.repeat(RANKS))
    parts = [torch.empty(4) for _ in range(RANKS)]
    group.allgather([parts], [source]).wait()
    assert all(torch.equal(part, source) for part in parts)


def test_what_is_reduced_is_the_mean(group: Loopback) -> None:
    source, target = torch.arange(6.0), torch.full((2,), torch.nan)
    group.reduce_scatter_single(target, source).wait()
    assert torch.equal(target, torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize(("there", "back"), [(7, 7), (4, 7), (7, 3), (2, 7)])
def test_all_that_is_awaited_arrives(group: Loopback, there: int, back: int) -> None:
    source, target = torch.arange(1.0, there + 1), torch.full((back,), torch.nan)
    group.all_to_all_single(target, source, [], []).wait()
    assert torch.equal(target, source.repeat(back)[:back])


def test_a_rank_without_heads_sends_nothing(group: Loopback) -> None:
    """The first of three ranks has none of 8/2 heads in the second round of `untied` with 6, and others have."""
    target = torch.full((7,), torch.nan)
    group.all_to_all_single(target, torch.empty(0), [], []).wait()
    assert torch.equal(target, torch.zeros(7))
