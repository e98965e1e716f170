"""How well a model uses a long context: scores of tasks by length, in a table, a JSON object and two pictures.

The effective length of a task is the longest of the measured lengths at which the model still passes: its greedy
answers have at least 85 % of what is asked for, there and at every shorter length (RULER's threshold).
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from ithaca.assemble import Model
from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_count, format_tokens
from ithaca.evaluate.language import Language
from ithaca.evaluate.score import Scored, score
from ithaca.evaluate.tasks import DEPTHS, HEAT, TASKS, Sample, chances, least_tokens, make_sample

PASSES = 0.85  # of a score
HALVINGS = 4  # of the longest length, where the user names one length
SEED = 0
COUNT = 50

Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Which tasks to run."""

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # as the user named them; one: it and a few halves of it
    count: int | None = None  # samples of each task at each length; None: COUNT
    out: Path | None = None  # the folder for tables and pictures

    @property
    def samples(self) -> int:
        """Samples of each task at each length."""
        return COUNT if self.count is None else self.count

    def check(self) -> None:
        """Raise an error for unknown tasks, wrong lengths and counts, and for options of tasks without a task."""
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"'{task}' is not a task: {', '.join(TASKS)} are, and all")
        if self.samples < 1:
            raise ConfigError(f"--count is {self.samples}: 1 or more samples are needed")
        for name, given in (("--count", self.count), ("--out", self.out)):
            if given is not None and not self.tasks:
                raise ConfigError(f"{name} {given} is about tasks, and none is named: add --task needle (or all)")
        if self.out:
            _check_folder(self.out)
        if len(self.lengths) > 1 and not self.tasks:
            raise ConfigError(
                f"--tokens has {len(self.lengths)} lengths, and a loss is measured at one: name one, or a --task"
            )


