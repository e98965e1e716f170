"""The command `ithaca data`: make a token file, or show the document lengths of one."""

from pathlib import Path

from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes, format_count
from ithaca.data.next_command import next_lines
from ithaca.data.prepare import Prepared, prepare, say
from ithaca.data.reader import open_tokens
from ithaca.data.stats import draw, table
from ithaca.data.tokenizer import load_tokenizer


def run(
    paths: list[Path],
    out: Path | None,
    tokenizer: Path | None,
    stats: bool,
    picture: Path | None,
    bin_dtype: str | None,
) -> None:
    """Run `ithaca data PATH… --out FILE` or `ithaca data FILE --stats`."""
    console = Console()
    if stats:
        for name, value in {"--out": out, "--tokenizer": tokenizer, "--bin-dtype": bin_dtype}.items():
            if value is not None:
                raise DataError(f"--stats reads an existing token file: leave out {name}")
        _show(console, paths, picture)
        return
    if picture is not None:
        raise DataError(
            "--picture needs --stats: make the token file first, then run `ithaca data FILE --stats --picture PNG`"
        )
    if out is None:
        raise DataError("--out is missing: name the token file to write, as --out corpus.tokens")
    made_by = load_tokenizer(tokenizer) if tokenizer else None
    _report(console, prepare(paths, out, made_by, bin_dtype, console), tokenizer)


def _show(console: Console, paths: list[Path], picture: Path | None) -> None:
    if len(paths) != 1:
        raise DataError(f"--stats was given {len(paths)} paths: name 1 token file")
    data = open_tokens(paths[0])
    picture = picture or paths[0].with_name(paths[0].name + ".png")
    console.print(table(data))
    draw(data, picture)
    say(console, f"Picture: {picture}")


def _report(console: Console, made: Prepared, tokenizer: Path | None) -> None:
    head = made.header
    documents = format_count(head.documents, "document")
    lines = [f"{made.path}: {format_count(head.tokens, 'token')}, {documents}, {format_bytes(head.file_bytes)}"]
    if head.tokenizer == "bytes":
        lines.append("Each byte is a token; --tokenizer uses a model's tokenizer instead")
    if made.binary:
        lines.append(f"Skipped: {format_count(made.binary, 'binary file')}")
    if made.empty:
        lines.append(f"Skipped: {format_count(made.empty, 'empty document')}")
    say(console, "\n".join([*lines, *next_lines(made.path, head, tokenizer)]))
