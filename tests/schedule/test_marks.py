"""Marks count when the device has passed them, change no number, and follow the order in which a pass runs."""

from collections import deque
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ithaca
from ithaca.model.source import load_model
from ithaca.parallel.axes import Axes
from ithaca.plans.recipes import RECIPES
from ithaca.schedule.job import Job
from ithaca.schedule.marks import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    REBUILD,
    PassWork,
    StepMarks,
    make_marks,
    pass_work,
)
from tests.models import make_model, save
from tests.schedule.steps import random_batch

WORK = PassWork(layers=2, forward=(1.0, 3.0), loss=4.0, backward=(3.0, 7.0))  # 2 · (4 + 10) + 4 = 32


class FakeEvent:
    """An event that passes when a test says so."""

    def __init__(self) -> None:
        self.passed, self.records = True, 0

    def record(self) -> None:
        assert self.passed, "an event was used again before it had passed"
        self.passed, self.records = False, self.records + 1

    def query(self) -> bool:
        return self.passed


class FakeDevice:
    """Makes events and passes them in the order in which they were recorded."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.queue: deque[FakeEvent] = deque()

    def event(self) -> FakeEvent:
        event, record = FakeEvent(), FakeEvent.record

        def queued() -> None:
            record(event)
            self.queue.append(event)

        event.record = queued  # pyrefly: ignore
        self.events.append(event)
        return event

    def run(self, count: int) -> None:
        for _ in range(count):
            self.queue.popleft().passed = True


def place(marks: StepMarks) -> tuple | None:
    reached = marks.last()
    return (reached.step.number, reached.number, reached.phase, reached.layer, reached.chunk) if reached else None


def test_a_mark_counts_only_when_the_device_has_passed_it() -> None:
    device = FakeDevice()
    marks = StepMarks(device.event, 8)
    with marks.step(5, [1.0]):
        mark = marks.begin_pass(lambda: WORK)
        mark(FORWARD, 0, 0)
        mark(FORWARD, 0, 1)
        mark(LOSS)
        assert place(marks) is None  # the host is far ahead
        device.run(1)
        assert place(marks) == (5, 0, FORWARD, 0, 0)
        assert place(marks) == (5, 0, FORWARD, 0, 0)
        device.run(2)
        assert place(marks) == (5, 0, LOSS, None, None)
        marks.mark(OPTIMIZER)
        assert place(marks) == (5, 0, LOSS, None, None)
        device.run(1)
        assert place(marks) == (5, 0, OPTIMIZER, None, None)
    assert place(marks) is None


def test_events_are_few_and_used_again_only_after_they_have_passed() -> None:
    """Marks without an event are dropped; once others have passed, marks are recorded again."""
    device = FakeDevice()
    marks = StepMarks(device.event, 3)
    with marks.step(1, [1.0]):
        mark = marks.begin_pass(lambda: WORK)
        for chunk in range(100):
            mark(FORWARD, 0, chunk)
        assert len(device.queue) == len(device.events) == 3
        device.run(2)
        assert place(marks) == (1, 0, FORWARD, 0, 1)
        for chunk in range(100, 200):
            mark(FORWARD, 0, chunk)
        assert [event.records for event in device.events] == [2, 2, 1]
        device.run(3)
        assert place(marks) == (1, 0, FORWARD, 0, 101)


def test_no_mark_is_left_after_an_error() -> None:
    device = FakeDevice()
    marks = StepMarks(device.event, 4)

    def break_off() -> None:
        with marks.step(1, [1.0, 1.0]):
            marks.begin_pass(lambda: WORK)(FORWARD, 0, 0)
            device.run(1)
            marks.begin_pass(lambda: WORK)(FORWARD, 1, 0)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        break_off()
    assert place(marks) is None
    with marks.step(1, [1.0]):
        mark = marks.begin_pass(lambda: WORK)
        mark(FORWARD, 0, 1)
        assert place(marks) is None
        device.run(1)  # the one that the broken step had left under way
        assert place(marks) is None
        device.run(1)
        assert place(marks) == (1, 0, FORWARD, 0, 1)
    assert not marks._pending
    assert marks._free is not None
    assert sorted(map(id, marks._free)) == sorted(map(id, device.events))
    marks.close()
    assert place(marks) is None


def test_other_passes_are_not_marked() -> None:
    """Those outside a step, and those that a second model runs beside the ones that were announced."""
    marks = make_marks(torch.device("cpu"))
    marks.begin_pass(lambda: WORK)(FORWARD, 0, 0)
    marks.mark(OPTIMIZER)
    assert place(marks) is None
    with marks.step(3, [1.0]):
        marks.mark(OPTIMIZER)
        assert place(marks) is None
        first, second = marks.begin_pass(lambda: WORK), marks.begin_pass(lambda: WORK)
        first(FORWARD, 1, 1)
        second(LOSS)
        assert place(marks) == (3, 0, FORWARD, 1, 1)


@pytest.mark.parametrize(
    ("phase", "layer", "chunk", "done"),
    [
        (FORWARD, 0, 0, 0),
        (FORWARD, 0, None, 0),
        (FORWARD, 1, 1, 5),
        (LOSS, None, None, 8),
        (BACKWARD, 1, 1, 12),
        (BACKWARD, 1, None, 12),
        (BACKWARD, 1, 0, 19),
        (REBUILD, 0, None, 22),
        (BACKWARD, 0, 0, 29),
        (OPTIMIZER, None, None, 32),
    ],
)
def test_the_share_of_a_pass(phase: str, layer: int | None, chunk: int | None, done: float) -> None:
    assert WORK.share(phase, layer, chunk) == pytest.approx(done / 32)


def test_the_share_of_a_step_whose_passes_differ() -> None:
    marks = make_marks(torch.device("cpu"))
    with marks.step(1, [10.0, 30.0]):
        marks.begin_pass(lambda: WORK)
        marks.begin_pass(lambda: WORK)(LOSS)
        reached = marks.last()
        assert reached is not None
        assert reached.share() == pytest.approx((10 + 30 * 8 / 32) / 40)


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (ithaca.Plan(recipe="sweep", chunk=1024), Axes(ulysses=2)),
        (ithaca.Plan(recipe="sweep", chunk=1024, o="recompute"), Axes(ring=2)),
        (ithaca.Plan(recipe="dense", checkpoint="none"), Axes()),
        (ithaca.Plan(recipe="dense"), Axes()),
        (ithaca.Plan(recipe="untied"), Axes(ulysses=2)),
    ],
)
def test_the_work_of_a_pass_is_what_its_schedule_costs(plan: ithaca.Plan, axes: Axes) -> None:
    job = Job(spec=load_model("tiny").spec, plan=plan, tokens=4096, axes=axes)
    work, found = job.costs.work(job), pass_work(job, job.layout, (0, 4096))
    assert found.total == pytest.approx(work.linear + (2.5 + work.attention_runs) * work.attention)
    assert len(found.forward) == len(found.backward) == job.chunks
    assert min(*found.forward, *found.backward, found.loss) > 0


def test_a_later_chunk_has_more_work_unless_a_document_begins_there() -> None:
    """Attention of chunk i to i earlier ones and half of itself."""
    job = Job(spec=load_model("tiny").spec, plan=ithaca.Plan(recipe="sweep", chunk=1024), tokens=4096)
    first, *_, last = forward = pass_work(job, job.layout, (0, 4096)).forward
    more = [after - before for before, after in pairwise(forward)]
    assert more == pytest.approx([more[0]] * 3)
    assert last > 1.5 * first
    cut = pass_work(job, job.layout, (0, 2048, 4096)).forward
    assert cut == pytest.approx((cut[0], cut[1], cut[0], cut[1]))


PLANS = {
    "none": (ithaca.Plan(recipe="dense", checkpoint="none"), {}),
    "selective": (ithaca.Plan(recipe="dense", checkpoint="selective", zero=1), {}),
    "full": (ithaca.Plan(recipe="dense", x="host"), {}),
    "ulysses": (ithaca.Plan(recipe="ulysses"), {"ulysses": 2}),
    "ulysses-none": (ithaca.Plan(recipe="ulysses", checkpoint="none"), {"ulysses": 2}),
    "alst": (ithaca.Plan(recipe="alst", tile=7), {"ulysses": 2}),
    "untied": (ithaca.Plan(recipe="untied"), {"ulysses": 2}),
    "ring": (ithaca.Plan(recipe="ring"), {"ring": 2}),
    "hybrid": (ithaca.Plan(recipe="hybrid", travel="gather", checkpoint="selective"), {"ring": 2}),
    "untied-ring": (ithaca.Plan(recipe="untied"), {"ring": 2}),
    "tensor": (ithaca.Plan(recipe="tensor", checkpoint="selective"), {"tensor": 2}),
    "fpdt": (ithaca.Plan(recipe="fpdt", chunks=4), {"ulysses": 2}),
    "sweep": (ithaca.Plan(recipe="sweep", chunk=8, x="host, rebuild"), {"ulysses": 2}),
    "sweep-ring": (ithaca.Plan(recipe="sweep", chunk=8, o="recompute"), {"ring": 2}),
    "sweep-rounds": (ithaca.Plan(recipe="sweep", chunk=8, heads=3), {"ring": 2}),
}


class Recorded(StepMarks):
    """Marks that keep every place, as the host comes to it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.places: list[tuple] = []

    def _mark(self, *args, **kwargs) -> None:
        super()._mark(*args, **kwargs)
        reached = self.last()
        assert reached is not None
        self.places.append((reached.number, reached.phase, reached.layer, reached.chunk, reached.share()))


