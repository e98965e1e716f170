"""A terminal for tests: a command runs in a pseudo-terminal, and its screen is read as a person would see it."""

import codecs
import fcntl
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ithaca.train.ranks.stop import SAME_SECONDS

CTRL_C = b"\x03"
COLUMNS, LINES = 150, 50
_BEGUN = re.compile(r"\x1b(\[[0-9;?]*)?$")
_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\r\n\x1b]+)")


class Screen:
    """The lines of a terminal after what was written to it. Knows what the live line uses, and nothing else."""

    def __init__(self) -> None:
        self._lines, self._row, self._column = [""], 0, 0
        self._decode, self._rest = codecs.getincrementaldecoder("utf-8")().decode, ""

    def write(self, written: bytes) -> None:
        text = self._rest + self._decode(written)
        begun = _BEGUN.search(text)  # a sequence whose end comes later
        text, self._rest = (text[: begun.start()], begun[0]) if begun else (text, "")
        for number, letter, control, words in _PARTS.findall(text):
            if words:
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = line[: self._column] + words + line[self._column + len(words) :]
                self._column += len(words)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row += 1
                self._lines += [""] * (self._row == len(self._lines))
            elif letter == "A":
                self._row -= int(number or 1)
            elif letter == "K":
                assert number == "2", "only whole lines are erased"
                self._lines[self._row] = ""
            else:
                assert letter in "mhl", f"{letter} is not known"  # colours, the cursor

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines]


def run_on_a_terminal(function: Callable[..., Any], args: tuple[Any, ...], record: Path, stops: list[str]) -> None:
    """Call a function in a pseudo-terminal. Writes its exit code and every screen that was seen to a file, as JSON.

    Ctrl-C is pressed each time that the next of the expressions `stops` is on the screen.
    """
    child, terminal = pty.fork()
    if not child:
        _call(function, args)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen, screens, stops, pressed = Screen(), [], list(stops), -math.inf
    while written := _read(terminal):
        screen.write(written)
        screens.append(screen.lines)
        if stops and re.search(stops[0], "\n".join(screen.lines)):
            time.sleep(max(pressed + 2 * SAME_SECONDS - time.monotonic(), 0))  # each is a request of its own
            os.write(terminal, CTRL_C)
            pressed = time.monotonic()
            del stops[0]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    record.write_text(json.dumps({"code": code, "screens": screens}))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that no process has the terminal open any more
        return b""


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code, _held = 1, (sys.stdout, sys.stderr)  # which would close descriptors 1 and 2, the terminal now
    try:
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(TERM="xterm", COLUMNS=str(COLUMNS), LINES=str(LINES))
        function(*args)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
