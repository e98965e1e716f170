"""The commands of `ithaca bench`. Each imports what it needs when it runs, so that `--help` answers at once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ithaca.base.errors import read_option
from ithaca.rehearsal import options as scene

if TYPE_CHECKING:
    from ithaca.bench.rows import Limits
    from ithaca.bench.run import Options

bench = typer.Typer(
    name="bench",
    help="Run the benchmark tables on this device, row by row. A stopped run resumes.",
    no_args_is_help=True,
)

Lengths = Annotated[str, typer.Option(help="Context lengths, with commas between them.")]
Timed = Annotated[str, typer.Option(help="Context length of the timed step, if it fits. 0: time nothing.")]
Host = Annotated[str, typer.Option(help="Memory of the node that the ranks share.")]
Most = Annotated[str, typer.Option(help="The longest context to look at.")]
Only = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Only rows whose names contain this. May be repeated.")
]
Seconds = Annotated[
    float | None, typer.Option(help="Stop after this many seconds. The same command resumes later. Default: no limit.")
]
Predict = Annotated[bool, typer.Option("--predict", help="Only predict what is not measured. Needs no GPU.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results are.")]
Commit = Annotated[str | None, typer.Option(help="The commit to record. Default: that of Ithaca's own folder.")]
RESULTS = Path("bench/results")


@bench.command()
def ladder(
    model: scene.Model = "llama3-8b",
    ranks: scene.Ranks = 8,
    cap: scene.Cap = "80GB",
    host: Host = "1.9TB",
    most: Most = "16M",
    tokens: Timed = "512K",
    only: Only = None,
    seconds: Seconds = None,
    predict: Predict = False,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """Longest context and speed of each technique, one added at a time."""
    _start("ladder", model, _limits(ranks, cap, host, most, tokens), _options(out, only, seconds, predict, commit))


@bench.command()
def ablation(
    model: scene.Model = "llama3-8b",
    ranks: scene.Ranks = 8,
    cap: scene.Cap = "24GB",
    host: Host = "1.9TB",
    most: Most = "16M",
    tokens: Timed = "0",
    only: Only = None,
    seconds: Seconds = None,
    predict: Predict = False,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """Leave one component out of the full stack, each in turn: the longest context that remains."""
    _start("ablation", model, _limits(ranks, cap, host, most, tokens), _options(out, only, seconds, predict, commit))


@bench.command("context-parallel")
def context_parallel(
    model: scene.Model = "llama3-8b",
    ranks: scene.Ranks = 8,
    tokens: Lengths = "4K,8K,16K,32K,64K,128K,256K,512K,1M",
    cap: scene.Cap = "80GB",
    host: Host = "1.9TB",
    only: Only = None,
    seconds: Seconds = None,
    predict: Predict = False,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """With and without context parallelism over lengths: memory, speed, and what does not fit."""
    _start("context-parallel", model, _limits(ranks, cap, host), _options(out, only, seconds, predict, commit), tokens)


@bench.command()
def dial(
    model: scene.Model = "llama3-8b",
    ranks: scene.Ranks = 8,
    tokens: Lengths = "256K",
    cap: scene.Cap = "80GB",
    host: Host = "1.9TB",
    only: Only = None,
    seconds: Seconds = None,
    predict: Predict = False,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """Chunk sizes and heads at a time: measured here, predicted for other GPUs."""
    _start("dial", model, _limits(ranks, cap, host), _options(out, only, seconds, predict, commit), tokens)


@bench.command()
def recompute(
    model: scene.Model = "llama3-8b",
    ranks: scene.Ranks = 8,
    tokens: Lengths = "64K,512K",
    cap: scene.Cap = "80GB",
    host: Host = "1.9TB",
    only: Only = None,
    seconds: Seconds = None,
    predict: Predict = False,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """What checkpointing none, selective, full, and keeping o, cost in time and give in memory."""
    _start("recompute", model, _limits(ranks, cap, host), _options(out, only, seconds, predict, commit), tokens)


@bench.command()
def peers(
    model: scene.Model = "llama3-8b",
    layers: Annotated[int | None, typer.Option(help="Layers of the model. Default: 2, or all of a small one.")] = None,
    tokens: Lengths = "64K,256K",
    rounds: Annotated[int, typer.Option(help="How often each side is measured; the sides take turns.")] = 2,
    path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with packages that are not installed.")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Attention of transformers, as sdpa or flash_attention_4; best: the fastest of all.")
    ] = "best",
    only: Only = None,
    seconds: Seconds = None,
    out: Out = RESULTS,
    commit: Commit = None,
) -> None:
    """Ithaca beside transformers, Liger and DeepSpeed on one GPU: the same weights, in turn."""
    from ithaca.bench.peers import run_peers

    lengths = _lengths(tokens)
    run_peers(model, layers, lengths, rounds, path, attention, _options(out, only, seconds, False, commit))


@bench.command()
def report(
    results: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the results are.")] = RESULTS,
    out: Annotated[Path, typer.Option(metavar="PAGE", help="The page to write; its pictures go beside it.")] = Path(
        "docs/results.md"
    ),
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the short table into this file, between its marks.")
    ] = None,
) -> None:
    """Write a page with tables and pictures of all stored results."""
    from ithaca.bench.report import write_report

    print("\n".join(f"Wrote {path}" for path in write_report(results, out, readme)))


def _options(out: Path, only: list[str] | None, seconds: float | None, predict: bool, commit: str | None) -> "Options":
    from ithaca.bench.run import Options

    return Options(out=out, only=tuple(only or ()), seconds=seconds, predict=predict, commit=commit)


def _limits(ranks: int, cap: str | None, host: str, most: str = "16M", timed: str = "0") -> "Limits":
    from ithaca.base.sizes import parse_tokens, read_memory
    from ithaca.bench.rows import Limits

    return Limits(
        ranks=ranks,
        cap=read_memory("--cap", cap or "80GB"),
        host=read_memory("--host", host),
        most=read_option("--most", parse_tokens, most),
        timed=0 if timed == "0" else read_option("--tokens", parse_tokens, timed),
    )


def _lengths(text: str) -> list[int]:
    from ithaca.base.sizes import parse_tokens

    return [read_option("--tokens", parse_tokens, word) for word in text.split(",")]


def _start(name: str, model: str, limits: "Limits", options: "Options", tokens: str = "") -> None:
    from ithaca.bench.tasks import start

    start(name, model, limits, options, _lengths(tokens) if tokens else [])
