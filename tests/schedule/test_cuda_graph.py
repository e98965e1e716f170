"""Passes as CUDA graphs: the same bits as passes whose operations are launched one by one.

There is no CUDA graph on a CPU. What surrounds it is tested here with a recorder whose replay runs the work again and
writes to the same memory; tests/test_gpu_graph.py has the real one."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.naive import Naive
from ithaca.base.errors import InputError, PlanError
from ithaca.schedule.cuda_graph import FEWEST, GraphedPasses
from tests.models import make_model, save

TOKENS = 48
CHECKPOINTS = ("none", "selective", "full")


class Rerun:
    """Replays by running the work again, into the memory of the first time.

    Works that are recorded later share memory with earlier ones: a replay leaves nothing of their outputs.
    """

    made = 0  # recorders

    def __init__(self) -> None:
        Rerun.made += 1
        self._recorded: list[list[Tensor]] = []

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        outputs = [torch.full_like(output, torch.nan) for output in work()]  # a capture computes nothing
        self._recorded.append(outputs)
        number = len(self._recorded)

        def replay() -> None:
            for lost in (output for later in self._recorded[number:] for output in later):
                lost.fill_(torch.nan)
            for old, new in zip(outputs, work(), strict=True):
                old.copy_(new)

        return outputs, replay


class ReadsBounds(Naive):
    """A kernel that reads the bounds of documents as late as a GPU would."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        return super().forward(q, k, v, _read(pieces), scale)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, pieces: Pieces, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().backward(do, q, k, v, o, lse, _read(pieces), scale)


def _read(pieces: Pieces) -> Pieces:
    if pieces.on_device is None:
        return pieces
    found = pieces.on_device.tolist()
    assert found == sorted(found)
    assert found[-1] == pieces.q_bounds[-1]
    return Pieces.documents(tuple(dict.fromkeys(found)))  # empty documents are nothing


@dataclass
class Twins:
    """One model twice: launched one by one, and replayed."""

    eager: ithaca.Model
    replayed: ithaca.Model

    def batch(self, documents: int, seed: int, tokens: int = TOKENS) -> Any:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 128, (tokens,), generator=draw)
        labels = ids.where(torch.rand(tokens, generator=draw) > 0.2, -100)
        begin = torch.randperm(tokens - 1, generator=draw)[: documents - 1] + 1
        marks = torch.zeros(tokens, dtype=torch.int64)
        marks[begin] = 1
        return self.eager.shard(ids, labels, marks.cumsum(0))

    def same(self) -> bool:
        """Bit by bit: weights and gradients."""
        pairs = zip(self.eager.named_parameters(), self.replayed.named_parameters(), strict=True)
        return all(_equal(a, b) and _equal(a.grad, b.grad) for (_, a), (_, b) in pairs)


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.to_local(), b.to_local())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top, sizes = tmp_path_factory.mktemp("models"), {"num_hidden_layers": 2, "vocab_size": 128}
    kinds = {"tied": "smollm2", "untied": "llama-bias"}
    return {name: save(make_model(kind, **sizes), top / name) for name, kind in kinds.items()}


def make(folder: Path, checkpoint: str = "none", dtype: str = "float32") -> Twins:
    plan = ithaca.Plan(recipe="dense", checkpoint=checkpoint, zero=2)
    eager, replayed = (ithaca.apply(ithaca.load_model(folder, dtype), plan, ithaca.mesh(device="cpu")) for _ in "ab")
    eager.kernel, replayed.kernel = Naive(), ReadsBounds()
    replayed._graphs = GraphedPasses(replayed.decoder, replayed.dtype, Rerun)
    Rerun.made = 0
    return Twins(eager, replayed)


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits(folders, name: str, checkpoint: str, dtype: str) -> None:
    """Steps over batches with other documents, labels and tokens each."""
    twins = make(folders[name], checkpoint, dtype)
    models = twins.eager, twins.replayed
    optimizers = [ithaca.make_optimizer(model, learning_rate=1e-2) for model in models]
    for step, documents in enumerate((1, 5, 2, FEWEST)):
        batch = twins.batch(documents, step)
        losses = [model(batch) for model in models]
        for loss, scale in zip(losses, (3, 3), strict=True):
            (scale * loss).backward()
        assert torch.equal(*losses)
        assert twins.same()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert Rerun.made == 1


