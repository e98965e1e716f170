"""One side of a comparison, in a process of its own: forward and backward of another program, or of Ithaca.

All sides have the same random weights and tokens, and train every weight. Theirs hold weights and gradients in bf16, as
people run them; Ithaca holds them in fp32 and computes in bf16. No side has an optimizer: its time is small at these
lengths, and its memory follows from the parameters. Memory counts what is allocated beside weights and gradients, at
the peak of a step that begins with the gradients of the step before: so every side has all its gradients at its peak.
Packages are those that are installed, or those of a folder. If one is missing, its side does not run, and the reason
has the line that installs it.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ithaca.assemble import apply
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.errors import RunError
from ithaca.bench.child import NO_MEMORY
from ithaca.bench.peer_names import BEST, INSTALL, ITHACA_PLANNED, ITHACA_SWEEP, LIGER_ALONE, PACKAGES, TILED, WITH_ALST
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Spec
from ithaca.parallel.mesh import alone
from ithaca.planner.hardware import RUNTIME, Cluster, causal_mfu
from ithaca.planner.search import search
from ithaca.plans.plan import Plan
from ithaca.rehearsal.kernel_bound import synchronize
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.tape.budget import host_budget

Json = dict[str, Any]
DEVIATION = 0.02  # of random weights
LOSS_TOLERANCE = 0.3  # of the first loss, in nats, from what random weights have
CUDNN = "sdpa with cuDNN"
TRIED = ("sdpa", CUDNN, "flash_attention_4")  # attention of transformers; the fastest on a shorter sequence counts
SHORTER = 4  # times
SHORT_STEP, REPEATS = 2.0, 3  # seconds: shorter steps are timed several times
OTHERS = 2**30  # bytes of the GPU that other programs may hold when a side runs out of memory
LOGITS = 2**30  # bytes of fp32 logits in a tile of ALST's loss, as its authors have it


class Side(Protocol):
    """A model with its tokens."""

    attention: str

    def step(self) -> Tensor:
        """Run forward and backward, and return the loss."""
        ...

    def clear(self) -> None:
        """Drop the gradients."""
        ...

    def held(self) -> int:
        """Bytes of weights and gradients."""
        ...


class NotRun(Exception):
    """A side that cannot run here, and why."""


def measure_side(request: Json) -> Json:
    """The seconds and the memory of a side, or why it does not run."""
    use_expandable_segments()
    if request["path"]:
        sys.path.insert(0, request["path"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = _held_by_others(device)
    try:
        _find_packages(request["side"], device)
        return {"ran": True, **_measure(request, device)}
    except NotRun as why:
        return {"ran": False, "why": str(why)}
    except RuntimeError as problem:
        if not _no_memory(problem):
            raise
        others = max(others, _held_by_others(device))
        if others > OTHERS:
            raise RunError(
                f"memory ran out, and other programs hold {others / 1e9:.1f} GB of this GPU, more than "
                f"{OTHERS / 1e9:.1f} GB: stop them, and run the command again"
            ) from problem
        return {"ran": False, "why": "out of memory", "final": True}


def _no_memory(problem: Exception) -> bool:
    """Whether memory ran out: libraries have errors of their own for that."""
    return isinstance(problem, torch.OutOfMemoryError) or any(word in str(problem) for word in NO_MEMORY)


def _held_by_others(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) - RUNTIME


def _find_packages(side: str, device: torch.device) -> None:
    for package in PACKAGES[side]:
        try:
            import_module(package)
        except ImportError as problem:
            raise NotRun(f"not run: {package} is not here ({problem}): {INSTALL[package]}") from None
        if package == "liger_kernel" and device.type != "cuda":
            raise NotRun("not run: Liger's kernels need a GPU")


def _measure(request: Json, device: torch.device) -> Json:
    config = dict(find_config(request["model"])[0])
    spec = read_spec(config).with_layers(request["layers"])
    config["num_hidden_layers"] = spec.layers
    tokens = request["tokens"]
    ids = torch.randint(0, spec.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    if request["side"] in (ITHACA_SWEEP, ITHACA_PLANNED):
        side: Side = Ours(spec, request, ids, device)
    else:
        side = _best_theirs(config, spec, request, ids, device)
    first = _check_loss(side.step().item(), spec)
    beside = _bytes_beside(side) if device.type == "cuda" else None
    side.clear()
    seconds = [_timed(side, device)]
    while seconds[0] < SHORT_STEP and len(seconds) < REPEATS:
        side.clear()
        seconds.append(_timed(side, device))
    middle = statistics.median(seconds)
    return {
        "attention": side.attention,
        "first_loss": first,
        "seconds": middle,
        "all_seconds": seconds,
        "bytes_beside": beside,
        "bytes_held": side.held(),
        "mfu_causal": _mfu(spec, tokens, middle, device),
    }


def _bytes_beside(side: Side) -> int:
    """Bytes beside weights and gradients at the peak of a step, after a step whose gradients were not dropped.

    Without them, some gradients would not exist yet at the peak. To subtract them all would flatter the side with the
    largest: Ithaca, whose gradients are fp32.
    """
    torch.cuda.reset_peak_memory_stats()
    side.step()
    return torch.cuda.max_memory_allocated() - side.held()


def _timed(side: Side, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    side.step()
    synchronize(device)
    return time.perf_counter() - began


def _check_loss(first: float, spec: Spec) -> float:
    """Return the first loss. Raise an error if it is not that of these random weights: something else was run."""
    expected = math.log(spec.vocab) + spec.hidden * DEVIATION**2 / 2
    if abs(first - expected) > LOSS_TOLERANCE:
        raise AssertionError(f"the first loss is {first:.3f}, and {expected:.3f} was expected of random weights")
    return first


def _mfu(spec: Spec, tokens: int, seconds: float, device: torch.device) -> float | None:
    gpu = known_gpu(device)
    return causal_mfu(spec, tokens, tokens / seconds, gpu.flops) if gpu else None


class Ours:
    """Ithaca: the sweep with its tapes in host memory, or the Plan that the planner picks for this GPU."""

    def __init__(self, spec: Spec, request: Json, ids: Tensor, device: torch.device):
        plan = Plan(recipe="sweep", zero=2)
        if request["side"] == ITHACA_PLANNED:
            plan = _planned(spec, request["tokens"], device)
        source = ModelSource(spec, {}, RandomWeights(spec, 0, DEVIATION), "auto", None)
        self._model = apply(source, plan, alone(device.type))
        self._model.allocate(1, request["tokens"])
        self._batch = self._model.shard(ids, ids)
        self.attention = f"{self._model.kernel.name}, {plan.recipe}"

    def step(self) -> Tensor:
        loss = self._model(self._batch)
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        self._model.zero_grad()

    def held(self) -> int:
        return _bytes([*self._model.parameters()])


def _planned(spec: Spec, tokens: int, device: torch.device) -> Plan:
    if device.type != "cuda":
        raise NotRun("not run: the planner plans for GPUs")
    gpu = known_gpu(device)
    if gpu is None:
        raise NotRun("not run: no table of the planner has this GPU")
    answer = search(spec, Cluster(1, gpu, host_budget()[0], node_gpus=1), tokens)
    if answer is None:
        raise NotRun("not run: no Plan fits this GPU")
    return answer.plan


def _bytes(parameters: list[Tensor]) -> int:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *gradients))


def _best_theirs(config: Json, spec: Spec, request: Json, ids: Tensor, device: torch.device) -> "Theirs":
    """Their side with the attention that was asked for, or with the fastest on a shorter sequence."""
    _patch_family(request["side"], config["model_type"])
    asked = request["attention"]
    tried = [asked] if asked != BEST else list(TRIED) if device.type == "cuda" else ["sdpa"]
    if len(tried) == 1:
        return Theirs(config, spec, request["side"], tried[0], ids, device)
    seconds, no_memory = {}, False
    for attention in tried:
        try:
            side = Theirs(config, spec, request["side"], attention, ids[:, : ids.shape[1] // SHORTER], device)
            side.step()
            side.clear()
            seconds[attention] = _timed(side, device)
        except (ImportError, ValueError, RuntimeError) as problem:  # this attention is not accepted here
            print(f"{request['side']}: {attention} cannot be used ({problem})", file=sys.stderr)
            no_memory |= _no_memory(problem)
        side = None  # its memory is freed before the next side is made
        torch.cuda.empty_cache()
    if not seconds and no_memory:
        raise torch.OutOfMemoryError("out of memory with every attention of transformers that works here")
    if not seconds:
        raise NotRun("not run: no attention of transformers works here")
    return Theirs(config, spec, request["side"], min(seconds, key=lambda name: seconds[name]), ids, device)


def _patch_family(side: str, family: str) -> None:
    """Put Liger's kernels into a family of transformers, for this process."""
    if "liger_kernel" not in PACKAGES[side]:
        return
    liger: Any = import_module("liger_kernel.transformers")
    patch = getattr(liger, f"apply_liger_kernel_to_{family}", None)
    if patch is None:
        raise NotRun(f"not run: Liger has no kernels for '{family}'")
    patch(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, cross_entropy=False)


