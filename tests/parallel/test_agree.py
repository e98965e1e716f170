"""What ranks tell each other before they go on."""

import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ithaca.parallel.agree import first_then_others, on_this_node


def on_uneven_nodes() -> tuple[int, int]:
    """Ranks 0, 1 and 2 on one node, rank 3 on another; each needs 1, 10, 100, 1000 bytes."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "first" if rank < 3 else "second")
        assert dist.group.WORLD is not None
        return on_this_node(dist.group.WORLD, 10**rank)


def test_only_ranks_of_a_node_share_its_memory(ranks) -> None:
    assert ranks(4).run(on_uneven_nodes) == [(111, 3)] * 3 + [(1000, 1)]


def compile_on_two_nodes(folder: str) -> bool:
    """Ranks 0 and 1 on one node, 2 and 3 on another; ranks 0 and 1 make different things."""
    rank = dist.get_rank()
    what = {0: "a", 1: "b", 2: "a", 3: "a"}[rank]
    node = "first" if rank < 2 else "second"
    file, found = Path(folder) / f"{node}-{what}", []

    def work() -> None:
        found.append(file.exists())
        if not found[0]:
            time.sleep(0.2)
            file.write_text("made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: node)
        assert dist.group.WORLD is not None
        first_then_others(dist.group.WORLD, what, work)
    assert len(found) == 1
    return found[0]


def test_one_rank_of_a_node_before_the_others(ranks, tmp_path) -> None:
    """Rank 3 finds what rank 2 made on its node; rank 1 makes something else, and rank 2 is on another node."""
    assert ranks(4).run(compile_on_two_nodes, str(tmp_path)) == [False, False, False, True]
