"""The lower bound of a step: every shape is timed once, and counts as often as the step had it."""

from collections import Counter

import pytest
import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.rehearsal import kernel_bound

CPU = torch.device("cpu")


@pytest.fixture
def one_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second(work, *_: object) -> float:
        work()
        return 1.0

    monkeypatch.setattr(kernel_bound, "median_seconds", one_second)


@pytest.mark.usefixtures("one_second_each")
def test_products_count_as_often_as_they_were_seen() -> None:
    products, a, b = kernel_bound.Products(), torch.randn(3, 4), torch.randn(4, 5)
    total = torch.zeros(3, 5)
    with products:
        for _ in range(2):
            a @ b
        total.addmm_(a, b)
        b.T @ a.T
        a + a
    assert sorted(products.seen.values()) == [1, 1, 2]
    assert kernel_bound.product_seconds(products.seen, CPU) == 4.0


@pytest.mark.usefixtures("one_second_each")
def test_attention_calls_count_as_often_as_they_were_seen() -> None:
    bounds, shape = (0, 6), (6, 2, 8)
    pieces = Pieces(bounds, bounds, causal=True, ragged=False)
    seen: Counter[kernel_bound.Call] = Counter({(False, shape, shape, pieces): 3, (True, shape, shape, pieces): 5})
    found = kernel_bound.attention_seconds(seen, choose_kernel("naive", CPU, torch.float32, 8), torch.float32, CPU)
    assert found == {"forward": 3.0, "backward": 5.0}


def test_the_median_leaves_out_the_first_call_and_the_earlier_half(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    taken = iter((9.0, 2.0, 4.0))  # the clock settles after the first
    monkeypatch.setattr(kernel_bound, "seconds_of", lambda work, _: work() or next(taken))
    assert kernel_bound.median_seconds(lambda: calls.append(None), 0.0, CPU) == 3.0
    assert len(calls) == 1 + 3


def test_the_fastest_call_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    taken = iter((9.0, *[4.0] * 17, 2.0, 5.0))
    monkeypatch.setattr(kernel_bound, "seconds_of", lambda work, _: work() or next(taken))
    assert kernel_bound.fastest_seconds(lambda: calls.append(None), 0.0, CPU) == 2.0
    assert len(calls) == 1 + 20