def test_several_passes_in_a_step(folders) -> None:
    """Gradients of a step's passes add up, also those that lie where a replay writes."""
    twins = make(folders["untied"])
    for passes, counts in ((3, (1, 2, 3)), (1, (1,)), (2, (2, 40)), (2, (7, 1))):  # 40: captured anew in between
        batches = [twins.batch(documents, 10 * passes + documents) for documents in counts]
        valid = sum(batch.valid_tokens for batch in batches)
        for model in (twins.eager, twins.replayed):
            model.zero_grad()
            for number, batch in enumerate(batches):
                model(batch, valid_tokens=valid, last=number == passes - 1).backward()
        assert twins.same()


def test_gradients_that_are_not_dropped(folders) -> None:
    """Zeroed in place, or of someone else, they are added to."""
    twins = make(folders["tied"])
    for step in range(3):
        for model in (twins.eager, twins.replayed):
            model(twins.batch(2, step)).backward()
        assert twins.same()
        for model in (twins.eager, twins.replayed):
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone() if step else parameter.grad.zero_()


def test_more_documents_than_there_is_room_for(folders, monkeypatch) -> None:
    twins = make(folders["tied"])
    monkeypatch.setattr("ithaca.schedule.cuda_graph.MOST_PIECES", 2 * FEWEST)
    for step, documents in enumerate((2, FEWEST, FEWEST + 1, 2 * FEWEST, 1, 2 * FEWEST + 1, 3)):
        for model in (twins.eager, twins.replayed):
            model.zero_grad()
            model(twins.batch(documents, step)).backward()
        assert twins.same()
    assert Rerun.made == 2


def test_frozen_weights(folders) -> None:
    twins = make(folders["untied"])
    for step, frozen in enumerate(("", "mlp", "embed", "")):
        for model in (twins.eager, twins.replayed):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in name)
            model(twins.batch(3, step)).backward()
        assert twins.same()
    assert Rerun.made == 4
    for model in (twins.eager, twins.replayed):
        model.requires_grad_(False)
    assert torch.equal(twins.eager(twins.batch(3, 9)), twins.replayed(twins.batch(3, 9)))
    assert Rerun.made == 4  # nothing to go backward through


def test_another_number_of_tokens(folders) -> None:
    """Such a pass is not captured, and the next one of the first number is replayed."""
    twins = make(folders["untied"])
    for step, tokens in enumerate((TOKENS, 20, TOKENS)):
        for model in (twins.eager, twins.replayed):
            model.zero_grad()
            model(twins.batch(2, step, tokens)).backward()
        assert twins.same()
    assert Rerun.made == 1


def test_a_backward_pass_that_comes_too_late(folders) -> None:
    twins = make(folders["tied"])
    first, second = (twins.replayed(twins.batch(2, seed)) for seed in (1, 2))
    with pytest.raises(InputError, match="call backward before the next pass"):
        first.backward()
    assert all(parameter.grad is None for parameter in twins.replayed.parameters())
    second.backward()
    twins.eager(twins.batch(2, 2)).backward()
    assert twins.same()


@pytest.mark.parametrize("fails", ["warm_up", "forward", "backward"])
@pytest.mark.parametrize("last", [True, False])
def test_a_capture_that_fails(folders, fails: str, last: bool) -> None:
    """As when memory runs out. What a later pass computes with must not be what the capture left behind."""
    twins = make(folders["untied"])

    class Fails(Rerun):
        def warm_up(self, work: Callable[[], None]) -> None:
            super().warm_up(work)
            if fails == "warm_up":
                raise torch.OutOfMemoryError

        def record(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
            found = super().record(work)
            if len(self._recorded) == ("warm_up", "forward", "backward").index(fails):
                raise torch.OutOfMemoryError
            return found

    graphs = twins.replayed._graphs
    twins.replayed._graphs = GraphedPasses(twins.replayed.decoder, twins.replayed.dtype, Fails)
    with pytest.raises(torch.OutOfMemoryError):
        twins.replayed(twins.batch(2, 1), last=last)
    for replays in (False, True):
        twins.replayed._graphs = graphs if replays else None
        for model in (twins.eager, twins.replayed):
            model(twins.batch(3, 2)).backward()  # before anything else: `parameters()` drops copies
        assert twins.same()
        assert all(parameter.grad is not None for parameter in twins.replayed.parameters())


def test_weights_that_are_replaced(folders) -> None:
    """A graph knows where weights lie, so others are captured anew."""
    twins = make(folders["untied"])
    for model in (twins.eager, twins.replayed):
        model(twins.batch(2, 1)).backward()
        model.load_state_dict({name: 0.5 * weight for name, weight in model.state_dict().items()}, assign=True)
        model(twins.batch(2, 1)).backward()
    assert twins.same()
    assert all(parameter.grad is not None for parameter in twins.replayed.parameters())
    assert Rerun.made == 2


@pytest.mark.parametrize("use", ["documents", "eager", "free_tapes", "greedy_decode"])
def test_a_graph_gives_its_memory_back(folders, use: str) -> None:
    """A loss that is kept after its backward pass keeps none of it."""
    twins = make(folders["tied"])
    loss = twins.replayed(twins.batch(2, 1))
    loss.backward()
    assert twins.replayed._graphs is not None
    graph = weakref.ref(twins.replayed._graphs._graph)
    if use == "documents":
        twins.replayed(twins.batch(40, 2))
    elif use == "eager":
        with twins.replayed.eager():
            assert graph() is None
    elif use == "free_tapes":
        twins.replayed.free_tapes()
    else:
        twins.replayed.greedy_decode(torch.arange(5), 2)
    gc.collect()
    assert graph() is None
    del loss


def test_other_uses_between_forward_and_backward(folders) -> None:
    twins = make(folders["untied"])
    batch, other = twins.batch(4, 1), twins.batch(3, 2)
    loss = twins.replayed(batch)
    wanted = twins.eager.token_losses(other)
    assert torch.equal(twins.replayed.token_losses(other), wanted)
    with torch.no_grad():
        assert torch.equal(twins.replayed(other), twins.eager(other))
    loss.backward()
    twins.eager(batch).backward()
    assert twins.same()


def test_hooks_of_parameters_run(folders) -> None:
    twins, seen = make(folders["tied"]), list[str]()
    for name, parameter in twins.replayed.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    for _ in range(2):
        twins.replayed(twins.batch(2, 1)).backward()
    names = [name for name, _ in twins.replayed.named_parameters()]
    assert sorted(seen) == sorted(2 * names)


def test_eager_meanwhile(folders) -> None:
    twins = make(folders["tied"])
    with twins.replayed.eager():
        twins.replayed(twins.batch(2, 1)).backward()
    assert Rerun.made == 0
    twins.eager(twins.batch(2, 1)).backward()
    assert twins.same()
    twins.replayed(twins.batch(2, 1)).backward()
    assert Rerun.made == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zero": 3}, "zero=2"),
        ({"zero": 2, "checkpoint": "full", "x": "host"}, "use x='device'"),
        ({"zero": 2, "cuda_graph": 1}, "must be true or false"),
        ({"recipe": "sweep", "zero": 2}, "use recipe 'dense'"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ithaca.Plan(**{"recipe": "dense", "cuda_graph": True, **options})


def test_no_gpu(folders) -> None:
    plan = ithaca.Plan(recipe="dense", zero=2, cuda_graph=True)
    with pytest.raises(PlanError, match="needs a CUDA GPU, and the model is on cpu: set plan"):
        ithaca.apply(ithaca.load_model(folders["tied"]), plan, ithaca.mesh(device="cpu"))
