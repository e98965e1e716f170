"""Which x are made again, from where, and onto which tapes."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.plans.places import REBUILD, RECOMPUTE, Placement
from ithaca.schedule.sweep.rebuild import (
    EMBEDDING,
    LONGEST_PASSING,
    layers_to_keep,
    passing_layers,
    plan_rebuilds,
    rebuild_passes,
)
from tests.schedule.sweep.placements import placements

SPEC = read_spec(PRESETS["llama3-8b"])  # whose o is as wide as its x


def from_the_first(last_o: str) -> Placement:
    """Six layers, x of the first one kept."""
    return Placement(("host",) + (REBUILD,) * 5, ("host",) * 5 + (last_o,))


@settings(max_examples=300, deadline=None)
@example(placement=from_the_first("host"), roomy=True)
@example(placement=from_the_first(RECOMPUTE), roomy=True)
@example(placement=Placement((REBUILD,) * 6, ("host",) * 6), roomy=True)
@example(placement=Placement((REBUILD,), (RECOMPUTE,)), roomy=False)
@given(placement=st.integers(1, 20).flatmap(placements), roomy=st.booleans())
def test_a_rebuilt_x_overwrites_nothing_that_is_needed(placement: Placement, roomy: bool) -> None:
    rebuilds, last = dict(plan_rebuilds(placement, roomy)), len(placement.x) - 1
    holds: dict[tuple[str, int], int] = {("x", n): n for n, word in enumerate(placement.x) if word != REBUILD}
    for layer in reversed(range(last + 1)):
        if layer not in holds.values():
            rebuild = rebuilds.pop(layer)
            assert rebuild.source == max((held for held in holds.values() if held < layer), default=EMBEDDING)
            assert all(placement.o[below] != RECOMPUTE for below in rebuild.layers(layer))
            for above, home in rebuild.targets.items():
                kind, owner = home
                assert rebuild.source < above <= layer
                assert kind == "x" or (roomy and placement.o[owner] != RECOMPUTE)
                # Of a layer that is done; or its own o, as it is used up, where K and V ask for no x before
                assert owner > layer or (home == ("o", layer) and above == layer - 1 and layer == last)
                assert home not in holds, "an x that is still needed"
                holds[home] = above
        holds = {home: held for home, held in holds.items() if held < layer}
    assert not rebuilds


@pytest.mark.parametrize("layers", [1, 4, 16, 28, 32, 61, 80])
def test_few_kept_x_rebuild_each_other_once(layers: int) -> None:
    for count in range(layers):
        kept = layers_to_keep(layers, count)
        assert len(kept) == count
        assert 0 not in kept
        placement = Placement(tuple("host" if n in kept else REBUILD for n in range(layers)), ("host",) * layers)
        passes = rebuild_passes(placement, SPEC)
        least = layers - 1 - count  # layer 0 is looked up
        assert passes >= least
        if 2 ** (count + 2) - 2 >= layers:
            assert passes == least
        if count > 0:
            assert passing_layers(plan_rebuilds(placement, roomy=True)) < LONGEST_PASSING
