"""Placements that can be had, for hypothesis."""

from hypothesis import strategies as st

from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, Placement


@st.composite
def placements(draw: st.DrawFn, layers: int) -> Placement:
    """Any that can be had."""
    o = tuple(draw(st.sampled_from((*KEPT, RECOMPUTE))) for _ in range(layers))
    x = [draw(st.sampled_from((*KEPT, REBUILD)))]
    for layer in range(1, layers):
        x.append(draw(st.sampled_from(KEPT if o[layer - 1] == RECOMPUTE else (*KEPT, REBUILD, REBUILD))))
    return Placement(tuple(x), o)
