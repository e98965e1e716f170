"""Launchers on several nodes that go through a run together: who takes part, how each attempt ended, when all leave.

They meet at a notice board, which the launcher on the node that `--meet` names has; a launcher alone is a meeting of
one, with a board that nobody can reach. A node's ranks are numbered after those of the nodes before it: first the node
that was named, which says what the run does, then the others by name, so that ranks lie the same whoever comes first.

An attempt ends for all: who has lost a rank says so, the others end theirs, and all go on to the next attempt when each
has said that its ranks are gone. An attempt's ranks have a store of their own, in the launcher that has the board, so
that whoever dies, the others can still ask there. What ends the run on one node is called off for all, in its words.
Nodes have a time to come; once they are there they are waited for, since the board knows who has gone.
"""

import contextlib
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from ithaca.base.errors import ConfigError, IthacaError, RunError, first_line
from ithaca.base.sizes import format_seconds
from ithaca.train.board import CAME, LEFT, OFF, Board, Line, host_board, listen

COME_SECONDS = 600.0  # that nodes have to come
LEAVE_SECONDS = 10.0  # that the others have to read their last notes
STORE_SECONDS = 30.0  # that the launcher has to reach the store that it has opened
POLL_SECONDS = 0.2
PORT = 29500

OPTIONS = "options"  # the topic of what the run does, as the node with the board has it


@dataclass(frozen=True)
class Place:
    """Where launchers meet, as `--meet` has it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


ALONE = Place("127.0.0.1", 0)  # what the ranks of one node need: none of them comes from elsewhere


def read_place(text: str) -> Place:
    """HOST or HOST:PORT, an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?P<colon>:(?P<port>.*))?", text)
    if not found:
        raise ConfigError(f"--meet '{text}' names no host: one of the nodes is needed, as --meet node0:{PORT}")
    host, port = found["six"] or found["host"], found["port"]
    try:
        host.encode("idna")
    except UnicodeError:  # too long, or no text
        raise ConfigError(f"--meet names no host: one of the nodes is needed, as --meet node0:{PORT}") from None
    if found["colon"] and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--meet '{text}' names port '{port}': 1 to 65535 can be, as --meet {host}:{PORT}")
    return Place(host, int(port) if port else PORT)


@contextmanager
def meet(place: Place, nodes: int, asked: Callable[[], int]) -> Iterator["Meeting"]:
    """Come to where the launchers of all nodes meet; who waits for whom is said by the meeting's methods.

    `asked` counts requests to stop: one that comes while this waits for others ends it. An error from the body is one
    on all nodes, and they have read it when this leaves.
    """
    line = Board() if nodes == 1 else host_board(place.host, place.port) or _reach(place, nodes, asked)
    meeting = Meeting(line, place, nodes, asked)
    try:
        meeting.come()
        yield meeting
    except BaseException as error:
        meeting.call_off(error)
        raise
    finally:
        meeting.leave()
        line.close()


