"""The command `ithaca data`: make a token file, or show the document lengths of one."""

from pathlib import Path

from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes, format_count
from ithaca.data.chat_template import load_format
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
    chat: str | None = None,
    chat_template: Path | None = None,
) -> None:
    """Run `ithaca data PATH… --out FILE` or `ithaca data FILE --stats`."""
    console = Console()
    if stats:
        for name, value in _given(out, tokenizer, bin_dtype, chat, chat_template).items():
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
    if tokenizer is None and (chat or chat_template):
        option = "--chat" if chat else "--chat-template"
        raise DataError(f"{option} needs a tokenizer: name the model's with --tokenizer")
    made_by = load_tokenizer(tokenizer) if tokenizer else None
    chats = load_format(tokenizer, chat_template, chat) if tokenizer else None
    _report(console, prepare(paths, out, made_by, bin_dtype, console, chats=chats))


def _given(
    out: Path | None, tokenizer: Path | None, bin_dtype: str | None, chat: str | None, chat_template: Path | None
) -> dict[str, object]:
    """Return the options that only making a token file has."""
    made = {"--out": out, "--tokenizer": tokenizer, "--bin-dtype": bin_dtype}
    return {**made, "--chat": chat, "--chat-template": chat_template}


def _show(console: Console, paths: list[Path], picture: Path | None) -> None:
    if len(paths) != 1:
        raise DataError(f"--stats was given {len(paths)} paths: name 1 token file")
    data = open_tokens(paths[0])
    picture = picture or paths[0].with_name(paths[0].name + ".png")
    console.print(table(data))
    draw(data, picture)
    say(console, f"Picture: {picture}")


def _report(console: Console, made: Prepared) -> None:
    head = made.header
    documents = format_count(head.documents, "document")
    lines = [f"{made.path}: {format_count(head.tokens, 'token')}, {documents}, {format_bytes(head.file_bytes)}"]
    if head.tokenizer == "bytes":
        lines.append("Each byte is a token; --tokenizer uses a model's tokenizer instead")
    if made.binary:
        lines.append(f"Skipped: {format_count(made.binary, 'binary file')}")
    if made.empty:
        lines.append(f"Skipped: {format_count(made.empty, 'empty document')}")
    lines += _about_chats(made)
    lines.append(f"Next: ithaca data {made.path} --stats")
    lines.append(f"      ithaca train --set data.source={made.path}")
    say(console, "\n".join(lines))


def _about_chats(made: Prepared) -> list[str]:
    counts, head = made.counts, made.header
    if not counts.conversations:
        return []
    became = f"{format_count(counts.conversations, 'conversation')} became {format_count(counts.samples, 'sample')}"
    lines = [f"Chats: {became}; {100 * head.labels / head.tokens:.1f} % of all tokens are learned"]
    if counts.divided:
        lines.append(
            f"Divided: {format_count(counts.divided, 'conversation')}, because the chat template writes a turn "
            "differently once others follow, as Qwen3 without its thinking; --chat whole refuses them"
        )
    if counts.unlearned:
        lines.append(
            f"Warning: nothing is learned in {format_count(counts.unlearned, 'conversation')}, the first is "
            f"{counts.first_unlearned}"
        )
    return lines
