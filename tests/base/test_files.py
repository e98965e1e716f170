from pathlib import Path

import pytest

from ithaca.base.files import read_small


def test_a_file_within_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("snö")
    assert read_small(path, most=4) == "snö"
    with pytest.raises(ValueError, match="more than 3 B"):
        read_small(path, most=3)


def test_a_file_without_end() -> None:
    with pytest.raises(ValueError, match="more than 1 KiB"):
        read_small(Path("/dev/zero"), most=1024)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError):
        read_small(tmp_path / "a")
