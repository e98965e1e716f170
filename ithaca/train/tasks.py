"""Long-context tasks during a run: at which lengths and after which steps, and the lines about their scores.

They run under the run's Plan, mesh and ranks, after every `evaluate.every` steps and at the end of the run or of a
stage. Tapes of training are freed meanwhile, so that an evaluation takes no more memory than a step; the next step
allocates them again. No sequence is cut: a length beyond the stage's tokens waits for a longer stage; a line says so.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaca.assemble import Model
from ithaca.assemble.decode import check_decoding
from ithaca.base.disk import reason
from ithaca.base.errors import ConfigError, PlanError
from ithaca.base.shell import quoted
from ithaca.base.sizes import format_count, format_tokens
from ithaca.config import Config, DataSection, EvaluateSection
from ithaca.data.synthetic import PREFIX, SYNTHETIC, VOCAB
from ithaca.evaluate.check import check_samples
from ithaca.evaluate.language import Language, Synthetic, read_language
from ithaca.evaluate.long_context import (
    Found,
    TaskOptions,
    choose_lengths,
    measure_tasks,
    needed_tokens,
    table,
    write_results,
)
from ithaca.model.source import ModelSource
from ithaca.train.folder.run_folder import TASKS


@dataclass
class Tasks:
    """The tasks of a run, or of a stage of it."""

    options: TaskOptions
    words: Language
    lengths: tuple[int, ...]  # that this stage measures; none: nothing fits it
    tokens: int  # of a sequence of this stage
    every: int  # steps; 0: at the end only
    left_out: str  # what this stage does not measure, and why
    warning: str | None = None  # that the run does not learn what tasks ask for
    last: int = 0  # the last step that was evaluated
    asked: dict[str, Any] | None = None  # what that evaluation measured; None if a checkpoint does not say

    def resume(self, manifest: dict[str, Any]) -> None:
        """Take over the state that a checkpoint's manifest has."""
        noted = manifest.get("tasks", {})
        self.last, self.asked = noted.get("step", 0), noted.get("asked")

    def add(self, step: int) -> None:
        """Note that a step was evaluated."""
        self.last, self.asked = step, self._asks()

    def note(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest."""
        return {"tasks": {"step": self.last, "asked": self.asked}} if self.last else {}

    def _asks(self) -> dict[str, Any]:
        return {"tasks": [*self.options.tasks], "tokens": [*self.lengths], "count": self.options.samples}

    def asks_anew(self, step: int) -> bool:
        """Return whether a step was evaluated, but not with these tasks, lengths and samples."""
        return bool(self.lengths) and self.last == step and self.asked not in (None, self._asks())

    def due(self, step: int, first: int, last: int) -> bool:
        """Return whether to evaluate after this step. `first`: steps before this stage; `last`: of the run or stage."""
        if not self.lengths or step in (first, self.last):
            return False
        return step == last or (self.every > 0 and step % self.every == 0)

    def check_memory(self, model: Model) -> None:
        """Raise an error if the Plan has no memory for the longest prompts, or cannot continue any. Collective."""
        check_decoding(model.mesh)
        try:
            if self.lengths:
                model.check_prompts(max(self.lengths))
        except PlanError as problem:
            raise PlanError(f"evaluate.tokens {max(self.lengths)} does not fit: {problem}") from None

    def measure(
        self,
        model: Model,
        watch: Callable[[], AbstractContextManager[None]],
        tell: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> list[Found] | None:
        """Return the scores of all tasks; None if a user asked to stop. Collective."""
        return measure_tasks(model, self.words, self.options, self.lengths, watch, tell, stopped)

    def describe(self) -> str:
        """Return what is measured and when, and what is left out; in a second line a warning, if there is one."""
        when = f"every {format_count(self.every, 'step')} and at the end" if self.every else "at the end"
        at = ", ".join(map(format_tokens, self.lengths))
        named, count = ", ".join(self.options.tasks), format_count(self.options.samples, "sample")
        what = f"{named} at {at} tokens, {count} each, {when}, in {self.words.name}" if at else "none in this stage"
        return f"Tasks: {what}{self.left_out}" + (f"\nwarning: {self.warning}" if self.warning else "")

    def describe_stopped(self, step: int, folder: Path) -> str:
        """Return the warning if a user stops the tasks at the end of a stage: the next stage has other lengths."""
        return (
            f"the tasks after step {step} are left out, because they were interrupted at the end of a stage; "
            f"before the run continues, `{self._command(folder)}` runs them on that checkpoint"
        )

    def describe_finished(self, step: int, folder: Path) -> str:
        """Return the warning if a finished run, which had its tasks, gets others."""
        return (
            f"the run is finished, so nothing was evaluated with the new options of [evaluate]: "
            f"`{self._command(folder)}` measures the checkpoint of step {step} with them"
        )

    def _command(self, folder: Path) -> str:
        """Return the command that runs these tasks on a run's last checkpoint."""
        named = " ".join(f"--task {task}" for task in self.options.tasks)
        at = ",".join(map(format_tokens, self.lengths))
        return f"ithaca evaluate {quoted(folder)} {named} --tokens {at} --count {self.options.samples}"

    def table(self, found: Sequence[Found]) -> list[str]:
        return table(found, self.words.name, self.options.samples, self.tokens)

    def write(self, folder: Path, model: str, step: int, found: list[Found]) -> str:
        """Write tables and pictures into `folder`; return a line about it. Files that fail do not end a run."""
        effective = min(task["effective_length"] or 0 for task in found) or None
        content = {
            "model": model,
            "step": step,
            "trained_length": self.tokens,
            "language": self.words.name,
            "tasks": found,
            "effective_length": effective,
        }
        try:
            files = write_results(folder, content, self.table(found))
        except OSError as problem:
            return (
                f"warning: '{folder}' could not be written ({reason(problem, folder)}); the scores are in the metrics"
            )
        return f"Written: {', '.join(map(str, files))}"


def describe_scores(step: int, found: Sequence[Found]) -> list[str]:
    """Return a line for each task: greedy scores by length."""
    return [
        f"Task {task['task']} after step {step}: "
        + ", ".join(f"{100 * row['greedy']:.1f} % at {format_tokens(row['tokens'])}" for row in task["lengths"])
        for task in found
    ]


def task_metrics(step: int, found: Sequence[Found], seconds: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl about an evaluation: both scores of each task at each length."""
    scores = {
        f"{task['task']}_{name}_{row['tokens']}": row[name]
        for task in found
        for row in task["lengths"]
        for name in ("greedy", "likelihood")
    }
    return {"step": step, **scores, TASKS: round(seconds, 4)}


def open_tasks(config: Config, source: ModelSource) -> Tasks | None:
    """Return the tasks of the stage that `config` describes, None if there are none. Raise what cannot be measured."""
    asked, tokens = config.evaluate, config.train.tokens
    if not asked.tasks:
        return None
    assert tokens is not None
    words = read_language(source.folder, source.spec.vocab)
    options = TaskOptions(tasks=asked.tasks, lengths=asked.tokens or (), count=asked.count)
    stages = [stage.tokens for stage in config.train.stages or ()] or [tokens]
    _check_lengths(asked, stages)
    _check_samples(options, words, stages, source.spec.vocab)
    every = config.run.checkpoint_every if asked.every is None else asked.every
    wanted = asked.tokens or choose_lengths(options, tokens, words)
    needed = needed_tokens(options, words, tokens)
    fits = {length for length in wanted if needed_tokens(options, words, length) <= length}
    lengths = tuple(sorted(length for length in fits if length <= tokens))
    longer = [format_tokens(length) for length in wanted if length > tokens]
    left = f"; {', '.join(longer)} wait for a longer stage than {format_tokens(tokens)}" if longer else ""
    short = f"; they need {needed} tokens, and the stage has {tokens}" if not lengths and not longer else ""
    warning = _warn_of_language(config.data, words, source.spec.vocab)
    return Tasks(options, words, lengths, tokens, every, left + short, warning)


def _check_lengths(asked: EvaluateSection, stages: Sequence[int]) -> None:
    """Raise an error for lengths that no stage can measure."""
    longest, name = max(stages), "the longest stage" if len(stages) > 1 else "train.tokens"
    for length in asked.tokens or ():
        if length > longest:
            raise ConfigError(
                f"evaluate.tokens has {length}, but {name} is {longest}: tasks run at up to the training length, and "
                f"nothing is cut; leave it out, or write evaluate.tokens={format_tokens(longest)}"
            )


def _check_samples(options: TaskOptions, words: Language, stages: Sequence[int], vocab: int) -> None:
    """Raise an error for samples that cannot be measured, of this stage and of all others."""
    if options.lengths:
        check_samples(options, words, options.lengths, vocab, "evaluate.tokens has")
        return
    # By default, a stage that is too short has no tasks; the longest one must have room
    longest = max(stages)
    lengths = {length for stage in stages for length in choose_lengths(options, stage, words)}
    fits = {length for length in lengths if length == longest or needed_tokens(options, words, length) <= length}
    name = "the longest stage is" if len(stages) > 1 else "train.tokens is"
    check_samples(options, words, sorted(fits), vocab, name)


def _warn_of_language(data: DataSection, words: Language, vocab: int) -> str | None:
    """Return a warning if the data are synthetic documents, and the tasks are in other tokens."""
    names = [name.removeprefix(PREFIX) for name in (data.source, *(data.mix or ()))]
    if words.name == Synthetic(VOCAB).name or not any(name in SYNTHETIC for name in names):
        return None
    return (
        f"the data are synthetic documents of {VOCAB} ids, but the model has a vocabulary of {vocab}, and its tasks "
        f"are in {words.name}, so it does not learn to answer them: model.source=needles fits both"
    )
