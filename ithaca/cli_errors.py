"""Run the command line; end it after a mistake, by one sentence that suggests a similar option if there is one."""

import errno
import io
import os
import shlex
import sys
import traceback
from typing import Any, NoReturn

import typer

from ithaca.base.errors import IthacaError

# typer has its own copy of click in some versions; both have this class below the one that typer exports
USAGE_ERROR = typer.BadParameter.__mro__[1]
# Errors of the system about a path that a user has named
REFUSALS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
# Options of a run under their names in other commands: (command, option) -> words
OTHER_FLAGS = {("plan", "--ranks"): "--gpus {}xH100-80GB", ("data", "--run"): "--out {}"}


def run_app(app: typer.Typer) -> None:
    """Run a command line. A user's mistake is one sentence, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may hold bytes that are no text
    try:
        _run(app)
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        end(1)


def _run(app: typer.Typer) -> NoReturn:
    try:
        code = app(prog_name="ithaca", standalone_mode=False)
    except IthacaError as error:
        fail(str(error), error.code)
    except USAGE_ERROR as error:
        fail_usage(error)
    except MemoryError as error:
        fail(f"the host has not enough memory ({error}): a smaller train.batch takes less", 1)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        fail(f"'{error.filename}' cannot be used ({error.strerror}): name another place", IthacaError.code)
    end(code or 0)  # an int if a command ended early, as after --version; else None


def fail(sentence: str, code: int) -> NoReturn:
    """Print one line, also if a name or a library's error has several. torchrun does not try again."""
    line = " ".join(sentence.split("\n")).strip()
    print("error:", line, file=sys.stderr)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from ithaca.train.ranks.elastic import end_torchrun, report_error

        report_error(line)
        end_torchrun()
    end(code)


def end(code: int) -> NoReturn:
    """End the process. A rank ends at once: leaving its job, NCCL would wait for the messages of other ranks, and a
    thread of gloo that calls into Python while it shuts down would abort the process, after a good end as well.
    """
    if "RANK" in os.environ:
        from ithaca.train.ranks.elastic import exit_now

        exit_now(code)
    sys.exit(code)


def fail_usage(error: Any) -> NoReturn:
    """Print typer's error about the command line, with a suggestion if a flag is unknown."""
    if len(sys.argv) == 1:  # the help is the answer
        error.show()
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "ithaca"
    if error.ctx and hasattr(error, "possibilities") and (hint := _suggest_flag(error.ctx.command, error.option_name)):
        fail(f"{error.option_name} is not an option of {command}: {hint}", error.exit_code)
    fail(f"{error.format_message().rstrip('.')}: see {command} --help", error.exit_code)


def _suggest_flag(command: Any, name: str) -> str | None:
    """Return what to write instead of an unknown flag, with its value; None if nothing is like it."""
    from ithaca.base.aliases import suggest_option
    from ithaca.config import option_defaults

    flags = {flag for item in command.params for flag in item.opts}
    of_scene = ("plan.", "mesh.")
    tables = {"train": ("",), "rehearse": of_scene, "profile": of_scene}.get(command.name, ())  # what its --set takes
    shown = []

    def show(setting: str) -> str:
        """The command's own flag if it has one for that, else its --set."""
        option, _, value = setting.partition(" " if setting.startswith("--") else "=")
        own = OTHER_FLAGS.get((command.name, option), f"--{option.removeprefix('--').rpartition('.')[2]} {{}}")
        if own.split()[0] in flags:
            return own.format(shlex.quote(value)) if value else own.split()[0]
        shown.append(not setting.startswith("--") and option.startswith(tables))
        return f"--set {shlex.quote(setting)}"

    hint = suggest_option(name, _value_after(name), option_defaults(), show, mistyped=command.name == "train")
    return hint if all(shown) else None


def _value_after(name: str) -> str | None:
    """Return the word that was given as a flag's value: `--lr 1e-5` or `--lr=1e-5`."""
    for word, following in zip(sys.argv, [*sys.argv[1:], "-"], strict=True):
        if word == name:
            return None if following.startswith("-") else following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
