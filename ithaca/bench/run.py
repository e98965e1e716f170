"""Runs every benchmark: measures rows one after another, stores each at once, and resumes a stopped run.

A benchmark is a list of `Task`s. A task has a name and a question, which together are its row in the file of results;
how to predict it, and how to measure it with what `Ask` answers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.shell import quoted
from ithaca.base.sizes import format_bytes, format_count, format_seconds, format_tokens
from ithaca.bench.ask import Ask, Deadline, MeasureError, TimeIsUp, find_machine
from ithaca.bench.origin import command, commit
from ithaca.bench.predict import Place
from ithaca.bench.store import Store, Stored
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.planner.hardware import find_gpu, parse_gpus, read_gpus

Json = dict[str, Any]
PREDICTED_FOR = "H100-80GB"  # the GPU of predictions without a device


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row that is to be measured."""

    name: str
    question: Json
    about: Json
    predict: Callable[[], Json | None]
    measure: Callable[[Ask], Json]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that all benchmarks have."""

    out: Path
    only: tuple[str, ...] = ()  # parts of names; none: all rows
    seconds: float | None = None
    predict: bool = False
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Here:
    """The model and the machine of a benchmark."""

    model: str
    spec: Spec
    place: Place
    machine: Json
    deadline: Deadline


def find_here(model: str, options: Options) -> Here:
    """Return the model, and the device that rows run on or are predicted for."""
    if options.seconds is not None and not options.seconds > 0:  # or not a number
        raise ConfigError(f"--seconds {options.seconds:g} is not a time: give 1 or more, as --seconds 500")
    spec, deadline = read_spec(find_config(model)[0]), Deadline(options.seconds)
    if options.predict:
        gpu = parse_gpus(PREDICTED_FOR, read_gpus())[1]
        machine: Json = {"predicted_for": gpu.name}
        return Here(model=model, spec=spec, place=Place(gpu=gpu), machine=machine, deadline=deadline)
    try:
        machine = find_machine(model, deadline)
    except TimeIsUp:
        raise ConfigError(
            f"--seconds {options.seconds:g} is too short even to look at the device: give more, as --seconds 500"
        ) from None
    # The time of a GPU that no table describes is not predicted
    gpu = None if machine["on_cpu"] else find_gpu(machine["device"], machine["device_bytes"], read_gpus())
    place = Place(gpu=gpu, on_cpu=machine["on_cpu"], kernel=machine["kernel"])
    return Here(model=model, spec=spec, place=place, machine=machine, deadline=deadline)


def run(tasks: Sequence[Task], store: Store, here: Here, options: Options, line: Callable[[Stored], str]) -> None:
    """Measure every row that has no result yet, and print a line of each row."""
    with store.opened(here.machine.get("device")):
        _run(tasks, store, here, options, line)


def _run(tasks: Sequence[Task], store: Store, here: Here, options: Options, line: Callable[[Stored], str]) -> None:
    chosen = _choose(tasks, options.only)
    origin = {"machine": here.machine, "commit": options.commit or commit(), "command": command()}
    if options.predict:
        gpu = here.machine["predicted_for"]
        print(f"Predictions are for {gpu}, where libraries take memory beside tensors that a CPU's do not")
    order = [task.name for task in tasks]
    left = 0
    for task in chosen:
        found = store.rows.get(task.name)
        if options.predict and found and found.answer:  # a prediction never replaces a measurement
            found.about = task.about
            print(line(found), flush=True)
            continue
        row = store.row(task.name, task.question)
        row.about = task.about
        if not row.done:
            row.predicted, row.origin = task.predict(), origin
        if not row.done and not options.predict:
            where = {"commit": origin["commit"], "device": here.machine["device"]}
            ask = Ask(row.measurements, lambda: store.save(order), here.deadline, where)
            left += not _measure(task, row, ask, origin)
        store.save(order)
        print(f"{task.name}: {row.error}" if row.error else line(row), flush=True)
    print(f"Results in {store.path}; `ithaca bench report {quoted(store.path.parent)}` makes a page of them")
    if left:
        print(f"{format_count(left, 'row')} still to be measured: run the same command again to continue")


def _measure(task: Task, row: Stored, ask: Ask, origin: Json) -> bool:
    """Measure a row. Return whether it is done; if not, what was measured of it is kept."""
    try:
        answer = task.measure(ask)
    except TimeIsUp:
        return False
    except MeasureError as problem:
        row.error = str(problem)
        return False
    row.answer, row.error, row.origin = answer, None, origin | {"commit": row.commits or origin["commit"]}
    row.measurements = []
    return True


def _choose(tasks: Sequence[Task], only: tuple[str, ...]) -> list[Task]:
    for part in only:
        if not any(part.lower() in task.name.lower() for task in tasks):
            names = "; ".join(task.name for task in tasks)
            raise ConfigError(f"--only '{part}' is in no row's name: the rows are {names}")
    return [task for task in tasks if not only or any(part.lower() in task.name.lower() for part in only)]


# One line of a row
def longest_line(row: Stored) -> str:
    """'Ulysses + ZeRO-3: 99K tokens, 74.5 GiB …' of a row whose longest context is asked for."""
    found, what = (row.answer, "") if row.answer else (row.predicted, "predicted ")
    if found is None:
        return f"{row.name}: not predicted"
    if not found["longest"]:
        return f"{row.name}: {what}nothing fits{_why_not(row, found)}"
    return f"{row.name}: {what}{'; '.join(_longest_words(found))}"


def _why_not(row: Stored, found: Json) -> str:
    """Return why not even the shortest context is predicted to fit. A measured row does not have these numbers."""
    if "fails_bytes" not in found:
        return ""
    tokens = format_tokens(found["fails"])
    if found["limit"] != "GPU":
        return f": {tokens} tokens are limited by {found['limit']}"
    libraries = format_bytes(found["libraries_bytes"])
    cap = format_bytes(row.question["limits"]["cap"])
    return f": {tokens} tokens take {format_bytes(found['fails_bytes'])}, {libraries} of it libraries; --cap is {cap}"


def _longest_words(found: Json) -> Iterable[str]:
    yield f"{format_tokens(found['longest'])} tokens, {format_bytes(found['peak_bytes'])}"
    if found.get("predicted"):
        yield f"predicted {format_tokens(found['predicted'])}, limited by {found['limit']}"
    if found.get("seconds"):
        yield f"{format_seconds(found['seconds'])} a step of {format_tokens(found['timed'])}, {_speed(found)}"


def point_line(row: Stored) -> str:
    """'256K with: 74.5 GiB …' of a row at one length."""
    found, what = (row.answer, "") if row.answer else (row.predicted, "predicted ")
    if found is None or not found["fits"]:
        return f"{row.name}: {what}does not fit"
    text = f"{row.name}: {what}{format_bytes(found['peak_bytes'])}"
    return f"{text}, {format_seconds(found['seconds'])} a step, {_speed(found)}" if found.get("seconds") else text


def _speed(found: Json) -> str:
    text = f"{found['tokens_per_second_per_gpu']:.0f} tokens/s of a GPU"
    return text if found["mfu_causal"] is None else f"{text}, {100 * found['mfu_causal']:.1f} % causal MFU"
