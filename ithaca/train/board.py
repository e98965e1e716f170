"""A notice board over TCP: launchers pin notes to it and read what others have pinned. Nothing is ever taken down.

Each node keeps one connection for as long as it takes part, so the board knows at once of a launcher that has ended,
and after `SILENT_SECONDS` of one that cannot be reached: it then pins to OFF by itself, which all others read. A note
is one line of JSON, so that nothing but data can come in. It costs a thread and some requests a second for each node.

torch's TCPStore could hold the notes as well, but it never learns who has gone, and a client of it that meets something
else at its port waits for ever or prints at length.
"""

import contextlib
import errno
import json
import socket
import threading
from collections import defaultdict
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from ithaca.errors import ConfigError, RunError

GREETING = b"ithaca board 1\n"
GREETING_SECONDS = 10.0  # in which who listens there has said that it is a board
SILENT_SECONDS = 120.0  # after which a node, which reads several times a second, cannot be reached any more

AGAIN = "start the same line again on all nodes"

CAME, LEFT, OFF = "came", "left", "off"  # topics: who takes part, who has said goodbye, and why all is over


class Board(ThreadingTCPServer):
    """The notes by their topic, served by threads of this process until it is closed."""

    daemon_threads, block_on_close = True, False

    def __init__(self, listener: socket.socket):
        super().__init__(listener.getsockname()[:2], _Visit, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._notes: dict[str, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    def pin(self, topic: str, *notes: Any) -> list[Any]:
        """All notes on the topic, these the last."""
        with self._lock:
            self._notes[topic] += notes
            return list(self._notes[topic])

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Visit(StreamRequestHandler):
    """One node's connection. A request is a list: a topic and the notes to pin there; the answer is all its notes."""

    timeout = SILENT_SECONDS
    server: Board

    def handle(self) -> None:
        name = None  # of a node that takes part and has not said goodbye
        # A line that breaks or is silent too long, or a stranger who says something else
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            self.wfile.write(GREETING)
            for line in self.rfile:
                topic, *notes = json.loads(line)
                if topic == CAME and notes:
                    name = notes[0]["name"]
                elif topic == LEFT and notes:
                    name = None
                self.wfile.write(json.dumps(self.server.pin(topic, *notes)).encode() + b"\n")
        if name is not None:
            self.server.pin(LEFT, name)
            self.server.pin(OFF, {"code": 1, "text": f"the launcher on {name} does not answer any more: {AGAIN}"})


def host_board(host: str, port: int) -> Board | None:
    """A board at this port, where the host is this machine and nothing listens there yet."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as problem:
        raise ConfigError(
            f"the host '{host}' of --meet is not known here ({problem.strerror}): name one of the nodes, or its address"
        ) from None
    for family, _, _, _, address in addresses:
        if _is_here(family, str(address[0])):
            # On every interface: a machine's own name may stand for 127.0.1.1 there, and others come from elsewhere
            try:
                return Board(socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6))
            except OSError as problem:
                if problem.errno == errno.EADDRINUSE:
                    return None  # by another launcher on this machine, or by something else: the greeting tells
                raise ConfigError(f"port {port} of --meet cannot be used here ({problem.strerror})") from None
    return None


def _is_here(family: int, address: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    with socket.socket(family) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
        return True


class Line:
    """A node's connection to the board."""

    def __init__(self, host: str, port: int):
        """Raises OSError where nobody listens yet, ConfigError where it is no board."""
        self._where = f"{host}:{port}"
        self._socket = socket.create_connection((host, port), timeout=GREETING_SECONDS)
        self._file = self._socket.makefile("rb")
        try:
            greeting = self._file.readline(len(GREETING))
        except OSError:
            greeting = b""
        if greeting != GREETING:
            self.close()
            raise ConfigError(
                f"{self._where} is in use by something else than a launcher of this version: "
                f"name another port, as --meet {host}:{port + 1 if port < 65535 else port - 1}"
            )
        self._socket.settimeout(SILENT_SECONDS)

    def pin(self, topic: str, *notes: Any) -> list[Any]:
        """Pin notes and read the topic."""
        try:
            self._socket.sendall(json.dumps([topic, *notes]).encode() + b"\n")
            answer = self._file.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise RunError(f"the launcher at {self._where}, where nodes meet, does not answer any more: {AGAIN}")
        return json.loads(answer)

    def read(self, topic: str) -> list[Any]:
        return self.pin(topic)

    def close(self) -> None:
        self._file.close()
        self._socket.close()
