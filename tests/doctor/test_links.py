"""Collectives inside a node and across nodes, by the nodes that the ranks report."""

import socket
from dataclasses import replace

from ithaca.doctor import links
from ithaca.doctor.exam import Exam, Found, begin
from ithaca.parallel.mesh import mesh
from tests.doctor.small import SIZES


def test_groups() -> None:
    assert links._inside(("a", "b", "a", "b")) == [[0, 2], [1, 3]]
    assert links._across(("a", "b", "a", "b")) == [[0, 1], [2, 3]]
    assert links._across(("a", "a", "a", "b")) == [[0, 3], [1], [2]]
    assert links._across(("a", "a")) == [[0], [1]]


def examine(nodes: str) -> tuple[Exam, Found, Found]:
    """In every rank; `nodes` has a letter for each."""
    grid, honest = mesh(device="cpu"), socket.gethostname
    socket.gethostname = lambda: nodes[grid.rank]
    try:
        exam = replace(begin(grid, True, None), sizes=SIZES)
    finally:
        socket.gethostname = honest
    found = links.examine(exam)
    told = exam.tell("links", found)
    conclusion = links.conclude(exam, told, {}) if told else {}
    return (exam.nodes, exam.node_ranks, exam.local_rank), found, conclusion  # pyrefly: ignore


def test_two_nodes(ranks) -> None:
    results = ranks(4).run(examine, "abab")
    assert [seat for seat, _, _ in results] == [
        (("a", "b", "a", "b"), here, place) for here, place in (([0, 2], 0), ([1, 3], 0), ([0, 2], 1), ([1, 3], 1))
    ]
    _, _, found = results[0]
    for where in ("inside", "across"):
        for size in ("4096", "65536"):
            slowest = {name: min(theirs[where][size][name] for _, theirs, _ in results) for name in links.COLLECTIVES}
            assert found[where][size] == slowest
    assert links.link_rate(found, "across") == found["across"]["65536"]["all_to_all"]
    assert len(links.lines(found)) == 6


def test_a_node_with_one_rank(ranks) -> None:
    """Two ranks are alone in their place on a node, and one is alone on its node: they have no such link."""
    results = ranks(4).run(examine, "aaab")
    _, _, found = results[0]
    assert {where: [bool(theirs[where]["4096"]) for _, theirs, _ in results] for where in ("inside", "across")} == {
        "inside": [True, True, True, False],
        "across": [True, False, False, True],
    }
    assert found.keys() == {"inside", "across"}


def count(size: int) -> dict[str, int]:
    grid = mesh(device="cpu")
    calls = links._calls(links.Group(grid.group), size, grid.device)
    for call, _ in calls.values():
        call()
    return {name: sent for name, (_, sent) in calls.items()}


def test_bytes_that_a_rank_sends(ranks) -> None:
    """Of 1200 bytes on 4 ranks, 900 go to others; around a ring, all do."""
    assert ranks(4).run(count, 1200)[0] == {
        "all_to_all": 900,
        "all_gather": 900,
        "reduce_scatter": 900,
        "send_recv": 1200,
    }
