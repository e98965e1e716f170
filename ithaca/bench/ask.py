"""Measurements in processes of their own. Each result is stored at once, and no measurement outlasts the deadline.

The processes are forked from a server (multiprocessing's) that imports torch once. So a measurement begins within a
second or two, on a device that its process has not used before.
"""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from ithaca.base.errors import RunError

Json = dict[str, Any]
CHILD = "ithaca.bench.child"
LONGEST = 20 * 86400.0  # seconds that a pipe can be waited for
LEAVING = 20  # seconds for a process to release its device after it has sent its result


class TimeIsUp(Exception):
    """The seconds that a command may take are over. What was measured is stored."""


class MeasureError(Exception):
    """A measurement ended with an error, which its row records."""


def context() -> Any:
    """Return how processes are started: from a server with torch imported."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([CHILD])
    return found


def run_child(request: Json, seconds: float | None = None) -> Json:
    """Measure in a process of its own. Raise `TimeIsUp` if that takes more seconds, and end the process."""
    from importlib import import_module

    started = context()
    serve: Callable[..., None] = import_module(CHILD).serve if started.get_start_method() == "fork" else _serve
    ours, theirs = started.Pipe()
    process = started.Process(target=serve, args=(request, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(None if seconds is None else min(seconds, LONGEST)):
            raise TimeIsUp
        found = ours.recv()
        process.join(LEAVING)
        return found
    except EOFError:
        process.join(LEAVING)
        return {"error": f"the process of the measurement ended with code {process.exitcode} and said nothing"}
    finally:
        process.kill()  # nothing happens if it has ended
        process.join()


def _serve(request: Json, pipe: Any) -> None:
    """Serve a request in the new process, which has imported torch; the command's own process has not."""
    from ithaca.bench.child import serve

    serve(request, pipe)


class Deadline:
    """When a command has to end; without seconds, never."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()


class Ask:
    """Answers requests: from stored results, or by measuring. `origin` is stored with each new answer."""

    def __init__(self, stored: list[Json], save: Callable[[], None], deadline: Deadline, origin: Json):
        self._stored, self._save, self._deadline, self._origin = stored, save, deadline, origin

    def __call__(self, request: Json) -> Json:
        """Return the result of a request. An error is not stored: the next run tries again."""
        found = next((each["result"] for each in self._stored if each["request"] == request), None)
        if found is not None:
            return found
        left = self._deadline.left
        if left is not None and left <= 0:
            raise TimeIsUp
        result = run_child(request, left)
        if "error" in result:
            raise MeasureError(result["error"])
        self._stored.append({"request": request, "result": result, **self._origin})
        self._save()
        return result


def find_machine(model: str, deadline: Deadline) -> Json:
    """Return the device that is here, and the versions."""
    found = run_child({"kind": "machine", "model": model}, deadline.left)
    if "error" in found:
        raise RunError(f"this machine's device cannot be used ({found['error']}): see ithaca doctor")
    return found
