"""The bare work of a step: every shape is timed once, and counted as often as the step had it."""

from collections import Counter

import pytest
import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.rehearsal import kernel_bound as bare

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def a_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(work, *_: object) -> float:
        work()
        return 1.0

    monkeypatch.setattr(bare, "_seconds", seconds)


def test_products_count_as_often_as_they_were_seen() -> None:
    products, a, b = bare.Products(), torch.randn(3, 4), torch.randn(4, 5)
    total = torch.zeros(3, 5)
    with products:
        for _ in range(2):
            a @ b
        total.addmm_(a, b)
        b.T @ a.T
        a + a
    assert sorted(products.seen.values()) == [1, 1, 2]
    assert bare.product_seconds(products.seen, CPU) == 4.0


def test_calls_of_attention_count_as_often_as_they_were_seen() -> None:
    bounds, shape = (0, 6), (6, 2, 8)
    pieces = Pieces(bounds, bounds, causal=True, ragged=False)
    seen: Counter[bare.Call] = Counter({(False, shape, shape, pieces): 3, (True, shape, shape, pieces): 5})
    found = bare.attention_seconds(seen, choose_kernel("naive", CPU, torch.float32, 8), torch.float32, CPU)
    assert found == {"forward": 3.0, "backward": 5.0}
