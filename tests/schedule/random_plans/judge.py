"""One case, run in every rank and judged there: by the naive twin's numbers, and by what the schedule's cost says.

The loss, every gradient and their norm equal the naive twin's. What a pass sends equals `messages` of the cost to the
byte; what it copies equals `work`, and the tapes in memory equal `tapes`. The cost speaks of weights that are all
trained, and copies of tiles of one size. Of other passes it is an upper bound.
"""

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import ithaca
from ithaca.assemble import Substitutes
from ithaca.base.errors import IthacaError
from ithaca.base.owners import KEYS, TAPES
from ithaca.optimizer.adamw import clip
from ithaca.parallel.batch import Batch
from ithaca.parallel.sharding import shards, whole_tensors
from ithaca.rehearsal.memory_meter import Meter
from ithaca.schedule.costs import Copies, Traffic, Work
from ithaca.tape.spec import device_bytes
from tests.models import make_model, save
from tests.ranks import Ranks
from tests.schedule.contexts import random_delays
from tests.schedule.counting import counting_copies, counting_disk, counting_messages, stated_messages
from tests.schedule.random_plans.cases import Case
from tests.schedule.random_plans.uses import judge_uses, naive_uses
from tests.schedule.steps import EXACT, Outcome, Rows, assert_same, naive_step, random_batch

Numbers = dict[str, float]  # what a pass sends and copies one way, forward or backward

UPSTREAM = 3  # what losses are scaled by, as a user may
LATEST = 0.001  # seconds that a copy is delayed by at most


@dataclass(frozen=True)
class Verdict:
    """What one rank says of a case."""

    refused: str = ""  # the kind of error
    sentence: str = ""
    findings: tuple[str, ...] = ()


def judge(case: Case, one: Ranks, ranks: Ranks, top: Path) -> Verdict:
    """Run a case on its ranks, with files below `top`. `one` is a job of one rank, which makes the model."""
    one.run(prepare, case, top)
    verdicts = ranks.run(run_case, case, top)
    findings = [f"rank {rank}: {found}" for rank, verdict in enumerate(verdicts) for found in verdict.findings]
    kinds = {verdict.refused for verdict in verdicts}
    if len(kinds) > 1:
        findings.append(f"ranks refused differently: {[verdict.refused for verdict in verdicts]}")
    findings += [f"{left} is left on the disk" for folder in _disks(case, top) for left in os.listdir(folder)]
    return Verdict(verdicts[0].refused, verdicts[0].sentence, tuple(findings))


def prepare(case: Case, top: Path) -> None:
    """Save the model of a case, and the loss and gradients that the naive twin finds. Make the folders for tapes."""
    for folder in _disks(case, top):
        folder.mkdir()
    folder = save(make_model(case.family, torch.float64, seed=case.seed, **case.keys), top / "model")
    batches = batches_of(case)
    torch.save((naive_step(folder, batches), naive_uses(folder, batches)), top / "wanted.pt")


def _disks(case: Case, top: Path) -> list[Path]:
    return [top / f"disk{number}" for number in range(case.folders)]


def batches_of(case: Case) -> list[Rows]:
    return [
        random_batch(batch.rows, batch.length, batch.documents, batch.ignored, batch.seed, case.keys["vocab_size"])
        for batch in case.batches
    ]


def run_case(case: Case, top: Path) -> Verdict:
    """Run and judge a case, in every rank of a job."""
    try:
        return Verdict(findings=tuple(dict.fromkeys(_findings(case, top))))
    except IthacaError as problem:
        sentence = str(problem)
        unclear = () if len(sentence) > 20 and "\n" not in sentence else (f"unclear refusal: {sentence!r}",)
        return Verdict(type(problem).__name__, sentence, unclear)


def _findings(case: Case, top: Path) -> Iterator[str]:
    """Everything that is wrong in this rank. Every rank goes on to the end, so that none waits for another."""
    model = open_case(case, top)
    optimizer = ithaca.make_optimizer(model, learning_rate=0.0)  # refuses a model whose weights are all frozen
    (loss, gradients), uses = torch.load(top / "wanted.pt")
    trained = {name for name, parameter in shards(model.decoder) if parameter.requires_grad}
    wanted = loss, {name: gradient for name, gradient in gradients.items() if name in trained}
    norm = UPSTREAM * torch.stack([gradient.norm() for gradient in wanted[1].values()]).norm().item()
    yield from _judge_tapes(model, case)
    for _ in range(case.steps):
        yield from judge_uses(model, case.uses, batches_of(case), uses)
        found = yield from _step(model, case)
        yield from _compare(found, wanted)
        clipped = clip(model, 1.0, optimizer).item()
        if not abs(clipped - norm) <= EXACT * norm:
            yield f"the gradients have norm {clipped}, not {norm}"
        optimizer.step()
        model.zero_grad()


