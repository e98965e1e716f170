"""One rank of a job of many, on the one device that is there: how long its step takes, and who holds its memory.

The model, its Plan and its optimizer are those of training; the ranks that are absent are looped back (looped.py), the
layers that are left out are held as ballast. So memory is that of the real rank, and time is without links between
GPUs. Each is measured in a step of its own: time with nothing watching, memory with a meter that asks for every tensor
who made it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.assemble import Model, apply
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.errors import PlanError
from ithaca.model.named import find_config
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Spec, read_spec
from ithaca.parallel.batch import Batch
from ithaca.parallel.looped import start_looped
from ithaca.parallel.mesh import mesh
from ithaca.planner.ballast import absent_bytes, hold, tapes_of, with_layers
from ithaca.planner.meter import Meter
from ithaca.plans.needs import host_bytes, layout_of, tiles_of
from ithaca.plans.plan import Plan
from ithaca.train.optimizer import make_optimizer

PEAK_FLOPS = 989e12  # Hopper's dense bf16, the base of causal MFU


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is rehearsed: rank 0 of shard × ring × ulysses."""

    model: str
    plan: Plan
    tokens: int
    ulysses: int = 1
    ring: int = 1
    shard: int = 1
    layers: int | None = None  # of the model's, the first ones; None: all
    cap: int | None = None  # bytes of the device that may be used

    @property
    def ranks(self) -> int:
        return self.shard * self.ring * self.ulysses


def rehearse(scene: Scene, device: str | None = None, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run a step of the scene in this process, which can take part in no other job after it."""
    spec = read_spec(find_config(scene.model)[0])
    start_looped(scene.ranks)
    grid = mesh(ulysses=scene.ulysses, ring=scene.ring, shard=scene.shard, device=device)
    if scene.cap is not None:
        _cap(grid.device, scene.cap)
    source = _source(scene, spec)
    meter = Meter(grid.device)
    with meter.running():
        model = apply(source, scene.plan, grid)
        model.kernel = timed = Timed(model.kernel, grid.device)
        optimizer = make_optimizer(model, learning_rate=0.0)
        absent = absent_bytes(model, spec, scene.tokens)
        ballast = hold(absent, grid.device)
        model.reserve(scene.shard, scene.tokens, say)
        batch = model.shard(*_tokens(scene, spec))
    # A first step is the warm-up, and the one whose memory is looked at: both take longer
    _synchronize(grid.device)
    if grid.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    meter.restart()
    with meter.running():
        _step(model, optimizer, batch, {})
    peak = _peaks(meter, grid.device)
    timed.clear()
    seconds: dict[str, float] = {}
    _step(model, optimizer, batch, seconds)
    seconds["attention"] = timed.seconds()
    del ballast
    return _report(scene, spec, model, peak, seconds)


def _source(scene: Scene, spec: Spec) -> ModelSource:
    layers = spec.layers if scene.layers is None else scene.layers
    if not 1 <= layers <= spec.layers:
        raise PlanError(
            f"--layers {layers} cannot be rehearsed: the model has {spec.layers}, so 1 to {spec.layers} can"
        )
    some = with_layers(spec, layers)
    return ModelSource(some, {}, RandomWeights(some, 0), "auto", None)


def _tokens(scene: Scene, spec: Spec) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, spec.vocab, (scene.shard, scene.tokens), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


def _step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch, seconds: dict[str, float]) -> None:
    device, began = model.mesh.device, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        _synchronize(device)
        now = time.perf_counter()
        seconds[name], began = now - began, now

    loss = model(batch)
    lap("forward")
    loss.backward()
    lap("backward")
    optimizer.step()
    optimizer.zero_grad()
    lap("optimizer")


class Timed:
    """A kernel with a clock."""

    def __init__(self, kernel: Kernel, device: torch.device):
        self.name, self.grain = kernel.name, kernel.grain
        self._kernel, self._cuda, self._laps = kernel, device.type == "cuda", []

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self._kernel.refuses(device, dtype, head_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        return self._lap(lambda: self._kernel.forward(q, k, v, pieces, scale))

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._lap(lambda: self._kernel.backward(*args))

    def clear(self) -> None:
        self._laps.clear()

    def seconds(self) -> float:
        if not self._cuda:
            return sum(after - before for before, after in self._laps)
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in self._laps) / 1e3

    def _lap(self, work: Callable[[], Any]) -> Any:
        before = self._now()
        result = work()
        self._laps.append((before, self._now()))
        return result

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _peaks(meter: Meter, device: torch.device) -> dict[str, int]:
    """Bytes by owner when they were most; what kernels take for themselves, and what the allocator keeps beside."""
    found = {owner: size for owner, size in meter.peak.most_common() if size > 0}
    if device.type != "cuda":
        return found
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return found | {"within kernels": allocated - sum(found.values()), "allocator": reserved - allocated}


def _report(scene: Scene, spec: Spec, model: Model, peak: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    plan, grid = model.plan, model.mesh
    layout = layout_of(plan, scene.tokens, scene.ulysses, scene.ring, shorten=True)
    host = host_bytes(tapes_of(model, spec), tiles_of(plan, layout), torch.device("cuda"))
    step = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
    per_token = with_layers(spec, model.spec.layers).flops_per_token(scene.tokens)
    rate = scene.tokens / step / (scene.ring * scene.ulysses)
    return {
        "model": scene.model,
        "tokens": scene.tokens,
        "ranks": scene.ranks,
        "mesh": {"shard": scene.shard, "ring": scene.ring, "ulysses": scene.ulysses},
        "layers": model.spec.layers,
        "recipe": plan.recipe,
        "plan": {name: value for name, value in vars(plan).items() if value is not None},
        "device": grid.device.type,
        "peak_bytes": sum(peak.values()),
        "peak_bytes_allocated": sum(peak.values()) - peak.get("allocator", 0),
        "memory": peak,
        "host_bytes": host,
        "seconds": step,
        "attention_seconds": seconds["attention"],
        **{f"{name}_seconds": seconds[name] for name in ("forward", "backward", "optimizer")},
        "tokens_per_second_per_gpu": rate,
        "mfu_causal": rate * per_token / PEAK_FLOPS,
    }


def _cap(device: torch.device, cap: int) -> None:
    if device.type != "cuda":
        raise PlanError(f"--cap {cap} is for a GPU, and there is none here: leave it out")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
