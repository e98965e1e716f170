"""The planted mistakes of tests/planted still fit the code; `make planted` tries whether the tests catch them."""

from pathlib import Path

import pytest

from tests.planted.run import Mistake, read_mistakes, refusal

ROOT = Path(__file__).parent.parent
MISTAKES = read_mistakes()


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_patch_applies_and_names_tests_that_exist(mistake: Mistake) -> None:
    assert not refusal(mistake)
    assert mistake.sentence.endswith(".")
    for test in mistake.caught_by:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test
