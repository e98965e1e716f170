"""The command line. It imports torch only in commands that need it, so `ithaca --help` answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ithaca import __version__
from ithaca.base.errors import ConfigError, PlanError, read_option
from ithaca.bench.commands import bench
from ithaca.cli_errors import run_app
from ithaca.rehearsal import options as scene

app = typer.Typer(
    help="Train transformers on contexts of millions of tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)


def _is_text(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ithaca {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="Configuration (TOML). Without it and --set: train a small demo model."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set an option, as train.steps=100.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder. An existing run continues. Default: a new folder in runs/.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine. Default: one per GPU, or 2 on a CPU.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(hidden=True)] = None,
    meet: Annotated[str | None, typer.Option(hidden=True)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rename the old run folder and start again.")] = False,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Start a new run from the weights of another run."),
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="With --from: take AdamW's state as well.")
    ] = False,
    profile_step: Annotated[
        int | None, typer.Option(metavar="N", help="Profile step N into the run folder: run.profile_step=N.")
    ] = None,
) -> None:
    """Train a model, or continue a run. On several nodes: start it with torchrun or srun."""
    for name, folder in (("--run", run), ("--from", from_)):
        if folder and not _is_text(folder):
            raise ConfigError(
                f"{name} {folder} has bytes that are not UTF-8, which the log cannot hold: name another folder"
            )
    if with_optimizer and not from_:
        raise ConfigError("--with-optimizer needs --from RUN: name the run whose optimizer state to take")
    from ithaca.train.setup.configuration import FIRST_RUN, read_again, read_run_config
    from ithaca.train.setup.named_run import check_again, check_new, holds_run

    words = set_ or []
    sets = [*words, *([] if profile_step is None else [f"run.profile_step={profile_step}"])]
    continued = holds_run(run) and not fresh
    told = bool(config or from_ or nodes or meet)  # what to train; `launch` says what replaces the last two
    again = fresh and not (told or words)
    if again:
        check_again(run)
    elif run and not (told or continued or fresh):
        check_new(run, words)
    is_first_run = not (config or sets or from_ or continued or again)
    if is_first_run:
        config, sets = FIRST_RUN, ["mesh.ulysses=1"] if ranks and ranks % 2 else []
    if run and again:
        resolved = read_again(run, sets)
    else:
        resolved = read_run_config(config, sets, run if not fresh else None, from_)
    from ithaca.train.ranks.launch import find_starter, launch
    from ithaca.train.setup.origin import Origin, origin_again

    origin = Origin(from_, with_optimizer) if from_ else origin_again(run) if run and again else None
    folder = launch(resolved, ranks, run, fresh, nodes, meet, origin)
    if is_first_run and not find_starter(resolved):
        from ithaca.train.evaluation.first_run import tell_first_run

        tell_first_run(folder, resolved, ranks)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The Hugging Face folder to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float32 or float64. Default: the dtype in which each weight was loaded."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the checkpoint with the lowest validation loss, not the last one.")
    ] = False,
) -> None:
    """Write the model of a run's last checkpoint as a Hugging Face folder."""
    from ithaca.train.folder.export import export as write

    step = write(run, folder, dtype, best)
    print(f"Wrote the model after step {step}: transformers.AutoModelForCausalLM.from_pretrained('{folder}')")


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A run folder, or a Hugging Face folder.")],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="A token file made by ithaca data. Tasks need none.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Context length, e.g. 64K; tasks take several, e.g. 8K,64K. Default: the run's; 8K or 64K."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",  # typer 0.27 takes a metavar that is the parameter's name for the option's: --TASK
            metavar="TASK",
            help="Also run a task: needle, keys, values, tracking, copy, repeat; or all of them.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(help="Samples of each task at each length. Default: 50.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the tables and pictures of tasks.")] = None,
    limit: Annotated[
        str | None, typer.Option(help="Count only this many tokens of DATA, from the beginning. Default: all.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the checkpoint with the lowest validation loss, not the last one.")
    ] = False,
    sample: Annotated[
        list[str] | None,
        typer.Option(metavar="PROMPT", help="Also show how the model continues this text, by transformers."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine. Default: one per GPU, or 2 on a CPU.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set an option of plan or mesh, as plan.recipe=sweep."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the loss of a model on a token file, by position in the document, and its use of a long context."""
    from ithaca.base.sizes import parse_tokens
    from ithaca.evaluate.long_context import TaskOptions
    from ithaca.evaluate.tasks import TASKS
    from ithaca.train.evaluation.command import Options, start

    lengths = tuple(read_option("--tokens", parse_tokens, word) for word in tokens.split(",")) if tokens else ()
    names = tuple(dict.fromkeys(name for given in task or () for name in (TASKS if given == "all" else (given,))))
    options = Options(
        model=model,
        data=data,
        tokens=max(lengths, default=None),
        tasks=TaskOptions(tasks=names, lengths=lengths, count=count, out=out),
        limit=read_option("--limit", parse_tokens, limit) if limit else None,
        best=best,
        overrides=tuple(set_ or ()),
        samples=tuple(sample or ()),
        as_json=json,
    )
    start(options, ranks)


@app.command()
def data(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Files or folders: text, JSONL, JSON, Parquet, Arrow, .npy, .bin; hf:NAME."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The token file to write.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a folder with one. Default: one token a byte.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="The field or column of the text. Default: text.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip files and records that cannot be read, and count them.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that encode. Default: one a core.")] = None,
    bin_dtype: Annotated[str | None, typer.Option(help="The dtype of .bin files: uint8, uint16 or uint32.")] = None,
    chat: Annotated[
        str | None,
        typer.Option(help="If a template rewrites earlier turns: split the chat (turns) or refuse it (whole)."),
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A chat template instead of the tokenizer's.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show the document lengths of a token file.")] = False,
    tokens: Annotated[str | None, typer.Option(help="A context length for --stats, as 64K.")] = None,
    picture: Annotated[Path | None, typer.Option(help="The file for the picture of --stats.")] = None,
) -> None:
    """Make a token file for training from documents, or show the document lengths of one."""
    from ithaca.data.preparation.command import run

    run(paths, out, tokenizer, stats, picture, bin_dtype, field, skip_bad, workers, tokens, chat, chat_template)


@app.command(hidden=True)
def mesh(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b.")],
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs on each node.")] = 8,
    tokens: Annotated[str, typer.Option(help="The context length, as 64K or 5M.")] = "1M",
    recipe: Annotated[str, typer.Option(help="A recipe that shares sequences: sweep, hybrid, ulysses …")] = "sweep",
    share: Annotated[int | None, typer.Option(help="GPUs that share a sequence; every number by default.")] = None,
    inside: Annotated[str, typer.Option(help="Bytes per second from a GPU to the others of its node.")] = "450GB",
    across: Annotated[str, typer.Option(help="Bytes per second from a GPU to other nodes.")] = "50GB",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The old name of `ithaca plan --meshes`."""
    from ithaca.base.sizes import parse_bytes, parse_tokens
    from ithaca.planner.command import run_mesh
    from ithaca.planner.hardware import Machine

    rates = (read_option(name, parse_bytes, rate) for name, rate in (("--inside", inside), ("--across", across)))
    machine = Machine(nodes=nodes, gpus=gpus, inside=next(rates), across=next(rates))
    run_mesh(model, machine, read_option("--tokens", parse_tokens, tokens), recipe, share, json)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b. Only sizes are read.")],
    gpus: Annotated[
        str | None,
        typer.Option(help="Number and kind, as 8xH100-80GB (the default); with nodes, as 4x8xH100-80GB."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="The context length, as 64K or 5M; max: the longest that fits.")] = "max",
    host: Annotated[str | None, typer.Option(help="Memory of each node, as 1.9TB. Default: the usual size.")] = None,
    disk: Annotated[str, typer.Option(help="Disk of each node for saved activations, as 28TB; 0: none.")] = "0",
    documents: Annotated[
        str | None, typer.Option(help="Packed documents, as 64x4K, 192K+64x1K or a token file. Default: one.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Sequences in a step: 32, 4M-tokens, or max (as many as fit at once).")
    ] = None,
    lean: Annotated[bool, typer.Option("--lean", help="The fastest Plan within 10 % of the least GPU memory.")] = False,
    recipe: Annotated[str | None, typer.Option(help="The recipe. Default: the fastest that fits.")] = None,
    kernel: Annotated[
        str,
        typer.Option(help="The attention kernel where it trains, as flash4; auto: the fastest here or in --hardware."),
    ] = "auto",
    meshes: Annotated[
        bool, typer.Option("--meshes", help="Compare all meshes: which GPUs share a sequence, and what they send.")
    ] = False,
    hardware: Annotated[Path | None, typer.Option(help="A TOML file with more GPUs, or other numbers for one.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure this machine's GPU, write the rates to this file, and use them."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw memory and speed over lengths into this file.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List the speeds and reserves that are assumed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    node_gpus: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show what fits on some GPUs before you rent them: the fastest Plan, the longest context, and why."""
    from ithaca.planner.command import Output, run

    if node_gpus is not None:
        print("--node-gpus is now part of --gpus, as 4x8xH100-80GB: the old option still works", file=sys.stderr)
    if measure:
        from ithaca.rehearsal.measure import measure_here

        if hardware:
            raise PlanError(f"--measure {measure} and --hardware {hardware} both name rates: give one of them")
        found, hardware = measure_here(measure), measure
        gpus = f"8x{found}" if gpus is None else gpus
    output = Output(as_json=json, verbose=verbose, meshes=meshes, picture=picture)
    run(model, gpus, tokens, host, disk, recipe, hardware, output, node_gpus, documents, lean, batch, kernel)


@app.command()
def rehearse(
    model: scene.Model,
    ranks: scene.Ranks = 8,
    tokens: scene.Tokens = "1M",
    layers: scene.Layers = None,
    documents: scene.Documents = None,
    recipe: scene.Recipe = "sweep",
    set_: scene.Sets = None,
    cap: scene.Cap = None,
    memory_only: Annotated[
        bool,
        typer.Option("--memory-only", help="Skip the arithmetic of attention, so that any length takes little time."),
    ] = False,
    bare: Annotated[
        bool, typer.Option("--bare", help="Also time the attention kernels and matrix products alone.")
    ] = False,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Instead of a step: read a prompt of this length and decode, as tasks do."),
    ] = False,
    hardware: scene.Hardware = None,
    json: scene.Json = False,
) -> None:
    """Run one rank of a large job on this machine's device: memory by owner, time by part."""
    from ithaca.base.sizes import parse_tokens, read_memory
    from ithaca.rehearsal.command import run

    limit = read_memory("--cap", cap) if cap else None
    length = read_option("--tokens", parse_tokens, tokens)
    words = set_ or []
    run(model, ranks, length, layers, recipe, words, limit, memory_only, bare, hardware, json, documents, evaluate)


@app.command()
def profile(
    model: scene.Model,
    ranks: scene.Ranks = 8,
    tokens: scene.Tokens = "1M",
    layers: scene.Layers = None,
    documents: scene.Documents = None,
    recipe: scene.Recipe = "sweep",
    set_: scene.Sets = None,
    cap: scene.Cap = None,
    hardware: scene.Hardware = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go. Default: a folder in profiles/.")
    ] = None,
    json: scene.Json = False,
) -> None:
    """Show where the memory and the time of a step go: a table, a page for the browser, a trace for Perfetto."""
    from ithaca.base.sizes import parse_tokens, read_memory
    from ithaca.profile.command import run

    limit = read_memory("--cap", cap) if cap else None
    length = read_option("--tokens", parse_tokens, tokens)
    run(model, ranks, length, layers, recipe, set_ or [], limit, hardware, documents, out, json)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="The model whose longest context is planned. Default: llama3-8b, tiny on a CPU.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine. Default: one per GPU, or 2 on a CPU.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is a GPU.")] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also measure the disk of this folder, or of several: /a,/b.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measured rates to this file, for ithaca plan --hardware."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute or two: smaller sizes, fewer repeats.")] = False,
    share_gpus: Annotated[
        bool,
        typer.Option("--share-gpus", help="Let several ranks take turns on one GPU, to test more ranks than GPUs."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine a machine: what it reaches beside what is assumed, and every recipe against one rank."""
    from ithaca.doctor.command import Options
    from ithaca.doctor.start import start

    options = Options(
        model=model, disk=disk, out=out, quick=quick, as_json=json, device=device, share_gpus=share_gpus
    )  # fmt: skip
    start(options, ranks)


def main() -> None:
    """Run the command line."""
    run_app(app)


if __name__ == "__main__":  # python -m ithaca.cli
    main()
