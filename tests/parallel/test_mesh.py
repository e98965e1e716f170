"""Meshes that do not fit, and ranks that do not agree: the same sentence on every rank, no hang."""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.parallel import mesh
from ithaca.parallel.agree import least, same_everywhere, together
from ithaca.parallel.axes import Axes
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import Mesh, alone, describe_crossing
from tests.models import make_model, save
from tests.nursery import Nursery


def sentence(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except ithaca.IthacaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mesh_sentence(sizes: dict[str, int]) -> str:
    return sentence(ithaca.mesh, **sizes)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"shard": 3}, "needs 3 ranks, but the job has 4: a job of 3 (--ranks 3) would fit, and so would mesh.shard=4"),
        ({"shard": 2, "ulysses": 4}, "mesh.shard=2 × mesh.ulysses=4 needs 8 ranks, but the job has 4: a job of 8"),
        ({"shard": 2, "ulysses": 3}, "needs 6 ranks, but the job has 4: a job of 6 (--ranks 6) would fit"),
        (
            {"ulysses": 3},
            "mesh.ulysses=3 needs 3 ranks, which do not divide the job's 4: 1, 2 or 4 would, and so would a job of 3 "
            "(--ranks 3)",
        ),
        ({"ring": 0}, "ring=0 is not a number of ranks: 1 or more is"),
        ({"shard": -4}, "shard=-4 is not a number of ranks"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
    ],
)
def test_meshes_that_do_not_fit(ranks, sizes: dict[str, int], wanted: str) -> None:
    for found in ranks(4).run(mesh_sentence, sizes):
        assert found.startswith("PlanError: ")
        assert wanted in found


def without_gloo() -> str:
    kept = dist.get_backend_config
    dist.get_backend_config = lambda: "cuda:nccl"
    try:
        return sentence(ithaca.mesh)
    finally:
        dist.get_backend_config = kept


def test_a_job_that_cannot_agree_on_the_host(ranks) -> None:
    for found in ranks(2).run(without_gloo):
        assert "begun with cuda:nccl alone" in found
        assert "begin it with 'cpu:gloo,cuda:nccl'" in found


def least_of_each() -> list[int]:
    rank = dist.get_rank()
    return least(dist.group.WORLD, 10 + rank, 10 - rank)


def test_the_least_over_ranks(ranks) -> None:
    assert ranks(3).run(least_of_each) == [[10, 8]] * 3


def coordinates() -> tuple[int, ...]:
    mesh = ithaca.mesh(replicate=2, device="cpu")
    return mesh.data_ranks, mesh.data_rank, mesh.parameter_ranks, mesh.parameter_rank, mesh.size


def test_coordinates(ranks) -> None:
    assert ranks(4).run(coordinates) == [(4, 0, 2, 0, 4), (4, 1, 2, 1, 4), (4, 2, 2, 0, 4), (4, 3, 2, 1, 4)]


def context_in_dense() -> str:
    return sentence(ithaca.apply, ithaca.load_model("tiny"), ithaca.Plan(), ithaca.mesh(ulysses=2))


def test_dense_has_no_context_ranks(ranks) -> None:
    for found in ranks(2).run(context_in_dense):
        assert "ulysses 2 × ring 1: set both to 1 and shard to 2" in found


def other_plans() -> str:
    plan = ithaca.Plan(checkpoint=("full", "none")[dist.get_rank() == 1])
    return sentence(ithaca.apply, ithaca.load_model("tiny"), plan, ithaca.mesh())


def test_ranks_with_other_plans(ranks) -> None:
    assert set(ranks(2).run(other_plans)) == {
        "PlanError: rank 1 has another model or Plan than rank 0: every rank must be given the same"
    }


def other_seeds() -> str:
    return sentence(ithaca.apply, ithaca.load_model("tiny", seed=dist.get_rank()), ithaca.Plan(), ithaca.mesh())


def other_weights(folders: list[Path]) -> str:
    source = ithaca.load_model(folders[dist.get_rank()], "float32")
    return sentence(ithaca.apply, source, ithaca.Plan(), ithaca.mesh())


def other_meshes() -> str:
    return sentence(ithaca.mesh, replicate=1 + dist.get_rank())


def other_batches() -> str:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh())
    tokens = torch.full((2, 8), dist.get_rank())
    return sentence(model, model.shard(tokens, tokens))


def other_counts() -> str:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh())
    tokens = torch.zeros((2, 8), dtype=torch.long)
    return sentence(model, model.shard(tokens, tokens), valid_tokens=14 * dist.get_rank())


