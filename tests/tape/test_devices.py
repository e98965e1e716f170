"""Which folders share a file system or a device, and which are memory, told from a made-up system."""

from pathlib import Path

import pytest

from ithaca.tape import devices
from ithaca.tape.devices import by_file_system, count_devices, is_memory


def test_folders_on_one_file_system_share_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    assert by_file_system(folders) == [[0, 1]]
    assert count_devices(folders) == 1


def test_a_folder_that_is_elsewhere_is_a_device_of_its_own() -> None:
    assert count_devices(("/nowhere/a", "/nowhere/b")) == 2


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/a and /b are partitions of one disk, /c is another disk without partitions, /d is memory."""
    blocks, disks = tmp_path / "sys/dev/block", tmp_path / "sys/devices"
    blocks.mkdir(parents=True)
    for number, path in (("259:1", "nvme0n1/nvme0n1p1"), ("259:2", "nvme0n1/nvme0n1p2"), ("259:5", "nvme1n1")):
        (disks / path).mkdir(parents=True)
        if "p" in path:
            (disks / path / "partition").write_text("1")
        (blocks / number).symlink_to(disks / path)
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = ["21 1 259:1 / /a rw - ext4 /dev/nvme0n1p1 rw", "22 1 0:44 / /d rw,nosuid shared:3 - tmpfs tmpfs rw"]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(mounts))
    numbers = {"/a": "259:1", "/b": "259:2", "/c": "259:5", "/d": "0:44"}
    monkeypatch.setattr(devices, "_file_system", numbers.get)
    return tmp_path


@pytest.mark.parametrize(
    ("folders", "count"), [(("/a",), 1), (("/a", "/b"), 1), (("/a", "/c"), 2), (("/a", "/b", "/c", "/d"), 3)]
)
def test_partitions_of_one_disk_are_one_device(system: Path, folders: tuple[str, ...], count: int) -> None:
    assert count_devices(folders, system) == count
    assert by_file_system(folders) == [[number] for number in range(len(folders))]


def test_memory_is_no_disk(system: Path) -> None:
    assert [is_memory(folder, system) for folder in ("/a", "/c", "/d", "/nowhere")] == [False, False, True, False]
