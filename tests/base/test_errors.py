"""Values from files in messages: one short line, whatever they are."""

import pytest

from ithaca.base.errors import ConfigError, DataError, read_option, shown

deep: list = []
for _ in range(5000):
    deep = [deep]


@pytest.mark.parametrize("value", ["x" * 10**7, "a\n\x1b[2J\ud800", 10**4000, [0] * 10**6, {"k" * 10**6: deep}, deep])
def test_shown_is_short_and_printable(value: object) -> None:
    found = shown(value)
    assert found.isprintable()
    assert len(found) <= 160


def test_shown_keeps_what_is_short() -> None:
    assert [shown(value) for value in ("a", 1.0, None, ["b"])] == ["'a'", "1.0", "None", "['b']"]


@pytest.mark.parametrize(("kind", "given"), [(ConfigError, "'x' is no number"), (DataError, "'x' cannot be read")])
def test_a_mistake_names_its_option_once(kind: type[Exception], given: str) -> None:
    def read(text: str) -> int:
        raise kind(text)

    assert read_option("--tokens", int, "5") == 5
    for text in (given, f"--tokens: {given}"):
        with pytest.raises(kind, match=f"^--tokens: {given}$"):
            read_option("--tokens", read, text)
