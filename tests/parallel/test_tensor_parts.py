"""Which tensor ranks hold the same part of a weight, as arithmetic."""

from dataclasses import replace

import pytest

from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.parallel import tensor_parts
from ithaca.parallel.tensor_parts import TensorPart

SPEC = replace(read_spec(find_config("llama3-70b")[0]), vocab=1000)


def names(spec: Spec) -> list[str]:
    return [f"layers.{layer}.{name}" for layer in (0, 79) for name in spec.block_shapes()]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(64, 8, 8), (64, 8, 16), (8, 2, 3), (14, 2, 4), (6, 6, 3)])
def test_sharers_are_those_who_hold_the_same_part(heads: int, kv_heads: int, ranks: int) -> None:
    """None of a weight that each rank has a part of its own of; else all that hold this rank's part."""
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads)
    parts = [TensorPart(spec, rank, ranks) for rank in range(ranks)]
    for name in names(spec):
        places = [part.place(name) for part in parts]
        for part, place in zip(parts, places, strict=True):
            holders = [rank for rank, other in enumerate(places) if other == place]
            assert part.sharers(name) == (holders if len(set(places)) < ranks else []), name
    assert parts[0].sharers("layers.3.mlp.up_proj.weight") == []
    assert parts[0].sharers("layers.3.input_layernorm.weight") == [*range(ranks)]


def test_layers_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks ask for every weight of a model at its first clipping: 126 layers on 128 ranks took half an hour."""
    asked, place = 0, TensorPart.place

    def counted(part: TensorPart, name: str) -> tuple[range, ...]:
        nonlocal asked
        asked += 1
        return place(part, name)

    monkeypatch.setattr(TensorPart, "place", counted)
    tensor_parts._sharers.cache_clear()
    part = TensorPart(SPEC, 5, 64)
    for layer in range(80):
        for name in SPEC.block_shapes():
            part.sharers(f"layers.{layer}.{name}")
    assert asked <= len(SPEC.block_shapes()) * 3 * 64
