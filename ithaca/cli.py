"""The command line. Importing it loads no torch: `ithaca --help` answers at once."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ithaca import __version__
from ithaca.base.errors import IthacaError, PlanError

app = typer.Typer(
    help="Train transformers on contexts of millions of tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_once(notice: str) -> None:
    """Print a notice, under torchrun and srun from the first rank only."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(notice, file=sys.stderr)


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
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one the defaults train.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override an option, as train.steps=100.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder, gone on with if it is there; a new one under runs/ by default.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine: one per GPU, or 2 on a CPU, when not given.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to train on: the same line is started on each. Under srun it is known.")
    ] = None,
    meet: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="The one of them where they meet; port 29500 by default.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set the old run aside and begin anew.")] = False,
) -> None:
    """Train a model; without a configuration a small one, on the Python standard library's sources, byte by byte."""
    from ithaca.config import read_config

    saved = run / "config.toml" if run and not fresh and not config else None
    saved = saved if saved and saved.exists() else None
    resolved = read_config(config or saved, set_ or [], _tell_once, saved=saved is not None)
    from ithaca.train.launch import launch

    launch(resolved, ranks, run, fresh, nodes, meet)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The Hugging Face folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float32 or float64; the model's own when not given.")
    ] = None,
) -> None:
    """Write the model of a run's last checkpoint as a Hugging Face folder."""
    from ithaca.train.export import export as write

    step = write(run, folder, dtype)
    print(f"{folder}: the model after step {step}; transformers.AutoModelForCausalLM.from_pretrained('{folder}')")


@app.command()
def data(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Text, JSONL, Parquet, .npy, .bin, folders.")],
    out: Annotated[Path | None, typer.Option(help="The token file to write.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a folder that holds one; bytes without it.")
    ] = None,
    bin_dtype: Annotated[str | None, typer.Option(help="What a .bin file holds: uint8, uint16 or uint32.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show the document lengths of a token file.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Where --stats puts its picture.")] = None,
) -> None:
    """Prepare data: documents into a token file that training reads."""
    from ithaca.data.command import run

    run(paths, out, tokenizer, stats, picture, bin_dtype)


@app.command()
def mesh(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b.")],
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs on each.")] = 8,
    tokens: Annotated[str, typer.Option(help="The context length, as 64K or 5M.")] = "1M",
    recipe: Annotated[str, typer.Option(help="One that shares sequences, as sweep, hybrid or ulysses.")] = "sweep",
    share: Annotated[int | None, typer.Option(help="GPUs that share a sequence; all when not given.")] = None,
    inside: Annotated[str, typer.Option(help="Bytes a second from a GPU to others of its node.")] = "450GB",
    across: Annotated[str, typer.Option(help="Bytes a second from a GPU to other nodes.")] = "50GB",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which Ulysses × ring ranks can share a sequence, what each link carries, and which mesh should be best."""
    from ithaca.base.sizes import parse_bytes, parse_tokens
    from ithaca.planner.machine import Machine
    from ithaca.planner.show_mesh import run

    machine = Machine(nodes=nodes, gpus=gpus, inside=parse_bytes(inside), across=parse_bytes(across))
    run(model, machine, parse_tokens(tokens), recipe, share, json)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b; its sizes alone count.")
    ],
    gpus: Annotated[
        str | None, typer.Option(help="How many of which; 8xH100-80GB, or 8 of what is measured, when not given.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="The context length, as 64K or 5M; max: the longest that fits.")] = "max",
    host: Annotated[str | None, typer.Option(help="Memory of a node, as 1.9TB; what is usual when not given.")] = None,
    disk: Annotated[str, typer.Option(help="Disk of a node for tapes, as 28TB; 0: none.")] = "0",
    recipe: Annotated[str | None, typer.Option(help="The Plan's; the fastest that fits when not given.")] = None,
    node_gpus: Annotated[int, typer.Option(help="GPUs on a node.")] = 8,
    hardware: Annotated[Path | None, typer.Option(help="A TOML file with more GPUs, or other numbers for one.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure the GPU that is here, write its numbers there, use them."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw memory and speed over lengths into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what fits on some GPUs before they are rented: the fastest Plan, the longest context, and why."""
    from ithaca.planner.command import run

    if measure:
        from ithaca.rehearsal.measure import measure_here

        if hardware:
            raise PlanError(f"--measure {measure} and --hardware {hardware} both name rates: give one of them")
        found, hardware = measure_here(measure), measure
        gpus = f"8x{found}" if gpus is None else gpus
    run(model, gpus, tokens, host, disk, recipe, node_gpus, hardware, picture, json)


@app.command()
def rehearse(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b; its sizes alone count.")
    ],
    ranks: Annotated[int, typer.Option(help="GPUs of the job, of which this process plays one.")] = 8,
    tokens: Annotated[str, typer.Option(help="The context length, as 64K or 5M.")] = "1M",
    layers: Annotated[
        int | None, typer.Option(help="Layers that are run; the others are held as memory. All when not given.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="The Plan's.")] = "sweep",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of plan or mesh, as plan.chunk=128K."),
    ] = None,
    cap: Annotated[str | None, typer.Option(help="Memory of the GPU that may be used, as 80GB.")] = None,
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Leave attention's arithmetic out: any length in little time.")
    ] = False,
    bare: Annotated[
        bool, typer.Option("--bare", help="Time the step's attention kernels and matrix products by themselves, too.")
    ] = False,
    hardware: Annotated[
        Path | None,
        typer.Option(help="A TOML file of GPUs, as ithaca plan --measure writes: rates for the prediction."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one rank of a job of many on the device that is here: its memory by owner, its time by part."""
    from ithaca.base.sizes import parse_bytes, parse_tokens
    from ithaca.rehearsal.command import run

    limit = parse_bytes(cap) if cap else None
    run(model, ranks, parse_tokens(tokens), layers, recipe, set_ or [], limit, memory_only, bare, hardware, json)


def main() -> None:
    """Run the command line; what a user did wrong is one sentence."""
    try:
        app()
    except IthacaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
    except MemoryError as error:
        print(f"error: the host has not enough memory ({error}): a smaller train.batch takes less", file=sys.stderr)
        sys.exit(1)
