"""What ranks tell each other before they go on."""

import socket

import pytest
import torch.distributed as dist

from ithaca.parallel.agree import on_this_node


def on_uneven_nodes() -> tuple[int, int]:
    """Ranks 0, 1 and 2 on one node, rank 3 on another; each needs 1, 10, 100, 1000 bytes."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "first" if rank < 3 else "second")
        assert dist.group.WORLD is not None
        return on_this_node(dist.group.WORLD, 10**rank)


def test_only_ranks_of_a_node_share_its_memory(ranks) -> None:
    assert ranks(4).run(on_uneven_nodes) == [(111, 3)] * 3 + [(1000, 1)]
