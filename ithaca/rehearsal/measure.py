"""Measures the rates of this machine's GPU and writes them as a table in the form of hardware.toml.

Each number is a median of repeated runs on random data, after the clock has settled under load. The matrix products are
those of a block's MLP: two as in the forward pass, and one weight gradient that is added in fp32. Attention is measured
with each kernel that runs here, at head sizes 128 and 64. How fast the host launches operations shows in steps of a
model that are too small to keep the GPU busy. One GPU cannot measure the links between GPUs, so the table leaves them
out.
"""

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
from ithaca.planner.hardware import HERE, nearest, read_gpus
from ithaca.planner.seconds import host_operations
from ithaca.plans.plan import Plan
from ithaca.rehearsal.kernel_bound import median_seconds
from ithaca.schedule.job import Job

COMPUTE_SECONDS, COPY_SECONDS = 2.0, 0.5  # how long each call is repeated
TOKENS, HIDDEN, MLP = 8192, 4096, 14336  # a tile of Llama3-8B
CHUNK, HEADS = 65536, 4  # a chunk of Llama3-8B under `sweep` on 8 ranks, with one key/value head
KERNELS = ("flash4", "cudnn+flash")
HEAD_SIZES = {"": 128, "_64": 64}  # ending of a rate's name: head size
VISITS = {True: 2, False: 15}  # causal: visits. The proportion of triangles and full squares over 16 chunks
COPIED = 2**28  # elements of a copy
# A model with the layers of a large one and nothing to compute; its heads are those of the measured kernels
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


def measure_here(file: Path) -> str:
    """Write the rates of the GPU here to a file and return the GPU's name."""
    if not torch.cuda.is_available():
        raise PlanError("--measure measures a GPU, and there is none here: leave it out, or run it where one is")
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    gpu = nearest(properties.name, properties.total_memory, read_gpus())
    rates = {"host": _host_rate(device), "bandwidth": _bandwidth(device), "matmul": _matmul_rate(device)}
    attention = []
    for kernel in KERNELS:
        if found := _kernel_rates(kernel, device):
            attention += ["", f'["{gpu.name}".attention."{kernel}"]', *_rate_lines(found)]
    lines = [f'["{gpu.name}"]', *_rate_lines(rates | {"launches": _launch_rate(device)}), *attention]
    try:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as problem:
        raise PlanError(f"--measure {file} cannot be written ({problem.strerror})") from None
    return gpu.name


def _rate_lines(rates: dict[str, float]) -> list[str]:
    return [f'{name} = [{rate:.4g}, "{HERE}"]' for name, rate in rates.items()]


def _launch_rate(device: torch.device) -> float:
    """GPU operations a second that the host launches in steps of a small model."""
    spec = read_spec(SMALL)
    model = apply(ModelSource(spec, {}, RandomWeights(spec, 0), _dtype(device), None), Plan(checkpoint="none", zero=2))
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
    return host_operations(job, job.costs.work(job)) / median_seconds(step, COMPUTE_SECONDS, device)


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _kernel_rates(name: str, device: torch.device) -> dict[str, float]:
    """FLOP/s of an attention kernel; nothing if it does not run here."""
    rates: dict[str, float] = {}
    for ending, head_size in HEAD_SIZES.items():
        kernel = make_kernel(name)
        if kernel.refuses(device, torch.bfloat16, head_size) is None:
            forward, backward = _attention_rates(kernel, head_size, device)
            rates |= {f"forward{ending}": forward, f"backward{ending}": backward}
    return rates


def _matmul_rate(device: torch.device) -> float:
    """FLOP/s of three matrix products of an MLP."""
    x_TE = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    gate_FE, down_EF = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((MLP, HIDDEN), (HIDDEN, MLP))
    )
    gradient_FE = torch.zeros(MLP, HIDDEN, device=device)

    def work() -> None:
        wide_TF = x_TE @ gate_FE.T
        _ = wide_TF @ down_EF.T
        add_product(gradient_FE, wide_TF.T, x_TE)

    return 3 * 2 * TOKENS * HIDDEN * MLP / median_seconds(work, COMPUTE_SECONDS, device)


def _attention_rates(kernel: Kernel, head_size: int, device: torch.device) -> tuple[float, float]:
    """FLOP/s of attention, forward and backward, over the triangles and squares that 16 chunks visit."""
    q = torch.randn(CHUNK, HEADS, head_size, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(CHUNK, 1, head_size, device=device, dtype=torch.bfloat16) for _ in range(2))
    scale = softmax_scale(q)
    bounds = (0, CHUNK)
    forward = backward = flops = 0.0
    for causal, visits in VISITS.items():
        pieces = Pieces(bounds, bounds, causal, ragged=False)
        o, lse = kernel.forward(q, k, v, pieces, scale)
        forward += visits * median_seconds(
            lambda pieces=pieces: kernel.forward(q, k, v, pieces, scale), COMPUTE_SECONDS, device
        )
        backward += visits * median_seconds(
            lambda pieces=pieces, o=o, lse=lse: kernel.backward(o, q, k, v, o, lse, pieces, scale),
            COMPUTE_SECONDS,
            device,
        )
        flops += visits * (2 if causal else 4) * CHUNK**2 * HEADS * head_size
    return flops / forward, 2.5 * flops / backward


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy within the GPU reads and writes."""
    x, y = (torch.randn(COPIED, device=device) for _ in range(2))
    return 2 * x.nbytes / median_seconds(lambda: y.copy_(x), COPY_SECONDS, device)


def _host_rate(device: torch.device) -> float:
    """Bytes a second between pinned host memory and the GPU, in the slower direction."""
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(host, device=device)
    return host.nbytes / max(
        median_seconds(lambda: here.copy_(host, non_blocking=True), COPY_SECONDS, device),
        median_seconds(lambda: host.copy_(here, non_blocking=True), COPY_SECONDS, device),
    )