Outcome = tuple[list[bytes], list[tuple]]  # losses and gradients, and the places that were marked


def with_and_without(folder: Path, plan: ithaca.Plan, axes: dict) -> tuple[Outcome, Outcome]:
    model = ithaca.apply(ithaca.load_model(folder, "float32"), plan, ithaca.mesh(**axes))
    batches = [model.shard(*random_batch(1 if axes else 2, 32, True, 0.1, seed)) for seed in (1, 2)]
    return run_step(model, batches, True), run_step(model, batches, False)


def run_step(model: ithaca.Model, batches: list[ithaca.Batch], marked: bool) -> Outcome:
    """Two passes of a step, then one without gradients."""
    valid, recorded, losses = sum(batch.valid_tokens for batch in batches), Recorded(), []
    marks = recorded if marked else None
    with recorded.step(1, [batch.attended for batch in batches]):
        for number, batch in enumerate(batches, start=1):
            loss = model(batch, valid_tokens=valid, last=number == 2, marks=marks)
            loss.backward()
            losses.append(loss.detach())
    places = list(recorded.places)
    with torch.no_grad(), recorded.step(2, [1.0]):
        losses.append(model(batches[0], marks=marks))
    assert {place[1] for place in recorded.places[len(places) :]} == ({FORWARD, LOSS} if marked else set())
    found = [*losses, *(parameter.grad.full_tensor() for parameter in model.parameters())]
    model.zero_grad()
    return [tensor.numpy().tobytes() for tensor in found], places


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3", num_hidden_layers=2), tmp_path_factory.mktemp("marks") / "model")


