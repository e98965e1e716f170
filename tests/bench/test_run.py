"""A benchmark stores what it has, goes on where it was, and measures nothing twice."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.errors import ConfigError
from ithaca.bench import ask, run, tasks
from ithaca.bench.rows import Limits
from ithaca.bench.run import Options
from ithaca.bench.store import Store, Stored, read_results
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from tests.models import make_model, save

Json = dict[str, Any]
GB = 10**9
FILE = "ladder-llama3-8b-8x80GB.json"
SPEC = read_spec(PRESETS["llama3-8b"])
LIMITS = Limits(ranks=8, cap=80 * GB, most=2**24, timed=2**19)
MACHINE = {"device": "NVIDIA H200", "on_cpu": False, "device_bytes": 141 * GB, "kernel": "cudnn+flash"}


class Child:
    """In the place of a process that measures: every length up to `holds` fits; it may end early, or fail."""

    def __init__(self, holds: int = 2**20):
        self.holds, self.asked, self.ends_after, self.fails_at = holds, [], 10**6, ""

    def __call__(self, request: Json, seconds: float | None = None) -> Json:
        if request["kind"] == "machine":
            return dict(MACHINE)
        if len(self.asked) == self.ends_after:
            raise KeyboardInterrupt
        if seconds is not None and seconds < 1:
            raise ask.TimeIsUp
        self.asked.append(json.dumps(request, sort_keys=True))
        if self.fails_at and self.fails_at in self.asked[-1]:
            return {"error": "RuntimeError: broken"}
        if request["kind"] == "time":
            layers = request["layers"]
            found = {"fits": True, "layers": layers, "seconds": 1.0 + layers, "fewer_layers": layers // 2}
            return found | {"fewer_seconds": 1.0 + layers // 2, "seconds_tried": [1.0 + layers]}
        fits = request["tokens"] <= self.holds
        return {
            "fits": fits,
            "peak_bytes": 1,
            "peak_bytes_predicted": 2,
            "host_bytes": 3,
            "disk_bytes": 4,
            "kernel": "x",
        }


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    found = Child()
    monkeypatch.setattr(ask, "run_child", found)
    return found


Ladder = Callable[..., dict[str, Stored]]


@pytest.fixture
def ladder(tmp_path: Path) -> Ladder:
    """ladder(): the rows that the command leaves in its file."""

    def start(limits: Limits = LIMITS, **more: Any) -> dict[str, Stored]:
        options = Options(**{"out": tmp_path, "only": ("ZeRO-3", "Sweep"), "commit": "c0ffee"} | more)
        tasks.start("ladder", "llama3-8b", limits, options, [])
        return {row.name: row for row in read_results(tmp_path / FILE)[1]}

    return start


def test_a_run_that_was_killed_goes_on_and_measures_nothing_twice(child: Child, ladder: Ladder, tmp_path: Path) -> None:
    two = ("+ checkpointing", "Sweep, keep o")
    whole = ladder(only=two)
    once = list(child.asked)
    assert len(once) == len(set(once)) > 6
    for after in range(1, len(once)):
        (tmp_path / FILE).unlink()
        child.asked, child.ends_after = [], after
        with pytest.raises(KeyboardInterrupt):
            ladder(only=two)
        child.ends_after = 10**6
        assert ladder(only=two) == whole
        assert child.asked == once


def test_a_row_names_every_commit_that_it_was_measured_at(child: Child, ladder: Ladder) -> None:
    child.ends_after = 1
    with pytest.raises(KeyboardInterrupt):
        ladder(only=("Sweep, keep o",), commit="first")
    child.ends_after = 10**6
    rows = ladder(only=("Sweep, keep o", "Sweep, disk"), commit="second")
    assert rows["Sweep, keep o"].origin["commit"] == "first, second"
    assert rows["Sweep, disk"].origin["commit"] == "second"


def test_memory_is_asked_for_with_the_kernel_of_the_machine(child: Child, ladder: Ladder) -> None:
    """Its package is loaded once, when the machine is looked at; steps that compute load it themselves."""
    ladder(only=("Sweep, keep o",))
    for request in map(json.loads, child.asked):
        assert request["plan"].get("kernel") == (MACHINE["kernel"] if request["kind"] == "memory" else None)


def test_what_is_there_is_not_measured_again(child: Child, ladder: Ladder) -> None:
    first = ladder()
    count = len(child.asked)
    assert ladder() == first
    assert len(child.asked) == count
    ladder(only=("Sweep",))
    assert len(child.asked) == count


def test_a_changed_question_is_measured_again(child: Child, ladder: Ladder) -> None:
    ladder(only=("Sweep, keep o",))
    count = len(child.asked)
    found = ladder(Limits(ranks=8, cap=80 * GB, host=500 * GB), only=("Sweep, keep o",))["Sweep, keep o"]
    assert len(child.asked) > count
    assert found.question["limits"]["host"] == 500 * GB


@pytest.mark.parametrize("measured", [1, 10**6])  # a part of a row, and a row
def test_another_device_needs_another_folder(
    child: Child, ladder: Ladder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: int
) -> None:
    child.ends_after = measured
    with contextlib.suppress(KeyboardInterrupt):
        ladder(only=("Sweep, keep o",))
    before, child.ends_after = (tmp_path / FILE).read_bytes(), 10**6
    monkeypatch.setitem(MACHINE, "device", "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="has rows measured on NVIDIA H200, and this is NVIDIA A100-SXM4-80GB: name"):
        ladder(only=("Sweep, disk",))
    assert (tmp_path / FILE).read_bytes() == before
    ladder(only=("Sweep, disk",), predict=True)  # a prediction belongs to no device


def test_a_row_stays_until_a_measurement_replaces_it(child: Child, ladder: Ladder) -> None:
    row = "Sweep, keep o"
    first = ladder(only=(row,))
    changed = Limits(ranks=8, cap=80 * GB, host=500 * GB)
    child.fails_at = "tokens"
    assert ladder(changed, only=(row,)) == first
    child.fails_at, child.ends_after = "", len(child.asked) + 1
    with pytest.raises(KeyboardInterrupt):
        ladder(changed, only=(row,))
    child.ends_after = 10**6
    assert ladder(changed, only=(row,))[row].question["limits"]["host"] == 500 * GB


def test_a_row_that_is_not_measured_names_where_its_prediction_was_made(child: Child, ladder: Ladder) -> None:
    ladder(only=("Sweep, keep o",), predict=True, commit="first")
    child.fails_at = "tokens"
    row = ladder(only=("Sweep, keep o",), commit="second")["Sweep, keep o"]
    assert (row.origin["machine"], row.origin["commit"]) == (MACHINE, "second")


@pytest.mark.usefixtures("child")
def test_models_of_one_name(tmp_path: Path) -> None:
    for name, layers in (("a", 2), ("b", 3)):
        save(make_model("llama3", num_hidden_layers=layers), tmp_path / name / "model")
    options = Options(out=tmp_path, commit="c0ffee", predict=True, only=("2K sweep",))
    start = partial(tasks.start, "recompute", limits=Limits(ranks=2, cap=GB), options=options, lengths=[2048])
    start(model=str(tmp_path / "a" / "model"))
    with pytest.raises(ConfigError, match="has results of another model"):
        start(model=str(tmp_path / "b" / "model"))
    shutil.move(tmp_path / "a", tmp_path / "c")  # the same model elsewhere
    start(model=str(tmp_path / "c" / "model"))


@pytest.mark.usefixtures("child")
def test_one_command_at_a_time_writes_a_file(ladder: Ladder, tmp_path: Path) -> None:
    ladder(only=("Sweep, keep o",))
    store = Store(tmp_path, "ladder", "llama3-8b", SPEC, "8x80GB")
    with store.opened(None), pytest.raises(ConfigError, match="is in use by another ithaca bench: wait until it has"):
        ladder(only=("Sweep, disk",))
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    ladder(only=("Sweep, disk",))


def test_results_of_an_older_release_go_on(child: Child, ladder: Ladder, tmp_path: Path) -> None:
    """Their measurements name neither commit nor device."""
    row, file = ("Sweep, keep o",), tmp_path / FILE
    child.ends_after = 1
    with pytest.raises(KeyboardInterrupt):
        ladder(only=row)
    stored = json.loads(file.read_text())
    for measured in (each for one in stored["rows"] for each in one["measurements"]):
        del measured["commit"], measured["device"]
    file.write_text(json.dumps(stored))
    child.ends_after = 10**6
    assert ladder(only=row)[row[0]].origin["commit"] == "unknown, c0ffee"
    assert len(set(child.asked)) == len(child.asked)


def test_time_that_is_up_keeps_what_was_measured(
    child: Child, ladder: Ladder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    clock = iter([0.0, *(10.0 * step for step in range(1000))])
    monkeypatch.setattr(ask.time, "monotonic", lambda: next(clock))
    rows = ladder(seconds=45)
    assert 0 < len(child.asked) < 6
    assert any(row.measurements and row.answer is None for row in rows.values())
    assert "still to be measured: run the same command again" in capsys.readouterr().out
    before = len(child.asked)
    rows = ladder()
    assert len(set(child.asked)) == len(child.asked) > before
    assert all(row.answer and not row.measurements for row in rows.values())


def test_a_row_that_fails_is_recorded_and_tried_again(child: Child, ladder: Ladder) -> None:
    child.fails_at = '"checkpoint": "none"'
    rows = ladder()
    assert rows["Ulysses + ZeRO-3"].error == "RuntimeError: broken"
    assert rows["Sweep"].answer
    child.fails_at = ""
    again = ladder()["Ulysses + ZeRO-3"]
    assert again.answer
    assert again.error is None


def test_a_prediction_replaces_no_measurement(child: Child, ladder: Ladder) -> None:
    predicted = ladder(predict=True)
    assert child.asked == []
    assert not any(row.answer for row in predicted.values())
    assert predicted["Sweep"].predicted["longest"] > 2**22  # pyrefly: ignore
    assert predicted["Sweep"].origin["machine"] == {"predicted_for": "H100-80GB"}
    measured = ladder(only=("Sweep, keep o",))
    again = ladder(Limits(host=500 * GB), predict=True, only=("Sweep, keep o",))
    assert again["Sweep, keep o"] == measured["Sweep, keep o"]
    assert measured["Sweep, keep o"].answer


@pytest.mark.usefixtures("child")
def test_a_row_says_what_was_predicted_and_measured(ladder: Ladder) -> None:
    rows = ladder(only=("Ulysses + ZeRO-3", "+ checkpointing", "Sweep"))
    # The device holds 1M whatever is kept: more than was predicted, as predicted, and less
    for name in ("Ulysses + ZeRO-3", "+ checkpointing", "Sweep"):
        row = rows[name]
        assert row.answer
        assert row.predicted
        assert row.answer["predicted"] == row.predicted["longest"]
        assert row.answer["longest"] <= 2**20 < row.answer["fails"]
        assert row.answer["tries"][str(row.answer["longest"])] is True
        assert row.answer["tries"][str(row.answer["fails"])] is False
        assert row.answer["limit"] == "GPU"
        # 3 s with two layers, 2 s with one: 33 s with 32
        assert row.answer["timed"] == 2**19
        assert (row.answer["seconds"], row.answer["layer_seconds"]) == (33.0, 1.0)
        assert row.answer["tokens_per_second_per_gpu"] == pytest.approx(2**19 / 33 / 8)
        assert 0 < row.answer["mfu_causal"] < 2
        assert row.origin == {"machine": MACHINE, "commit": "c0ffee", "command": row.origin["command"]}


def test_host_memory_is_counted_not_tried(child: Child, ladder: Ladder) -> None:
    child.holds = 2**30
    found = ladder(Limits(host=200 * GB), only=("Sweep, K and V",))["Sweep, K and V on the host"]
    assert found.answer
    assert found.answer["limit"] == "host"
    assert found.answer["fails"] < 2**21
    lengths = {json.loads(request)["tokens"] for request in child.asked}
    assert found.answer["fails"] not in lengths


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"only": ("Sweep", "nothing")}, "--only 'nothing' is in no row's name: the rows are Tensor parallel; "),
        ({"seconds": 0}, "--seconds 0 is not a time: give 1 or more"),
        ({"seconds": math.nan}, "--seconds nan is not a time: give 1 or more"),
        ({"limits": Limits(ranks=64)}, "--ranks 64 cannot share a sequence of 'llama3-8b' by its 32 heads"),
        ({"limits": Limits(ranks=0)}, "--ranks 0 cannot be measured: give 1 or more"),
        ({"out": Path("/proc/none")}, "--out /proc/none cannot be written"),
    ],
)
@pytest.mark.usefixtures("child")
def test_refused(ladder: Ladder, words: Json, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        ladder(**words)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ladder-tiny.json").write_text('{"rows": [{"colour": "red"}]}')
    store = Store(tmp_path, "ladder", "tiny", SPEC)
    with pytest.raises(ConfigError, match="holds no results of ithaca bench: move it away"), store.opened(None):
        pass


def test_the_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, "ladder", "tiny", SPEC)
    store.row("one", {"a": 1}).answer = {"longest": 1}
    store.save()
    before = store.path.read_bytes()
    store.row("two", {"a": 2})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ithaca.bench.store.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save()
    assert store.path.read_bytes() == before
    assert [row.name for row in read_results(store.path)[1]] == ["one"]


def test_lines() -> None:
    row = Stored("x", {}, {"longest": 0})
    assert run.longest_line(row) == "x: predicted nothing fits"
    assert run.longest_line(Stored("x", {})) == "x: not predicted"
    assert run.point_line(Stored("x", {}, None, {"fits": False})) == "x: does not fit"
