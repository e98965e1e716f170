"""The end of the first run, `ithaca train` without options: how often it finds a needle, by length, at its milestones.

Three rows: before training, after the first stage, and after the last. So a newcomer sees what the longer stages
changed. It takes about 20 seconds on two CPU cores.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from ithaca.assemble import Model, apply
from ithaca.base.sizes import format_tokens
from ithaca.config import Config
from ithaca.evaluate.language import Language, read_language
from ithaca.evaluate.long_context import Found, TaskOptions, measure_tasks
from ithaca.evaluate.tasks import HEAT
from ithaca.parallel.agree import together
from ithaca.parallel.hangs import answering
from ithaca.train.evaluation.command import limit_passes
from ithaca.train.evaluation.model import load_checkpoint, open_model, read_options, start_mesh
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks.elastic import leave
from ithaca.train.ranks.launch import run_once
from ithaca.train.setup.start import load_source

COUNT = 50  # samples at each length


def tell_first_run(path: Path, config: Config, ranks: int | None) -> None:
    """Print the table, unless the run was stopped before its end."""
    if RunFolder(path).last_checkpoint() == _ends(config)[-1]:
        run_once(partial(measure_ranks, path), config, ranks, "the table of needles")


def _ends(config: Config) -> list[int]:
    """Return the steps at which the stages end."""
    steps = [stage.steps for stage in config.train.stages or ()]
    return [sum(steps[: number + 1]) for number in range(len(steps))]


def measure_ranks(path: Path, count: int = COUNT) -> None:
    """Measure as one rank of this job; the first one prints."""
    config, run = read_options(path, []), RunFolder(path)
    assert config.train.stages is not None
    lengths = sorted({stage.tokens for stage in config.train.stages})
    ends, grid = _ends(config), start_mesh(config)
    options = TaskOptions(tasks=(HEAT,), count=count)
    with answering(grid.group, lambda lost: leave(f"error: {lost}")) as roll:
        opened = open_model(path, config, grid, lengths[-1], chosen=False, best=False)
        model, watch = opened.model, limit_passes(opened, config.run.timeout, roll)
        words = together(grid.group, lambda: read_language(run.model, model.spec.vocab))
        needles = partial(_needles, words=words, options=options, lengths=lengths, watch=watch)
        last = needles(model)
        load_checkpoint(model, run, best=False, only=ends[0])
        first = needles(model)
        before = needles(apply(load_source(config), model.plan, model.mesh))
    if grid.rank == 0:
        names = "before training", *(f"after stage {n}" for n in (1, len(ends)))
        print("\n".join(_table([*zip(names, (before, first, last), strict=True)], config, count)), flush=True)


def _needles(
    model: Model,
    words: Language,
    options: TaskOptions,
    lengths: Sequence[int],
    watch: Callable[[], AbstractContextManager[None]],
) -> Found:
    found = measure_tasks(model, words, options, lengths, watch)
    assert found is not None  # nothing asks it to stop
    return found[0]


def _table(rows: Sequence[tuple[str, Found]], config: Config, count: int) -> list[str]:
    stages, found = config.train.stages or (), rows[0][1]
    short, long = (format_tokens(stages[number].tokens) for number in (0, -1))
    columns = "".join(f"{format_tokens(row['tokens']):>8}" for row in found["lengths"])
    return [
        "",
        "Needle test: one fact is hidden in noise, and the model is asked for it. "
        f"Share of {count} texts in which it answers right, by length:",
        "",
        f"{'tokens':<18}{columns}",
        *(f"{name:<18}" + "".join(f"{row['greedy']:>8.0%}" for row in each["lengths"]) for name, each in rows),
        f"{'by chance':<18}" + f"{found['chance_greedy']:>8.0%}" * len(found["lengths"]),
        "",
        f"Stage 1 trained on {short} tokens at a time, stage {len(stages)} on {long}.",
    ]
