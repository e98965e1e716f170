"""The first lines of a run: what it trains, on what, for how long and at which rate."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ithaca.attention.kernels.choose import explain_kernel
from ithaca.base.sizes import format_count, format_seconds, format_tokens
from ithaca.data.misfit import byte_tokens
from ithaca.train.setup.epochs import describe_epochs
from ithaca.train.setup.learning_rate import describe_rate, warn_of_warmup
from ithaca.train.setup.origin import describe_origin, describe_weights
from ithaca.train.setup.start import has_random_weights

if TYPE_CHECKING:
    from ithaca.train.loop import TrainingRun


def describe_run(run: "TrainingRun") -> Iterator[str]:
    """Yield the lines that a run begins with."""
    model, options, grid = run.model, run.config.train, run.mesh
    dtype, device = str(model.dtype).removeprefix("torch."), grid.device.type
    ranks = format_count(grid.size, "GPU" if device == "cuda" else f"{device.upper()} rank")
    origin = run.past.get("origin")
    yield (
        f"Model: {model.spec.family}, {model.spec.parameters() / 1e6:.1f}M parameters, "
        f"{describe_weights(run.config, origin)}, in {dtype} on {ranks}; "
        f"attention kernel: {explain_kernel(model.kernel, grid.device, model.dtype, model.spec.head_size)}"
    )
    passes = f" in {format_count(options.batch // options.micro_batch, 'pass')}" if options.micro_batch else ""  # pyrefly: ignore
    yield (
        f"Each step: {format_count(options.batch, 'sequence')} of {format_tokens(options.tokens)} tokens{passes}; "  # pyrefly: ignore
        f"{format_count(run.steps, 'step')}; run folder {run.folder.path}"
    )
    if run.span.count > 1:
        yield run.span.describe(run.config)
    what = "this stage" if run.span.count > 1 else "the run"
    yield describe_epochs(options, run.data.tokens, run.rows.per_epoch, what)
    if problem := byte_tokens(run.data, model.source.folder):
        yield f"warning: {problem}"
    yield describe_rate(options, model.spec.parameters(), has_random_weights(run.config, origin), run.span)
    if problem := warn_of_warmup(options, run.span):
        yield f"warning: {problem}"
    yield from model.describe_ranks()
    if grid.size > 1:
        yield f"Hang timeout: {format_seconds(run.timeout)} (run.timeout)"
    if device == "cuda" and run.peak_flops is None:
        yield f"Causal MFU is not reported: the peak of {torch.cuda.get_device_name(grid.device)} is not known"
    if origin and not run.done:
        yield describe_origin(origin)
    if run.done:
        yield f"Continuing from the checkpoint of step {run.done}"
    if run.validation:
        yield run.validation.describe()
    if run.tasks:
        yield run.tasks.describe()
