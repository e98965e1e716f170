"""An unknown GPU is refused with its nearest known relative, and what is named works."""

import re

import pytest

from ithaca.base.errors import PlanError
from ithaca.planner.hardware import parse_gpus, read_gpus
from ithaca.planner.relatives import _FAMILY, _FOREIGN, _OLD, _pairs

MEANT = {
    "4090": "did you mean 'RTX4090-24GB'",
    "RTX 4090": "did you mean 'RTX4090-24GB'",
    "NVIDIA GeForce RTX 4090": "did you mean 'RTX4090-24GB'",
    "NVIDIA H100 80GB HBM3": "did you mean 'H100-80GB'",
    "NVIDIA A100-SXM4-40GB": "did you mean 'A100-40GB'",
    "A100-SXM4-80GB": "did you mean 'A100-80GB'",
    "A100-64GB": "did you mean 'A100-80GB'",
    "H100-96GB": "did you mean 'H100-80GB'",
    "H100x8": "did you mean '8xH100-80GB'",
    "H100:8": "did you mean '8xH100-80GB'",
    "8 H100": "did you mean '8xH100-80GB'",
    "8*H200": "did you mean '8xH200-141GB'",
    "HH100": "did you mean 'H100-80GB'",
    "RTX409": "did you mean 'RTX4090-24GB'",
    "V100": "its compute capability is 7.0, and 8.0 is needed: 4xA100-40GB works",
    "Tesla T4": "its compute capability is 7.5, and 8.0 is needed: 4xRTX4090-24GB works",
    "MI300X": "it is not an NVIDIA GPU, and Ithaca runs only on these; the nearest in memory is 4xB200-180GB",
    "TPUv5p": "it is not an NVIDIA GPU, and Ithaca runs only on these; the nearest in memory is 4xGH200-96GB",
    "A6000": "the nearest known GPU is 4xL40S-48GB",
    "NVIDIA RTX A6000": "the nearest known GPU is 4xL40S-48GB",
    "GB200": "the nearest known GPU is 4xB200-180GB",
    "H20": "the nearest known GPU is 4xH100-80GB",
    "RTX3090": "the nearest known GPU is 4xRTX4090-24GB",
    "Homemade-200GB": "the nearest in memory is 4xB200-180GB",
    "Homemade": "known are A100-40GB",
}


@pytest.mark.parametrize("name", MEANT)
def test_the_nearest(name: str) -> None:
    given = name if MEANT[name].startswith("did you mean '8x") else f"4x{name}"
    with pytest.raises(PlanError, match=re.escape(f"GPU '{name}' is not known: {MEANT[name]}")):
        parse_gpus(given, read_gpus())


@pytest.mark.parametrize("given", ["8xH100", "h100", "8xh100-80gb", "RTX4090", "B200", "GH200", "8 × H200"])
def test_short_names_are_enough(given: str) -> None:
    assert parse_gpus(given, read_gpus())[1].name in read_gpus()


def test_what_is_named_is_known() -> None:
    """For every name in the tables, and for memory between two: the answer is taken when it is given."""
    names = [name for row in _FAMILY.values() for name in row.split()]
    names += [name for row in (*_OLD.values(), _FOREIGN) for name, _ in _pairs(row)]
    for name in [*names, "x-1GB", "x-60GB", "x-999GB"]:
        with pytest.raises(PlanError) as refused:
            parse_gpus(f"2x{name}", read_gpus())
        works = re.findall(r"\b2x[A-Z0-9]+-\d+GB", str(refused.value))
        assert works, str(refused.value)
        assert parse_gpus(works[-1], read_gpus())[0] == 2
