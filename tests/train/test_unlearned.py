"""Steps and passes without a label: they change nothing, a run says so, and it resumes as if nobody had stopped it."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.checkpoint.files import CheckpointFolder, text_sha256
from ithaca.config import Config
from ithaca.data.packing import Rows
from ithaca.parallel.batch import IGNORED
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.ranks.stop import StopRequest
from ithaca.train.report.conclusion import draw_loss
from ithaca.train.report.sinks import WeightsAndBiases
from ithaca.train.report.unlearned import Unlearned
from ithaca.train.run import train
from tests.nursery import Nursery

STEPS = 8
ALL = (0, 1, 2, 3)
# Rows without a label by step, from 0 on. A pass has two rows
EMPTY = {0: ALL, 2: (0, 1), 3: ALL, 4: ALL, 5: (2, 3), 7: ALL}
NO_LABELS = {1, 4, 5, 8}  # steps, from 1 on


def masked(config: Config, path: Path, rows: dict[int, tuple[int, ...]], stop_after: int = 0) -> None:
    """Train on data in which some rows have no label. Stop after some steps as Ctrl-C does."""
    whole = Rows.draw

    def draw(self, count, step, only):
        drawn = whole(self, count, step, only)
        for place, row in enumerate(only):
            if row in rows.get(step, ()):
                drawn[1][place] = IGNORED
        return drawn

    Rows.draw = draw
    if stop_after:
        asked = iter(range(1, STEPS + 1))
        StopRequest.agreed = lambda _: next(asked) == stop_after
    train(config, path)


@pytest.fixture(scope="module")
def config(small_config: Config) -> Config:
    options = replace(small_config.train, steps=STEPS, micro_batch=2, learning_rate=0.01, weight_decay=0.5)
    return replace(small_config, train=options, run=replace(small_config.run, checkpoint_every=1, keep=99))


@pytest.fixture(scope="module")
def whole(nursery: Nursery, config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with steps and passes without labels, and what it said."""
    path = tmp_path_factory.mktemp("whole") / "run"
    (end,) = nursery.job(masked, config, path, EMPTY)
    assert end.code == 0, end.err
    return path, end.out


def metrics(path: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "labels")
    return [tuple(line[name] for name in names) for line in RunFolder(path).read_metrics()]


def state(path: Path, step: int) -> dict[str, Tensor]:
    """Weights and moments after a step."""
    files = CheckpointFolder(path / "checkpoints")
    manifest = files.manifest(step)
    assert manifest is not None
    return dict(files.read(step, manifest["tensors"]))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_a_step_without_labels_changes_nothing(whole) -> None:
    path, _ = whole
    for step in range(2, STEPS + 1):
        assert same(state(path, step), state(path, step - 1)) == (step in NO_LABELS)
    first = state(path, 1)
    assert all(not tensor.any() for name, tensor in first.items() if name.startswith("exp_avg"))
    lines = RunFolder(path).read_metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert (line["loss"] is None) == (line["gradient_norm"] is None) == (line["labels"] == 0)
        assert (line["labels"] == 0) == (line["step"] in NO_LABELS)
        assert (line["tokens_per_second_per_rank"] == 0) == (line["step"] in NO_LABELS)
    full = lines[1]["labels"]
    assert [line["labels"] for line in lines] == [0, full, full // 2, 0, 0, full // 2, full, 0]
    assert lines[0]["learning_rate"] < lines[1]["learning_rate"]  # the schedule goes on


def test_what_is_said(whole) -> None:
    path, out = whole
    said = [line for line in out.splitlines() if "learned nothing" in line]
    why = "none of its 256 tokens has a label, so the weights do not change"
    one = "learned nothing: 0 of 128 tokens there have a label that counts"
    none = "no token there had a label that counts"
    assert said == [
        f"warning: step 1 learned nothing: {why} (1 such step so far)",
        f"warning: 1 pass of the 2 in step 3 {one} (1 such pass so far)",
        f"warning: step 4 learned nothing: {why} (2 such steps so far)",
        f"warning: 1 pass of the 2 in step 6 {one} (2 such passes so far)",
        f"warning: step 8 learned nothing: {why} (4 such steps so far)",
        f"warning: 4 of 8 steps learned nothing: {none}",
        f"warning: 2 passes of other steps learned nothing: {none}",
    ]
    assert f"Step 1/{STEPS}  no labels  " in out
    assert "loss 0.000" not in out
    losses = [loss for _, loss, *_ in metrics(path) if loss is not None]
    assert f"Done: loss {losses[0]:.3f} -> {losses[-1]:.3f} over 8 steps" in out
    assert (path / "loss.png").stat().st_size


def test_resumed_at_every_place(nursery: Nursery, config: Config, whole, tmp_path: Path) -> None:
    """As a kill leaves it: metrics of later steps are there, checkpoints of later steps are not."""
    path, _ = whole
    for step in range(1, STEPS):
        copy = Path(shutil.copytree(path, tmp_path / str(step)))
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}")
        (end,) = nursery.job(masked, config, copy, EMPTY)
        assert end.code == 0, end.err
        assert "warning: 4 of 8 steps learned nothing" in end.out
        assert "warning: 2 passes of other steps learned nothing" in end.out
        assert metrics(copy) == metrics(path)
        assert same(state(copy, STEPS), state(path, STEPS))


