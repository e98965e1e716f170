"""Sides that are measured in turn have the same weights: transformers here, DeepSpeed's pieces by a stand-in."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ithaca.base.errors import RunError
from ithaca.bench import peer_sides
from ithaca.bench.peer_names import (
    BEST,
    ITHACA_PLANNED,
    ITHACA_SWEEP,
    LIGER,
    LIGER_ALONE,
    PACKAGES,
    PLAIN,
    TILED,
    WITH_ALST,
)
from ithaca.bench.report import make_report
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.planner.hardware import RUNTIME
from tests.bench.test_commands import answer, measured, only
from tests.nursery import Nursery

# DeepSpeed's tiled MLP and loss as its documentation describes them, without its memory savings
STAND_IN = """
import torch

class TiledMLP:
    @staticmethod
    def apply(fn, module, x, shards, parameters):
        assert len(parameters) == 3
        return torch.cat([fn(module, part) for part in x.chunk(shards, dim=-2)], dim=-2)

class TiledFusedLogitsLoss:
    @staticmethod
    def apply(fn, module, x, y, mask, shards, parameters, reduction):
        assert mask is None and reduction == "sum" and shards >= 1 and x.shape[:2] == y.shape
        parts = zip(x.flatten(0, 1).chunk(shards), y.flatten(0, 1).chunk(shards))
        return sum(fn(module, *part) for part in parts)
"""


def test_sides_in_turn(nursery: Nursery, tmp_path: Path) -> None:
    place = tmp_path / "packages" / "deepspeed" / "runtime" / "sequence_parallel"
    place.mkdir(parents=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    (place / "ulysses_sp.py").write_text(STAND_IN)
    words = ["peers", "tiny", "--tokens", "600", "--rounds", "2", "--path", "packages"]
    rows = measured(nursery, tmp_path, *words, *only("round 1", f"round 2: {ITHACA_SWEEP}"))
    assert [*rows] == [*(f"600 round 1: {side}" for side in PACKAGES), f"600 round 2: {ITHACA_SWEEP}"]
    found = {side: answer(rows[f"600 round 1: {side}"]) for side in PACKAGES}
    assert [side for side in PACKAGES if found[side]["ran"]] == [PLAIN, WITH_ALST, ITHACA_SWEEP]
    for side in (WITH_ALST, ITHACA_SWEEP):
        assert found[side]["first_loss"] == pytest.approx(found[PLAIN]["first_loss"], abs=1e-5)
        assert found[side]["seconds"] > 0
    assert found[PLAIN]["bytes_held"] == found[ITHACA_SWEEP]["bytes_held"]  # fp32 on a CPU
    for side in (LIGER, LIGER_ALONE, TILED):
        assert found[side]["why"].startswith("not run: ")
        assert found[side]["why"].endswith("pip install liger-kernel") or "need a GPU" in found[side]["why"]
    assert found[ITHACA_PLANNED]["why"] == "not run: the planner plans for GPUs"
    assert not rows[f"600 round 1: {LIGER}"].done  # tried again when the package is there
    page = make_report(tmp_path / "out")["results.md"]
    assert f"| 600 | {PLAIN} | " in page
    assert "not run: " in page


def test_a_side_whose_first_loss_is_wrong_has_no_time() -> None:
    spec = read_spec(PRESETS["tiny"])
    expected = math.log(spec.vocab) + spec.hidden * 0.02**2 / 2
    assert peer_sides._check_loss(expected + 0.2, spec) == expected + 0.2
    with pytest.raises(AssertionError, match="was expected of random weights"):
        peer_sides._check_loss(expected + 0.4, spec)


TOKENS = 48


def theirs(side: str) -> peer_sides.Theirs:
    """A side of transformers on the CPU, without Liger's kernels."""
    config = PRESETS["tiny"]
    ids = torch.randint(0, config["vocab_size"], (1, TOKENS))
    return peer_sides.Theirs(config, read_spec(config), side, "sdpa", ids, torch.device("cpu"))


def test_host_offload_moves_the_input_of_each_block_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    name, moved = "deepspeed.runtime.sequence_parallel.ulysses_sp", []
    stand_in = ModuleType(name)
    exec(STAND_IN, stand_in.__dict__)
    monkeypatch.setitem(sys.modules, name, stand_in)

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.shape)
        return tensor

    def save_on_cpu(pin_memory: bool) -> Any:
        assert not pin_memory
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_on_cpu)
    theirs(WITH_ALST).step()
    spec = read_spec(PRESETS["tiny"])
    assert moved == [(1, TOKENS, spec.hidden)] * spec.layers


