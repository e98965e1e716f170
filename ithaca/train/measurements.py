"""What a run measures between its steps: the loss on data that it does not train on, and long-context tasks.

Both are collective, ask between passes whether a user wants to stop, and go into the next checkpoint's manifest, so
that a run that continues makes none twice.
"""

import math
import time
from typing import TYPE_CHECKING, Any

from ithaca.data.windows import Windows
from ithaca.parallel.agree import from_first
from ithaca.parallel.hangs import Roll
from ithaca.train.tasks import describe_scores, task_metrics
from ithaca.train.validation import Validation, measure, metrics_of

if TYPE_CHECKING:
    from ithaca.train.loop import TrainingRun


def make_validation(run: "TrainingRun", held_out: Windows, manifest: dict[str, Any]) -> Validation:
    """Return the validations of a run. `manifest`: of the checkpoint that it continues from."""
    options = run.config.run
    every = options.checkpoint_every if options.validate_every is None else options.validate_every
    validation = Validation(held_out, every, manifest, bool(run.config.train.stages))
    validation.best = from_first(run.mesh.group, lambda: run.checkpoints.best(validation.data))
    if validation.changed and not run.config.train.stages:  # each stage has sequences of its own length
        run.warn(
            f"the validation data have changed since the checkpoint of step {run.done}: losses on the old "
            "data are not compared with losses on the new data, and the best checkpoint is chosen anew"
        )
    return validation


def measure_start(run: "TrainingRun", roll: Roll) -> None:
    """Measure what is due before a start's first step. Add the results to the checkpoint of that step."""
    if validate(run, roll) and run.validation:
        run.checkpoints.add_note(run.done, run.validation.note())
    if evaluate(run, roll) and run.tasks:
        run.checkpoints.add_note(run.done, run.tasks.note())
    elif run.tasks and run.done == run.steps and run.tasks.asks_anew(run.done):
        run.progress.warn(run.tasks.describe_finished(run.done, run.folder.path))


def validate(run: "TrainingRun", roll: Roll) -> bool:
    """Measure the validation loss if that is due. Return whether it is the lowest so far."""
    validation = run.validation
    if validation is None or not validation.due(run.done, run.span.last):
        return False
    began, rows = time.perf_counter(), run.pass_size()[0]
    limit, stopped, tell = lambda: roll.limit(run.timeout), run.stop.agreed, run.progress.place
    found = measure(run.model, validation.windows, rows, limit, stopped, tell)
    if found is None:
        return False
    if not math.isfinite(found.loss):
        run.fail(f"the validation loss after step {run.done} is {found.loss}")
    # The first rank's: ranks may learn of a failed write in different steps
    validation.best = from_first(run.mesh.group, lambda: validation.best)
    best = validation.add(run.done, found.loss)
    lowest = ", the lowest so far" if best else ""
    run.progress.say(f"Validation after step {run.done}: loss {found.loss:.4f}{lowest}")
    run.sinks.write(metrics_of(run.done, found, time.perf_counter() - began))
    return best


def evaluate(run: "TrainingRun", roll: Roll) -> bool:
    """Run the tasks if they are due. Return whether they have scores."""
    tasks = run.tasks
    if tasks is None or not tasks.due(run.done, run.span.first, run.span.last):
        return False
    began = time.perf_counter()
    limit, stopped, tell = lambda: roll.limit(run.timeout), run.stop.agreed, run.progress.place
    found = tasks.measure(run.model, limit, tell, stopped)
    at_end = run.done == run.span.last
    if found is None:
        if at_end and not run.span.is_last:
            run.progress.warn(tasks.describe_stopped(run.done, run.folder.path))
        return False
    tasks.add(run.done)
    for text in tasks.table(found) if at_end else describe_scores(run.done, found):
        run.progress.say(text)
    run.sinks.write(task_metrics(run.done, found, time.perf_counter() - began))
    if at_end and run.first:
        folder = run.folder.path / "evaluation" / f"step-{run.done}"
        run.progress.say(tasks.write(folder, str(run.folder.path), run.done, found))
    return True


def notes(run: "TrainingRun") -> dict[str, Any]:
    """Return the entries of a checkpoint's manifest about validation and tasks."""
    return (run.validation.note() if run.validation else {}) | (run.tasks.note() if run.tasks else {})
