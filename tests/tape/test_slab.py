"""A slab's parts have the sizes that were asked for, begin on pages, keep apart and keep what is written.

On a CPU nothing is registered with a driver: that is left to a GPU's tests.
"""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.tape.slab import Slab

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


def make_slab(sizes: list[int]) -> Slab:
    def silent(line: str) -> None:
        pytest.fail(f"nothing is registered on a CPU, yet it says: {line}")

    return Slab(sizes, CPU, silent)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([PAGE - 1, PAGE, PAGE + 1])), max_size=6))
def test_parts_have_their_sizes_begin_on_pages_and_do_not_overlap(sizes: list[int]) -> None:
    slab = make_slab(sizes)
    assert [part.nbytes for part in slab.parts] == sizes
    assert slab.nbytes == sum(-(-size // PAGE) * PAGE for size in sizes)  # whole pages and no more
    end = 0
    for part in (part for part in slab.parts if part.nbytes):
        assert part.data_ptr() % PAGE == 0
        assert part.data_ptr() >= end
        end = part.data_ptr() + part.nbytes


@pytest.mark.parametrize("sizes", [[24], [PAGE, PAGE], [8, 3 * PAGE + 8, 0, 16, PAGE]])
def test_content_survives(sizes: list[int]) -> None:
    slab = make_slab(sizes)
    views = [part.view(torch.float64) for part in slab.parts]
    for number, view in enumerate(views):
        view.copy_(torch.arange(len(view)) + 1000 * number)
    for number, view in enumerate(views):
        assert torch.equal(view, torch.arange(len(view), dtype=torch.float64) + 1000 * number)


def test_memory_outlives_the_slab_while_a_part_is_held() -> None:
    (part,) = make_slab([PAGE]).parts
    assert torch.equal(part.fill_(7), torch.full((PAGE,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_nothing_asked_for_is_nothing_taken(sizes: list[int]) -> None:
    slab = make_slab(sizes)
    assert slab.nbytes == 0
    assert [part.shape for part in slab.parts] == [(0,)] * len(sizes)
    slab.close()


def test_closing_gives_the_memory_back() -> None:
    slab = make_slab([8])
    slab.close()
    slab.close()  # once more does no harm
    assert slab.parts == []
