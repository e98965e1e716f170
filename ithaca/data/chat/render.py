"""Render conversations in a process of their own, which a bad template can end without ending this one.

The process costs about 0.1 s to start and answers a group of conversations at a time. Each process that encodes starts
its own at its first conversation, so a `Renderer` can go to worker processes. It ends when its input closes, also when
this process is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ithaca.base.errors import DataError, first_line
from ithaca.base.sizes import format_bytes
from ithaca.data.chat.template import ChatFormat
from ithaca.data.chat.turns import Span
from ithaca.data.chat.worker import MEMORY, MEMORY_FACTOR, TEXT_FACTOR, read_frame, write_frame

_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from ithaca.data.chat.worker import serve
serve(int(sys.argv[2]))
"""
_OLDEST = (3, 1, 6)  # before, a template could leave the sandbox (CVE-2025-27516)


class NoRendering(DataError):
    """A template that renders no conversation, or never ends. --skip-bad does not skip it."""


@dataclass(frozen=True)
class Rendered:
    """One sample: the number of its conversation in the group, its text, and the characters that are learned."""

    conversation: int
    text: str
    spans: list[Span]


class Renderer:
    """Renders conversations with a format. The process starts when it is first needed."""

    def __init__(self, form: ChatFormat):
        self.form = form
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __getstate__(self) -> ChatFormat:
        return self.form

    def __setstate__(self, form: ChatFormat) -> None:
        self.__init__(form)

    def render(self, conversations: Sequence[str], names: Sequence[str]) -> Iterator[Rendered]:
        """Yield the samples of each conversation (its JSON, and its name for messages) in order."""
        request = f"[{','.join(conversations)}]".encode()
        child = self._started(names[0])
        assert child.stdin is not None
        done = False
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; the reason is found below
                write_frame(child.stdin, request)
                child.stdin.flush()
            for number, name in enumerate(names):
                while "text" in (answer := self._answer(child, name, len(request))):
                    yield Rendered(number, answer["text"], [(start, end) for start, end in answer["spans"]])
                done = number + 1 == len(names)
                if answer["problem"]:
                    kind = NoRendering if answer["problem"] == "syntax" else DataError
                    raise kind(self._sentence(name, answer, len(request)))
        finally:
            if not done:  # unread answers are still under way
                self.close()

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # it has ended, and something was still to be written
                pipe.close()
        if self._owner == os.getpid():  # a fork has copies of the pipes, and must not end the process
            child.kill()
            child.wait()

    def __del__(self) -> None:
        self.close()

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        if self._child is None or self._owner != os.getpid():
            self.close()
            _check_jinja(name)
            if not self.form.templates:
                raise NoRendering(
                    f"{name} is a conversation, and the tokenizer has no chat template: name one with --chat-template"
                )
            command = [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), str(os.getpid())]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._owner = os.getpid()
            assert self._child.stdin
            with contextlib.suppress(BrokenPipeError):
                write_frame(self._child.stdin, json.dumps(asdict(self.form)).encode())
        return self._child

    def _answer(self, child: subprocess.Popen[bytes], name: str, size: int) -> dict[str, Any]:
        assert child.stdout
        frame = read_frame(child.stdout)
        if frame is not None:
            return json.loads(frame)
        code = child.wait()
        if code == -signal.SIGPROF:
            raise NoRendering(self._sentence(name, {"problem": "time"}, size))
        raise NoRendering(self._sentence(name, {"problem": "ended", "why": f"code {code}"}, size))

    def _sentence(self, name: str, answer: dict[str, Any], size: int) -> str:
        template, why = f"the chat template {self.form.origin}", _one_line(answer.get("why", ""))
        memory = format_bytes(MEMORY + MEMORY_FACTOR * size)
        other = "change it, or name another template with --chat-template"
        return {
            "syntax": f"{template} is not a Jinja template ({why}): fix it, or name another one with --chat-template",
            "turn": f"{name}: {template} {why}",
            "refused": f"{name} cannot be rendered by {template} ({why}): {other}",
            "length": f"{name}: {template} writes more than {answer.get('most')} characters, {TEXT_FACTOR} for each "
            f"byte and 1 MiB: {other}",
            "memory": f"{name}: {template} takes more than {memory} of memory: {other}",
            "time": f"{name}: {template} computes for more than {self.form.seconds:g} s: {other}",
            "ended": f"{name}: {template} ended the process that renders it ({why}): {other}",
        }[answer["problem"]]


def _one_line(text: str) -> str:
    return first_line(Exception(text)) if text else ""


def _check_jinja(name: str) -> None:
    if util.find_spec("jinja2") is None:
        raise NoRendering(f"{name} is a conversation, and rendering it needs Jinja2: pip install 'ithaca[chat]'")
    found = metadata.version("jinja2")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < _OLDEST:
        raise NoRendering(
            f"{name} is a conversation, and Jinja2 {found} is older than 3.1.6: pip install 'ithaca[chat]'"
        )
