"""The command `ithaca evaluate`: the loss of a model on a token file, by position, samples, and long-context tasks.

The loss is that of validation (train/validation.py): every label counts once, and the number is the same under every
Plan and on any number of ranks, but for rounding.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ithaca.assemble import save_model
from ithaca.base.disk import reason
from ithaca.base.errors import ConfigError, RunError
from ithaca.base.sizes import format_count, format_tokens
from ithaca.data.misfit import byte_tokens
from ithaca.data.reader import TokenFile, open_tokens
from ithaca.data.windows import Windows
from ithaca.evaluate.check import check_samples as check_task_samples
from ithaca.evaluate.language import read_language
from ithaca.evaluate.long_context import TaskOptions, choose_lengths, measure_tasks, table, write_results
from ithaca.model.extend import beyond_context, context_length
from ithaca.model.families import read_spec
from ithaca.model.folder import read_json
from ithaca.parallel.agree import together
from ithaca.parallel.hangs import Roll, answering, set_timeout, step_seconds, timeout
from ithaca.train.evaluation.model import Opened, check_model_path, open_model, read_options, start_mesh
from ithaca.train.evaluation.sample import check_samples, generate
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks.elastic import leave
from ithaca.train.ranks.launch import run_once
from ithaca.train.setup.stages import trained_length
from ithaca.train.setup.start import CPU_TOKENS, GPU_TOKENS, check_data, check_vocabulary, open_file
from ithaca.train.validation import Losses, measure

Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command."""

    model: Path  # a run folder or a Hugging Face folder
    data: Path | None = None  # a token file
    tokens: int | None = None  # the context length; the longest one of tasks
    limit: int | None = None  # tokens of the data that count
    best: bool = False
    overrides: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    tasks: TaskOptions = field(default_factory=TaskOptions)
    as_json: bool = False


def start(options: Options, ranks: int | None) -> None:
    """Evaluate on this machine's GPUs, on `ranks` processes, or as a rank of the job that this process belongs to."""
    for name, count in (("--tokens", options.tokens), ("--limit", options.limit)):
        if count is not None and count < 2:
            raise ConfigError(f"{name} is {count}: 2 or more are needed, one to predict from the other")
    options.tasks.check()
    config = read_options(options.model, list(options.overrides))
    check_model_path(options.model, config, options.best)
    folder = _described(options.model)
    if options.data is None:
        _check_without_data(options)
    else:
        data = open_tokens(options.data)
        if options.samples:
            spec = read_spec(read_json(folder, "config.json"))
            check_samples(options.samples, spec, folder, data.tokenizer)
    if options.tasks.tasks:
        _check_tasks(options, folder, config.train.tokens)
    run_once(partial(evaluate_ranks, options), config, ranks, "the evaluation")


def _check_tasks(options: Options, folder: Path, trained: int | None) -> None:
    """Raise an error for samples that cannot be measured. `trained`: the length of a run, if this is one."""
    vocab = read_spec(read_json(folder, "config.json")).vocab
    words = read_language(folder, vocab)
    named = options.tokens or (trained if RunFolder(options.model).begun() else None)
    for longest in (named,) if named else (CPU_TOKENS, GPU_TOKENS):  # ranks take one of these two by their device
        lengths = choose_lengths(options.tasks, longest, words)
        check_task_samples(options.tasks, words, lengths, vocab, "--tokens has")


def _check_without_data(options: Options) -> None:
    """Raise an error unless there is something to do without a token file."""
    if not options.tasks.tasks:
        raise ConfigError(
            "nothing says what to evaluate on: name a token file behind the model, or --task needle (or all)"
        )
    for name, given in (("--limit", options.limit), ("--sample", options.samples)):
        if given:
            raise ConfigError(f"{name} is about a token file, and none is named: name one behind the model")


