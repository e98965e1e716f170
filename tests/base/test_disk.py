import os
from pathlib import Path

from ithaca.base.disk import same_file


def test_an_open_file_is_the_one_that_its_path_names(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("x")
    link.symlink_to("a")
    descriptor = os.open(link, os.O_RDONLY)
    try:
        assert same_file(path, descriptor)
        assert same_file(link, descriptor)  # export looked for another checkpoint for ever
        assert not same_file(tmp_path / "none", descriptor)
        link.unlink()
        link.symlink_to("link")
        assert not same_file(link, descriptor)
        link.unlink()
        link.write_text("x")
        assert not same_file(link, descriptor)
    finally:
        os.close(descriptor)
