"""Several ranks on one GPU, by gloo: the real kernels in bf16 under every recipe that shares a sequence.

Ranks are spawned, not forked: once it has asked for its GPUs, a process can hand none on to its children.
"""

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import ithaca
from ithaca.attention.kernels.facts import gpu_kernel
from ithaca.model.decoder import stored_name
from tests.models import make_model, save
from tests.test_gpu import GPU_SIZES, HOST

LENGTHS = [100, 300, 7, 194]  # documents of the packed batch; 2 × 601 tokens do not divide by 4
TOKENS = sum(LENGTHS)
PLANS: dict[str, dict[str, Any]] = {
    "ulysses-none": {"recipe": "ulysses", "checkpoint": "none"},
    "ulysses-selective": {"recipe": "ulysses", "checkpoint": "selective"},
    "ulysses-full": {"recipe": "ulysses"},
    "alst": {"recipe": "alst", "tile": 100},
    "untied": {"recipe": "untied", "tile": 100},
    "sweep": {"recipe": "sweep", "chunk": 250, "tile": 50},
    "sweep-host": {"recipe": "sweep", "chunk": 250} | HOST,
    "sweep-rebuild": {"recipe": "sweep", "chunk": 256, "x": "rebuild, host, rebuild"},
    "sweep-recompute": {"recipe": "sweep", "chunk": 400, "o": "recompute"},
    "fpdt": {"recipe": "fpdt", "chunks": 7, "tile": 50},
}


RING_PLANS: dict[str, dict[str, Any]] = {
    "hybrid": {"recipe": "hybrid"},
    "hybrid-gather": {"recipe": "hybrid", "travel": "gather", "checkpoint": "selective"},
    "ring-untied": {"recipe": "untied", "tile": 100},
    "ring-sweep": {"recipe": "sweep", "chunk": 250, "tile": 50},
    "ring-sweep-host": {"recipe": "sweep", "chunk": 100} | HOST,
    "ring-sweep-recompute": {"recipe": "sweep", "chunk": 250, "o": "recompute"},
    "ring-fpdt": {"recipe": "fpdt", "chunks": 9},
}


def batch(packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    lengths = LENGTHS if packed else [TOKENS]
    return tokens, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, TOKENS)


def work(rank: int, world: int, top: Path) -> None:
    """In a process of its own: this rank's part of the gradients under every Plan, written down.

    Put together they are by the test: gloo crashes in DTensor's own gathering on a GPU.
    """
    try:
        dist.init_process_group("gloo", init_method=f"file://{top}/store", rank=rank, world_size=world)
        ulysses, ring = ithaca.mesh(ulysses=world), ithaca.mesh(ulysses=world // 2, ring=2)
        for name, options in (PLANS | RING_PLANS).items():
            mesh = ring if name in RING_PLANS else ulysses
            model = ithaca.apply(ithaca.load_model(top / "in", "bfloat16"), ithaca.Plan(**options), mesh)
            assert model.kernel.name == gpu_kernel(model.spec.head_size).name
            model.engine.poison = True
            for packed in (False, True):
                tokens, ids = batch(packed)
                model(model.shard(tokens, tokens, ids)).backward()
                found = {stored_name(n): p.grad.to_local().cpu() for n, p in model.decoder.named_parameters()}
                model.zero_grad()
                torch.save(found, top / f"{name}-{packed}-{rank}")
        dist.barrier()
    except BaseException:
        (top / f"failed-{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module", params=[("llama3.1", 2), ("qwen3", 4)], ids=lambda pair: f"{pair[0]}-{pair[1]}-ranks")
def top(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and what the ranks made of it; four ranks share two key/value heads."""
    family, world = request.param
    top = tmp_path_factory.mktemp("ranks")
    save(make_model(family, torch.bfloat16, **GPU_SIZES), top / "in")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, world, top)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        process.kill()
    return top


def theirs(folder: Path, packed: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """transformers, each document by itself; the mean over all tokens that predict one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").cuda()
    lengths = LENGTHS if packed else [TOKENS]
    for part in batch(packed)[0].cuda().split(lengths, dim=1):
        share = (part.shape[1] - 1) / (TOKENS - len(lengths))
        (model(part, labels=part).loss * share).backward()
    return {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("plan", PLANS | RING_PLANS)
def test_ranks_are_no_further_from_exact_than_one(top: Path, plan: str, packed: bool) -> None:
    failures = [file.read_text() for file in top.glob("failed-*")]
    assert not failures, failures[0]
    parts = [torch.load(file) for file in sorted(top.glob(f"{plan}-{packed}-*"))]
    ours = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    exact, plain = (theirs(top / "in", packed, dtype) for dtype in (torch.float64, torch.bfloat16))

    def error(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(found[name].double() - exact[name]).norm() / exact[name].norm() for name in exact])

    assert (error(ours) <= 1.5 * error(plain)).all(), torch.stack((error(ours), error(plain)))
