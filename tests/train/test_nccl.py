"""Ranks of one job that fail, each a process of its own and without a launcher: over NCCL on one GPU, and over gloo.

Over NCCL, ranks that wait get no error. They must end by themselves, with a sentence that names the one that is lost.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import nccl
from tests.models import make_model, save
from tests.test_gpu import GPU_SIZES
from tests.train.test_nodes import losses

ROOT = Path(__file__).parents[2]
TIMEOUT = 20  # run.timeout
BOUND = TIMEOUT + 60  # seconds, in which the others have called the roll and ended


def no_shared(monkeypatch: pytest.MonkeyPatch, available: bool, version: tuple[int, ...], enabled: str) -> str | None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(nccl, "nccl_version", lambda: version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    return nccl.no_shared_gpu()


def test_reasons_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_shared(monkeypatch, False, (), "1") == "no CUDA device"
    assert "NCCL is 2.28, and" in str(no_shared(monkeypatch, True, (2, 28, 9), "1"))
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1 is not set" in str(no_shared(monkeypatch, True, (2, 32, 3), "0"))
    assert no_shared(monkeypatch, True, (2, 32, 3), "1") is None


@dataclass(frozen=True)
class Ended:
    code: int
    at: float
    said: str


def run_ranks(
    folder: Path, model: Path, device: str, ranks: int, *deaths: str, steps: int = 9, batch: int | None = None
) -> list[Ended]:
    """Run all ranks to their end. One that is stopped or hangs is killed when the others have ended."""
    folder.mkdir(exist_ok=True)
    left = [death for death in deaths if not (folder / f"died-{death}").exists()]
    stays = {int(death.split(":")[0]) for death in left if death.endswith(("STOP", "HANG"))}
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = str(trial.getsockname()[1])
    sets = [f"model.source={model}", "train.tokens=64", f"train.batch={batch or ranks}", f"train.steps={steps}"]
    sets += ["train.warmup=3", "train.learning_rate=0.003", "run.checkpoint_every=4", f"run.timeout={TIMEOUT}"]
    sets += [f"train.device={device}", "plan.recipe=sweep", f"mesh.ulysses={min(ranks, 2)}", "plan.chunk=32"]
    words = ["train", "--run", "run", *(word for item in sets for word in ("--set", item))]
    command = [sys.executable, "-m", "tests.train.dying", *deaths, *words]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    common |= {"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}  # all on the first GPU
    outputs, processes = [folder / f"output{rank}" for rank in range(ranks)], []
    for rank, output in enumerate(outputs):
        environ = {**os.environ, **common, "RANK": str(rank)}
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file))
    try:
        ends = {rank: wait(process) for rank, process in enumerate(processes) if rank not in stays}
    finally:
        for process in processes:
            process.kill()
    ends |= {rank: wait(processes[rank]) for rank in stays}
    return [Ended(*ends[rank], output.read_text(errors="replace")) for rank, output in enumerate(outputs)]


def wait(process: subprocess.Popen) -> tuple[int, float]:
    return process.wait(timeout=600), time.time()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3", **GPU_SIZES | {"vocab_size": 256}), tmp_path_factory.mktemp("model") / "in")


SILENT = "rank 1 of {} does not answer any more (it has ended or hangs)"
ABSENT = "rank 1 of {} answers, but has not come to where the others wait: rank 1 is at threading.py:"
NCCL = [("cuda", ranks, death, said) for ranks in (2, 4) for death, said in (("SIGKILL", SILENT), ("SIGSTOP", SILENT))]
NCCL += [("cuda", 4, "ERROR", SILENT), ("cuda", 4, "HANG", ABSENT)]
GLOO = [("cpu", 2, "SIGSTOP", SILENT), ("cpu", 4, "HANG", ABSENT), ("cpu", 2, "ERROR", SILENT)]


@pytest.mark.parametrize(
    ("device", "ranks", "death", "said"),
    [pytest.param(*case, marks=pytest.mark.nccl) for case in NCCL]
    + [pytest.param(*case, marks=pytest.mark.full) for case in GLOO],
)
def test_the_others_end_and_the_run_goes_on(
    model: Path, tmp_path: Path, device: str, ranks: int, death: str, said: str
) -> None:
    """In bounded time, with a sentence; started again, with the losses of an undisturbed run."""
    death = f"1:6:{death}"
    ends = run_ranks(tmp_path / "run", model, device, ranks, death)
    died = (tmp_path / "run" / f"died-{death}").stat().st_mtime
    for rank, end in enumerate(ends):
        assert end.code, end
        if rank != 1:
            assert f"error: {said.format(ranks)}" in end.said, end.said
            assert end.at - died < BOUND
    ended = max(end.at for rank, end in enumerate(ends) if rank != 1) - died
    print(f"{ranks} ranks, {death}: the others ended {ended:.1f} s later")
    for name in ("run", "one"):  # the note says that the rank has died, so in "run" it does not die again
        began = time.time()
        again = run_ranks(tmp_path / name, model, device, ranks, *([death] if name == "run" else []))
        print(f"{name}: started again, ended {time.time() - began:.1f} s later" if name == "run" else "undisturbed")
        assert [end.code for end in again] == [0] * ranks, again
    found, wanted = losses(tmp_path / "run" / "run"), losses(tmp_path / "one" / "run")
    print("losses:", *(f"{loss:.4f}/{other:.4f}" for (_, loss, _), (_, other, _) in zip(found, wanted, strict=True)))
    assert [step for step, *_ in found] == list(range(1, 10))
    if device == "cpu":
        assert found == wanted
    for (_, a, _), (_, b, _) in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-2)


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.nccl), pytest.param("cpu", marks=pytest.mark.full)]
)
def test_fifty_steps_that_change_their_number_of_ranks(model: Path, tmp_path: Path, device: str) -> None:
    """Four ranks until one is killed, two to the end: the losses of one rank, within the spread of the dtype."""
    death = "1:23:SIGKILL"
    assert all(end.code for end in run_ranks(tmp_path / "run", model, device, 4, death, steps=50, batch=4))
    for name, ranks in (("run", 2), ("one", 1)):
        ends = run_ranks(tmp_path / name, model, device, ranks, steps=50, batch=4)
        assert [end.code for end in ends] == [0] * ranks, ends
    found, wanted = losses(tmp_path / "run" / "run"), losses(tmp_path / "one" / "run")
    assert [step for step, *_ in found] == list(range(1, 51))
    for (_, a, _), (_, b, _) in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-2 if device == "cuda" else 1e-4)
    assert found[-1][1] < found[0][1] - 1  # it has learned something, so the losses could differ
