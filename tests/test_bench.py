"""The benchmarks of many points in their tiny form, and the arithmetic that their tables rest on."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench import chunks, disk, kernels, live_line, operations, overlap, points, recipes
from ithaca.attention.documents import Pieces
from tests.nursery import Nursery

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """run(main, "--smoke"): the results that a benchmark records."""

    def run(main: Callable[[], None], *words: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["bench", *words, "--out", str(tmp_path), "--commit", "none"])
        main()
        return [row for file in sorted(tmp_path.glob("*.json")) for row in json.loads(file.read_text())["results"]]

    return run


def test_a_point_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("too wide\nby far")

    args = points.points_command_line("").parse_args(["--out", str(tmp_path), "--commit", "none"])
    rows = points.run_points("x", [("one", fails), ("two", lambda: {"seconds": 1})], args, lambda _: "fine")
    assert rows[0] == {"point": "one", "error": "ValueError: too wide", "out_of_memory": False}
    assert rows[1] == {"point": "two", "seconds": 1}
    assert json.loads((tmp_path / "x.json").read_text())["results"] == rows
    assert capsys.readouterr().out.splitlines() == ["one: ValueError: too wide", "fine"]


def test_no_point_begins_after_the_limit_which_all_tables_of_a_run_share(tmp_path: Path) -> None:
    args = points.points_command_line("").parse_args(["--out", str(tmp_path), "--commit", "none", "--limit", "50"])
    assert "error" not in points.run_points("x", [("one", dict)], args, str)[0]
    args.began -= 60
    assert "--limit 50 s" in points.run_points("y", [("two", dict)], args, str)[0]["error"]


@pytest.mark.parametrize("tokens", [512, 8192, 65536])
def test_packed_documents_fill_the_sequence_and_are_the_same_each_time(tokens: int) -> None:
    bounds = points.packed(tokens, tokens // 8)
    lengths = torch.tensor(bounds).diff()
    assert bounds[0] == 0
    assert bounds[-1] == tokens
    assert lengths.min() >= points.SHORTEST_DOCUMENT
    assert len(set(lengths.tolist())) > 2
    assert bounds == points.packed(tokens, tokens // 8) != points.packed(tokens, tokens // 8, seed=1)


@pytest.mark.parametrize(
    "pieces", [kernels.documents(1, 2, 37, 20), Pieces((0, 1, 30), (0, 40, 41), causal=False)], ids=["causal", "full"]
)
def test_the_reference_in_blocks_of_rows_is_attention(pieces: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 128)  # a few rows at a time
    q, k, v, do = kernels.Case(pieces, 4, 2, 8).inputs(torch.device("cpu"), torch.float64)
    for x in (q, k, v):
        x.requires_grad_()
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for rows, keys in pieces.spans():
        seen[rows, keys] = torch.ones(rows.stop - rows.start, keys.stop - keys.start).tril().bool()
        if not pieces.causal:
            seen[rows, keys] = True
    scores = torch.einsum("thd,uhd->htu", q, k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(~seen, -math.inf)
    o = torch.einsum("htu,uhd->thd", scores.softmax(-1), v.repeat_interleave(2, 1))
    o.backward(do)
    wanted = (o, scores.logsumexp(-1), q.grad, k.grad, v.grad)
    found = kernels.exact(q.detach(), k.detach(), v.detach(), do, pieces, 0.3)
    for name, got, true in zip(kernels.TENSORS, found, wanted, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12, msg=name)


def test_kernels(run: Run) -> None:
    rows = run(kernels.main, "--smoke")
    errors = [row for row in rows if "over" in row]
    assert len(errors) == len(kernels.SMOKE_ERRORS)
    assert len(rows) == len(errors) + len(kernels.SMOKE_RATES)
    for row in rows:
        assert not row["refused"]
    for row in errors:
        assert max(row["torch-cpu"].values()) < 1e-5
        assert {*row["over"]} <= {f"{name} {scope}" for name in kernels.TENSORS for scope in ("all", "longest")}
    for row in rows:
        if "ratios" in row:
            assert row["ratios"]["naive"] == row["naive"]["seconds"] / row["torch-cpu"]["seconds"]
            assert row["torch-cpu"]["forward_tflops"] > 0


def test_what_attention_needs_is_counted_by_pieces() -> None:
    assert points.attention_flops(kernels.documents(3, 5), 4, 8) == 2 * (9 + 25) * 4 * 8
    assert points.attention_flops(Pieces.rectangle(3, 7, ragged=False), 4, 8) == 4 * 21 * 4 * 8


def test_the_cases_are_those_that_their_names_say() -> None:
    assert sum(kernels.FIVE) == 2**18
    assert sum(kernels.EIGHTEEN) == 2**16
    assert len(kernels.EIGHTEEN) == 18
    groups = {case.heads // case.kv_heads for case in kernels.ERRORS.values()}
    assert groups == {1, 2, 3, 4, 5, 6, 7, 8}
    spans = [rows for case in kernels.ERRORS.values() if case.pieces.causal for rows, _ in case.pieces.spans()]
    lengths = {rows.stop - rows.start for rows in spans}
    assert (min(lengths), max(lengths)) == (1, 70000)


def event(name: str, start: float, stop: float, gpu: bool, named: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        is_user_annotation=named,
        time_range=SimpleNamespace(start=start, end=stop),
    )


def test_named_ranges_are_no_operations_and_overlapping_ones_keep_the_gpu_busy_once() -> None:
    found = operations.count(
        [
            event("cudaStreamSynchronize", 0, 5, gpu=False),  # before the step
            event(operations.STEP, 10, 100, gpu=False, named=True),
            event("FSDP::pre_forward", 11, 12, gpu=False, named=True),
            event("cudaLaunchKernel", 12, 13, gpu=False),
            event("cudaStreamSynchronize", 20, 30, gpu=False),
            event("cudaDeviceSynchronize", 101, 120, gpu=False),  # ours, after it
            event(operations.STEP, 15, 110, gpu=True, named=True),
            event("FSDP::pre_forward", 15, 60, gpu=True),
            event("gemm", 20, 40, gpu=True),
            event("gemm", 30, 50, gpu=True),
            event("Memcpy HtoD (Pinned -> Device)", 60, 70, gpu=True),
        ]
    )
    assert found["operations"] == 3
    assert found["launches"] == 1
    assert found["busy_seconds"] == pytest.approx(40e-6)
    assert found["kernel_seconds"] == pytest.approx(50e-6)
    assert found["stream_synchronisations"] == 1
    assert found["device_synchronisations"] == 0
    assert found["host_to_device_copies"] == 1
    assert found["longest"][0] == {"name": "gemm", "seconds": pytest.approx(40e-6), "operations": 2}


def test_operations(run: Run) -> None:
    (row,) = run(operations.main, "--smoke", "--plan", "recipe=sweep; x=device", "--documents", "2x100+56")
    assert row["documents"] == 3
    assert row["plan"]["x"] == "device"
    assert row["tokens_per_second"] == 256 / row["seconds"]
    assert row["first_loss"] == pytest.approx(math.log(256), abs=0.3)


def test_fresh_points_are_enough_and_none_of_them_was_tuned_with() -> None:
    kinds = ("fresh", "tuned", "host", "graphs")
    fresh, tuned, host, graphs = ({point.name for point in recipes.POINTS[kind]} for kind in kinds)
    assert len(fresh) >= 20
    assert len(fresh) + len(tuned) >= 24
    assert not (fresh | host | graphs) & tuned
    assert not fresh & host
    every = [point for group in recipes.POINTS.values() for point in group]
    assert {point.packed for point in every} == {True, False}
    assert (min(point.tokens for point in every), max(point.tokens for point in every)) == (2048, 2**18)


def test_plans_that_run_alike_are_one_candidate() -> None:
    point = recipes.Point("smollm2-135m", 16384)
    found = recipes.candidates(point, points.cluster_here())
    assert found[0].name.startswith("picked")
    assert len({one.key for one in found}) == len(found)
    words = " = ".join(one.name for one in found).split(" = ")
    assert sorted(words) == sorted(
        ["picked", "dense none", "dense selective", "dense full", "sweep device", "sweep planned", "sweep host"]
    )
    slow = recipes.replace(found[-1], seconds=9 * min(one.seconds for one in found), name="slow", host=0)
    assert "9.0 times" in str(recipes.left_out(slow, found, 0))
    assert "pin" in str(recipes.left_out(recipes.replace(slow, seconds=found[0].seconds, host=10**9), found, 10**8))
    assert recipes.left_out(recipes.replace(slow, name="picked"), found, 0) is None


def test_recipes(run: Run, capsys: pytest.CaptureFixture) -> None:
    run(recipes.main, "--smoke", "--dry-run")
    assert "2 points: about" in capsys.readouterr().out
    (row,) = run(recipes.main, "--smoke", "--points", "fresh")
    ran = {one["name"]: one["seconds"] for one in row["candidates"]}
    assert row["documents"] > 2
    assert len(ran) == 5
    assert row["best"] == min(ran, key=lambda name: ran[name])
    assert row["picked_over_best"] == ran[row["picked"]] / min(ran.values())
    assert "fresh: 1 points" in capsys.readouterr().out


def test_disk(run: Run, tmp_path: Path) -> None:
    rows = run(disk.main, "--smoke", "--folder", str(tmp_path), "--move", "o", "--move", "kv")
    assert [row["point"] for row in rows] == ["256-o", "256-kv"]
    for row in rows:
        assert row["same_first_loss"]
        assert row["largest_loss_difference"] == 0
        assert row["host"]["disk_bytes_read"] == 0 < row["disk"]["disk_bytes_read"]
        assert row["disk_rates"].keys() == {"write", "read", "both", "direct", "devices"}
        predicted = row["disk"]["seconds_predicted"] / row["host"]["seconds_predicted"]
        assert row["slowdown_predicted"] == predicted >= 1


def test_a_trace_shows_the_order_of_launches_waits_and_hidden_messages() -> None:
    def launch(number: int, at: float, name: str, start: float, seconds: float) -> list[dict[str, Any]]:
        args = {"correlation": number}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": args}
        return [call, {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": seconds, "args": args}]

    def wait(at: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": at, "dur": 1, "args": {}}

    events = [
        *launch(1, 0, "ncclDevKernel_SendRecv", 100, 10),
        *launch(2, 2, "kernel_cutlass_flash_fwd", 110, 40),
        *launch(3, 3, "ncclDevKernel_SendRecv", 120, 20),  # all of it under the first attention
        *launch(4, 4, "ncclDevKernel_SendRecv", 145, 10),  # half of it
        *launch(5, 6, "elementwise", 150, 5),
        *launch(6, 7, "kernel_cutlass_flash_fwd", 160, 40),
        wait(5),
        wait(8),  # behind the last attention launch
        {"ph": "M", "name": "process_name"},
    ]
    assert overlap.read_trace(events) == {
        "order": "M1 A1 M2 A1",
        "attention_kernels": 2,
        "messages": 3,
        "messages_between_attention": 2,
        "waits": 1,
        "message_seconds": 40e-6,
        "hidden": 25 / 40,
    }


def bench_live_line(folder: Path) -> None:
    options = [
        "--model",
        "tiny",
        "--layers",
        "2",
        "--ranks",
        "2",
        "--tokens",
        "512",
        "--plan",
        "recipe=sweep; chunk=128",
    ]
    sys.argv = ["bench", *options, "--pairs", "2", "--device", "cpu", "--out", str(folder), "--commit", "none"]
    live_line.main()


def test_the_cost_of_the_live_line(nursery: Nursery, tmp_path: Path) -> None:
    """Two layers of four chunks, forward and backward, the loss and the optimizer."""
    (end,) = nursery.job(bench_live_line, tmp_path)
    assert end.code == 0, end.err
    (row,) = json.loads((tmp_path / "live-line-tiny-512-2.json").read_text())["results"]
    assert row["marks"] == 2 * 2 * 4 + 2
    assert len(row["seconds_with"]) == len(row["seconds_without"]) == 2
    mean = sum(row["seconds_without"]) / 2
    assert row["share"] == pytest.approx(sum(row["seconds_with"]) / 2 / mean - 1)
    assert row["share_of_marks_on_the_host"] == pytest.approx(18 * row["seconds_of_a_mark"] / mean)


def bench_chunks(folder: Path) -> None:
    sys.argv = ["bench", "--smoke", "--only", "256", "--out", str(folder), "--commit", "none"]
    chunks.main()


def test_the_chunk_curve(nursery: Nursery, tmp_path: Path) -> None:
    (end,) = nursery.job(bench_chunks, tmp_path)
    assert end.code == 0, end.err
    rows = json.loads((tmp_path / "chunks-tiny-512-4-smoke.json").read_text())["results"]
    assert [(row["recipe"], row["chunk"], row["tokens"]) for row in rows] == [("fpdt", 256, 512), ("sweep", 256, 512)]
    assert (tmp_path / "chunks-tiny-512-4-smoke.png").stat().st_size > 10000


def test_the_fastest_chunk_is_marked(tmp_path: Path) -> None:
    measured, predicted = (3.0, 2.0, 2.5), (2.9, 2.4, 2.3)
    rows = [
        {"recipe": recipe, "chunk": chunk, "seconds": seconds, "seconds_predicted": other, "peak_bytes": 2**30}
        | {"tokens_per_second_per_gpu": 100 / seconds, "peak_bytes_predicted": 2**30}
        for recipe in chunks.RECIPES
        for chunk, seconds, other in zip((8192, 65536, 262144), measured, predicted, strict=True)
    ]
    found = [chunks.best(rows[:3], name) for name in chunks.SPEED]
    assert [row and row["chunk"] for row in found] == [65536, 262144]
    chunks.draw([*rows, {"point": "fpdt 16K", "error": "not run"}], "a title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10000
