"""Measures the rates of this machine's GPU and writes them as a table in the form of hardware.toml.

Each number is a median of repeated runs on random data, after the clock has settled under load. The matrix products are
those of a block's MLP: two as in the forward pass, and one weight gradient that is added in fp32. Attention is measured
with each kernel that runs here, at head sizes 128 and 64. The rate at which the host launches operations comes from the
fastest of many steps that are too small to keep the GPU busy: other work on the machine only slows the host down. One
GPU cannot measure the links between GPUs, so the table leaves them out.

`ithaca doctor` measures with the same functions, also on a CPU, which computes in float32. An `Effort` sets sizes and
durations, never what a number means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ithaca.assemble import apply
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.base.errors import PlanError
from ithaca.model.families import read_spec
from ithaca.model.linear import add_product
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.optimizer.adamw import clip, make_optimizer
from ithaca.parallel.mesh import alone
from ithaca.planner.hardware import HERE, nearest, read_gpus
from ithaca.planner.seconds import host_operations
from ithaca.plans.plan import Plan
from ithaca.rehearsal.kernel_bound import fastest_seconds, median_seconds
from ithaca.schedule.job import Job

KERNELS = ("flash4", "cudnn+flash")
HEAD_SIZES = {"": 128, "_64": 64}  # ending of a rate's name: head size
VISITS = {True: 2, False: 15}  # causal: visits. The proportion of triangles and full squares over 16 chunks
HEADS = 4  # query heads of one key/value head, as Llama3-8B has them on 8 ranks
# A model with as many layers as a large one and little to compute; its heads are those of the measured kernels
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}
SMALL_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How large a measurement is and how long it takes. The defaults suit a GPU."""

    compute_seconds: float = 2.0  # how long each product or attention call is repeated
    copy_seconds: float = 0.5  # the same for a copy
    tokens: int = 8192  # of the products: a tile of Llama3-8B, as the next two
    hidden: int = 4096
    mlp: int = 14336
    chunk: int = 65536  # tokens of attention: a chunk of Llama3-8B under `sweep`
    copied: int = 2**28  # elements of a copy


FULL = Effort()


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype that models compute in by default (`dtype="auto"`)."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure_here(file: Path) -> str:
    """Write the rates of the GPU here to a file and return the GPU's name."""
    if not torch.cuda.is_available():
        raise PlanError("--measure measures a GPU, and there is none here: leave it out, or run it where one is")
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    gpu = nearest(properties.name, properties.total_memory, read_gpus())
    rates = {"host": host_rate(device), "bandwidth": bandwidth(device), "matmul": matmul_rate(device)}
    kernels = {kernel: kernel_rates(kernel, device) for kernel in KERNELS}
    rates["launches"] = launch_rate(device)
    tables = {f'"{gpu.name}"': rates} | {f'"{gpu.name}".attention."{name}"': found for name, found in kernels.items()}
    try:
        write_rates(
            file, {name: {rate: (value, HERE) for rate, value in found.items()} for name, found in tables.items()}
        )
    except OSError as problem:
        raise PlanError(f"--measure {file} cannot be written ({problem.strerror})") from None
    return gpu.name


def write_rates(file: Path, tables: dict[str, dict[str, tuple[float, str]]]) -> None:
    """Write rates, each with its source, as hardware.toml has them. Tables without a rate are left out."""
    lines = []
    for name, rates in tables.items():
        if rates:
            lines += [
                f"[{name}]",
                *(f'{rate} = [{value:.4g}, "{source}"]' for rate, (value, source) in rates.items()),
                "",
            ]
    file.write_text("\n".join(lines), encoding="utf-8")


