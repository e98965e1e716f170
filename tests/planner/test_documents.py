"""Documents of a packed sequence: as they are named, as they fill a sequence, and what the planner makes of them."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.block import read_documents as bench_documents
from ithaca.attention.documents import document_bounds
from ithaca.base.errors import DataError, PlanError
from ithaca.data.mixture import Data, mix
from ithaca.data.packing import Rows
from ithaca.data.reader import in_memory
from ithaca.data.sample import sequences
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.command import Output, read_cluster, run
from ithaca.planner.documents import Documents, file_documents, parse_documents, read_documents
from ithaca.planner.search import search
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job

K = 2**10


def test_names() -> None:
    assert parse_documents("2x4K") == (4096, 4096)
    assert parse_documents("192K+2x1K+7") == (192 * K, 1024, 1024, 7)
    assert parse_documents("2 X 1.5K + 3") == (1536, 1536, 3)
    assert bench_documents("2x4K+1") == (0, 4096, 8192, 8193)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--documents  cannot be read at '': write 64x4K, 192K.64x1K or the name of a token file"),
        ("4K+", "cannot be read at ''"),
        ("0x4K", "--documents 0x4K cannot be read at '0x4K': write 64x4K"),
        ("64x", "cannot be read at '64x'"),
        ("x4K", "cannot be read at 'x4K'"),
        ("4Q", "cannot be read at '4Q'"),
        ("-4K", "cannot be read at '-4K'"),
        ("1.3", "cannot be read at '1.3'"),
        ("64x4K,8K", "cannot be read at '64x4K,8K'"),
        ("9999999x1", "--documents 9999999x1 has 9999999 documents: give at most 1048576"),
        ("99999999999x1", "cannot be read at '99999999999x1'"),
    ],
)
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        read_documents(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as a token file"):
        read_documents(str(tmp_path / "none.tokens"))


def test_a_pattern_fills_the_sequence() -> None:
    found = read_documents("5+2x3")
    assert found.lengths(11) == (5, 3, 3)
    assert found.lengths(25) == (5, 3, 3, 5, 3, 3, 3)
    assert found.lengths(7) == (5, 2)
    assert found.attended(11) == pytest.approx((25 + 9 + 9) / 11)
    assert found.describe(11) == "3 in each sequence (5+2x3); a token sees 2 others on average"
    assert "(5+2x3, 11 tokens, repeated to 25)" in found.describe(25)
    assert "(5+2x3, 11 tokens, cut to 7)" in found.describe(7)


def test_a_pattern_longer_than_a_file_name() -> None:
    assert read_documents("+".join(["3640"] * 80)).lengths(80 * 3640) == (3640,) * 80


def test_too_many_documents() -> None:
    with pytest.raises(PlanError, match=r"--documents 1 makes about .* documents of 4M tokens: give longer ones"):
        read_documents("1").lengths(4 * 2**20)


def file_of(lengths: list[int]) -> Documents:
    bounds = np.array([0, *accumulate(lengths)])
    return file_documents(in_memory(np.arange(bounds[-1]) % 7, bounds))


def test_a_window_of_many_laps() -> None:
    """A short file in a long sequence: its documents again and again, without a loop over the laps."""
    file, wanted = file_of([3, 5]), [3, 5] * 100_000
    assert file._window(0, 800_000).tolist() == wanted
    assert file._window(1, 800_000).tolist() == [2, *wanted[1:], 1]
    assert len(file.lengths(800_000)) in (200_000, 200_001)


def test_windows_of_a_file_are_those_of_training() -> None:
    """Every window that training draws, from any start, has the documents that are counted here."""
    lengths = [1, 5, 2, 9, 3]
    data = in_memory(np.arange(20) % 7, np.array([0, *accumulate(lengths)]))
    windows = {tuple(file_of(lengths)._window(start, 8).tolist()) for start in range(20)}
    for step in range(40):
        ids = sequences(data, 1, 8, seed=0, step=step)[2]
        bounds = torch.tensor(document_bounds(ids))
        assert tuple(bounds.diff().tolist()) in windows
    assert file_of(lengths)._window(15, 45).tolist() == [2, 3, *lengths, *lengths]


def test_an_average_window_stands_for_a_file() -> None:
    """One document of half the file, and many short ones: the mean lies between, and no window has it exactly."""
    found = file_of([6400, *([64] * 100)])
    wanted = np.mean([sum(n * n for n in found._window(start, 640)) for start in range(0, 12800, 40)])
    seen = sum(n * n for n in found.lengths(640))
    everything = {sum(n * n for n in found._window(start, 640)) for start in range(0, 12800, 200)}
    assert abs(seen - wanted) <= 1.2 * min(abs(each - wanted) for each in everything)
    assert sum(found.lengths(640)) == 640
    assert "an average sequence of the data" in found.describe(640)


def rows_of(data: Data, packing: str, tokens: int, count: int) -> list[tuple[int, ...]]:
    """The documents of rows that training draws."""
    rows = Rows(data, tokens, 0, packing)
    bounds = (torch.tensor(document_bounds(rows.draw(1, number)[2])) for number in range(count))
    return [tuple(each.diff().tolist()) for each in bounds]


def test_whole_documents_are_those_of_training() -> None:
    """Padding included; conversations that are too long lose their ends."""
    lengths = np.random.default_rng(0).integers(1, 900, 300)
    bounds = np.array([0, *accumulate(lengths.tolist())])
    data = in_memory(np.arange(bounds[-1]) % 7, bounds, np.arange(bounds[-1]) % 2 == 0)
    found = file_documents(data)  # auto, and there is a mask
    epoch = rows_of(data, "whole", 700, Rows(data, 700, 0, "whole").per_epoch)
    seen = set(epoch)
    assert {tuple(lengths.tolist()) for _, lengths in found._candidates(700)} <= seen
    assert found.lengths(700) in seen
    mean = np.mean([sum(n * n for n in lengths) for lengths in epoch])
    assert found.attended(700) * 700 == pytest.approx(mean, rel=0.1)


def test_joined_documents_are_one() -> None:
    data = in_memory(np.arange(40) % 7, np.arange(0, 41, 4))
    assert file_documents(data, "joined").lengths(16) == (16,)
    assert [file_documents(data, packing).longest(16) for packing in ("cut", "whole", "joined")] == [4, 4, 16]


def test_a_mixture_has_the_attention_of_its_shares() -> None:
    """Three quarters of the rows are one document, the others many."""
    long, short = in_memory(np.arange(6400) % 7, np.array([0, 6400])), in_memory(np.arange(640), np.arange(0, 641, 8))
    found = file_documents(mix({"a": (3, long), "b": (1, short)}, 1, None))
    weights = [weight for weight, _ in found._candidates(64)]
    assert sum(weights) == pytest.approx(1)
    mean = sum(weight * sum(n * n for n in lengths) for weight, lengths in found._candidates(64))
    assert mean == pytest.approx(0.75 * 64 * 64 + 0.25 * 8 * 64, rel=0.05)
    assert found.lengths(64) in {tuple(lengths.tolist()) for _, lengths in found._candidates(64)}
    assert "an average sequence of the mixture" in found.describe(64)
    assert (found.longest(64), found.longest(10**6)) == (64, 6400)


# What they change
def work_of(plan: Plan, documents: tuple[int, ...] | None) -> Any:
    job = Job(spec=read_spec(find_config("llama3.2-1b")[0]), plan=plan, tokens=256 * K, documents=documents)
    return job.costs.work(job)


@pytest.mark.parametrize("plan", [Plan(recipe="sweep"), Plan(recipe="dense", checkpoint="none")], ids=str)
def test_flops_follow_the_squares(plan: Plan) -> None:
    one, two, odd = (work_of(plan, lengths) for lengths in (None, (128 * K,) * 2, (192 * K, 64 * K)))
    assert two.attention == one.attention / 2
    assert odd.attention == one.attention * (9 + 1) / 16
    assert (one.linear, one.moved) == (two.linear, two.moved)


def test_visits_follow_the_documents() -> None:
    """Four chunks of 64K. One document: 6 visits to others. Two of 128K: 2. One of 96K and one of 160K: 1 and 3."""
    plan = Plan(recipe="sweep", kv="host")
    one, two, odd, none = (
        work_of(plan, lengths) for lengths in (None, (128 * K,) * 2, (96 * K, 160 * K), (64 * K,) * 4)
    )
    assert two.merged == pytest.approx(one.merged * 2 / 6)
    # Rows: 32K of the first; of the second, 64K of chunk 2 see one, and 64K of chunk 3 see two
    assert odd.merged == pytest.approx(one.merged * (32 + 64 + 2 * 64) / (6 * 64))
    assert none.merged == 0
    assert none.launches < two.launches < odd.launches < one.launches
    assert none.host.into < two.host.into < one.host.into


def test_the_planner_sees_them() -> None:
    cluster, spec = read_cluster("1xH200", None, None, "0"), read_spec(find_config("llama3.2-1b")[0])
    whole, packed = (search(spec, cluster, 64 * K, documents=found) for found in (None, read_documents("4K")))
    assert whole is not None
    assert packed is not None
    assert packed.seconds.attention_forward < whole.seconds.attention_forward / 12
    job = Job(spec=spec, plan=packed.plan, tokens=64 * K, documents=(4 * K,) * 16, axes=packed.axes)
    assert packed.seconds == predict_seconds(job, cluster.gpu, cluster.machine)


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(output: Output, documents: str | None) -> str:
        run("tiny", "1xH100", "64K", None, "0", None, None, output, documents=documents)
        return capsys.readouterr().out

    assert "\nDocuments: 16 in each sequence (4K, 4K tokens, repeated to 64K); a token sees 2,048" in ask(
        Output(), "4K"
    )
    assert "Documents" not in ask(Output(), None)
    one, packed = (json.loads(ask(Output(as_json=True), documents)) for documents in (None, "4K"))
    assert (one["documents"], packed["documents"]) == (1, 16)
    assert packed["seconds_per_step"] < one["seconds_per_step"]
    assert packed["max_tokens"] == one["max_tokens"]
    meshes = [json.loads(ask(Output(as_json=True, meshes=True), each))["meshes"][0]["seconds"] for each in (None, "4K")]
    assert meshes[1] < meshes[0]
