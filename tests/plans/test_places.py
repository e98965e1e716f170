"""Places as text, there and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.base.errors import PlanError
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, Placement, over_layers, read_places, spell


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from((*KEPT, REBUILD)), min_size=1, max_size=40))
def test_spelling(words: list[str]) -> None:
    assert over_layers("x", read_places("x", spell(words), (*KEPT, REBUILD)), len(words)) == tuple(words)


def test_an_x_is_rebuilt_from_the_o_of_the_layer_below() -> None:
    """Its own o may be recomputed; that of the layer below must be kept."""
    assert Placement(("host", REBUILD), ("host", RECOMPUTE)).x == ("host", REBUILD)
    with pytest.raises(PlanError, match="x of layer 1 is to be rebuilt from o of layer 0, which is not kept"):
        Placement(("host", REBUILD), (RECOMPUTE, "host"))
    assert Placement((REBUILD, "host"), (RECOMPUTE, "host")).x == (REBUILD, "host")  # layer 0 is looked up