def evaluate_ranks(options: Options) -> None:
    """Evaluate as one rank of this job; the first one prints."""
    config = read_options(options.model, list(options.overrides))
    grid = start_mesh(config)
    with ExitStack() as until_sampled:
        with answering(grid.group, lambda lost: leave(f"error: {lost}")) as roll:
            data = None
            if options.data:
                data = open_file(options.data, None, grid)
                check_data(data, grid, "DATA")
            chosen = any(override.strip().startswith(("plan.", "mesh.")) for override in options.overrides)
            opened = open_model(options.model, config, grid, options.tokens, chosen, options.best)
            found = _described_model(options, opened)
            watch = limit_passes(opened, config.run.timeout, roll)
            if data:
                found |= _losses(options, opened, data, watch)
            if options.tasks.tasks:
                found |= _tasks(options, opened, trained_length(config, opened.step or 0), watch)
            weights = _sampled_weights(options, opened, until_sampled)
        if grid.rank == 0 and data and options.samples:  # slowly, on the CPU, when no other rank waits any more
            found["samples"] = generate(weights, options.samples, data.tokenizer)
    if grid.rank == 0:
        said = lines(found) if data else []
        if options.tasks.tasks:
            said += [*([""] if said else [_title(found)]), *found.pop("table")]
        print(json.dumps(found, indent=2) if options.as_json else "\n".join(said), flush=True)
        if options.tasks.tasks and (folder := _results_folder(options, opened)):
            _write(options, folder, found, said)