def _check_folder(out: Path) -> None:
    """Raise an error if something else is where a folder is to be."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"--out {out} cannot be a folder, because '{there}' is none: name another folder")


def choose_lengths(options: TaskOptions, longest: int, words: Language) -> tuple[int, ...]:
    """Return the lengths to measure, the shortest first: those named, or the longest and halves with room for all."""
    if len(options.lengths) > 1:
        return tuple(sorted({*options.lengths}))
    halves = [longest >> power for power in range(HALVINGS + 1)]
    return tuple(sorted(half for half in halves if half == longest or half >= 2 * needed_tokens(options, words, half)))


def needed_tokens(options: TaskOptions, words: Language, length: int) -> int:
    """Return the tokens that samples of all tasks at this length need; beyond them is noise."""
    return max(least_tokens(task, words, length, SEED, options.samples) for task in options.tasks)


def measure_tasks(
    model: Model,
    words: Language,
    options: TaskOptions,
    lengths: Sequence[int],
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    tell: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Found] | None:
    """Return the scores of each task at each length. Collective; `tell` is called with the progress.

    `stopped` is called before each pass; if it is True, on all ranks, return None. Tapes of training are freed first,
    those of prompts at the end.
    """
    model.free_tapes()
    try:
        return _measure(model, words, options, lengths, watch, tell, stopped)
    finally:
        model.free_tapes()


def _measure(
    model: Model,
    words: Language,
    options: TaskOptions,
    lengths: Sequence[int],
    watch: Callable[[], AbstractContextManager[None]],
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
) -> list[Found] | None:
    found = []
    for task in options.tasks:
        rows = []
        for length in lengths:
            tell(f"Task {task}, {format_tokens(length)} tokens")
            samples = [make_sample(task, words, length, SEED, number) for number in range(options.samples)]
            scored = score(model, samples, max(lengths), words.slack, watch, stopped)
            if scored is None:
                return None
            rows.append({"tokens": length, **_scores(samples, scored), "depths": _by_depth(samples, scored)})
        likelihood, greedy = chances(task, words)
        found.append(
            {
                "task": task,
                "effective_length": effective_length(rows),
                "chance_likelihood": likelihood,
                "chance_greedy": greedy,
                "lengths": rows,
            }
        )
    return found


def _scores(samples: Sequence[Sample], scored: Sequence[Scored]) -> Found:
    right = [one.likeliest == sample.right for sample, one in zip(samples, scored, strict=True)]
    return {"samples": len(samples), "likelihood": mean(right), "greedy": mean(one.share for one in scored)}


def _by_depth(samples: Sequence[Sample], scored: Sequence[Scored]) -> list[Found]:
    """The scores for each depth of a needle; nothing for other tasks."""
    rows = []
    for depth in DEPTHS:
        chosen = [number for number, sample in enumerate(samples) if sample.depth == depth]
        if chosen:
            part = _scores([samples[number] for number in chosen], [scored[number] for number in chosen])
            rows.append({"depth": depth, **part})
    return rows


def effective_length(rows: Sequence[Found]) -> int | None:
    """The longest length up to which every measured length passes; None if the shortest does not."""
    passed = None
    for row in rows:
        if row["greedy"] < PASSES:
            break
        passed = row["tokens"]
    return passed


def table(found: Sequence[Found], language: str, count: int, trained: int) -> list[str]:
    """The scores in lines."""
    lengths = [row["tokens"] for row in found[0]["lengths"]]
    columns = "".join(f"{format_tokens(length):>8}" for length in lengths)
    lines = [
        f"Tasks in {language}, {format_count(count, 'sample')} each; trained length {format_tokens(trained)}",
        "",
        f"{'task':<10}{'score':<12}{columns}{'chance':>10}  effective length ({PASSES:.0%})",
    ]
    for task in found:
        passed = task["effective_length"]
        effective = format_tokens(passed) if passed else f"below {format_tokens(lengths[0])}"
        for name, behind in (("greedy", effective), ("likelihood", "")):
            scores = "".join(f"{100 * row[name]:>6.1f} %" for row in task["lengths"])
            title, chance = (task["task"] if behind else ""), 100 * task[f"chance_{name}"]
            lines.append(f"{title:<10}{name:<12}{scores}{chance:>8.2g} %  {behind}".rstrip())
    return lines


def write_results(folder: Path, found: Found, lines: Sequence[str]) -> list[Path]:
    """Write `tasks.json`, `tasks.txt` and pictures of the scores, or raise OSError. Return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "tasks.json", folder / "tasks.txt", folder / "tasks.png"]
    files[0].write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    files[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    _draw_scores(files[2], found)
    needles = [task for task in found["tasks"] if task["task"] == HEAT]
    if needles:
        files.append(folder / f"{HEAT}.png")
        _draw_depths(files[-1], found, needles[0])
    return files


def _draw_scores(file: Path, found: Found) -> None:
    """Greedy scores over the length, a line for each task."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    lengths = [row["tokens"] for row in found["tasks"][0]["lengths"]]
    for task in found["tasks"]:
        axes.plot(lengths, [100 * row["greedy"] for row in task["lengths"]], marker="o", label=task["task"])
    axes.axhline(100 * PASSES, color="gray", linestyle="--", linewidth=1)
    axes.axvline(found["trained_length"], color="gray", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_tokens(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("tokens (dotted: trained length)")
    axes.set_ylabel("% of what was asked for, greedy")
    axes.legend()
    axes.set_title(found["model"])
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_depths(file: Path, found: Found, needle: Found) -> None:
    """A heat map of needles over length and depth."""
    pyplot = _pyplot()
    lengths = [row["tokens"] for row in needle["lengths"]]
    depths = sorted({cell["depth"] for row in needle["lengths"] for cell in row["depths"]})
    cells = [{cell["depth"]: 100 * cell["greedy"] for cell in row["depths"]} for row in needle["lengths"]]
    scores = [[row.get(depth, float("nan")) for row in cells] for depth in depths]
    figure, axes = pyplot.subplots(figsize=(1.2 * len(lengths) + 3, 3.6), constrained_layout=True)
    image = axes.imshow(scores, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [format_tokens(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the needle")
    for y, row in enumerate(scores):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=9)
    figure.colorbar(image, ax=axes, label="% found, greedy")
    axes.set_title(f"{found['model']}, trained length {format_tokens(found['trained_length'])}")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl  # only when needed: it takes long to load

    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot
