"""Requests to stop: what counts as one, and who ends at the second."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

import ithaca
from ithaca.train.ranks import stop
from ithaca.train.ranks.stop import SIGNALS, Requests, StopRequest
from tests.nursery import Nursery


def test_signals_that_come_together_are_one_request_and_a_closed_terminal_is_no_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = Requests()
    assert [requests.add(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)] == [True, False, False]
    monkeypatch.setattr(stop, "SAME_SECONDS", -1.0)
    assert [requests.add(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)] == [False, True, False]
    assert requests.count == 2


def be_asked(launched: bool, *numbers: int) -> None:
    """Each signal a request of its own."""
    stop.SAME_SECONDS = -1.0
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started under
    StopRequest(SimpleNamespace(first_on_node=True), launched)  # pyrefly: ignore
    for number in numbers:
        os.kill(os.getpid(), number)
    print("still there")


def test_only_a_rank_without_a_launcher_ends_itself(nursery: Nursery) -> None:
    """As a shell has it: 128 and the number of SIGINT."""
    for launched, code in ((True, 0), (False, 130)):
        (end,) = nursery.job(be_asked, launched, signal.SIGINT, signal.SIGTERM)
        assert end.code == code, end
        assert ("still there" in end.out) == launched
        assert end.err.count("Finishing this step") == 1
    (end,) = nursery.job(be_asked, False, signal.SIGHUP)
    assert end.code == 0
    assert "Finishing this step" in end.err


class Busy:
    """A stream that the main thread is writing to when the signal comes."""

    def write(self, _: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name=2>")

    flush = isatty = write


def be_asked_while_printing() -> None:
    _held = sys.stdout, sys.stderr  # which would close descriptors 1 and 2
    sys.stdout = sys.stderr = Busy()  # pyrefly: ignore
    be_asked(False, signal.SIGINT, signal.SIGTERM)


def test_signals_that_come_while_a_line_is_printed(nursery: Nursery) -> None:
    (end,) = nursery.job(be_asked_while_printing)
    assert end.code == 130
    said = ["Finishing this step, then saving. Ctrl-C again stops at once.", "Stopped at once."]
    assert [line for line in end.err.splitlines() if line] == said


def be_hung_up_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest(SimpleNamespace(first_on_node=True), launched=False)  # pyrefly: ignore
    os.kill(os.getpid(), signal.SIGHUP)
    request.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nohup_is_respected(nursery: Nursery) -> None:
    (end,) = nursery.job(be_hung_up_under_nohup)
    assert (end.code, end.err) == (0, "")


def be_asked_when_nobody_listens() -> None:
    """The terminal that was closed had the errors too."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    be_asked(True, signal.SIGHUP)


def test_a_terminal_that_was_closed(nursery: Nursery) -> None:
    (end,) = nursery.job(be_asked_when_nobody_listens)
    assert (end.code, end.out) == (0, "still there\n")


def asked_on_one_rank(asked: int) -> tuple[bool, bool]:
    """Whether the ranks agree to stop before and after a signal that reaches one of them."""
    grid = ithaca.mesh(device="cpu")
    request = StopRequest(grid, launched=True)
    before = request.agreed()
    if grid.rank == asked:
        os.kill(os.getpid(), signal.SIGTERM)
    after = request.agreed()
    request.close()
    return before, after


@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_stop_when_one_is_asked(ranks, asked: int) -> None:
    assert ranks(3).run(asked_on_one_rank, asked) == [(False, True)] * 3


def test_a_rank_that_has_lost_another_one_ignores_signals() -> None:
    """Also when it has closed the request: torchrun sends SIGTERM while it calls the roll."""
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    try:
        request = StopRequest(SimpleNamespace(first_on_node=True), launched=False)  # pyrefly: ignore
        request.ignore()
        request.close()
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert request._requests.count == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
