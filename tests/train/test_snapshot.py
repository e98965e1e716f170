"""The copy of the state that checkpoints are written from, and runs that move their optimizer states."""

import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import ithaca
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.checkpoint.snapshot import Snapshot, training_state
from ithaca.config import Config
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks.stop import StopRequest
from ithaca.train.run import train
from tests.optimizer import test_adamw
from tests.optimizer.test_adamw import alone, give_gradients, make_late, with_free

folder = test_adamw.folder


def in_little_memory(config: Config, path: Path, free: int) -> None:
    psutil.virtual_memory = with_free(free)
    train(config, path)


def test_a_copy_for_checkpoints_leaves_tapes_their_memory(nursery, small_config: Config, tmp_path: Path) -> None:
    """Either would fit; the tapes come later, and a run that cannot have them would be refused."""
    config = replace(
        small_config,
        plan=ithaca.Plan(recipe="sweep", chunk=32),
        train=replace(small_config.train, steps=2, tokens=512, batch=1),
    )
    for name, free in (("little", 1_200_000), ("enough", 3_000_000)):
        (end,) = nursery.job(in_little_memory, config, tmp_path / name, free)
        assert end.code == 0, end.err
    said = [(tmp_path / name / "log.txt").read_text() for name in ("little", "enough")]
    assert "a copy of the state for checkpoints takes " in said[0]
    assert "of tapes, and free memory is 1.14 MiB: training will wait while checkpoints are written" in said[0]
    assert "training will wait" not in said[1]


def test_a_snapshot_is_of_the_moment_it_was_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late its copies are: the optimizer waits for them, and so does whoever reads them."""
    copy, may_copy = Snapshot._copy, threading.Event()

    def late(snapshot: Snapshot, names: list[str]) -> None:
        assert may_copy.wait(60)
        copy(snapshot, names)

    def take() -> None:
        may_copy.clear()
        snapshot.take()  # returns before the copy begins: training continues
        threading.Timer(0.1, may_copy.set).start()

    monkeypatch.setattr(Snapshot, "_copy", late)
    model, optimizer = alone(folder)
    make_late(model)
    snapshot = Snapshot(training_state(model, optimizer))
    for step in range(3):
        give_gradients(model, step)
        snapshot.before_update()
        optimizer.step()
        wanted = {name: shard.local.clone() for name, shard in training_state(model, optimizer).items()}
        take()
    with snapshot.finished() as found:
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].local, tensor) for name, tensor in wanted.items())
    give_gradients(model, 3)
    take()
    snapshot.before_update()
    optimizer.step()
    with snapshot.finished() as found:
        assert all(torch.equal(found[name].local, tensor) for name, tensor in wanted.items())
    snapshot.close()


def test_a_snapshot_without_memory_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ithaca.IthacaError("no memory")

    monkeypatch.setattr("ithaca.checkpoint.snapshot.Slab", fail)
    snapshot = Snapshot(training_state(*alone(folder)))
    with pytest.raises(ithaca.IthacaError, match="no memory"):
        snapshot.take()
    snapshot.close()


def train_some(config: Config, path: Path, steps: int) -> None:
    """Stop after some steps as Ctrl-C does."""
    asked = iter(range(1, steps + 1))
    StopRequest.agreed = lambda _: next(asked) == steps
    train(config, path)


def losses(path: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in RunFolder(path).read_metrics()]


def go_through(nursery, config: Config, path: Path, parts: tuple[tuple[str, int, int], ...]) -> list:
    for place, ranks, steps in parts:
        hosted = replace(config, plan=ithaca.Plan(optimizer=place))
        for end in nursery.job(train_some, hosted, path, steps, ranks=ranks):
            assert end.code == 0, end.err
    return losses(path)


def test_a_run_goes_on_with_its_states_elsewhere(nursery, small_config: Config, tmp_path: Path) -> None:
    """The same losses bit for bit, and on other numbers of ranks but for the order of sums."""
    config = replace(small_config, train=replace(small_config.train, steps=9))
    wanted = go_through(nursery, config, tmp_path / "left", (("device", 2, 9),))
    assert len(wanted) == 9
    parts = (("device", 2, 3), ("host", 2, 3), ("device", 2, 3))
    assert go_through(nursery, config, tmp_path / "moved", parts) == wanted
    parts = (("host", 2, 5), ("host", 1, 4))
    found = go_through(nursery, config, tmp_path / "others", parts)
    assert [step for step, *_ in found] == [step for step, *_ in wanted]
    for (_, loss, _), (_, other, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-5)


def random_numbers_of_a_resumed_run(path: Path) -> tuple[list[float], list[float]]:
    """The numbers that a rank draws after a checkpoint, and after the checkpoint was read again."""
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    checkpoints = Checkpoints(path, model, ithaca.make_optimizer(model, learning_rate=1e-3), keep=1)
    checkpoints.clean()
    torch.manual_seed(10 + model.mesh.rank)
    checkpoints.save(1, {"config": "", "data": [1, 1, "bytes", 0]})
    checkpoints.wait()
    wanted = torch.rand(3).tolist()
    assert checkpoints.load() is not None
    found = torch.rand(3).tolist()
    checkpoints.close()
    return wanted, found


def test_every_rank_goes_on_with_its_own_random_numbers(ranks, tmp_path: Path) -> None:
    answers = ranks(2).run(random_numbers_of_a_resumed_run, tmp_path / "checkpoints")
    for wanted, found in answers:
        assert found == wanted
    assert answers[0] != answers[1]


def test_the_tokens_of_a_run_that_continues(nursery, small_config: Config, tmp_path: Path) -> None:
    """The metrics count all tokens of the run, also those before the last start."""
    short = replace(small_config, train=replace(small_config.train, steps=3))
    for steps in (2, 3):
        (end,) = nursery.job(train_some, short, tmp_path / "run", steps)
        assert end.code == 0, end.err
    each = small_config.train.batch * small_config.train.tokens
    assert [line["tokens"] for line in RunFolder(tmp_path / "run").read_metrics()] == [each, 2 * each, 3 * each]
