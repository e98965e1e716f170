"""Assumed beside measured on an H200, with made-up figures in place of a GPU's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.doctor import devices, meaning, versions
from ithaca.doctor.exam import Found
from ithaca.doctor.rates import cluster, known_gpus, measured_tables
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.hardware import HERE, read_gpus
from ithaca.planner.search import longest

NAME = "H200-141GB"


@pytest.fixture
def exam(monkeypatch: pytest.MonkeyPatch) -> Any:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    grid = SimpleNamespace(gpu=True, device=torch.device("cuda", 0), size=16)
    return SimpleNamespace(grid=grid, nodes=("a",) * 8 + ("b",) * 8, most_on_a_node=8, model="llama3-8b")


def rank(name: str = "NVIDIA H200", **rates: float) -> Found:
    told = {"matmul": 600e12, "bandwidth": 4e12, "attention.flash4.forward": 640e12, "host_alone": 50e9, "host": 20e9}
    told |= {key.replace("__", "."): value for key, value in rates.items()}
    memory = {"memory": 150 * 10**9, "free": 149 * 10**9, "host_free": 950 * 10**9}
    return {"device": name, "id": "0", "cores": None, **memory, "rates": told, "not_run": {}, "errors": []}


@pytest.fixture
def findings(exam: Any) -> dict[str, Found]:
    told = [rank() | {"id": str(place)} for place in range(15)] + [rank(matmul=300e12) | {"id": "15"}]
    sizes = {"1024": dict.fromkeys(("all_to_all", "send_recv"), 1e9), "4096": {"all_to_all": 200e9, "send_recv": 9e9}}
    across = {"4096": {"all_to_all": 30e9, "send_recv": 9e9}}
    return {
        "devices": devices.conclude(exam, told, {}),
        "links": {"inside": sizes, "across": across},
        "disk": {"folder": "/a, /b", "devices": 2, "write_beside": 3e9, "read_beside": 2e9},
    }


def test_the_slowest_rank_counts(findings: dict[str, Found]) -> None:
    found = findings["devices"]
    assert found["slowest"]["matmul"] == 300e12
    assert found["ranks_on_a_device"] == 1
    assert found["notes"] == ["rank 15 reaches 50% of the median in matmul"]
    assert "  ".join(devices.lines(found)).count("host link") == 2


def test_ranks_that_share_a_device(exam: Any) -> None:
    """Ranks on other nodes have a GPU of the same number, which is another one."""
    told = [rank() | {"id": str(place // 2)} for place in [*range(8), *range(8)]]
    found = devices.conclude(exam, told, {})
    assert found["ranks_on_a_device"] == 2
    tables = measured_tables(exam, {"devices": found, "links": {}})
    assert tables[f'"{NAME}"']["matmul"] == (600e12, f"{HERE}, 2 ranks on one device at once")
    assert "inside" not in tables[f'"{NAME}"']


def test_the_file(exam: Any, findings: dict[str, Found]) -> None:
    tables = measured_tables(exam, findings)
    gpus = known_gpus(exam, tables)
    own, found = gpus["assumed"], gpus["measured"]
    assert own == read_gpus()[NAME]
    assert (found.matmul, found.bandwidth, found.host) == (300e12, 4e12, 20e9)  # all at once, not alone
    assert (found.inside, found.across) == (200e9, 30e9)
    assert found.sources["host"] == HERE
    assert (found.memory, found.ram) == (150e9, pytest.approx(125e9))
    assert found.flops == own.flops
    rates, before = found.rates("flash4"), own.rates("flash4")
    assert rates is not None
    assert before is not None
    assert rates.forward == 640e12
    assert found.rates("cudnn+flash") == own.rates("cudnn+flash")  # which did not run


def test_what_it_means(exam: Any, findings: dict[str, Found], monkeypatch: pytest.MonkeyPatch) -> None:
    # flash4 was measured, so it is there; else the assumed rates would be those of another kernel
    monkeypatch.setattr("ithaca.attention.kernels.facts._installed", lambda _: True)
    found = meaning.conclude(exam, [], findings)
    spec = read_spec(find_config("llama3-8b")[0])
    gpus = known_gpus(exam, measured_tables(exam, findings))
    assert found["longest"] == {kind: longest(spec, cluster(exam, gpu)) for kind, gpu in gpus.items()}
    assert found["longest"]["measured"] < found["longest"]["assumed"]  # half the host memory
    assert found["tokens"] == found["longest"]["measured"]
    assert found["step_seconds"]["measured"] > found["step_seconds"]["assumed"]
    table = {row["name"]: (row["assumed"], row["measured"]) for row in found["table"]}
    assert table["inside"] == (450e9, 200e9)
    assert table["disk_write"] == (4e9, 1.5e9)  # of one of two disks
    assert table["disk_read"] == (4e9, 1e9)
    assert table["attention.flash4.forward"] == (655e12, 640e12)
    text = "\n".join(meaning.lines(found))
    assert "2x8xH200-141GB" in text
    assert "llama3-8b: longest context" in text


def test_nothing_was_measured(exam: Any) -> None:
    """Where the devices failed, the planner's own numbers remain; a CPU has none."""
    failed = {"devices": {"status": "failed"}, "links": {"status": "failed"}, "disk": {"status": "failed"}}
    assert measured_tables(exam, failed) == {}
    assert meaning.conclude(exam, [], failed)["longest"].keys() == {"assumed"}
    exam.grid.gpu, exam.grid.device = False, torch.device("cpu")
    assert meaning.conclude(exam, [], failed) == {"skipped": "the device was not measured, and no table describes it"}


def test_a_gpu_of_no_table(exam: Any, findings: dict[str, Found], monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA X9000", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    findings["devices"]["device"] = "NVIDIA X9000"
    (found,) = known_gpus(exam, measured_tables(exam, findings)).values()
    assert (found.name, found.capability, found.flops) == ("NVIDIA-X9000", (9, 0), 300e12)


def test_versions_that_differ(exam: Any) -> None:
    told: list[Found] = [{"versions": {"torch": "2.13.0", "NCCL": None}, "missing": {}} for _ in range(16)]
    assert versions.conclude(exam, told, {})["problems"] == []
    told[9]["versions"] = {"torch": "2.11.0", "NCCL": None}
    assert versions.conclude(exam, told, {})["problems"] == [
        "rank 9 on b has torch 2.11.0, but rank 0 has 2.13.0: install the same"
    ]


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that only run on a GPU are not missing on a CPU, and flash-attn-4 needs Hopper."""
    none = dict.fromkeys(("NCCL", "flash-attn-4", "triton", "transformers"))
    assert versions._missing(none, torch.device("cpu")).keys() == {"NCCL", "transformers"}
    capability = [(8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability.pop(0))
    assert "flash-attn-4" not in versions._missing(none, torch.device("cuda"))
    assert versions._missing(none, torch.device("cuda"))["flash-attn-4"] == "pip install 'ithaca[flash4]'"
