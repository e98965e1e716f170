"""What ranks tell each other before they go on."""

import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.attention.kernels.choose import make_kernel
from ithaca.base.errors import PlanError
from ithaca.parallel.agree import first_then_others, on_this_node
from tests.models import make_model, save


def on_uneven_nodes() -> tuple[int, int]:
    """Ranks 0, 1 and 2 on one node, rank 3 on another; each needs 1, 10, 100, 1000 bytes."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "first" if rank < 3 else "second")
        assert dist.group.WORLD is not None
        return on_this_node(dist.group.WORLD, 10**rank)


def test_only_ranks_of_a_node_share_its_memory(ranks) -> None:
    assert ranks(4).run(on_uneven_nodes) == [(111, 3)] * 3 + [(1000, 1)]


def kernels_of_two_nodes(folder: Path) -> str:
    """One node has a package that the other has not: `auto` takes another kernel there."""
    name = ("torch-cpu", "naive")[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.assemble.model.choose_kernel", lambda *_: make_kernel(name))
        with pytest.raises(PlanError) as refused:
            ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    return str(refused.value)


def test_ranks_attend_with_one_kernel(ranks, tmp_path: Path) -> None:
    """Otherwise those whose kernel compiles would wait for the others for ever."""
    folder = save(make_model("llama3"), tmp_path / "in")
    for text in ranks(2).run(kernels_of_two_nodes, folder):
        assert "rank 1 would attend with kernel 'naive' and rank 0 with 'torch-cpu': set plan.kernel" in text


def prepared(folder: Path, options: dict) -> list[tuple[int, int]]:
    """The heads that the kernel is prepared for by a pass that nothing was allocated for, and what it then sees."""
    mesh = ithaca.mesh(ulysses=dist.get_world_size(), device="cpu")
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**options), mesh)
    inner, wanted, seen = model.kernel, [], set()

    class Watched(type(inner)):
        def prepare(self, device, dtype, heads, kv_heads, head_size, rectangles) -> None:
            assert (device, dtype, head_size) == (mesh.device, torch.float32, model.spec.head_size)
            assert not rectangles
            wanted.append((heads, kv_heads))

        def forward(self, q, k, *args):
            seen.add((q.shape[1], k.shape[1]))
            return super().forward(q, k, *args)

    model.kernel = Watched()
    model.kernel.name = "flash4"  # one that is compiled
    tokens = torch.arange(64) % 50
    model(model.shard(tokens, tokens)).backward()
    model.logits(tokens)
    assert seen == {*wanted}
    return wanted


def test_every_rank_prepares_for_the_heads_that_it_attends_with(ranks, tmp_path: Path) -> None:
    """Also in rounds of heads, where the last rank has none left in the last round."""
    folder = save(make_model("llama3", num_attention_heads=6, num_key_value_heads=3), tmp_path / "in")
    whole = {"recipe": "alst"}
    assert ranks(2).run(prepared, folder, whole) == [[(4, 2)], [(2, 1)]]
    rounds = {"recipe": "untied", "heads": 2}
    assert ranks(2).run(prepared, folder, rounds) == [[(1, 1)], [(1, 1)]]


def fail_on_one_rank(at: int) -> tuple[str, bool]:
    """Rank 0 works before rank 1; an error of either is raised on both."""
    worked = []

    def work() -> None:
        worked.append(True)
        if dist.get_rank() == at:
            raise PlanError("no compiler")

    assert dist.group.WORLD is not None
    with pytest.raises(PlanError) as raised:
        first_then_others(dist.group.WORLD, "a", work)
    return str(raised.value), bool(worked)


def test_an_error_of_one_rank_is_raised_on_all(ranks) -> None:
    assert ranks(2).run(fail_on_one_rank, 0) == [("no compiler", True), ("no compiler", False)]
    assert ranks(2).run(fail_on_one_rank, 1) == [("rank 1: no compiler", True), ("no compiler", True)]


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