def open_case(case: Case, top: Path) -> ithaca.Model:
    """The model on its ranks, with slots that are NaN when they are free, and late copies."""
    disk = ", ".join(map(str, _disks(case, top))) or None
    plan, mesh = ithaca.Plan(**case.plan, disk=disk), ithaca.mesh(device="cpu", **case.axes)
    substitutes = Substitutes(cache_place=case.cache)
    model = ithaca.apply(ithaca.load_model(top / "model", "float64"), plan, mesh, substitutes)
    model.engine.poison = True
    if case.late is not None:
        model.engine.before_copy = random_delays(case.late + mesh.rank, LATEST)
        model.engine.before_disk = random_delays(case.late + mesh.rank + 1, LATEST)
    for name, parameter in model.decoder.named_parameters():
        parameter.requires_grad_(not any(word in name for word in case.frozen))
    return model


def _judge_tapes(model: ithaca.Model, case: Case) -> Iterator[str]:
    """Allocate the tapes of the first pass, and judge their bytes."""
    first, tokens = case.batches[0], model.shard(*batches_of(case)[0]).layout.tokens
    with Meter(model.mesh.device, torch.float64) as meter:
        model.allocate(first.rows, first.length)
    job = model.reservation.job(tokens)
    for owner in (KEYS, TAPES):
        stated = device_bytes([tape for tape in job.tapes if (tape.option == "kv") == (owner == KEYS)], job.tiles)
        if meter.now[owner] != stated:
            yield f"{meter.now[owner]} bytes of {owner}, and {stated} are stated"


def _step(model: ithaca.Model, case: Case) -> Generator[str, None, Outcome]:
    """The loss and the gradients of all micro-batches."""
    parts = [model.shard(*batch) for batch in batches_of(case)]
    valid, loss = sum(part.valid_tokens for part in parts), 0.0
    for number, part in enumerate(parts, start=1):
        with counting_messages() as sent, counting_copies(model) as copied, counting_disk() as moved:
            found = model(part, valid_tokens=valid, last=number == len(parts))
            forward = _numbers(sent.take(), copied.take(), moved.take())
            (UPSTREAM * found).backward()
            backward = _numbers(sent.take(), copied.take(), moved.take())
        loss += found.item()
        yield from _judge_pass(model, part, not case.frozen, [forward, backward])
    return loss, _gradients(model)


def _gradients(model: ithaca.Model) -> dict[str, Tensor]:
    """Whole gradients of the weights that are trained, which the others do not have."""
    frozen = {name: parameter for name, parameter in shards(model.decoder) if not parameter.requires_grad}
    for parameter in frozen.values():
        assert parameter.grad is None
        parameter.grad = torch.zeros_like(parameter)
    whole = whole_tensors(model.decoder, model.mesh, model.part, gradients=True)
    found = {name: gradient / UPSTREAM for name, gradient in whole if name not in frozen}
    for parameter in frozen.values():
        parameter.grad = None
    return found


def _compare(found: Outcome, wanted: Outcome) -> Iterator[str]:
    try:
        assert_same(found, wanted)
    except AssertionError as problem:
        yield f"not the naive twin's: {problem}"


def _numbers(sent: Traffic, copied: Copies, moved: Copies) -> Numbers:
    return {
        "messages": sent.messages,
        "bytes sent": sent.bytes,
        "bytes into the device": copied.into,
        "bytes out of the device": copied.out,
        "bytes from the disk": moved.into,
        "bytes to the disk": moved.out,
    }


def _judge_pass(model: ithaca.Model, batch: Batch, trained: bool, found: list[Numbers]) -> Iterator[str]:
    """Compare what was counted forward and backward with the cost; `trained`: all weights are."""
    documents = tuple(end - start for start, end in pairwise(batch.bounds))
    said, work = stated_messages(model, batch.layout.tokens, documents), _work(model, batch, documents)
    exact = _exact(model, batch, trained)
    for number, way in enumerate(("forward", "backward")):
        stated = _numbers(said[number], getattr(work.host, way), getattr(work.disk, way))
        for what, count in found[number].items():
            limit = round(stated[what])
            if count > limit or (what in exact and count != limit):
                yield f"{way}, {batch.layout.tokens} tokens: {count:.0f} {what}, and {limit} are stated"


def _exact(model: ithaca.Model, batch: Batch, trained: bool) -> set[str]:
    """The numbers of a pass that the cost states exactly."""
    everything, chunks = set(_numbers(Traffic(0, 0), Copies(), Copies())), batch.layout.chunks
    if not trained:
        return set()
    if not model.plan.sweeps:
        return everything
    if len(batch.bounds) > 2 and model.mesh.ring > 1:  # a ring rank may hold no keys of a document that reaches a chunk
        return {"bytes sent"}
    return everything if batch.layout.tokens == chunks.count * chunks.size else {"messages", "bytes sent"}


def _work(model: ithaca.Model, batch: Batch, documents: tuple[int, ...]) -> Work:
    """The cost's work for the tokens of a pass, with padding and the last tile made whole."""
    plan, chunks = model.plan, batch.layout.chunks
    if plan.sweeps:
        plan = replace(plan, chunks=None, chunk=chunks.size, tile=min(plan.tile or chunks.size, chunks.size))
    tokens, (*others, last) = chunks.count * chunks.size, documents
    documents = *others, last + tokens - sum(documents)
    job = replace(model.reservation.job(tokens), plan=plan, documents=documents)
    return job.costs.work(job)
