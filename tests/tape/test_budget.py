"""What may still be taken of a node's memory, read from made-up trees of /proc and /sys."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ithaca.tape.budget import host_budget

FREE = (850_000, "free memory")  # 900 000 are available, less 5 % of a million
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900_000, total=1_000_000))


def belong(system: Path, *lines: str) -> None:
    """The control groups that the process is in."""
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def limit(folder: Path, names: tuple[str, str, str], most: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cache_name = names
    (folder / limit_name).write_text(f"{most}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5000\nactive_file 7000\n{cache_name} {cache}\n")


def limited(most: int, used: int, cache: int = 0) -> tuple[int, str]:
    return most - used + cache - most // 20, "the control group's limit"


def test_no_control_groups(tmp_path: Path) -> None:
    assert host_budget(tmp_path) == FREE


def test_groups_without_files(tmp_path: Path) -> None:
    belong(tmp_path, "0::/user.slice")
    assert host_budget(tmp_path) == FREE


def test_version_2_own_limit(tmp_path: Path) -> None:
    belong(tmp_path, "0::/jobs/mine")
    limit(tmp_path / "sys/fs/cgroup/jobs/mine", V2, 400_000, 100_000)
    assert host_budget(tmp_path) == limited(400_000, 100_000) == (280_000, "the control group's limit")


def test_version_2_limit_of_a_parent(tmp_path: Path) -> None:
    """The group itself has "max"; what its siblings use counts, too, since the parent's use is read."""
    belong(tmp_path, "0::/jobs/today/mine")
    limit(tmp_path / "sys/fs/cgroup/jobs/today/mine", V2, "max", 1_000)
    limit(tmp_path / "sys/fs/cgroup/jobs", V2, 500_000, 200_000)
    assert host_budget(tmp_path) == limited(500_000, 200_000)


@pytest.mark.parametrize("narrow", ["jobs", "jobs/mine"])
def test_the_narrowest_of_several_limits_counts(tmp_path: Path, narrow: str) -> None:
    belong(tmp_path, "0::/jobs/mine")
    for name in ("jobs", "jobs/mine"):
        limit(tmp_path / "sys/fs/cgroup" / name, V2, 600_000, 300_000 if name == narrow else 100_000)
    assert host_budget(tmp_path) == limited(600_000, 300_000)


def test_no_limit_at_all(tmp_path: Path) -> None:
    belong(tmp_path, "0::/jobs/mine")
    limit(tmp_path / "sys/fs/cgroup/jobs/mine", V2, "max", 300_000)
    assert host_budget(tmp_path) == FREE


def test_pages_of_files_that_can_be_dropped_are_free(tmp_path: Path) -> None:
    belong(tmp_path, "0::/mine")
    limit(tmp_path / "sys/fs/cgroup/mine", V2, 400_000, 390_000, cache=250_000)
    assert host_budget(tmp_path) == limited(400_000, 390_000, 250_000) == (240_000, "the control group's limit")


def test_free_memory_counts_where_it_is_less_than_the_limit(tmp_path: Path) -> None:
    belong(tmp_path, "0::/mine")
    limit(tmp_path / "sys/fs/cgroup/mine", V2, 2_000_000, 100_000)
    assert host_budget(tmp_path) == FREE


def test_version_1(tmp_path: Path) -> None:
    """Entries of other controllers and the empty one of version 2 stand beside it, as on real machines."""
    belong(tmp_path, "7:cpu,cpuacct:/docker/abc", "5:memory:/docker/abc", "0::/docker/abc")
    folder = tmp_path / "sys/fs/cgroup/memory/docker/abc"
    limit(folder, V1, 400_000, 300_000, cache=50_000)
    # inactive_file is the group's own there, total_inactive_file that of its children as well
    (folder / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 50000\n")
    assert host_budget(tmp_path) == limited(400_000, 300_000, 50_000)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    """Version 1 has no "max": it writes the largest number of whole pages."""
    belong(tmp_path, "5:memory:/")
    limit(tmp_path / "sys/fs/cgroup/memory", V1, 2**63 - 4096, 300_000)
    assert host_budget(tmp_path) == FREE


@pytest.mark.parametrize(
    ("entry", "top", "names"), [("0::/host/abc", "", V2), ("5:memory:/host/abc", "memory", V1)], ids=["v2", "v1"]
)
def test_a_path_of_the_host_within_a_container(tmp_path: Path, entry: str, top: str, names: tuple) -> None:
    belong(tmp_path, entry)
    limit(tmp_path / "sys/fs/cgroup" / top, names, 400_000, 100_000)
    assert host_budget(tmp_path) == limited(400_000, 100_000)


def test_nothing_above_the_groups_is_read(tmp_path: Path) -> None:
    belong(tmp_path, "0::/mine")
    limit(tmp_path / "sys/fs/cgroup/mine", V2, "max", 0)
    limit(tmp_path / "sys/fs", V2, 1_000, 0)
    assert host_budget(tmp_path) == FREE


def test_never_less_than_nothing(tmp_path: Path) -> None:
    belong(tmp_path, "0::/mine")
    limit(tmp_path / "sys/fs/cgroup/mine", V2, 400_000, 399_000)
    assert host_budget(tmp_path) == (0, "the control group's limit")
