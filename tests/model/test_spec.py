"""Sizes and FLOPs of a Spec against published numbers; runs of heads."""

import math

import pytest

from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.spec import runs

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    spec = read_spec(PRESETS[name])
    assert spec.parameters() == sum(math.prod(shape) for _, shape in spec.shapes()) == PUBLISHED[name]


def test_flops_count_the_head_and_not_the_lookup() -> None:
    spec = read_spec(PRESETS["llama3-8b"])
    matrices = spec.parameters() - 128256 * 4096
    assert spec.flops_per_token(1000) == 6 * matrices + 6 * 32 * 4096 * 1000
    tied = read_spec(PRESETS["llama3.2-1b"])
    assert tied.flops_per_token(0) == 6 * tied.parameters()


def test_runs_of_heads() -> None:
    assert runs(range(3, 7)) == [range(3, 7)]
    assert runs((0, 1, 4, 6, 7, 8)) == [range(2), range(4, 5), range(6, 9)]
    assert runs((5,)) == [range(5, 6)]
    assert runs(range(0)) == runs(()) == [range(0)]
