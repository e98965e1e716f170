"""The command line. Importing it loads no torch: `ithaca --help` answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ithaca import __version__
from ithaca.errors import IthacaError

app = typer.Typer(
    help="Train transformers on contexts of millions of tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine: one per GPU, or 2 on a CPU, when not given.")
    ] = None,
) -> None:
    """Train a model; without a configuration a small one, on the Python standard library's sources, byte by byte."""
    from ithaca.config import read_config

    resolved = read_config(config, set_ or [])
    from ithaca.train.launch import launch

    launch(resolved, ranks)


def main() -> None:
    """Run the command line; what a user did wrong is one sentence and code 2."""
    try:
        app()
    except IthacaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
