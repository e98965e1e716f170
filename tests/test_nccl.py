"""Real NCCL between processes that share one GPU: every recipe against `transformers`, with poison and late copies.

    pytest -m nccl tests/test_nccl.py

Needs a NCCL that lets ranks share a GPU (`SHARING_NCCL` in parallel/nccl.py), preloaded if torch brings an older one.
"""

import multiprocessing
import os
import random
import socket
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.optimizer.adamw import clip
from ithaca.parallel.sharding import whole_tensors
from tests.models import make_model, save
from tests.test_gpu import GPU_SIZES
from tests.test_gpu_ranks import PLANS, RING_PLANS, batch, theirs

TENSOR_PLANS: dict[str, dict[str, Any]] = {
    "tensor-none": {"recipe": "tensor", "checkpoint": "none"},
    "tensor-selective": {"recipe": "tensor", "checkpoint": "selective"},
    "tensor-full": {"recipe": "tensor", "x": "host", "tile": 100},
    "tensor-ring": {"recipe": "tensor", "travel": "gather"},
}
DENSE = {f"dense, ZeRO-{zero}": {"recipe": "dense", "zero": zero} for zero in (1, 2, 3)}
FEW = ("sweep", "hybrid")  # at 8 ranks
WORLDS = {2: "llama3.1", 4: "qwen3", 8: "qwen3"}
ROWS = 2  # of the batch
LATEST = 300_000  # GPU cycles by which a copy may come late


def plans(world: int) -> dict[str, dict[str, Any]]:
    every = PLANS | RING_PLANS | TENSOR_PLANS | DENSE
    return {name: options for name, options in every.items() if world < 8 or name in FEW}


def join(rank: int, world: int, port: int) -> None:
    """What torchrun would set."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}


def meshes(world: int, name: str) -> ithaca.Mesh:
    if name in DENSE:
        return ithaca.mesh(share_gpus=True)
    if name in TENSOR_PLANS:
        ring = 2 if name == "tensor-ring" and world > 2 else 1
        return ithaca.mesh(tensor=world // ring, ring=ring, share_gpus=True)
    if name in RING_PLANS:
        return ithaca.mesh(ulysses=world // 2, ring=2, share_gpus=True)
    return ithaca.mesh(ulysses=world, share_gpus=True)


def copies(mesh: ithaca.Mesh) -> int:
    """How often the rows of a batch are repeated, so that each data rank has one. Their mean gradient is the same."""
    return -(-mesh.data_ranks // ROWS)


def work(rank: int, world: int, port: int, top: Path) -> None:
    """In a process of its own: collectives, then gradients and the norm of them under every Plan, written by rank 0."""
    try:
        join(rank, world, port)
        ithaca.mesh(share_gpus=True)
        collectives(rank, world)
        chance = random.Random(rank)
        for name, options in plans(world).items():
            model = ithaca.apply(ithaca.load_model(top / "in", "bfloat16"), ithaca.Plan(**options), meshes(world, name))
            model.engine.poison = True
            model.engine.before_copy = lambda: torch.cuda._sleep(chance.randrange(LATEST))
            optimizer = ithaca.make_optimizer(model, learning_rate=0.0)
            for packed in (False, True):
                tokens, ids = (rows.repeat(copies(model.mesh), 1) for rows in batch(packed))
                model(model.shard(tokens, tokens, ids)).backward()
                found = dict(whole_tensors(model.decoder, model.mesh, model.part, gradients=True))
                norm = clip(model, 1e9, optimizer).item()
                optimizer.zero_grad()
                if rank == 0:
                    torch.save((found, norm), top / f"{name}-{packed}")
            del model, optimizer
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (top / f"failed-{rank}").write_text(traceback.format_exc())
        raise


def collectives(rank: int, world: int) -> None:
    mine = torch.arange(4 * world, device="cuda", dtype=torch.float32) + 100 * rank
    found = torch.empty_like(mine)
    dist.all_to_all_single(found, mine)
    assert found.view(world, 4)[:, 0].tolist() == [100 * other + 4 * rank for other in range(world)]
    gathered = torch.empty(world * len(mine), device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.view(world, -1)[:, 0].tolist() == [100 * other for other in range(world)]
    part = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(part, mine)
    assert part[0].item() == sum(100 * other + 4 * rank for other in range(world))
    coming = torch.empty_like(mine)
    ways = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, coming, (rank - 1) % world)]
    for way in dist.batch_isend_irecv(ways):
        way.wait()
    assert coming[0].item() == 100 * ((rank - 1) % world)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}-ranks")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The number of ranks, and a folder with a model and what the ranks made of it."""
    world, top = request.param, tmp_path_factory.mktemp("nccl")
    save(make_model(WORLDS[world], torch.bfloat16, **GPU_SIZES), top / "in")
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = [spawn.Process(target=work, args=(rank, world, port, top)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
        process.kill()
    return world, top


@pytest.mark.nccl
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("plan", PLANS | RING_PLANS | TENSOR_PLANS | DENSE)
def test_ranks_are_no_further_from_exact_than_one(made: tuple[int, Path], plan: str, packed: bool) -> None:
    world, top = made
    if plan not in plans(world):
        pytest.skip(f"at {world} ranks only {' and '.join(FEW)}")
    failures = [file.read_text() for file in top.glob("failed-*")]
    assert not failures, failures[0]
    ours, norm = torch.load(top / f"{plan}-{packed}")
    exact, plain = (theirs(top / "in", packed, dtype) for dtype in (torch.float64, torch.bfloat16))

    def error(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(found[name].double() - exact[name]).norm() / exact[name].norm() for name in exact])

    assert (error(ours) <= 1.5 * error(plain)).all(), torch.stack((error(ours), error(plain)))
    assert norm == pytest.approx(torch.cat([gradient.double().flatten() for gradient in ours.values()]).norm().item())
