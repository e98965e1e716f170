"""The tasks of each benchmark, made of its table and the limits that were asked for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_tokens
from ithaca.bench.bracket import PERCENT
from ithaca.bench.measure import Measured
from ithaca.bench.predict import Place
from ithaca.bench.rows import Limits, Row
from ithaca.bench.run import Here, Options, Task, find_here, longest_line, point_line, run
from ithaca.bench.store import Store
from ithaca.bench.tables import ABLATION, GPUS, LADDER, PEAK_AT, RECOMPUTE, WITH_SHARING, WITHOUT_SHARING, dial_rows
from ithaca.planner.hardware import read_gpus

Json = dict[str, Any]


def _longest_task(row: Row, here: Here, limits: Limits) -> Task:
    """Return the task of a row whose longest context is asked for."""
    published = row.published.get(here.model)
    about = {"adds": row.adds, "begins": row.begins, "published": asdict(published) if published else None}
    question = {
        "plans": [dict(plan) for plan in row.plans],
        "axes": str(row.axes(limits.ranks)),
        "layers": row.layers,
        "limits": asdict(limits),
        "percent": PERCENT,
        "peak_at": PEAK_AT.get(here.model),
    }
    measured = Measured(here.model, here.spec, row, limits, here.place, PEAK_AT.get(here.model))
    return Task(
        name=row.name,
        question=question,
        about=about,
        predict=measured.predict_longest,
        measure=measured.measure_longest,
    )


def _point_task(name: str, row: Row, tokens: int, here: Here, limits: Limits, gpus: tuple[str, ...] = ()) -> Task:
    """Return the task of a row at one length; `gpus`: those that it is also predicted for."""
    measured = Measured(here.model, here.spec, row, limits, here.place)
    question = {
        "row": row.name,
        "plans": [dict(plan) for plan in row.plans],
        "axes": str(row.axes(limits.ranks)),
        "layers": row.layers,
        "tokens": tokens,
        "limits": asdict(limits),
    }

    def predict() -> Json:
        found = measured.predict_at(tokens)
        known = [read_gpus()[gpu] for gpu in gpus]
        others = {
            gpu.name: Measured(here.model, here.spec, row, replace(limits, cap=int(gpu.memory)), Place(gpu=gpu))
            for gpu in known
        }
        return found | ({"gpus": {gpu: other.predict_at(tokens) for gpu, other in others.items()}} if gpus else {})

    return Task(
        name=name,
        question=question,
        about={"adds": row.adds},
        predict=predict,
        measure=lambda ask: measured.measure_at(ask, tokens),
    )


def _context_parallel_tasks(lengths: Sequence[int], here: Here, limits: Limits) -> list[Task]:
    """Return tasks with and without context parallelism at each length."""
    return [
        _point_task(f"{format_tokens(tokens)} {row.name}", row, tokens, here, limits)
        for tokens in lengths
        for row in (WITHOUT_SHARING, WITH_SHARING)
    ]


def _dial_tasks(lengths: Sequence[int], here: Here, limits: Limits) -> list[Task]:
    """Return tasks for chunk sizes and heads at a time at each length, predicted for several GPUs."""
    tasks = []
    for tokens in lengths:
        for row in dial_rows(limits.ranks, tokens, here.spec.heads):
            kind, size = row.name.split()
            name = f"{format_tokens(tokens)} {kind} {format_tokens(int(size))}"
            tasks.append(_point_task(name, row, tokens, here, limits, GPUS))
    return tasks


def _recompute_tasks(lengths: Sequence[int], here: Here, limits: Limits) -> list[Task]:
    """Return a task for each way of saving activations at each length."""
    return [
        _point_task(f"{format_tokens(tokens)} {row.name}", row, tokens, here, limits)
        for tokens in lengths
        for row in RECOMPUTE
    ]


LONGEST = {"ladder": LADDER, "ablation": ABLATION}
POINTS: dict[str, Callable[[Sequence[int], Here, Limits], list[Task]]] = {
    "context-parallel": _context_parallel_tasks,
    "dial": _dial_tasks,
    "recompute": _recompute_tasks,
}


def start(name: str, model: str, limits: Limits, options: Options, lengths: Sequence[int]) -> None:
    """Run `ithaca bench NAME MODEL`."""
    here = find_here(model, options)
    _check_ranks(here, limits.ranks)
    if name in LONGEST:
        rows = [row for row in LONGEST[name] if row.plans or model in row.published]
        tasks, line = [_longest_task(row, here, limits) for row in rows], longest_line
    else:
        tasks, line = POINTS[name](lengths, here, limits), point_line
    size = f"{limits.cap / 1e9:g}GB" if limits.cap >= 1e9 else f"{limits.cap / 1e6:g}MB"
    store = Store(options.out, name, model, here.spec, f"{limits.ranks}x{size}")
    run(tasks, store, here, options, line)


def _check_ranks(here: Here, ranks: int) -> None:
    """Raise an error if this many ranks cannot share a sequence of this model."""
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} cannot be measured: give 1 or more")
    if ranks > here.spec.heads:
        raise ConfigError(
            f"--ranks {ranks} cannot share a sequence of '{here.model}' by its {here.spec.heads} heads: give at most "
            f"{here.spec.heads}"
        )
