"""Small files of text that a user names: configurations, tables, descriptions of models."""

from pathlib import Path

from ithaca.base.sizes import format_bytes

MOST = 64 << 20  # bytes; what a person or a program writes as TOML or JSON is far smaller


def read_small(path: Path, most: int = MOST) -> str:
    """Return the text of a file. A file without end, as /dev/zero, is a ValueError, and so is one that is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {format_bytes(most)}")
    return data.decode("utf-8")
