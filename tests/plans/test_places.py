"""Places as text, there and back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.plans.places import KEPT, REBUILD, over_layers, read_places, spell


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from((*KEPT, REBUILD)), min_size=1, max_size=40))
def test_spelling(words: list[str]) -> None:
    assert over_layers("x", read_places("x", spell(words), (*KEPT, REBUILD)), len(words)) == tuple(words)
