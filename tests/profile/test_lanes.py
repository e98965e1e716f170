"""Lanes from traces made by hand: who is busy when, what is exposed, and whose a kernel is."""

from typing import Any

import pytest

from ithaca.parallel.loopback import MARK
from ithaca.profile.lanes import (
    COMPUTE,
    DEVICE,
    DISK,
    EXCHANGE,
    HOST,
    STEP,
    Threads,
    describe_lanes,
    read_lanes,
    thread_events,
)
from ithaca.profile.spans import clipped, covered, overlap, thinned, union
from ithaca.tape.engine import COPY_IN, DISK_READ

MAIN = 7


def event(name: str, cat: str, start: float, end: float, tid: Any = MAIN, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "pid": 1, "tid": tid, "args": args
    }  # fmt: skip


def gpu_trace() -> list[dict[str, Any]]:
    """A step of 100 µs: kernels, a NCCL message half hidden, one that loops back, copies both ways, a read."""
    return [
        {"ph": "M", "name": "process_name"},
        event(STEP, "user_annotation", 0, 90),
        event(STEP, "gpu_user_annotation", 10, 100, tid="stream 7"),
        event("gemm", "kernel", 10, 40, correlation=1),
        event("gemm", "kernel", 35, 50, correlation=2),
        event("ncclDevKernel_SendRecv", "kernel", 40, 60, correlation=3),
        event(MARK, "user_annotation", 5, 9),
        event("cudaMemcpyAsync", "cuda_runtime", 6, 8, correlation=4),
        event("cudaMemcpyAsync", "cuda_runtime", 6, 8, tid=8, correlation=5),  # another thread
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 60, 70, correlation=4),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 70, 75, correlation=5),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 20, 30, correlation=6),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 80, 100, correlation=7),
        event(DISK_READ, "ithaca_thread", 50, 130),  # over the step's end
        event(COPY_IN, "ithaca_thread", 0, 90),  # of a CPU's engine: a GPU has its own on the trace
        event("aten::mm", "cpu_op", 0, 90),
    ]


def test_lanes_of_a_gpu() -> None:
    lanes = read_lanes(gpu_trace())
    assert lanes.step == (0, 100)  # until the last operation, though the host left before
    assert {lane: lanes.spans(lane) for lane in lanes.work} == {
        COMPUTE: [(10, 50), (70, 75)],
        EXCHANGE: [(40, 70)],
        HOST: [(20, 30), (80, 100)],
        DISK: [(50, 100)],
    }
    found = describe_lanes(lanes)
    shares = {lane: round(each["idle_share"], 6) for lane, each in found.items()}
    assert shares == {COMPUTE: 0.55, EXCHANGE: 0.7, HOST: 0.7, DISK: 0.5, DEVICE: 0.35}
    exposed = {lane: found[lane]["exposed_seconds"] for lane in (EXCHANGE, HOST, DISK)}
    assert exposed == {EXCHANGE: pytest.approx(20e-6), HOST: pytest.approx(20e-6), DISK: pytest.approx(45e-6)}
    assert found[COMPUTE]["longest"][0] == {"name": "gemm", "seconds": pytest.approx(45e-6), "operations": 2}


def test_lanes_of_a_cpu() -> None:
    """Operations within others count once, those of a message are the message's, and gloo's are in a thread."""
    trace = [
        event(STEP, "user_annotation", 0, 100),
        event("SweepBackward", "cpu_op", 0, 100),  # a range around operations, not one of them
        event("aten::linear", "cpu_op", 0, 20),
        event("aten::mm", "cpu_op", 5, 15),
        event(MARK, "user_annotation", 30, 40),
        event("aten::copy_", "cpu_op", 32, 38),
        event("gloo:all_to_all", "user_annotation", 50, 70, tid=9),
        event("aten::add", "cpu_op", 60, 80),
        event(COPY_IN, "ithaca_thread", 60, 65),
    ]
    lanes = read_lanes(trace)
    assert [name for name, _ in lanes.work[COMPUTE]] == ["aten::linear", "aten::add"]
    assert {lane: lanes.spans(lane) for lane in lanes.work} == {
        COMPUTE: [(0, 20), (60, 80)],
        EXCHANGE: [(30, 40), (50, 70)],
        HOST: [(60, 65)],
        DISK: [],
    }
    found = describe_lanes(lanes)
    assert found[EXCHANGE]["exposed_seconds"] == pytest.approx(20e-6)
    assert found[HOST]["exposed_seconds"] == 0
    assert found[DISK]["idle_share"] == 1


def test_threads_on_the_clock_of_the_trace() -> None:
    times = iter([1.0, 1.5])
    threads = Threads(lambda: next(times))
    with pytest.raises(OSError), threads.watch(DISK_READ):
        raise OSError
    (found,) = thread_events(threads, offset=2e6, process=1)
    assert (found["name"], found["ts"], found["dur"]) == (DISK_READ, 3e6, 5e5)


def test_spans() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert covered([(5, 6), (0, 2), (1, 3)]) == 4
    assert covered([]) == 0
    assert overlap([(0, 4), (2, 10)], [(1, 3), (5, 6), (9, 20)]) == 2 + 3
    assert overlap([(0, 4)], []) == 0
    assert clipped([(0, 2), (3, 9), (9, 12)], (1, 9)) == [(1, 2), (3, 9)]
    assert thinned([(0, 1), (1.5, 2), (9, 10), (10.1, 11)], 2) == [(0, 2), (9, 11)]
    assert thinned([(0, 1)], 2) == [(0, 1)]