class Theirs:
    """`transformers` with gradient checkpointing, unless its side has none, and with what its side adds."""

    def __init__(self, config: Json, spec: Spec, side: str, attention: str, ids: Tensor, device: torch.device):
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
        settings.use_cache = False
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self._model: Any = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=attention.removesuffix(" with cuDNN")
            )
        _fill(self._model, spec)
        if side != LIGER_ALONE:
            offloads = side in (TILED, WITH_ALST)
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": offloads})
            if offloads:
                _offload_block_inputs(self._model, device)
        self._model.train()
        self.attention, self._ids = attention, ids.to(device)
        self._loss: Callable[[], Tensor] = self._plain_loss
        if side == TILED:
            _tile_by_liger(self._model, settings)
        if side == WITH_ALST:
            _tile_by_deepspeed(self._model)
            self._loss = self._tiled_loss

    def step(self) -> Tensor:
        cudnn = self.attention == CUDNN
        # Checkpointing runs attention again in backward, by the same kernel
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
            loss = self._loss()
            loss.backward()
        return loss.detach()

    def _plain_loss(self) -> Tensor:
        return self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss

    def _tiled_loss(self) -> Tensor:
        """ALST's loss in tiles: logits exist for a tile at a time, and its gradient is made in the same pass."""
        parts: Any = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        hidden = self._model.model(input_ids=self._ids, use_cache=False).last_hidden_state
        labels = F.pad(self._ids[:, 1:], (0, 1), value=-100)
        count, head = self._ids.shape[1] - 1, self._model.lm_head
        shards = math.ceil(self._ids.numel() * head.weight.shape[0] * 4 / LOGITS)

        def tile_loss(_: object, x: Tensor, y: Tensor) -> Tensor:
            logits = head(x).float().flatten(0, -2)
            return F.cross_entropy(logits, y.flatten(), ignore_index=-100, reduction="sum") / count

        return parts.TiledFusedLogitsLoss.apply(tile_loss, head, hidden, labels, None, shards, [head.weight], "sum")

    def clear(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def held(self) -> int:
        return _bytes([*self._model.parameters()])


def _fill(model: Any, spec: Spec) -> None:
    """Give the model Ithaca's random weights."""
    weights, names = RandomWeights(spec, 0, DEVIATION), {name for name, _ in spec.shapes()}
    for name, parameter in model.named_parameters():
        if name not in names:
            raise AssertionError(f"transformers has a weight '{name}' that Ithaca's model has not")
        weights.read(name, range(parameter.shape[0]), parameter.data)


def _offload_block_inputs(model: Any, device: torch.device) -> None:
    """Let each block's checkpoint keep the block's input in host memory. Nothing else is moved there."""

    def checkpointed(checkpoint: Callable[..., Any], *inputs: Any) -> Any:
        # A reentrant checkpoint saves its inputs by autograd's own means, and runs the block without autograd
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            return checkpoint(*inputs)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(checkpointed, layer._gradient_checkpointing_func)


def _tile_by_liger(model: Any, settings: Any) -> None:
    """Replace every MLP by Liger's tiled one, with the same weights."""
    tiled: Any = import_module("liger_kernel.transformers.tiled_mlp")
    for layer in model.model.layers:
        with torch.device("meta"):
            mlp = tiled.LigerTiledSwiGLUMLP(settings)
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
        layer.mlp = mlp


def _tile_by_deepspeed(model: Any) -> None:
    """Let every MLP run in as many tiles as ALST's authors take: tokens / hidden."""
    parts: Any = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def forward(self: Any, x: Tensor) -> Tensor:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return parts.TiledMLP.apply(mlp, self, x, math.ceil(x.shape[-2] / x.shape[-1]), weights)

    for layer in model.model.layers:
        layer.mlp.forward = MethodType(forward, layer.mlp)