def limit_passes(opened: Opened, longest: float | None, roll: Roll) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context limits the time of a pass. Collective."""
    model, grid = opened.model, opened.model.mesh
    flops = model.spec.flops_per_token(opened.tokens) * opened.tokens / grid.context_ranks
    seconds = longest or timeout(step_seconds(flops, grid.device, torch.get_num_threads()))
    set_timeout(grid.groups, seconds)
    return lambda: roll.limit(seconds)


def _losses(
    options: Options, opened: Opened, data: TokenFile, watch: Callable[[], AbstractContextManager[None]]
) -> Found:
    """Return the losses on a token file, one sequence for each data rank at a time. Collective."""
    model, grid = opened.model, opened.model.mesh
    together(grid.group, lambda: check_vocabulary(model.source, data))
    windows = together(grid.group, lambda: Windows(data, opened.tokens, options.limit))
    for text in _warnings(opened, windows) if grid.rank == 0 else ():
        print(f"warning: {text}", file=sys.stderr, flush=True)  # stdout may be JSON
    losses = measure(model, windows, grid.data_ranks, watch)
    assert losses is not None
    if not math.isfinite(losses.loss):
        raise RunError(f"the loss of '{options.model}' on '{options.data}' is {losses.loss}: no number")
    return as_object(options, windows, losses)


def _warnings(opened: Opened, windows: Windows) -> list[str]:
    """Return warnings that the loss may say little: the model was made for other tokens, or for shorter contexts."""
    source = opened.model.source
    shorter = f"--tokens {format_tokens(context_length(source.spec))} stays within it"
    found = [
        byte_tokens(windows.data, source.folder, trains=False),
        beyond_context(source.spec, windows.longest, opened.tokens, shorter),
    ]
    return [text for text in found if text]


def _tasks(
    options: Options, opened: Opened, trained: int | None, watch: Callable[[], AbstractContextManager[None]]
) -> Found:
    """Return the scores of the tasks, and the table of them. Collective."""
    model = opened.model
    words = together(model.mesh.group, lambda: read_language(_described(options.model), model.spec.vocab))
    lengths = together(model.mesh.group, lambda: choose_lengths(options.tasks, opened.tokens, words))
    found = measure_tasks(model, words, options.tasks, lengths, watch)
    assert found is not None
    reach = trained if opened.step is not None and trained else context_length(model.spec)
    return {
        "trained_length": reach,
        "language": words.name,
        "tasks": found,
        "effective_length": min((task["effective_length"] or 0 for task in found), default=0) or None,
        "table": table(found, words.name, options.tasks.samples, reach),
    }


def _write(options: Options, folder: Path, found: Found, said: list[str]) -> None:
    """Write tables and pictures of scores that have been printed. A failure is an error if the user named `folder`."""
    try:
        files = write_results(folder, found, said)
    except OSError as problem:
        text = f"'{folder}' could not be written ({reason(problem, folder)}); the scores are printed above"
        if options.tasks.out:
            raise RunError(text) from None
        print(f"warning: {text}", file=sys.stderr, flush=True)  # stdout may be JSON
        return
    if not options.as_json:
        print(f"\nWritten: {', '.join(map(str, files))}", flush=True)


def _results_folder(options: Options, opened: Opened) -> Path | None:
    """Return where tables and pictures go: the folder that is named, or that of a run; None for other models."""
    if options.tasks.out or opened.step is None:
        return options.tasks.out
    return options.model / "evaluation" / f"step-{opened.step}"


def _sampled_weights(options: Options, opened: Opened, stack: ExitStack) -> Path:
    """Return the Hugging Face folder to sample from: for a run, a temporary one with the evaluated weights. Collective.

    The temporary one is deleted with the stack.
    """
    if opened.step is None or not options.samples:
        return options.model
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ithaca-evaluate-"))) / "model"
    save_model(opened.model, folder)
    return folder


def _described_model(options: Options, opened: Opened) -> Found:
    """What is evaluated, for the object of `--json`."""
    model = opened.model
    return {
        "model": str(options.model),
        "step": opened.step,
        "context": opened.tokens,
        "ranks": model.mesh.size,
        "recipe": model.plan.recipe,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def as_object(options: Options, windows: Windows, losses: Losses) -> Found:
    """The losses for the object of `--json`, without samples yet."""
    ends = zip(losses.edges, losses.edges[1:], losses.sums, losses.counts, strict=False)
    return {
        "data": str(options.data),
        "loss": losses.loss,
        "perplexity": _perplexity(losses.loss),
        "labels": losses.labels,
        "tokens": windows.tokens,
        "documents": windows.documents,
        "left_out_tokens": windows.left_out,
        "positions": [
            {
                "from": low,
                "to": high,
                "labels": count,
                "loss_sum": total,
                "loss": total / count if count else None,
                "perplexity": _perplexity(total / count) if count else None,
            }
            for low, high, total, count in ends
        ],
        "samples": [],
    }


def _perplexity(loss: float) -> float | None:
    """exp(loss); None if it is too large for a float."""
    return math.exp(loss) if loss < 700 else None


def lines(found: Found) -> list[str]:
    """What the command prints about losses."""
    left = f"; --limit leaves out {found['left_out_tokens']:,} tokens" if found["left_out_tokens"] else ""
    head = [
        f"{_title(found)} on {found['data']}, context {format_tokens(found['context'])}",
        f"Loss {found['loss']:.4f}, perplexity {_shown(found['perplexity'])}, over {found['labels']:,} labels in "
        f"{format_count(found['documents'], 'document')}{left}",
        "",
        f"{'position':>16}  {'labels':>12}  {'loss':>8}  {'perplexity':>10}",
    ]
    table = [
        f"{_span(row):>16}  {row['labels']:>12,}  {_shown(row['loss'], '.4f'):>8}  {_shown(row['perplexity']):>10}"
        for row in found["positions"]
    ]
    said = [line for sample in found["samples"] for line in ("", f"Prompt: {sample['prompt']}", sample["text"])]
    return [*head, *table, *said]


def _title(found: Found) -> str:
    step = f" after step {found['step']}" if found["step"] is not None else ""
    return f"{found['model']}{step}"


def _span(row: Found) -> str:
    return f"{format_tokens(row['from'])}-{format_tokens(row['to'])}"


def _shown(number: float | None, form: str = ".4g") -> str:
    return "–" if number is None else format(number, form)


def _described(path: Path) -> Path:
    """Return the folder that has the config.json and the tokenizer of a run or of a Hugging Face folder."""
    run = RunFolder(path)
    return run.model if run.begun() else path