def launch_rate(device: torch.device, effort: Effort = FULL) -> float:
    """GPU operations a second that the host launches in the fastest of many steps of a small model."""
    spec, dtype = read_spec(SMALL), str(compute_dtype(device)).removeprefix("torch.")
    plan = Plan(checkpoint="none", zero=2)
    model = apply(ModelSource(spec, {}, RandomWeights(spec, 0), dtype, None), plan, alone(device.type))
    model.allocate(1, SMALL_TOKENS)
    optimizer = make_optimizer(model, learning_rate=0.0)
    tokens = torch.randint(0, spec.vocab, (1, SMALL_TOKENS))
    batch = model.shard(tokens, tokens)

    def step() -> None:
        model(batch).backward()
        clip(model, 1.0, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    job = Job(spec=spec, plan=model.plan, tokens=SMALL_TOKENS)
    return host_operations(job, job.costs.work(job)) / fastest_seconds(step, effort.compute_seconds, device)


def kernel_rates(name: str, device: torch.device, effort: Effort = FULL) -> dict[str, float]:
    """FLOP/s of an attention kernel; nothing if it does not run here."""
    rates: dict[str, float] = {}
    for ending, head_size in HEAD_SIZES.items():
        kernel = make_kernel(name)
        if kernel.refuses(device, compute_dtype(device), head_size) is None:
            forward, backward = attention_rates(kernel, head_size, device, effort)
            rates |= {f"forward{ending}": forward, f"backward{ending}": backward}
    return rates


def products(device: torch.device, effort: Effort) -> tuple[Callable[[], None], float]:
    """Three matrix products of an MLP, as a function, and their FLOPs."""
    dtype, tokens, hidden, mlp = compute_dtype(device), effort.tokens, effort.hidden, effort.mlp
    x_TE = torch.randn(tokens, hidden, device=device, dtype=dtype)
    gate_FE, down_EF = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((mlp, hidden), (hidden, mlp)))
    gradient_FE = torch.zeros(mlp, hidden, device=device)

    def work() -> None:
        wide_TF = x_TE @ gate_FE.T
        _ = wide_TF @ down_EF.T
        add_product(gradient_FE, wide_TF.T, x_TE)

    return work, 3 * 2 * tokens * hidden * mlp


def matmul_rate(device: torch.device, effort: Effort = FULL) -> float:
    """FLOP/s of three matrix products of an MLP."""
    work, flops = products(device, effort)
    return flops / median_seconds(work, effort.compute_seconds, device)


def attention_rates(kernel: Kernel, head_size: int, device: torch.device, effort: Effort = FULL) -> tuple[float, float]:
    """FLOP/s of attention, forward and backward, over the triangles and squares that 16 chunks visit."""
    dtype, chunk, seconds = compute_dtype(device), effort.chunk, effort.compute_seconds
    q = torch.randn(chunk, HEADS, head_size, device=device, dtype=dtype)
    k, v = (torch.randn(chunk, 1, head_size, device=device, dtype=dtype) for _ in range(2))
    scale = softmax_scale(q)
    bounds = (0, chunk)
    forward = backward = flops = 0.0
    for causal, visits in VISITS.items():
        pieces = Pieces(bounds, bounds, causal, ragged=False)
        o, lse = kernel.forward(q, k, v, pieces, scale)
        forward += visits * median_seconds(
            lambda pieces=pieces: kernel.forward(q, k, v, pieces, scale), seconds, device
        )
        backward += visits * median_seconds(
            lambda pieces=pieces, o=o, lse=lse: kernel.backward(o, q, k, v, o, lse, pieces, scale),
            seconds,
            device,
        )
        flops += visits * (2 if causal else 4) * chunk**2 * HEADS * head_size
    return flops / forward, 2.5 * flops / backward


def bandwidth(device: torch.device, effort: Effort = FULL) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    x, y = (torch.randn(effort.copied, device=device) for _ in range(2))
    return 2 * x.nbytes / median_seconds(lambda: y.copy_(x), effort.copy_seconds, device)


def host_rate(device: torch.device, effort: Effort = FULL) -> float:
    """Bytes a second between pinned host memory and the GPU, in the slower direction."""
    host = torch.empty(effort.copied, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(host, device=device)
    return host.nbytes / max(
        median_seconds(lambda: here.copy_(host, non_blocking=True), effort.copy_seconds, device),
        median_seconds(lambda: host.copy_(here, non_blocking=True), effort.copy_seconds, device),
    )
