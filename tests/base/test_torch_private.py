"""Each private name of torch that Ithaca uses does what it is used for. Seen with torch 2.11 and 2.13."""

import ast
import gc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ithaca
from ithaca.attention.kernels import flash4
from ithaca.base import torch_private
from ithaca.parallel.loopback import Loopback
from tests.nursery import Nursery

PACKAGE = Path(ithaca.__file__).parent


class Counting(torch_private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_operations() -> None:
    with Counting() as counting:
        torch.ones(2) + 1
    assert counting.calls == 2


def abort() -> None:
    assert dist.is_initialized()
    torch_private.abort_groups()
    assert not dist.is_initialized()


def test_groups_are_left_at_once(nursery: Nursery) -> None:
    ended = nursery.job(abort, ranks=2)
    assert [one.code for one in ended] == [0, 0], ended


def test_tree_leaves() -> None:
    assert torch_private.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]


@pytest.mark.parametrize("name", torch_private.ATTENTION_OPERATORS)
def test_attention_operators_exist(name: str) -> None:
    assert getattr(torch.ops.aten, name).default


def test_storage_key_is_of_the_storage() -> None:
    a, b = torch.ones(4), torch.ones(4)
    keys = [torch_private.storage_key(tensor.untyped_storage()) for tensor in (a, a[1:], b)]
    assert keys[0] == keys[1] != keys[2]


def test_copy_all() -> None:
    sources, targets = [torch.rand(3), torch.rand(2, 5)], [torch.empty(3).bfloat16(), torch.empty(2, 5).bfloat16()]
    torch_private.copy_all(targets, sources)
    assert all(torch.equal(target, source.bfloat16()) for target, source in zip(targets, sources, strict=True))


def test_count_all() -> None:
    counts = [torch.tensor(0.0), torch.tensor(4.0)]
    torch_private.count_all(counts)
    assert counts == [1, 5]


def test_a_step_without_hooks() -> None:
    """Also of a class whose step torch has not wrapped yet."""

    class Other(torch.optim.SGD):
        def step(self, closure: object = None) -> object:
            return closure

    assert torch_private.step_without_hooks(Other)(None, "done") == "done"
    optimizer, seen = torch.optim.AdamW([weight := torch.zeros(2, requires_grad=True)]), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    weight.grad = torch.ones(2)
    torch_private.step_without_hooks(torch.optim.AdamW)(optimizer)
    assert weight.detach().all()
    assert not seen


def test_expandable_segments() -> None:
    torch_private.use_expandable_segments()


def test_gradient_hooks() -> None:
    weight, seen = torch.zeros(2, requires_grad=True), []
    torch_private.run_gradient_hooks(weight)  # it has none
    first = weight.register_post_accumulate_grad_hook(lambda found: seen.append((1, found)))
    weight.register_post_accumulate_grad_hook(lambda found: seen.append((2, found)))
    torch_private.run_gradient_hooks(weight)
    first.remove()
    torch_private.run_gradient_hooks(weight)
    assert [number for number, _ in seen] == [1, 2, 2]
    assert all(found is weight for _, found in seen)


def in_a_job() -> None:
    group, store = dist.group.WORLD, torch_private.job_store()
    assert group is not None
    assert torch_private.group_name(group) == group.group_name
    store.set(f"here/{dist.get_rank()}", "yes")
    store.wait(["here/0", "here/1"], timedelta(seconds=60))
    torch_private.set_group_timeout(group, 1234)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=1234)
    torch_private.set_group_timeout(group, 1800)

    mesh = init_device_mesh("cpu", (2,))
    cut = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    assert torch.equal(torch_private.local_tensor(cut), torch.ones(3))
    like, local = torch_private.sharded_like(cut, zeros := torch.zeros(3)), torch_private.local_tensor
    assert (like.shape, like.placements, like.device_mesh) == (cut.shape, cut.placements, cut.device_mesh)
    assert local(like).data_ptr() == zeros.data_ptr()

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    assert not torch_private.fsdp_backward_unfinished(model)
    model(torch.ones(1, 4)).sum().backward()
    assert not torch_private.fsdp_backward_unfinished(model)
    torch_private.discard_fsdp_gradients(model)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    # Of the second pass alone: the first one's gradients are forgotten
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4))

    dropped_between_units(mesh)

    failing = model(Fails.apply(torch.ones(1, 4, requires_grad=True)))
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.sum().backward()
    assert torch_private.fsdp_backward_unfinished(model)


def dropped_between_units(mesh: DeviceMesh) -> None:
    """The second unit's gradient is kept after its reduction, until it is dropped."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    kept = []

    def count() -> int:
        return sum(type(found).__name__ == "ReduceScatterState" for found in gc.get_objects())

    def between(*_) -> None:
        kept.append(count())
        torch_private.drop_reduced(model, None)
        kept.append(count())

    model[0].register_full_backward_pre_hook(between)
    model(torch.ones(1, 4)).sum().backward()
    assert kept == [1, 0]
    assert all(parameter.grad is not None for parameter in model.parameters())


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        raise RuntimeError("on purpose")


def test_of_a_job(ranks) -> None:
    ranks(2).run(in_a_job)


def test_work_of_a_group_in_python() -> None:
    work = Loopback(0, 2).barrier()
    assert isinstance(work, torch_private.Work)
    assert work.wait()


def test_no_other_file_uses_private_names_of_torch() -> None:
    """A private attribute that no file of ours defines belongs to somebody else."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
    ours = {name for tree in trees.values() for name in defined(tree)}
    ours |= {"_getframe", "_current_frames", "_exit", "_Unpickler"}  # of sys, os and pickle
    kernels = PACKAGE / "attention" / "kernels"
    for file, tree in trees.items():
        if file == PACKAGE / "base" / "torch_private.py":
            continue
        allowed = ours | set(torch_private.ATTENTION_OPERATORS if file.parent == kernels else ())
        if file == kernels / "flash4.py":  # of flash-attn-4: named there and nowhere else
            allowed |= {*flash4.USED, "_validate_head_dims"}
        foreign = sorted(set(used(tree)) - allowed)
        assert not foreign, f"{file.relative_to(PACKAGE)} uses {foreign}: give it a function in base/torch_private.py"


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used(tree: ast.Module) -> Iterator[str]:
    """Private attributes, and private modules and names that are imported from outside of Ithaca."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ithaca"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        else:
            names = []
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))
