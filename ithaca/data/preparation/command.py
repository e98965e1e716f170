"""The command `ithaca data`: make a token file, or show the document lengths of one."""

from pathlib import Path

from rich.console import Console

from ithaca.base.errors import DataError, read_option
from ithaca.base.sizes import format_bytes, format_count, parse_tokens
from ithaca.data.chat.template import load_format
from ithaca.data.preparation.meter import say
from ithaca.data.preparation.next_command import next_lines
from ithaca.data.preparation.prepare import Prepared, prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens
from ithaca.data.stats import CONTEXTS, context_table, draw, table


def run(
    paths: list[Path],
    out: Path | None,
    tokenizer: Path | None,
    stats: bool,
    picture: Path | None,
    bin_dtype: str | None,
    field: str | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    tokens: str | None = None,
    chat: str | None = None,
    chat_template: Path | None = None,
) -> None:
    """Run `ithaca data PATH… --out FILE` or `ithaca data FILE --stats`."""
    console = Console()
    if stats:
        given = {"--out": out, "--tokenizer": tokenizer, "--bin-dtype": bin_dtype, "--field": field}
        given |= {
            "--skip-bad": skip_bad or None,
            "--workers": workers,
            "--chat": chat,
            "--chat-template": chat_template,
        }
        for name, value in given.items():
            if value is not None:
                raise DataError(f"--stats reads an existing token file: leave out {name}")
        _show(console, paths, picture, read_option("--tokens", parse_tokens, tokens) if tokens else None)
        return
    if picture is not None:
        raise DataError(
            "--picture needs --stats: make the token file first, then run `ithaca data FILE --stats --picture PNG`"
        )
    if tokens is not None:
        raise DataError(f"--tokens {tokens} needs --stats: a token file has no context length, train.tokens has one")
    if out is None:
        raise DataError("--out is missing: name the token file to write, as --out corpus.tokens")
    if tokenizer is None and (chat or chat_template):
        option = "--chat" if chat else "--chat-template"
        raise DataError(f"{option} needs a tokenizer: name the model's with --tokenizer")
    made_by = load_tokenizer(tokenizer) if tokenizer else None
    chats = load_format(tokenizer, chat_template, chat) if tokenizer else None
    options = {"field": field, "skip_bad": skip_bad, "workers": workers, "chats": chats}
    _report(console, prepare(paths, out, made_by, bin_dtype, console, **options), tokenizer)


def _show(console: Console, paths: list[Path], picture: Path | None, tokens: int | None) -> None:
    if len(paths) != 1:
        raise DataError(f"--stats was given {len(paths)} paths: name 1 token file")
    data = open_tokens(paths[0])
    picture = picture or paths[0].with_name(paths[0].name + ".png")
    console.print(table(data))
    console.print(context_table(data, (tokens,) if tokens else CONTEXTS))
    draw(data, picture)
    say(console, f"Picture: {picture}")


def _first(paths: tuple[Path, ...], most: int = 3) -> str:
    """Return the names of the first files, for a message."""
    return ", ".join([*(path.name for path in paths[:most]), *(["…"] if len(paths) > most else [])])


def _report(console: Console, made: Prepared, tokenizer: Path | None) -> None:
    head = made.header
    counts = f"{format_count(head.tokens, 'token')}, {format_count(head.documents, 'document')}"
    lines = [*made.notes, f"{made.path}: {counts}, {format_bytes(head.file_bytes)}"]
    if head.tokenizer == "bytes":
        lines.append("Each byte is a token; --tokenizer uses a model's tokenizer instead")
    if made.others:
        lines.append(f"Skipped: {format_count(len(made.others), 'file')} of other kinds ({_first(made.others)})")
    if made.empty:
        lines.append(f"Skipped: {format_count(made.empty, 'empty document')}")
    if made.bad:
        lines.append(f"Skipped: {format_count(made.bad, 'bad file or record')}, the first of them:")
        lines += [f"  {sentence}" for sentence in made.first_bad]
    if made.forced:
        cuts = format_count(made.forced, "cut")
        lines.append(f"{cuts} of long texts changed tokens: no word ended within 2,048 characters")
    lines += _about_chats(made)
    say(console, "\n".join([*lines, *next_lines(made.path, head, tokenizer)]))


def _about_chats(made: Prepared) -> list[str]:
    counts, head = made.counts, made.header
    if not counts.conversations:
        return []
    became = f"{format_count(counts.conversations, 'conversation')} became {format_count(counts.samples, 'sample')}"
    lines = [f"Chats: {became}; {100 * head.labels / head.tokens:.1f} % of all tokens count in the loss"]
    if counts.divided:
        lines.append(
            f"Divided: {format_count(counts.divided, 'conversation')}, because the chat template writes a turn "
            "differently once others follow, as Qwen3 without its thinking; --chat whole refuses them"
        )
    if counts.unlearned:
        lines.append(
            f"Warning: no token counts in the loss in {format_count(counts.unlearned, 'conversation')}, the first is "
            f"{counts.first_unlearned}"
        )
    return lines
