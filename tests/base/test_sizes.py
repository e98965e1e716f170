"""Sizes in words: what is printed can be given back."""

import pytest

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import nearest_divisors, parse_bytes, read_memory, spell_bytes


@pytest.mark.parametrize("text", ["80GB", "5MB", "64GiB", "1900GB", "1KiB", "80", "28TB", "1001"])
def test_bytes_are_spelled_as_they_are_read(text: str) -> None:
    assert spell_bytes(parse_bytes(text)) == text


def test_a_memory_has_a_unit() -> None:
    assert read_memory("--host", "64GB") == 64 * 10**9
    for text, sentence in (
        ("1.9", "--host 1.9 is less than 1MB: give a size with its unit"),
        ("foo", "--host: 'foo' is"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read_memory("--host", text)


@pytest.mark.parametrize(
    ("number", "near", "words"), [(4, 3, "1, 2 or 4"), (1, 3, "1"), (2, 3, "1 or 2"), (96, 13, "8, 12 or 16")]
)
def test_divisors_that_are_near(number: int, near: int, words: str) -> None:
    assert nearest_divisors(number, near) == words
