"""The options of a scene, which several commands share: what they are called, and their help. No torch."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, or a preset as llama3-8b. Weights are not read.")]
Ranks = Annotated[int, typer.Option(help="GPUs of the job, of which one rank runs here.")]
Tokens = Annotated[str, typer.Option(help="The context length, as 64K or 5M.")]
Layers = Annotated[int | None, typer.Option(help="Layers to run; the others only take their memory. Default: all.")]
Documents = Annotated[
    str | None, typer.Option(help="Packed documents, as 64x4K, 192K+64x1K or a token file. Default: one.")
]
Recipe = Annotated[str, typer.Option(help="The recipe.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set an option of plan or mesh, as plan.chunk=128K."),
]
Cap = Annotated[str | None, typer.Option(help="GPU memory to use at most, as 80GB.")]
Hardware = Annotated[
    Path | None, typer.Option(help="A TOML file with the GPU's rates, as ithaca plan --measure writes.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