def test_ranks_that_were_given_other_things(ranks, tmp_path: Path) -> None:
    folders = [save(make_model("llama3", seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    for found in (ranks(2).run(other_seeds), ranks(2).run(other_weights, folders)):
        assert all("rank 1 has another model or Plan than rank 0" in text for text in found)
    assert all("rank 1 has another mesh than rank 0" in text for text in ranks(2).run(other_meshes))
    assert all("the ranks were given different batches" in text for text in ranks(2).run(other_batches))
    assert all("the ranks were given different valid_tokens" in text for text in ranks(2).run(other_counts))


def one_fails(kind: type[Exception]) -> str:
    def work() -> None:
        if dist.get_rank() == 1:
            raise kind("its file is gone")

    return sentence(together, ithaca.mesh().group, work)


def test_one_rank_fails_for_all(ranks) -> None:
    first, second = ranks(2).run(one_fails, ithaca.ModelError)
    assert (first, second) == ("ModelError: rank 1: its file is gone", "ModelError: its file is gone")


def surprise() -> str:
    try:
        return one_fails(OSError)
    except OSError as error:
        return f"raised here: {error}"


def test_a_surprise_on_one_rank_reaches_all(ranks) -> None:
    first, second = ranks(2).run(surprise)
    assert first == "RunError: rank 1: OSError: its file is gone"
    assert second == "raised here: its file is gone"


def agree_on_values() -> str:
    return sentence(same_everywhere, ithaca.mesh().group, "value", (1, "a"))


def test_ranks_that_agree(ranks) -> None:
    assert ranks(2).run(agree_on_values) == ["no error"] * 2


def alone_in_a_job() -> float:
    torch.manual_seed(0)
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), mesh=None)
    assert model.mesh.size == 1
    tokens = torch.randint(0, 256, (1, 40)) if dist.get_rank() == 0 else torch.zeros(1, 40, dtype=torch.long)
    return model(model.shard(tokens, tokens)).item()


def test_a_process_alone_within_a_job(ranks) -> None:
    first, second = ranks(2).run(alone_in_a_job)
    assert first != second


def crossing(world: int, node_ranks: int | None, ulysses: int, ring: int = 1, rings: bool = True) -> list[str]:
    data = world // (ulysses * ring)
    mesh = Mesh(Axes(1, data, ring, ulysses), 0, torch.device("cpu"), None, None, node_ranks=node_ranks)  # pyrefly: ignore
    return describe_crossing(mesh, rings)


def test_ulysses_ranks_that_lie_on_several_nodes() -> None:
    assert crossing(8, 4, ulysses=8) == [
        "the 8 Ulysses ranks of a sequence lie on 2 nodes of 4 ranks, so their all-to-alls cross nodes; "
        "mesh.ulysses=4 and mesh.ring=2 would keep them inside"
    ]
    (found,) = crossing(24, 8, ulysses=6, ring=2)
    assert "the 6 Ulysses ranks of a sequence lie on 2 nodes of 8 ranks" in found  # 6 to 11 lie on both sides of 8
    assert "mesh.ulysses=2 and mesh.ring=6 would" in found
    (found,) = crossing(12, 3, ulysses=4, rings=False)
    assert "; plan.recipe=sweep, mesh.ulysses=1 and mesh.ring=4 would" in found
    (found,) = crossing(16, 4, ulysses=16)
    assert "lie on 4 nodes of 4 ranks" in found


def test_tensor_ranks_that_lie_on_several_nodes() -> None:
    axes = Axes(ring=2, tensor=4)
    mesh = Mesh(axes, 0, torch.device("cpu"), None, None, node_ranks=2)  # pyrefly: ignore
    assert describe_crossing(mesh, True) == [
        "the 4 tensor ranks of a sequence lie on 2 nodes of 2 ranks, so their gathers and sums cross nodes; "
        "mesh.tensor=2 and mesh.ring=4 would keep them inside"
    ]


def test_ulysses_ranks_inside_a_node() -> None:
    for world, node_ranks, ulysses, ring in ((8, 4, 4, 2), (8, 4, 2, 4), (16, 8, 1, 16), (8, 8, 8, 1), (6, None, 6, 1)):
        assert crossing(world, node_ranks, ulysses, ring) == []


def test_who_speaks_for_a_node() -> None:
    def spokesmen(world: int, node_ranks: int | None) -> list[int]:
        grids = [
            Mesh(Axes(1, world), rank, torch.device("cpu"), None, None, node_ranks=node_ranks)  # pyrefly: ignore
            for rank in range(world)
        ]
        return [grid.rank for grid in grids if grid.first_on_node]

    assert spokesmen(8, 4) == [0, 4]
    assert spokesmen(8, None) == spokesmen(8, 8) == [0]


def groups_of_a_job() -> None:
    start_loopback(8)
    meshes = [ithaca.mesh(device="cpu", ring=2, ulysses=2), ithaca.mesh(device="cpu", ring=2, ulysses=2), alone("cpu")]
    first, second, own = ([group.group_name for group in mesh.groups] for mesh in meshes)
    assert first == second  # made once for a job
    assert own != first
    seen = [weakref.ref(group) for mesh in meshes for group in mesh.groups]
    assert len(seen) == 9  # four of each grid, and one
    del meshes
    gc.collect()
    assert all(ref() is not None for ref in seen)  # torch keeps them for the next mesh
    dist.destroy_process_group()
    gc.collect()
    assert all(ref() is None for ref in seen)


def test_groups_end_with_their_job(nursery: Nursery) -> None:
    (end,) = nursery.job(groups_of_a_job)
    assert end.code == 0, end.err


@pytest.mark.parametrize("uncaught", [False, True])
def test_a_job_is_left_without_waiting_after_an_error(uncaught: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL a rank that raised would wait for messages of the others for ever."""
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(mesh, "abort_groups", lambda: calls.append("aborted"))
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    if not uncaught:
        monkeypatch.delattr(sys, "last_value")
    mesh._leave()
    assert calls == ["aborted" if uncaught else "destroyed"]