@pytest.mark.parametrize("place", [pytest.param("device", marks=pytest.mark.full), "host"])
def test_stopped_after_every_step(nursery: Nursery, config: Config, tmp_path: Path, place: str) -> None:
    config = replace(config, plan=ithaca.Plan(zero=1, optimizer=place))
    for end in nursery.job(masked, config, tmp_path / "whole", EMPTY, ranks=2):
        assert end.code == 0, end.err
    for _ in range(STEPS):
        for end in nursery.job(masked, config, tmp_path / "parts", EMPTY, 1, ranks=2):
            assert end.code == 0, end.err
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert same(state(tmp_path / "parts", STEPS), state(tmp_path / "whole", STEPS))


def test_a_checkpoint_from_before_updates_were_counted(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    for name, stop in (("whole", 0), ("parts", 3)):
        (end,) = nursery.job(masked, config, tmp_path / name, {}, stop)
        assert end.code == 0, end.err
        assert "learned nothing" not in end.out
    file = tmp_path / "parts" / "checkpoints" / "step-00000003" / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in ("sha256", "updates", "passes_without_labels"):
        del manifest[name]
    file.write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))
    (end,) = nursery.job(masked, config, tmp_path / "parts", {})
    assert end.code == 0, end.err
    assert "learned nothing" not in end.out
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert same(state(tmp_path / "parts", STEPS), state(tmp_path / "whole", STEPS))


def test_a_run_without_any_label(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    (end,) = nursery.job(masked, config, tmp_path / "run", dict.fromkeys(range(STEPS), ALL))
    assert end.code == 0, end.err
    assert "warning: 8 of 8 steps learned nothing" in end.out
    assert "Done: no loss over 8 steps" in end.out
    (tmp_path / "run" / "loss.png").unlink()
    draw_loss(RunFolder(tmp_path / "run").read_metrics(), tmp_path / "run" / "loss.png")
    assert (tmp_path / "run" / "loss.png").stat().st_size


def passes_left_out(folder: Path, zero: int) -> list[bool]:
    """Whether the loss and each gradient of a step are the same bits if passes without labels run as well."""
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(zero=zero), ithaca.mesh(device="cpu"))
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(9):
        tokens = torch.randint(0, 256, (2, 29), generator=generator)
        labels = torch.full_like(tokens, IGNORED) if number in (0, 3, 4, 8) else tokens
        batches.append(model.shard(tokens, labels))
    valid, losses = sum(batch.valid_tokens for batch in batches), []
    for number, batch in enumerate(batches, start=1):
        loss = model(batch, valid_tokens=valid, last=number == len(batches))
        loss.backward()
        losses.append(loss.detach())
    wanted = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    run: Any = TrainingRun.__new__(TrainingRun)
    run.model = model
    found = [run._backward(batches) == torch.stack(losses).sum().item()]
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    return found + [torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_pass_without_labels_may_be_left_out(ranks, small_model: Path, world: int, zero: int) -> None:
    for found in ranks(world).run(passes_left_out, small_model, zero):
        assert len(found) > 5
        assert all(found)


def test_warnings_do_not_flood() -> None:
    unlearned, empty = Unlearned({"step": 10, "updates": 7}), SimpleNamespace(valid_tokens=0, total_tokens=5)
    warned = [step for step in range(11, 61) if unlearned.add(step, [empty])]  # pyrefly: ignore
    assert warned == [11, 15, 23, 39]  # the 4th, 8th, 16th and 32nd
    assert unlearned.note(60) == {"updates": 7, "passes_without_labels": 0}


def test_weights_and_biases_get_no_nulls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = []
    run = SimpleNamespace(log=lambda metrics, step: told.append((metrics, step)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))  # pyrefly: ignore
    WeightsAndBiases(RunFolder(tmp_path)).write({"step": 3, "loss": None, "labels": 0})
    assert told == [({"step": 3, "labels": 0}, 3)]


def test_the_sum_of_the_losses_rounds_as_with_all_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    for passes in range(2, 80):
        losses = torch.rand(passes, generator=generator) * (torch.rand(passes, generator=generator) < 0.5)
        losses[1] = 1.0
        run: Any = TrainingRun.__new__(TrainingRun)
        run.model = lambda batch, **_: torch.tensor(batch.loss, requires_grad=True)
        batches = [SimpleNamespace(loss=loss, valid_tokens=int(loss > 0)) for loss in losses.tolist()]
        assert run._backward(batches) == losses.sum().item()
