"""How a run ended: its last lines, the picture of its loss, and what is left after a second Ctrl-C."""

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ithaca.base.disk import not_a_file, reason
from ithaca.base.errors import RunError
from ithaca.base.shell import continue_command, quoted
from ithaca.base.sizes import format_count
from ithaca.train.folder.run_folder import VALIDATION, RunFolder, partial_name
from ithaca.train.report.report import Progress


def tell_conclusion(
    folder: RunFolder, progress: Progress, begun: int, done: int, saved: int, stopped: bool, staged: bool
) -> None:
    """Draw the loss and say how the run ended. Raise an error if its files were taken away or cannot be written.

    `begun`, `done`: the steps before this start, and after it. `staged`: the run has stages, which no option extends.
    """
    progress.end_live()
    complete = f"the checkpoint of step {saved} is complete"
    if lost := folder.lost():
        raise RunError(f"{lost}, but {complete}")
    metrics, problem = list[dict[str, Any]](), None
    try:
        metrics = folder.read_metrics("loss", "stage")
    except OSError as error:
        problem = f"'{folder.metrics}' cannot be read ({error.strerror})"
    else:
        if len(metrics) < done:
            progress.warn(f"'{folder.metrics}' has the metrics of {len(metrics)} of {format_count(done, 'step')}")
    try:
        if metrics:
            draw_loss(metrics, folder.picture, folder.read_validations())
    except OSError as error:
        problem = f"'{folder.picture}' could not be written ({reason(error, folder.path)})"
    if stopped:
        progress.say(f"Stopped after step {done}. Continue with: {continue_command(folder.path)}")
    else:
        ended = _trained(metrics, done) if done > begun else _finished(folder, done, staged)
        progress.say("\n".join((ended, *_files(folder))))
    if kind := not_a_file(folder.log):
        problem = problem or f"the log '{folder.log}' could not be written (it is {kind})"
    if problem:
        raise RunError(f"{problem}, but {complete}")


def stopped_at_once(folder: RunFolder, done: int) -> str:
    """Return what a second Ctrl-C did and what is left of the run after `done` steps."""
    finished = f"Step {done} was the last to finish" if done else "The first step was not finished"
    if saved := folder.last_checkpoint():
        kept = f"the checkpoint of step {saved} is kept: {continue_command(folder.path)} continues from there"
    elif folder.begun():
        kept = f"there is no checkpoint yet: {continue_command(folder.path)} starts again from the beginning"
    else:
        kept = "nothing was saved"
    return f"Stopped at once. {finished}; {kept}."


def _trained(metrics: list[dict[str, Any]], done: int) -> str:
    losses = [loss for _, loss in _losses(metrics)]
    learned = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "no loss"
    return f"Done: {learned} over {format_count(done, 'step')}"


def _finished(folder: RunFolder, done: int, staged: bool) -> str:
    all_steps = f"All {done} steps are done" if done > 1 else "The only step is done"
    more = f"ithaca train --from {quoted(folder.path)} --run DIR" if staged else f"--set train.steps={2 * done}"
    return f"{all_steps}, nothing was trained: {more} trains further"


def _files(folder: RunFolder) -> Iterator[str]:
    yield f"  run folder   {folder.path}"
    if os.path.isfile(folder.picture):
        yield f"  loss curve   {folder.picture}"
    yield f"  next         ithaca export {quoted(folder.path)} {quoted(Path(f'{folder.path}-model'))}"


def _losses(metrics: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the steps that have a loss, and their losses."""
    return [(line["step"], line["loss"]) for line in metrics if isinstance(line.get("loss"), int | float)]


def draw_loss(metrics: list[dict[str, Any]], file: Path, validations: Sequence[dict[str, Any]] = ()) -> None:
    """Draw the loss of each step as a thin line and a running mean over a twentieth of the steps as a thick one.

    Steps without a label have no loss and are left out. Validation losses are points.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = [step for step, _ in _losses(metrics)], [loss for _, loss in _losses(metrics)]
    width = max(len(losses) // 20, 1)
    sums = [0.0, *accumulate(losses)]  # so that a million steps take a second
    means = [(sums[i + 1] - sums[max(i + 1 - width, 0)]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(steps, losses, color="#9db8d2", linewidth=1)
    axes.plot(steps, means, color="#1f4e79", linewidth=2)
    stages = {line["step"]: line["stage"] for line in metrics if "stage" in line}
    for step in [step for step in stages if stages.get(step - 1, stages[step]) != stages[step]]:
        axes.axvline(step - 0.5, color="gray", linestyle=":", linewidth=1)  # a new stage
    if validations:
        points = [(line["step"], line[VALIDATION]) for line in validations]
        axes.plot(*zip(*points, strict=True), color="#c0504d", marker="o", markersize=4, label="validation")
        axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    partial = partial_name(file)
    try:
        figure.savefig(partial, format="png")
        partial.rename(file)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)
