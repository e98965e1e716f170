"""The bytes that a step's tapes copy to the device and from it are those that the sweep's cost states, to the byte."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import ithaca
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.sweep.copies import copies
from tests.sampling import sampled
from tests.schedule.counting import counting_copies, counting_disk

TOKENS, CHUNK = 128, 32
DEVICE = dict.fromkeys(("x", "o", "lse", "residual", "kv"), "device")
PLACES: dict[str, dict[str, str]] = {
    "nothing": {},
    "x": {"x": "host"},  # written once, read forward, by its chunk, and for K and V of later chunks
    "o": {"o": "host"},
    "lse": {"lse": "host"},
    "residual": {"residual": "host"},
    "K and V": {"kv": "host"},
    "x recomputed": {"x": "host, rebuild*3", "o": "host"},
    "every second x": {"x": "host, rebuild", "o": "host", "residual": "host"},
    "x of the first layer looked up": {"x": "rebuild*2, host, rebuild", "o": "host", "residual": "host"},
    "no x": {"x": "rebuild", "o": "host"},
    "attention recomputed": {"x": "host", "o": "recompute"},
    "attention recomputed, one x looked up": {"x": "rebuild, host*3", "o": "recompute"},
    "attention recomputed, K and V": {"x": "host", "o": "recompute", "kv": "host"},
    "some attention recomputed, K and V": {"x": "host", "o": "recompute*2, host*2", "kv": "host"},
    "everything": dict.fromkeys(DEVICE, "host"),
}


def counted(
    plan: Plan,
    model_name: str | Path = "tiny",
    ulysses: int = 1,
    ring: int = 1,
    documents: tuple[int, ...] = (TOKENS,),
) -> tuple[float, float, Job]:
    """Bytes into the device and out of it in one step on a rank, over documents of these lengths."""
    mesh = ithaca.mesh(ulysses=ulysses, ring=ring) if ulysses * ring > 1 else None
    model = ithaca.apply(ithaca.load_model(model_name, "float64"), plan, mesh)
    model.allocate(1, TOKENS)
    row, job = torch.arange(TOKENS) % 97, replace(model.reservation.job(TOKENS), documents=documents)
    ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    with counting_copies(model) as copied:
        loss = model(model.shard(row, row, ids))
        forward = copied.take()
        assert copies(job, ("host", "disk")).forward == forward
        loss.backward()
        step = forward + copied.take()
    return step.into, step.out, job


@pytest.mark.parametrize("chunk", [CHUNK, TOKENS])
@pytest.mark.parametrize("name", PLACES)
def test_copies_of_a_step(name: str, chunk: int) -> None:
    into, out, job = counted(Plan(recipe="sweep", chunk=chunk, tile=8, **DEVICE | PLACES[name]))
    stated = copies(job, ("host", "disk"))
    assert (stated.into, stated.out) == (into, out)
    assert copies(job, ("disk",)).most == 0
    assert job.costs.work(job).host == stated


@pytest.mark.parametrize("chunk", [CHUNK, TOKENS])
@pytest.mark.parametrize(
    "places",
    [
        *({name: "disk"} for name in DEVICE),
        {"x": "disk", "o": "recompute", "kv": "disk"},
        {"x": "disk, rebuild*3", "o": "disk, host", "residual": "disk"},
        {"x": "rebuild*2, disk, rebuild", "o": "disk, host"},
        dict.fromkeys(DEVICE, "disk"),
    ],
    ids=str,
)
def test_what_the_disk_moves(places: dict[str, str], chunk: int, tmp_path: Path) -> None:
    plan = Plan(recipe="sweep", chunk=chunk, tile=8, disk=str(tmp_path), **DEVICE | places)
    with counting_disk() as moved:
        into, out, job = counted(plan)
    stated, on_disk = job.costs.work(job), moved.take()
    assert (stated.disk.into, stated.disk.out) == (on_disk.into, on_disk.out)
    assert (stated.host.into, stated.host.out) == (into, out)


@pytest.mark.parametrize(
    ("axes", "o"),
    sampled(
        product([(2, 1), (1, 2), (2, 2)], ["host", "recompute"]), lambda axes, o: (o == "recompute") == (axes == (2, 2))
    ),
)
def test_copies_of_chunks_that_overlap(ranks, axes: tuple[int, int], o: str) -> None:
    """Chunks under way fetch nothing twice, and leave nothing that was fetched."""
    plan = Plan(recipe="fpdt", chunks=16, tile=8, o=o)  # more than are ever under way
    for into, out, job in ranks(axes[0] * axes[1]).run(counted, plan, "tiny", *axes):
        stated = job.costs.work(job).host
        assert (stated.into, stated.out) == (into, out)


DOCUMENTS = (70, 1, 16, 25, 16)  # over eight chunks: the first reaches the fifth, others a next one or none


@pytest.mark.parametrize("name", ["x", "K and V", "every second x", "attention recomputed, K and V", "everything"])
def test_copies_of_documents(name: str) -> None:
    """K and V that no later chunk asks for are not fetched, and no x is read for them."""
    plan = Plan(recipe="sweep", chunk=16, tile=8, **DEVICE | PLACES[name])
    into, out, job = counted(plan, documents=DOCUMENTS)
    stated = job.costs.work(job).host
    assert (stated.into, stated.out) == pytest.approx((into, out), rel=1e-12)
    assert stated.into < counted(plan)[0]


@pytest.mark.parametrize("name", ["x", "everything"])
def test_copies_of_documents_on_ranks(ranks, name: str) -> None:
    plan = Plan(recipe="sweep", chunk=16, tile=8, **DEVICE | PLACES[name])
    for into, out, job in ranks(2).run(counted, plan, "tiny", 2, 1, DOCUMENTS):
        stated = job.costs.work(job).host
        assert (stated.into, stated.out) == pytest.approx((into, out), rel=1e-12)


def test_the_busier_direction_counts() -> None:
    """x is read three times for each time that it is written."""
    on_host = Plan(recipe="sweep", chunk=CHUNK, tile=8, **DEVICE | {"x": "host"})
    _, out, job = counted(on_host)
    assert copies(job, ("host",)).most > 2.5 * out