def test_every_recipe_is_among_the_plans() -> None:
    assert {plan.recipe for plan, _ in PLANS.values()} == set(RECIPES)


@pytest.mark.parametrize("name", PLANS)
def test_marks_change_no_bit_and_follow_the_pass(ranks, folder: Path, name: str) -> None:
    plan, axes = PLANS[name]
    for (found, places), (wanted, none) in ranks(2).run(with_and_without, folder, plan, axes):
        assert found == wanted
        assert none == []
        check_order(places, plan)


def check_order(places: list[tuple], plan: ithaca.Plan) -> None:
    """Each part once and in its order, recomputation included, with shares that never fall."""
    chunks = [place[3] for place in places if place[:3] == (0, FORWARD, 0)]
    assert chunks == (list(range(8 if plan.heads else 4)) if plan.sweeps else [None]), asdict(plan)
    forward = [(FORWARD, layer, chunk) for layer in (0, 1) for chunk in chunks]
    backward = [(BACKWARD, layer, chunk) for layer in (1, 0) for chunk in reversed(chunks)]
    rebuilt = [(REBUILD, 1, None)] if "rebuild" in str(plan.x) else []
    wanted = [*forward, (LOSS, None, None), *rebuilt, *backward]
    for number in (0, 1):
        assert [place[1:4] for place in places if place[0] == number] == wanted
    shares = [place[4] for place in places]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.01
    assert 0.5 < shares[-1] < 1
