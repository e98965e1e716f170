"""Chat templates in Jinja's sandbox, with the names and filters that `transformers` gives them.

Only the process of worker.py loads this, because a template is a program: it may never end, or fill the memory.
The sandbox keeps it from files and from Python's internals. `{% generation %}` … `{% endgeneration %}` marks what the
assistant wrote: the marks go through the text as half surrogate pairs, which no record can hold, and are removed.
"""

import json
import re
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import ext, nodes, sandbox, utils
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro

from ithaca.data.chat.turns import Span

_BEGIN, _END = "\ud800", "\ud801"
_METHODS = frozenset(dir({}))
_PLACES = ("index", "index0", "first", "last", "length", "revindex", "revindex0")


class TooLong(Exception):
    """A template wrote more than it may."""


class _Generation(ext.Extension):
    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Dict:
    """`dict(…)` without the attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)


class _Namespace(utils.Namespace):
    """`namespace(…)` without names that begin with an underscore, which would reach into the object."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may want a name of that kind
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name '{name}'")


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with shortcuts that give the same answers without its many checks.

    The shortcuts serve the most frequent lookups: fields of messages, places in a loop, names that a template sets.
    They halve the time of a rendering, and a conversation is rendered once or twice for each of its turns.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext and attribute in _PLACES) or (kind is _Namespace and not attribute.startswith("_")):
            try:
                return getattr(obj, attribute)
            except AttributeError:  # a name that the template has not set
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class Template:
    """A compiled template. `marked`: whether it marks the assistant's text itself."""

    def __init__(self, source: str):
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = environment.globals
        names |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
        tree = environment.parse(source)
        self.marked = any(
            isinstance(block.call, nodes.Call) and isinstance(block.call.node, nodes.ExtensionAttribute)
            for block in tree.find_all(nodes.CallBlock)
        )
        self._compiled = environment.from_string(source)

    def render(self, variables: dict[str, Any], most: int) -> tuple[str, list[Span]]:
        """Return the text and the spans that are marked in it. Raise TooLong at more than `most` characters."""
        pieces, length = [], 0
        for piece in self._compiled.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise TooLong
        text = "".join(pieces)
        return _without_marks(text) if self.marked else (text, [])


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and the spans between them. Of nested marks the outer ones count."""
    parts = re.split(f"([{_BEGIN}{_END}])", text)
    spans: list[Span] = []
    start = at = depth = 0
    for text_part, mark in zip(parts[::2], [*parts[1::2], ""], strict=True):
        at += len(text_part)
        if mark == _BEGIN:
            start = at if depth == 0 else start
            depth += 1
        elif mark == _END:
            depth -= 1
            if depth == 0:
                spans.append((start, at))
    return "".join(parts[::2]), spans
