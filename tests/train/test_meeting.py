"""Launchers that meet: who gets which ranks, what ends a meeting, and what a user reads then. Threads for nodes."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ithaca.base.errors import ConfigError, IthacaError, RunError
from ithaca.train import board, nodes
from ithaca.train.board import CAME, GREETING, Board, Line, host_board
from ithaca.train.nodes import ALONE, Meeting, Place, meet, read_place


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return trial.getsockname()[1]


@pytest.fixture
def place() -> Place:
    return Place("127.0.0.1", free_port())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """patient(2): so many seconds for nodes to come."""
    return lambda seconds: monkeypatch.setattr(nodes, "COME_SECONDS", seconds)


def never() -> int:
    return 0


@contextmanager
def launchers(*works: Callable[[], Any]) -> Iterator[list[Future]]:
    with ThreadPoolExecutor(len(works)) as pool:
        yield [pool.submit(work) for work in works]


def attend(
    place: Place,
    count: int,
    ranks: int,
    work: Callable[[Meeting], Any],
    asked: Callable[[], int] = never,
    steps: str = "3",
) -> Any:
    with meet(place, count, asked) as meeting:
        meeting.number_ranks(ranks, {"train.seed": "0", "train.steps": steps})
        return work(meeting)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", 29500),
        ("node0:4321", "node0", 4321),
        ("[::1]:80", "::1", 80),
        ("[fe80::1]", "fe80::1", 29500),
    ],
)
def test_places(text: str, host: str, port: int) -> None:
    assert read_place(text) == Place(host, port)


@pytest.mark.parametrize("text", ["", ":80", "node0:", "node0:0", "node0:65536", "node0:http", "::1", "[::1", "[]:3"])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--meet '.*' names (no host|port)"):
        read_place(text)


def test_every_rank_has_a_number_and_all_the_same_store(place: Place) -> None:
    """Nodes may have the same name, and launchers the same process id, as in containers."""

    def work(meeting: Meeting) -> list[tuple[str, ...]]:
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return [tuple(one[name] for name in names) for one in meeting.environments(0)]

    with launchers(*(lambda ranks=ranks: attend(place, 3, ranks, work) for ranks in (2, 2, 2))) as ends:
        found = sorted(rank for end in ends for rank in end.result())
    assert [int(rank[0]) for rank in found] == list(range(6))
    assert all(int(local) < int(here) for _, local, here, *_ in found)
    assert len({rank[3:] for rank in found}) == 1
    assert found[0][3:5] == ("6", "127.0.0.1")


def test_an_attempt_ends_for_all_by_what_happened_first(place: Place) -> None:
    def work(meeting: Meeting, how: str | None) -> list[str | None]:
        if how is None:
            while not meeting.troubled(0):
                time.sleep(0.01)
        return [meeting.settle(0, how), meeting.settle(1, None)]

    well, ill = (lambda meeting, how=how: work(meeting, how) for how in (None, "rank 0 ended with code 1"))
    with launchers(lambda: attend(place, 2, 1, well), lambda: attend(place, 2, 1, ill)) as ends:
        for end in ends:
            assert end.result() == ["rank 0 ended with code 1", None]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("no such model"), 2, "no such model"),
        (RunError("out of memory"), 1, "out of memory"),
        (KeyboardInterrupt(), 1, "the run was stopped on "),
        (ValueError("odd"), 1, r"failed \(ValueError: odd\)"),
    ],
)
def test_what_ends_the_run_on_one_node_ends_it_on_all(place: Place, error: BaseException, code: int, text: str) -> None:
    def fail(_: Meeting) -> None:
        raise error

    with launchers(lambda: attend(place, 2, 1, fail), lambda: attend(place, 2, 1, lambda m: m.settle(0, None))) as ends:
        with pytest.raises(type(error)):
            ends[0].result()
        with pytest.raises(IthacaError, match=text) as other:
            ends[1].result()
    assert other.value.code == code


def test_a_node_that_never_comes(place: Place, patient) -> None:
    patient(0.5)
    sentence = rf"1 of 3 nodes came to {place} within 0.5 s: start the same line on all of them"
    with pytest.raises(RunError, match=sentence):
        attend(place, 3, 1, lambda _: None)
    with pytest.raises(RunError, match=r"1 of 2 nodes came to 192.0.2.1:29500 within 0.5 s"):
        nodes._reach(Place("192.0.2.1", 29500), 2, never)


def settle_with_a_late_one(place: Place, asked: Callable[[], int], patient: Callable[[float], None]) -> list[Future]:
    """One node has settled and waits; the other, which still saves, does so when the first has looked five times."""
    looked = threading.Event()
    looks = iter(range(5))

    def look() -> int:
        if next(looks, None) is None:
            looked.set()
        return asked()

    def save(meeting: Meeting) -> str | None:
        while not looked.wait(0.01):
            meeting.troubled(0)
        return meeting.settle(0, None)

    def settle(meeting: Meeting) -> str | None:
        patient(0.01)  # now that all have come
        meeting._asked = look
        return meeting.settle(0, None)

    with launchers(lambda: attend(place, 2, 1, settle), lambda: attend(place, 2, 1, save)) as ends:
        return ends


def test_a_node_that_saves_for_long_is_waited_for(place: Place, patient) -> None:
    """Also by a node that was asked to stop meanwhile; asked twice, it ends all."""
    asked = iter([0, 0])
    assert [end.result() for end in settle_with_a_late_one(place, lambda: next(asked, 1), patient)] == [None, None]
    meeting = Meeting(Board(), place, 2, lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        meeting.settle(0, None)


def test_a_request_to_stop_while_waiting(place: Place) -> None:
    asked = iter([0, 0, 0])
    with pytest.raises(KeyboardInterrupt):
        attend(place, 2, 1, lambda _: None, lambda: next(asked, 1))
    with pytest.raises(KeyboardInterrupt):
        nodes._reach(Place("127.0.0.1", free_port()), 2, lambda: 1)


def test_a_launcher_that_is_killed_is_missed_at_once(place: Place) -> None:
    sentence = "the launcher on node7 does not answer any more: start the same line again"

    def miss(meeting: Meeting) -> None:
        gone = Line(place.host, place.port, lambda: False)
        gone.pin(CAME, {"name": "node7", "nodes": 2})
        gone.close()
        meeting.settle(0, None)

    with pytest.raises(RunError, match=sentence), meet(place, 2, never) as meeting:
        miss(meeting)


def test_the_node_that_has_the_board_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = threading.Thread(target=lambda: server.accept()[0].sendall(GREETING))
        line.start()
        found = Line("127.0.0.1", server.getsockname()[1], lambda: False)
        line.join()
        with pytest.raises(RunError, match="where nodes meet, does not answer any more"):
            found.pin(CAME)
        found.close()


def test_different_numbers_of_nodes(place: Place) -> None:
    with launchers(*(lambda count=count: attend(place, count, 1, lambda _: None) for count in (2, 3))) as ends:
        for end in ends:
            with pytest.raises(IthacaError, match=r"--nodes is \d on .*, but \d on .*: give the same number") as error:
                end.result()
            assert error.value.code == 2


def test_one_node_too_many_is_turned_away(place: Place) -> None:
    """And the run goes on."""

    def work(meeting: Meeting) -> str | None:
        with pytest.raises(ConfigError, match=r"the 2 nodes of a run have met at .* already"):
            attend(place, 2, 1, lambda _: None)
        return meeting.settle(0, None)

    with launchers(*(lambda: attend(place, 2, 1, work) for _ in range(2))) as ends:
        assert [end.result() for end in ends] == [None, None]


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_something_else_uses(monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    monkeypatch.setattr(board, "GREETING_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connections = []

        def serve() -> None:
            connections.append(server.accept()[0])
            connections[0].sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(
            ConfigError, match=rf"127.0.0.1:{port} is in use by something else .*, as --meet 127.0.0.1:"
        ):
            attend(Place("127.0.0.1", port), 2, 1, lambda _: None)
        thread.join()
        connections[0].close()


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"5\n",
    b"[[]]\n",
    b'["came", 3]\n',
    b"\xff\n",
    b"",
    200000 * b"[" + b"\n",
    b'["' + (board.LONGEST - 2) * b"x" + b'"]\n',
]


def test_strangers_at_the_board_do_no_harm(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    found = host_board(place.host, place.port)
    assert found
    for words in STRANGE:
        with socket.create_connection((place.host, place.port)) as stranger:
            answer = b""
            with contextlib.suppress(OSError):  # it may be shown the door while it speaks
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                while part := stranger.recv(4096):
                    answer += part
            assert answer in (b"", GREETING)
    line = Line(place.host, place.port, lambda: False)
    assert line.pin(CAME, {"name": "node0"}) == [{"name": "node0"}]
    line.close()
    found.close()
    assert capfd.readouterr().err == ""


def listening() -> set[str]:
    return {f"{one.laddr.ip} {one.laddr.port}" for one in psutil.Process().net_connections() if one.status == "LISTEN"}


def test_one_node_needs_no_board_and_its_ranks_come_from_nowhere_else() -> None:
    before = listening()
    with meet(ALONE, 1, never) as meeting:
        meeting.number_ranks(2, {})
        assert listening() == before
        first, second = meeting.environments(0)
        assert listening() - before == {f"127.0.0.1 {first['MASTER_PORT']}"}
        assert (first["MASTER_ADDR"], second["RANK"], second["WORLD_SIZE"]) == ("127.0.0.1", "1", "2")
        assert not meeting.troubled(0)
        assert meeting.settle(0, "rank 1") == "rank 1"


def test_a_board_on_the_loopback_is_for_this_machine_alone(place: Place) -> None:
    for host, interfaces in (("127.0.0.1", {"127.0.0.1"}), (socket.gethostname(), {"0.0.0.0", "::"})):
        found = host_board(host, place.port)
        assert found
        assert any(f"{interface} {place.port}" in listening() for interface in interfaces)
        found.close()


def test_a_kernel_without_ipv6(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = -1, *args: Any, **more: Any):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args, **more)

    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", place.port, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", place.port))
    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    found = host_board("localhost", place.port)
    assert found
    found.close()


def paused_board(answers: threading.Event) -> tuple[int, threading.Thread]:
    """One that answers its first request only after a while."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with server, connection:
            connection.sendall(GREETING)
            connection.recv(4096)
            answers.wait()
            with contextlib.suppress(OSError):
                connection.sendall(b"[1]\n")

    thread = threading.Thread(target=serve)
    thread.start()
    return server.getsockname()[1], thread


