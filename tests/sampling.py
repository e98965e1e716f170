"""Matrices of cases of which `make test` runs a sample and `make test-all` every one."""

from collections.abc import Callable, Iterable
from itertools import combinations

import pytest
from _pytest.mark import ParameterSet

Case = tuple[object, ...]


def sampled(cases: Iterable[Case], kept: Callable[..., bool]) -> list[ParameterSet]:
    """Parameters for every case; those that are not kept are marked `full`."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if kept(*case) else pytest.mark.full)
        for case in cases
    ]


def pairwise(cases: Iterable[Case], cost: Callable[..., float] = lambda *_: 1) -> list[ParameterSet]:
    """Parameters for every case; kept are a few cheap ones in which every two values that can meet do."""
    every = list(cases)
    missing = set().union(*map(_pairs, every))
    kept: set[Case] = set()
    while missing:
        best = max(every, key=lambda case: len(missing & _pairs(case)) / cost(*case))
        kept.add(best)
        missing -= _pairs(best)
    return sampled(every, lambda *case: case in kept)


def _pairs(case: Case) -> set[tuple[tuple[int, object], ...]]:
    return set(combinations(enumerate(case), 2))
