"""A notice board over TCP: launchers pin notes to it and read what others have pinned. Nothing is ever taken down.

Who has the board pins to it directly. Each other node keeps one connection for as long as it takes part, so the board
knows at once of a launcher that has ended, and after `DEAD_SECONDS` of a machine that cannot be reached: it then pins
to OFF by itself, which all others read. A launcher that says nothing while its machine still answers is paused, and is
waited for. A note is one line of JSON, so that nothing but data can come in. It costs a thread and some requests a
second for each node.

torch's TCPStore could hold the notes as well, but it never learns who has gone, and a client of it that meets something
else at its port waits for ever or prints at length.
"""

import contextlib
import errno
import ipaddress
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from ithaca.base.errors import ConfigError, RunError

GREETING = b"ithaca board 1\n"
GREETING_SECONDS = 10.0  # in which who listens there has said that it is a board
DEAD_SECONDS = 120  # after which a machine that acknowledges nothing is gone
PROBES = 8  # in that time, while nothing is sent
LOOK_SECONDS = 0.2  # between two looks whether to wait on for an answer; signals are handled then
LONGEST = 2**20  # bytes of a request

AGAIN = "start the same line again on all nodes"

CAME, LEFT, OFF = "came", "left", "off"  # topics: who takes part, who has said goodbye, and why all is over


class Board:
    """The notes by their topic; where it has a listener, served by threads of this process until it is closed."""

    def __init__(self, listener: socket.socket | None = None):
        self._notes: dict[str, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()
        self._server = _Server(listener, self) if listener else None

    def pin(self, topic: str, *notes: Any) -> list[Any]:
        """All notes on the topic, these the last."""
        with self._lock:
            self._notes[topic] += notes
            return list(self._notes[topic])

    def read(self, topic: str) -> list[Any]:
        return self.pin(topic)

    def close(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingTCPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, listener: socket.socket, board: Board):
        super().__init__(listener.getsockname()[:2], _Visit, bind_and_activate=False)
        self.socket.close()
        self.socket, self.board = listener, board
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()


class _Visit(StreamRequestHandler):
    """One node's connection. A request is a list: a topic and the notes to pin there; the answer is all its notes."""

    server: _Server

    def handle(self) -> None:
        board, name = self.server.board, None  # the name of a node that takes part and has not said goodbye
        # A line that breaks, or a stranger who says something else
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            _break_when_dead(self.request)
            self.wfile.write(GREETING)
            while (line := self.rfile.readline(LONGEST)).endswith(b"\n"):
                topic, *notes = json.loads(line)
                if topic == CAME and notes:
                    name = notes[0]["name"]
                elif topic == LEFT and notes:
                    name = None
                self.wfile.write(json.dumps(board.pin(topic, *notes)).encode() + b"\n")
        if name is not None:
            board.pin(LEFT, name)
            board.pin(OFF, {"code": 1, "text": f"the launcher on {name} does not answer any more: {AGAIN}"})


def _break_when_dead(connection: socket.socket) -> None:
    """Have the system end a connection whose other machine is gone, whether or not something is on its way there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, DEAD_SECONDS // PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)


def host_board(host: str, port: int) -> Board | None:
    """A board at this port, where the host is this machine and nothing listens there yet."""
    try:
        listener = listen(host, port)
    except socket.gaierror as problem:
        raise ConfigError(
            f"the host '{host}' of --meet is not known here ({problem.strerror}): name one of the nodes, or its address"
        ) from None
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            return None  # by another launcher on this machine, or by something else: the greeting tells
        raise ConfigError(f"port {port} of --meet cannot be used here ({problem.strerror})") from None
    return Board(listener) if listener else None


def listen(host: str, port: int) -> socket.socket | None:
    """A socket at this port, or at any that is free (0); None where the host is another machine."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        here = str(address[0])
        if _is_here(family, here):
            # On every interface: a machine's own name may stand for 127.0.1.1 there, and others come from elsewhere
            interface = here if host in (here, "localhost") and ipaddress.ip_address(here).is_loopback else ""
            both = family == socket.AF_INET6 and not interface
            return socket.create_server((interface, port), family=family, dualstack_ipv6=both)
    return None


def _is_here(family: int, address: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    try:
        with socket.socket(family) as trial:  # there may be no IPv6, though a name has such an address
            trial.bind((address, 0))
    except OSError:
        return False
    return True


class Line:
    """A node's connection to the board."""

    def __init__(self, host: str, port: int, given_up: Callable[[], bool]):
        """Raises OSError where nobody listens yet, ConfigError where it is no board.

        `given_up` is asked now and then while an answer is waited for.
        """
        self._where, self._given_up = f"{host}:{port}", given_up
        self._socket, self._rest = socket.create_connection((host, port), timeout=GREETING_SECONDS), b""
        with contextlib.suppress(OSError):
            while len(self._rest) < len(GREETING) and (part := self._socket.recv(len(GREETING) - len(self._rest))):
                self._rest += part
        if self._rest != GREETING:
            self.close()
            raise ConfigError(
                f"{self._where} is in use by something else than a launcher of this version: "
                f"name another port, as --meet {host}:{port + 1 if port < 65535 else port - 1}"
            )
        self._rest = b""
        self._socket.settimeout(LOOK_SECONDS)
        _break_when_dead(self._socket)

    def pin(self, topic: str, *notes: Any) -> list[Any]:
        """Pin notes and read the topic; KeyboardInterrupt, and no further answers, where that is given up."""
        try:
            self._socket.sendall(json.dumps([topic, *notes]).encode() + b"\n")
            return json.loads(self._answer())
        except OSError:
            raise RunError(
                f"the launcher at {self._where}, where nodes meet, does not answer any more: {AGAIN}"
            ) from None

    def _answer(self) -> bytes:
        """A line, for which this waits as long as the connection holds: who has the board may be paused."""
        while b"\n" not in self._rest:
            try:
                part = self._socket.recv(2**16)
            except TimeoutError as silence:
                if silence.errno:  # the system's own: nobody is there any more
                    raise
                if self._given_up():
                    self.close()
                    raise KeyboardInterrupt from None
                continue
            if not part:
                raise ConnectionError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def read(self, topic: str) -> list[Any]:
        return self.pin(topic)

    def close(self) -> None:
        self._socket.close()
