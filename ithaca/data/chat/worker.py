"""The process that renders conversations, with limits on time, memory and text. render.py starts it.

It reads frames: the format, then lists of conversations as JSON. It answers with a frame for each sample, and one
behind the last sample of each conversation that says how it ended. It imports neither numpy nor the tokenizer, so that
it starts quickly and the limit on its memory is about the template.

When a rendering computes for too long, the kernel ends the process, wherever it is (SIGPROF). Time in which the process
waits does not count, nor does what other processes take.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import IO, Any

from ithaca.base.parent import end_with_parent
from ithaca.data.chat.turns import NoSpan, Span, samples

MEMORY = 512 << 20  # bytes of the process, and …
MEMORY_FACTOR = 64  # … for each byte of the conversations that are rendered together
TEXT = 1 << 20  # characters of one rendering, and …
TEXT_FACTOR = 16  # … for each byte of its conversation
_LENGTH = struct.Struct("<Q")


def write_frame(file: IO[bytes], content: bytes) -> None:
    """Write the length of the content, then the content."""
    file.write(_LENGTH.pack(len(content)))
    file.write(content)


def read_frame(file: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the file, also if it ends within a frame."""
    head = file.read(_LENGTH.size)
    content = file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    return content if len(head) == _LENGTH.size and len(content) == _LENGTH.unpack(head)[0] else None


def serve(parent: int) -> None:
    """Answer requests until the other side closes, or the process `parent` ends."""
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    if not end_with_parent(parent):  # which is also heeded in the middle of a rendering
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, and its end is seen below
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the other process does with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = _Renderer(json.loads(read_frame(given) or b"{}"))
    with contextlib.suppress(BrokenPipeError):
        while (request := read_frame(given)) is not None:
            _limit_memory(MEMORY + MEMORY_FACTOR * len(request))
            for conversation in json.loads(request):
                for answer in renderer.answers(conversation):
                    write_frame(answers, json.dumps(answer, ensure_ascii=False).encode())
                answers.flush()


class _Renderer:
    def __init__(self, form: dict[str, Any]):
        self._form = form
        self._compiled: dict[str, Any] = {}

    def answers(self, conversation: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the samples of a conversation, then its end: what went wrong, or nothing."""
        most = TEXT + TEXT_FACTOR * len(json.dumps(conversation))
        try:
            for text, spans in self._samples(conversation, most):
                text.encode()
                yield {"text": text, "spans": spans}
            yield {"problem": None}
        except NoSpan as problem:
            yield {"problem": "turn", "why": str(problem)}
        except UnicodeEncodeError:
            yield {"problem": "refused", "why": "it writes half a surrogate pair"}
        except MemoryError:
            yield {"problem": "memory", "why": ""}
        except Exception as problem:  # a template can raise whatever Python can
            yield self._described(problem, most)

    def _described(self, problem: Exception, most: int) -> dict[str, Any]:
        kind = {"TooLong": "length", "TemplateSyntaxError": "syntax"}.get(type(problem).__name__, "refused")
        line = getattr(problem, "lineno", None)
        why = str(problem) or type(problem).__name__
        return {"problem": kind, "why": f"line {line}: {why}" if kind == "syntax" else why, "most": most}

    def _samples(self, conversation: dict[str, Any], most: int) -> Iterator[tuple[str, list[Span]]]:
        messages, learned = conversation["messages"], conversation["learned"]
        given = {**self._form["tokens"], **conversation["variables"], "tools": conversation["tools"], "documents": None}
        with self._limited():
            template = self._template("tool_use" if conversation["tools"] else "default")

        def render(count: int, prompt: bool) -> tuple[str, list[Span]]:
            with self._limited():
                return template.render({**given, "messages": messages[:count], "add_generation_prompt": prompt}, most)

        if template.marked:
            text, spans = render(len(messages), False)
            yield text, _chosen(spans, messages, learned)
        else:
            yield from samples(lambda n, prompt: render(n, prompt)[0], len(messages), learned, self._form["choice"])

    def _template(self, name: str) -> Any:
        from ithaca.data.chat.jinja import Template

        name = name if name in self._form["templates"] else "default"
        if name not in self._compiled:
            self._compiled[name] = Template(self._form["templates"][name])
        return self._compiled[name]

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, self._form["seconds"])
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _chosen(spans: list[Span], messages: list[dict[str, Any]], learned: list[int]) -> list[Span]:
    """Return the marked spans of the messages that are learned."""
    assistant = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if learned == assistant:
        return spans
    if len(spans) != len(assistant):
        raise NoSpan(
            f"marks {len(spans)} spans for {len(assistant)} messages of the assistant, which does not say what to "
            "leave out: drop 'train' and 'weight', or give each message one {% generation %}"
        )
    return [span for number, span in zip(assistant, spans, strict=True) if number in learned]


def _limit_memory(wanted: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
