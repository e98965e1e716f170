"""The sections of an examination: all ranks run them one after the other, and one that fails ends none of the others.

A rank tells the result of a section, or its error, through the job's store. The first rank reads what all have told and
concludes. So a rank that fails is heard even while the others still wait for it in a collective: their wait ends after
`COLLECTIVE_SECONDS`, each tells its own error, and all go on together. Sections that need the broken connection fail
then as well; the others still run.
"""

import gc
import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ithaca.base.errors import LostRankError, first_line
from ithaca.base.torch_private import job_store
from ithaca.parallel.agree import from_first, together_with
from ithaca.parallel.hangs import named, own_output, set_timeout, without_key
from ithaca.parallel.mesh import Mesh
from ithaca.rehearsal.measure import FULL, Effort

COLLECTIVE_SECONDS = 300.0  # a kernel may compile for minutes on one rank while the others wait
SECTION_SECONDS = 2 * COLLECTIVE_SECONDS  # that ranks may be apart at the end of a section

Found = dict[str, Any]  # values that JSON has; "problems": what is wrong, "skipped": why nothing was done


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of measurements. Figures mean the same whatever the sizes are."""

    effort: Effort
    messages: tuple[int, ...]  # bytes of the tensors that collectives move
    repeats: int  # of each collective
    disk: int  # bytes that each rank writes and reads
    step_tokens: int  # of the step that is predicted and measured


_KI, _MI = 2**10, 2**20
_CPU = {"tokens": 256, "hidden": 512, "mlp": 1792, "chunk": 1024, "copied": 2**24}
GPU_SIZES = Sizes(
    effort=FULL,
    messages=(64 * _KI, _MI, 16 * _MI, 256 * _MI),
    repeats=20,
    disk=4096 * _MI,
    step_tokens=64 * _KI,
)
GPU_QUICK = Sizes(
    effort=Effort(compute_seconds=0.2, copy_seconds=0.1),
    messages=(_MI, 256 * _MI),
    repeats=6,
    disk=512 * _MI,
    step_tokens=16 * _KI,
)
CPU_SIZES = Sizes(
    effort=Effort(compute_seconds=1.0, copy_seconds=0.5, **_CPU),
    messages=(64 * _KI, _MI, 16 * _MI),
    repeats=20,
    disk=256 * _MI,
    step_tokens=2 * _KI,
)
CPU_QUICK = Sizes(
    effort=Effort(compute_seconds=0.1, copy_seconds=0.1, **_CPU),
    messages=(64 * _KI, _MI),
    repeats=6,
    disk=64 * _MI,
    step_tokens=512,
)


@dataclass(frozen=True)
class Exam:
    """An examination, seen from one rank."""

    grid: Mesh  # all ranks
    nodes: tuple[str, ...]  # the node of each rank, as it reports it
    label: str  # the part of the store's keys that only this examination has
    sizes: Sizes
    model: str  # whose longest context is predicted
    disk: tuple[str, ...] = ()  # the folders whose disks are measured

    @property
    def first(self) -> bool:
        return self.grid.rank == 0

    @property
    def node_ranks(self) -> list[int]:
        """The ranks on this node."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.grid.rank]]

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its node."""
        return self.node_ranks.index(self.grid.rank)

    @property
    def most_on_a_node(self) -> int:
        return max(self.nodes.count(node) for node in self.nodes)

    def begin_together(self) -> None:
        """Wait for all ranks, so that what follows runs on all of them at the same time."""
        if self.grid.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.grid.group)

    def tell(self, topic: str, own: Found) -> list[Found] | None:
        """Send `own` to the first rank, which returns those of all ranks. The others return None when they are read."""
        if self.grid.size == 1:
            return [own]
        store, prefix, ranks = job_store(), f"ithaca/doctor/{self.label}/{topic}/", list(range(self.grid.size))
        keys, read = [f"{prefix}{rank}" for rank in ranks], f"{prefix}read"
        store.set(keys[self.grid.rank], json.dumps(own))
        try:
            store.wait(keys if self.first else [read], timedelta(seconds=SECTION_SECONDS))
        except RuntimeError:
            silent = without_key(store, prefix, ranks) or [0]
            raise LostRankError(
                f"{named(silent)} of {len(ranks)} told nothing of section '{topic}' within {SECTION_SECONDS:.0f} s: "
                f"{own_output(silent)} says why",
                silent,
            ) from None
        if not self.first:
            return None
        told = [json.loads(store.get(key)) for key in keys]
        store.set(read, "-")
        return told


def begin(grid: Mesh, quick: bool, model: str | None, disk: tuple[str, ...] = ()) -> Exam:
    """Begin an examination of the ranks of a grid. Collective."""
    set_timeout(grid.groups, COLLECTIVE_SECONDS)
    _, nodes = together_with(grid.group, socket.gethostname, lambda name: name)
    label = from_first(grid.group, lambda: uuid.uuid4().hex)
    if grid.gpu:
        sizes, usual = GPU_QUICK if quick else GPU_SIZES, "llama3-8b"
    else:
        sizes, usual = CPU_QUICK if quick else CPU_SIZES, "tiny"
    return Exam(grid, tuple(nodes), label, sizes, model or usual, disk)


@dataclass(frozen=True)
class Section:
    """A part of the examination."""

    name: str
    examine: Callable[[Exam], Found]  # on every rank
    conclude: Callable[[Exam, list[Found], dict[str, Found]], Found]
    """On the first rank, from what every rank found and from the sections before."""
    lines: Callable[[Found], list[str]]  # the conclusion as text


def run_sections(
    exam: Exam, sections: tuple[Section, ...], say: Callable[[Section, Found], None] = lambda *_: None
) -> dict[str, Found]:
    """Run all sections. Return the conclusions by name on the first rank, and nothing on the others."""
    findings: dict[str, Found] = {}
    for section in sections:
        began = time.perf_counter()
        told = exam.tell(section.name, _caught(lambda: section.examine(exam)))  # noqa: B023
        if told is not None:
            failed = [f"rank {rank}: {found['error']}" for rank, found in enumerate(told) if "error" in found]
            results = [found.get("result", {}) for found in told]
            caught = _caught(lambda: section.conclude(exam, results, findings)) if not failed else {}  # noqa: B023
            failed += [caught["error"]] if "error" in caught else []
            found = {"status": "failed", "problems": failed} if failed else _judged(caught["result"])
            findings[section.name] = found | {"took": time.perf_counter() - began}
            say(section, findings[section.name])
        gc.collect()
        if exam.grid.gpu:
            torch.cuda.empty_cache()
    return findings


def _judged(found: Found) -> Found:
    """A conclusion with its status first."""
    status = "wrong" if found.get("problems") else "skipped" if found.get("skipped") else "right"
    return {"status": status, **found}


def _caught(work: Callable[[], Found]) -> Found:
    """The result of some work, or its error, so that no error of a section ends the examination."""
    try:
        return {"result": work()}
    except Exception as error:
        return {"error": describe(error)}


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {first_line(error)}"
