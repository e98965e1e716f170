"""Whatever a user mistypes is one sentence on stderr."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

from ithaca import __version__
from ithaca.base.errors import ConfigError, DataError, IthacaError, LostRankError, ModelError, PlanError, RunError
from ithaca.bench.commands import bench
from ithaca.cli import app, main
from ithaca.train.setup.named_run import check_new
from tests.nursery import Ended

Say = Callable[..., Ended]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> Say:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ithaca", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


USAGE = {
    ("nonsense",): "No such command 'nonsense': see ithaca --help",
    ("train", "--nonsense"): "No such option: --nonsense",
    ("plan",): "Missing argument 'model': see ithaca plan --help",
    ("plan", "tiny", "--gpus"): "requires an argument: see ithaca",
    ("train", "--ranks", "two"): "Invalid value for '--ranks'",
    ("export", "a", "b", "c"): "unexpected extra argument",
}


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_a_wrong_word_is_one_sentence(say: Say, words: tuple[str, ...]) -> None:
    end = say(*words)
    assert (end.code, end.out) == (2, "")
    assert end.err.startswith("error: ")
    assert USAGE[words] in end.err
    assert end.err.count("\n") == 1


def test_no_option_is_named_by_its_metavar() -> None:
    """typer 0.27 names an option of the parameter `task` and metavar TASK --TASK, unless its name is given."""
    for command in (*app.registered_commands, *bench.registered_commands):
        assert command.callback
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                alike = (getattr(option, "metavar", None) or "").lower() == name
                # In an Annotated, typer reads the first name from the place of the default
                assert not alike or option.default == f"--{name}", (command.callback.__name__, name)


def test_no_word_at_all_shows_the_help(say: Say) -> None:
    end = say()
    assert end.code == 2
    assert "Usage:" in end.out + end.err
    assert "error" not in end.err
    assert say("--version").code == 0


@pytest.mark.parametrize("module", ["ithaca", "ithaca.cli"])
def test_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"ithaca {__version__}\n"), done.stderr


def test_a_name_that_the_system_refuses(say: Say) -> None:
    end = say("train", "--run", "a" * 300, "--ranks", "1", "--set", "train.steps=1")
    assert end.code == 2
    assert end.err.startswith(f"error: '{'a' * 300}' cannot be made a run folder (File name too long")
    end = say("train", "a" * 300)
    assert end.code == 2
    assert end.err == f"error: '{'a' * 300}' cannot be read (File name too long)\n"


def test_a_mistyped_run_trains_nothing(say: Say) -> None:
    """Without a configuration and --set only `ithaca train` alone is the first run."""
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.toml").write_text("")
    near = "did you mean 'runs/mine'? Or, to start a run there, name a configuration or model.source"
    for more in ([], ["--set", "train.steps=4000"], ["--profile-step", "7"]):
        end = say("train", "--run", "runs/mien", *more)
        assert (end.code, end.out) == (2, "")
        assert end.err == f"error: 'runs/mien' has no run to continue: {near}\n"
    start = "to start a run there, name a configuration or --set options"
    end = say("train", "--run", "elsewhere/x", "--ranks", "1")
    assert (end.code, end.err) == (2, f"error: 'elsewhere/x' has no run to continue: {start}\n")
    assert [file.name for file in Path().rglob("*")] == ["runs", "mine", "config.toml"]


def test_a_new_run_may_be_named_like_another(tmp_path: Path) -> None:
    (tmp_path / "try-1").mkdir()
    (tmp_path / "try-1/config.toml").write_text("")
    for name, more in (("try-2", []), ("tri-1", ["model.source=my-model"]), ("other", [])):
        check_new(tmp_path / name, ["train.steps=4", *more])


def test_nothing_starts_again_where_no_run_is(say: Say) -> None:
    Path("other").mkdir()
    instead = "name a configuration or --set options"
    for name in ("runs/none", "other"):
        end = say("train", "--run", name, "--fresh", "--ranks", "1")
        assert (end.code, end.err) == (2, f"error: --fresh: '{name}' has no run to start again: {instead}\n")
    end = say("train", "--fresh")
    assert (end.code, end.err) == (
        2,
        "error: --fresh: --run is missing: name it, or a configuration or --set options\n",
    )
    assert [file.name for file in Path().rglob("*")] == ["other"]


def test_a_name_of_two_lines_is_quoted_on_one(say: Say) -> None:
    Path("a\nb.jsonl").write_text("{")
    end = say("data", "a\nb.jsonl", "--out", "x.tokens")
    assert end.code == 2
    assert end.err.startswith("error: 'a b.jsonl', line 1 is not JSON")
    assert end.err.count("\n") == 1


def test_a_name_that_is_no_text(say: Say) -> None:
    name = os.fsdecode(b"\xff.txt")
    Path(name).write_text("the sea")
    assert "'\\udcff.txt' " in say("data", name, "--out", name).err
    end = say("data", name, "--out", os.fsdecode(b"\xff.tokens"))
    assert end.code == 0, end.err
    assert "\\udcff.tokens: 7 tokens" in end.out
    end = say("train", "--run", name)
    assert end.code == 2
    assert end.err.startswith("error: --run \\udcff.txt has bytes that are not UTF-8")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_configuration_that_is_no_file(say: Say, make: Callable[[str], None]) -> None:
    Path("run").mkdir()
    make("run/config.toml")
    end = say("train", "--run", "run")
    assert end.code == 2
    assert end.err.startswith("error: 'run/config.toml' ")
    assert end.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--version"], ["plan"]], ids=" ".join)
@pytest.mark.parametrize("rank", [None, "0"])
def test_a_rank_ends_without_pythons_shutdown(rank: str | None, words: list[str]) -> None:
    """During it, a gloo thread of a finished run aborted the process under torchrun, once in 35 times."""
    program = f"import atexit, sys; atexit.register(print, 'shut down'); sys.argv[1:] = {words}"
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; from ithaca.cli import main; main()"],
        env=environ | ({} if rank is None else {"RANK": rank}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if words == ["--version"] else 2)
    assert (__version__ in done.stdout) is (done.returncode == 0)
    assert ("shut down" in done.stdout) is (rank is None)


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise FileNotFoundError(2, "No such file", "internal")

    monkeypatch.setattr("ithaca.cli.app", fail)
    with pytest.raises(FileNotFoundError):
        main()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("that cannot be"), 2) for kind in (IthacaError, ConfigError, DataError, ModelError, PlanError)),
        (RunError("that cannot be"), 1),
        (LostRankError("that cannot be", [1]), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_sentence_and_a_code(
    error: IthacaError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 for a user's mistake, 1 for a run that cannot continue: schedulers start only the latter again."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("ithaca.cli.app", fail)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err == "error: that cannot be\n"
