"""A rank draws its own rows, one step ahead, and gets the batches that the whole step would give it."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ithaca
from ithaca.base.errors import DataError
from ithaca.config import Config, TrainSection
from ithaca.data import sample
from ithaca.data.packing import Rows
from ithaca.data.preparation.inputs import standard_library
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import TokenFile, in_memory, open_tokens
from ithaca.data.sample import sequences
from ithaca.parallel.batch import IGNORED
from ithaca.train.loader import Loader
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from ithaca.train.setup import opening
from tests.nursery import Nursery

OPTIONS = TrainSection(tokens=48, batch=8, micro_batch=4, steps=3, seed=5)


def tiny(**sizes: int) -> ithaca.Model:
    plan = ithaca.Plan(recipe="sweep", chunk=16) if sizes else ithaca.Plan()
    return ithaca.apply(ithaca.load_model("tiny", "float32"), plan, ithaca.mesh(**sizes, device="cpu"))


def cut(data: TokenFile) -> Rows:
    return Rows(data, OPTIONS.tokens, OPTIONS.seed, "cut")  # pyrefly: ignore


def same_as_the_whole_step(**sizes: int) -> bool:
    """Whether the loader's batches are, field by field, those of `model.shard` on the whole step."""
    model, data = tiny(**sizes), standard_library()
    mine = Loader(cut(data), OPTIONS, model)
    for step in range(OPTIONS.steps):
        whole = sequences(data, OPTIONS.batch, OPTIONS.tokens, OPTIONS.seed, step)
        parts = zip(*(tensor.split(OPTIONS.micro_batch) for tensor in whole), strict=True)
        for ours, part in zip(mine.batches(step), parts, strict=True):
            theirs = model.shard(*part)
            for name, value in vars(theirs).items():
                found = getattr(ours, name)
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
    mine.close()
    return not any(thread.name.startswith("loader") for thread in threading.enumerate())


def with_a_ring() -> bool:
    return same_as_the_whole_step(ring=2)


def with_data_ranks() -> bool:
    return same_as_the_whole_step()


@pytest.mark.parametrize("work", [with_a_ring, with_data_ranks])
def test_the_same_batches_as_from_the_whole_step(ranks, work) -> None:
    assert ranks(4).run(work) == [True] * 4


def counted(config: Config, path: Path) -> None:
    """Train; print the rows that this rank has drawn, and that each step finds the next one begun."""
    rows, begun = [], threading.Event()
    fill, backward = sample._fill_row, TrainingRun._backward

    def count(*args: object) -> None:
        rows.append(None)
        if len(rows) == 3:
            begun.set()
        fill(*args)  # pyrefly: ignore

    def wait(run: TrainingRun, batches: list) -> float:
        assert run.done or begun.wait(120), "the rows of step 2 are not drawn while step 1 computes"
        return backward(run, batches)

    sample._fill_row, TrainingRun._backward = count, wait
    train(config, path)
    print("rows", len(rows), flush=True)
    print("threads", [thread.name for thread in threading.enumerate() if "loader" in thread.name])


def test_a_rank_draws_its_own_rows_ahead_of_the_step(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """4 sequences a step over 2 ranks, 3 steps: 6 rows for each rank."""
    config = replace(small_config, train=replace(small_config.train, steps=3))
    for end in nursery.job(counted, config, tmp_path / "run", ranks=2):
        assert end.code == 0, end.err
        assert "rows 6\nthreads []" in end.out


def test_an_error_is_raised_in_the_step_that_needs_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Rows.draw

    def fail(rows: Rows, batch: int, step: int, only: range) -> object:
        if step == 1:
            raise DataError("the disk is gone")
        return drawn(rows, batch, step, only)

    monkeypatch.setattr(Rows, "draw", fail)
    mine = Loader(cut(standard_library()), OPTIONS, ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan()))
    assert len(mine.batches(0)) == 2
    with pytest.raises(DataError, match="the disk is gone"):
        mine.batches(1)
    mine.close()


def other_data_on_rank_1(config: Config, path: Path) -> None:
    """Train on a node whose file has one other token, far from both ends."""
    data = standard_library()
    tokens = data.read(0, data.tokens).tokens.copy()
    if os.environ["RANK"] == "1":
        tokens[data.tokens // 3] ^= 1
    opening.open_data = lambda *_: (in_memory(tokens, data.bounds(), tokenizer="bytes", vocab=256), None)
    train(config, path)


def test_ranks_with_other_data_are_refused(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """No two data ranks draw the same row, so their rows cannot be compared."""
    for end in nursery.job(other_data_on_rank_1, small_config, tmp_path / "run", ranks=2):
        assert end.code != 0
        assert "rank 1 reads other data than rank 0 from Python's standard library" in end.err
        assert "data.source must be the same file on all nodes" in end.err


def labels_of_each_pass(path: Path) -> tuple[list[int], list[int]]:
    """The labels that count in each pass, by the loader and in the rows themselves."""
    model, data = tiny(), open_tokens(path)
    mine = Loader(cut(data), OPTIONS, model)
    found = [batch.valid_tokens for step in range(OPTIONS.steps) for batch in mine.batches(step)]
    mine.close()
    wanted = []
    for step in range(OPTIONS.steps):
        whole = sequences(data, OPTIONS.batch, OPTIONS.tokens, OPTIONS.seed, step)
        for _, labels, ids in zip(*(tensor.split(OPTIONS.micro_batch) for tensor in whole), strict=True):
            wanted.append(int(((labels[:, 1:] != IGNORED) & (ids[:, 1:] == ids[:, :-1])).sum()))
    return found, wanted


def test_each_pass_counts_its_own_labels(ranks, tmp_path: Path) -> None:
    """Those of all ranks, in passes with unequal counts."""
    lines = [{"prompt": "a" * (number % 50), "completion": "b" * (50 - number % 50)} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "a.tokens")
    for found, wanted in ranks(2).run(labels_of_each_pass, tmp_path / "a.tokens"):
        assert found == wanted
        assert len(set(found)) == len(found)