def test_a_launcher_that_is_paused_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one is asked twice to stop; then the line is of no use any more."""
    monkeypatch.setattr(board, "LOOK_SECONDS", 0.01)
    answers = threading.Event()
    port, thread = paused_board(answers)
    silences = iter(range(3))

    def look() -> bool:
        if next(silences, None) is None:
            answers.set()
        return False

    line = Line("127.0.0.1", port, look)
    assert line.read("topic") == [1]
    line.close()
    thread.join()

    answers.clear()
    port, thread = paused_board(answers)
    line = Line("127.0.0.1", port, lambda: True)
    with pytest.raises(KeyboardInterrupt):
        line.read("topic")
    with pytest.raises(RunError, match="does not answer any more"):
        line.read("topic")
    answers.set()
    thread.join()


def test_a_machine_that_is_gone_breaks_the_connection(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, and within two minutes, as the system is told; nothing else limits how long one is silent."""
    ends: list[dict[str, int]] = []
    told = board._break_when_dead

    def watched(connection: socket.socket) -> None:
        told(connection)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        ends.append({name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names})
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    monkeypatch.setattr(board, "_break_when_dead", watched)
    found = host_board(place.host, place.port)
    assert found
    line = Line(place.host, place.port, lambda: False)
    line.read("topic")
    line.close()
    found.close()
    assert len(ends) == 2
    for end in ends:
        assert end["TCP_KEEPIDLE"] + end["TCP_KEEPINTVL"] * end["TCP_KEEPCNT"] == 120
        assert end["TCP_USER_TIMEOUT"] == 120000
    assert board._Visit.timeout is None


def test_nodes_with_different_options(place: Place) -> None:
    def work(meeting: Meeting) -> str | None:
        return meeting.settle(0, None)

    with launchers(*(lambda steps=steps: attend(place, 2, 1, work, steps=steps) for steps in "35")) as ends:
        for end in ends:
            sentence = r"train\.steps is [35] on .*, but [35] on .*: start the same line on all nodes"
            with pytest.raises(IthacaError, match=sentence) as error:
                end.result()
            assert error.value.code == 2


def test_a_store_that_cannot_be_reached_from_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistNetworkError("The client socket has failed\nto connect")

    monkeypatch.setattr(nodes, "dist", SimpleNamespace(TCPStore=fail, DistError=dist.DistError))
    with pytest.raises(RunError, match=r"cannot be opened at 127\.0\.0\.1 \(The client socket has failed\): another"):
        nodes._make_store("127.0.0.1")


def test_a_host_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"the host 'node0\.invalid' of --meet is not known here"):
        attend(Place("node0.invalid", 29500), 2, 1, lambda _: None)


def test_a_host_elsewhere_has_the_board() -> None:
    assert host_board("192.0.2.1", 29500) is None  # an address of documentation, nobody's
