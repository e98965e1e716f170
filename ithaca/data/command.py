"""What `ithaca data` does: make a token file, or say how long the documents of one are."""

from pathlib import Path

from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes
from ithaca.data.prepare import Prepared, prepare, say
from ithaca.data.stats import draw, table
from ithaca.data.tokenfile import open_tokens
from ithaca.data.tokenizer import load_tokenizer


def run(
    paths: list[Path],
    out: Path | None,
    tokenizer: Path | None,
    stats: bool,
    picture: Path | None,
    bin_dtype: str | None,
) -> None:
    """`ithaca data PATH… --out FILE` or `ithaca data FILE --stats`."""
    console = Console()
    if stats:
        for name, value in {"--out": out, "--tokenizer": tokenizer, "--bin-dtype": bin_dtype}.items():
            if value is not None:
                raise DataError(f"--stats reads a token file that is there: leave out {name}")
        _show(console, paths, picture)
        return
    if picture is not None:
        raise DataError(
            "--picture goes with --stats: prepare the file first, then `ithaca data FILE --stats --picture`"
        )
    if out is None:
        raise DataError("--out is missing: name the token file to write, as --out corpus.tokens")
    made_by = load_tokenizer(tokenizer) if tokenizer else None
    _report(console, prepare(paths, out, made_by, bin_dtype, console))


def _show(console: Console, paths: list[Path], picture: Path | None) -> None:
    if len(paths) != 1:
        raise DataError(f"--stats is given {len(paths)} paths: name 1 token file")
    data = open_tokens(paths[0])
    picture = picture or paths[0].with_name(paths[0].name + ".png")
    console.print(table(data))
    draw(data, picture)
    say(console, f"picture: {picture}")


def _report(console: Console, made: Prepared) -> None:
    head = made.header
    lines = [f"{made.path}: {head.tokens:,} tokens, {head.documents:,} documents, {format_bytes(head.file_bytes)}"]
    if head.tokenizer == "bytes":
        lines.append("tokens are bytes; --tokenizer names another way")
    if made.binary:
        lines.append(f"left out: {made.binary:,} binary files")
    if made.empty:
        lines.append(f"left out: {made.empty:,} empty documents")
    lines.append(f"next: ithaca data {made.path} --stats")
    lines.append(f"      ithaca train --set data.source={made.path}")
    say(console, "\n".join(lines))
