"""Small files: regular, of bounded size."""

import os
from pathlib import Path

import pytest

from ithaca.base.files import read_small


def test_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"home")
    assert read_small(path, most=4) == b"home"
    with pytest.raises(ValueError, match="it has 4 bytes, and 3 are the most"):
        read_small(path, most=3)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="it is a device or a pipe, not a file"):
            read_small(path)
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")


def test_a_file_that_says_it_is_empty() -> None:
    """The files of /proc have size 0 and content all the same."""
    with pytest.raises(ValueError, match="it has 6 bytes, and 5 are the most"):
        read_small(Path("/proc/self/status"), most=5)