@pytest.mark.parametrize(("side", "times"), [(LIGER, 2), (LIGER_ALONE, 1)])
def test_one_side_with_liger_runs_no_block_again(side: str, times: int) -> None:
    ran = []
    model = theirs(side)
    model._model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: ran.append(1))
    model.step()
    assert len(ran) == times


class Meter:
    """A side whose peak comes before its last gradient is made, and the memory of its GPU."""

    weights, gradients, early, activations = 100, 60, 10, 1000  # bytes; `early`: of gradients made before the peak
    attention = "sdpa"

    def __init__(self) -> None:
        self.steps, self.has_gradients, self.peak = 0, False, 0
        self.begun_with: list[bool] = []

    def step(self) -> Tensor:
        self.begun_with.append(self.has_gradients)
        made = self.gradients if self.has_gradients else self.early
        self.peak = max(self.peak, self.weights + made + self.activations)
        self.has_gradients = True
        return torch.tensor(math.log(read_spec(PRESETS["tiny"]).vocab))

    def clear(self) -> None:
        self.has_gradients = False

    def held(self) -> int:
        return self.weights + self.gradients * self.has_gradients

    def reset(self) -> None:
        self.peak = 0


def test_all_gradients_exist_at_the_peak_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Meter()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", side.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: side.peak)
    monkeypatch.setattr(peer_sides, "_best_theirs", lambda *_: side)
    monkeypatch.setattr(peer_sides, "synchronize", lambda _: None)
    monkeypatch.setattr(peer_sides, "_mfu", lambda *_: None)
    request = {"model": "tiny", "layers": 1, "tokens": 8, "side": PLAIN}
    found = peer_sides._measure(request, torch.device("cuda"))
    assert found["bytes_beside"] == side.activations
    assert len(found["all_seconds"]) == peer_sides.REPEATS
    assert side.begun_with == [False, True, *[False] * peer_sides.REPEATS]  # steps that are timed make their own


TOTAL = 141 * 10**9
REQUEST = {"side": PLAIN, "path": None, "model": "tiny", "layers": 1, "tokens": 8, "attention": BEST}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, Exception], None]:
    """Makes a GPU on which a side ends with an error; others hold this much of it before the side and at its end."""

    def make(before: int, then: int, problem: Exception) -> None:
        ours, others = [0, 90 * 10**9], iter((before, then))

        def measure(*_: object) -> None:
            ours.pop(0)
            raise problem

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: ours[0])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - RUNTIME - ours[0] - next(others), TOTAL))
        monkeypatch.setattr(peer_sides, "use_expandable_segments", lambda: None)
        monkeypatch.setattr(peer_sides, "_measure", measure)

    return make


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
]


@pytest.mark.parametrize("problem", OUT_OF_MEMORY)
def test_memory_that_ran_out_is_an_answer(gpu: Callable[..., None], problem: Exception) -> None:
    gpu(2**29, 2**30, problem)
    assert peer_sides.measure_side(REQUEST) == {"ran": False, "why": "out of memory", "final": True}


@pytest.mark.parametrize("problem", OUT_OF_MEMORY)
@pytest.mark.parametrize(("before", "then"), [(2**31, 0), (0, 2**31)])
def test_memory_of_other_programs_is_no_answer(
    gpu: Callable[..., None], problem: Exception, before: int, then: int
) -> None:
    gpu(before, then, problem)
    with pytest.raises(RunError, match=r"other programs hold 2.1 GB of this GPU, more than 1.1 GB: stop them"):
        peer_sides.measure_side(REQUEST)


def test_another_error_of_a_side_stays_an_error(gpu: Callable[..., None]) -> None:
    gpu(0, 0, RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        peer_sides.measure_side(REQUEST)


@pytest.mark.parametrize(
    ("problems", "ends"),
    [
        ([torch.OutOfMemoryError("CUDA out of memory")] * 3, torch.OutOfMemoryError),
        ([*OUT_OF_MEMORY, ImportError("no flash_attn")], torch.OutOfMemoryError),
        ([ValueError("not accepted")] * 3, peer_sides.NotRun),
    ],
)
def test_memory_that_ran_out_with_every_attention(
    monkeypatch: pytest.MonkeyPatch, problems: list[Exception], ends: type[Exception]
) -> None:
    left = iter(problems)

    def fail(*_: object) -> None:
        raise next(left)

    monkeypatch.setattr(peer_sides, "Theirs", fail)
    config = PRESETS["tiny"]
    with pytest.raises(ends):
        peer_sides._best_theirs(config, read_spec(config), REQUEST, torch.zeros(1, 8), torch.device("cuda"))
    assert next(left, None) is None