class Meeting:
    """What a launcher knows of the others."""

    def __init__(self, line: Board | Line, place: Place, nodes: int, asked: Callable[[], int]):
        self.nodes, self.name = nodes, socket.gethostname()
        self.ranks, self.world = range(0), 0  # this node's, and how many all have; known when all have come
        self._line, self._place, self._asked = line, place, asked
        self._hosts = isinstance(line, Board)
        self._counts = False  # whether the run needs this node
        self._store: dist.TCPStore | None = None

    def come(self) -> None:
        """Be one of those who take part."""
        there = self._line.pin(CAME, {"name": self.name, "nodes": self.nodes})
        first = there[0]
        if len(there) > first["nodes"]:
            raise ConfigError(
                f"the {first['nodes']} nodes of a run have met at {self._place} already: end that run, or name another "
                "port with --meet"
            )
        self._counts = True
        if first["nodes"] != self.nodes:
            raise ConfigError(
                f"--nodes is {self.nodes} on {self.name}, but {first['nodes']} on {first['name']}: "
                "give the same number on all nodes"
            )

    def number_ranks(self, ranks: int, options: Mapping[str, str]) -> None:
        """Tell how many this node has, and wait until all nodes have come and told; all must have the same options."""
        if self._hosts:
            self._line.pin(OPTIONS, options)
        me = [not self._hosts, self.name, secrets.token_hex(8), ranks]  # names may be the same, in containers
        told = sorted(self._gather("ranks", me, until=time.monotonic() + COME_SECONDS))
        first = sum(node[-1] for node in told[: told.index(me)])
        self.ranks, self.world = range(first, first + ranks), sum(node[-1] for node in told)
        self._compare(options, self._line.read(OPTIONS)[0], told[0][1])

    def _compare(self, ours: Mapping[str, str], theirs: Mapping[str, str], host: str) -> None:
        for option, value in ours.items():
            if theirs.get(option) != value:
                raise ConfigError(
                    f"{option} is {value} on {self.name}, but {theirs.get(option)} on {host}: "
                    "start the same line on all nodes"
                )

    def environments(self, attempt: int) -> list[dict[str, str]]:
        """What each of this node's ranks must find in its environment to join the others in this attempt."""
        common = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "MASTER_ADDR": self._place.host,
            "MASTER_PORT": str(self._open_store(attempt)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: rank 0 must not open one
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        return [{**common, "RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(self.ranks)]

    def _open_store(self, attempt: int) -> int:
        """The port, on the node with the board, where the ranks of this attempt have their store."""
        port = None
        if self._hosts:
            self._store = _make_store(self._place.host)
            port = self._store.port
        return next(port for port in self._gather(f"store {attempt}", port) if port)

    def troubled(self, attempt: int) -> bool:
        """Whether another node has lost a rank; an error where the run is called off."""
        self._look()
        return any(self._line.read(_end(attempt)))

    def settle(self, attempt: int, how: str | None) -> str | None:
        """Tell how a rank of this node ended, if wrongly; who was the first of any node, once all have told."""
        told = self._gather(_end(attempt), how, asked=1)  # who is asked once waits for what the others still save
        return next((how for how in told if how), None)

    def newest(self, when: str, step: int) -> int:
        """Return the newest step that any node sees in the run folder: disks may show a file late."""
        return max(self._gather(f"newest {when}", step, asked=1))

    def call_off(self, error: BaseException) -> None:
        """End the run on the other nodes, for the reason that it ends here."""
        if not self._counts:
            return
        if isinstance(error, IthacaError):
            code, text = error.code, str(error)
        elif isinstance(error, KeyboardInterrupt):
            code, text = 1, f"the run was stopped on {self.name}"
        else:
            code, text = 1, f"the launcher on {self.name} failed ({type(error).__name__}: {error})"
        with contextlib.suppress(RunError, KeyboardInterrupt):
            self._line.pin(OFF, {"code": code, "text": text})

    def leave(self) -> None:
        """Say goodbye; who has the board stays until all have."""
        with contextlib.suppress(RunError, KeyboardInterrupt):
            self._line.pin(LEFT, self.name)
        if self._hosts:
            until = time.monotonic() + LEAVE_SECONDS
            while len(self._line.read(LEFT)) < len(self._line.read(CAME)) and time.monotonic() < until:
                time.sleep(POLL_SECONDS / 4)

    def _look(self) -> None:
        if off := self._line.read(OFF):
            _end_with(**off[0])

    def _gather(self, topic: str, note: Any, asked: int = 0, until: float | None = None) -> list[Any]:
        """Pin a note, and wait until every node has pinned its own, or one is asked to stop more often than `asked`."""
        notes = self._line.pin(topic, note)
        while len(notes) < self.nodes:
            self._look()
            if self._asked() > asked:
                raise KeyboardInterrupt
            if until and time.monotonic() > until:
                _missing(len(notes), self.nodes, self._place)
            time.sleep(POLL_SECONDS)
            notes = self._line.read(topic)
        return notes


def _make_store(host: str) -> dist.TCPStore:
    """At a port that is free; torch's own socket would take connections on every interface, whatever the host."""
    try:
        listener = listen(host, 0)
        assert listener, "where the board is, a store can be"
        port, fd = listener.getsockname()[1], listener.detach()
        wait = timedelta(seconds=STORE_SECONDS)
        return dist.TCPStore(host, port, None, True, timeout=wait, wait_for_workers=False, master_listen_fd=fd)
    except (OSError, dist.DistError) as problem:
        reason = first_line(problem)
        raise RunError(
            f"the store of the ranks cannot be opened at {host} ({reason}): another address of this machine may work "
            "as --meet, or more open files, as ulimit -n 4096"
        ) from None


def _reach(place: Place, nodes: int, asked: Callable[[], int]) -> Line:
    """The board's line, as soon as the node that has it is there."""
    until = time.monotonic() + COME_SECONDS
    while True:
        try:
            return Line(place.host, place.port, lambda: asked() > 1)
        except OSError:
            if asked():
                raise KeyboardInterrupt from None
            if time.monotonic() > until:
                _missing(1, nodes, place)
            time.sleep(POLL_SECONDS)


def _missing(count: int, nodes: int, place: Place) -> NoReturn:
    raise RunError(
        f"{count} of {nodes} nodes came to {place} within {format_seconds(COME_SECONDS)}: start the same line on "
        "all of them, that of --meet included"
    )


def _end_with(code: int, text: str) -> NoReturn:
    raise RunError(text) if code == RunError.code else IthacaError(text)


def _end(attempt: int) -> str:
    return f"end {attempt}"
