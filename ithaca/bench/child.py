"""One measurement in a process of its own, from a request to a result, both JSON.

A rehearsal makes its process rank 0 of a job for good, and memory that ran out can leave a device in any state. So each
measurement has a process, forked from a server that has imported torch and done nothing else (ask.py).

    machine    the device and the versions that results depend on
    memory     a memory-only rehearsal of some layers under a cap, the others held: does a length fit?
    time       steps of n layers and of n / 2, timed: what one layer more takes
    peer       a training step of another program, or of Ithaca, on one GPU (peer_sides.py)
"""

import gc
import os
import platform
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from ithaca.attention.kernels.choose import choose_kernel
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.base.errors import IthacaError, RunError
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.mesh import Mesh
from ithaca.planner.hardware import RUNTIME
from ithaca.plans.plan import Plan
from ithaca.rehearsal.measure import compute_dtype
from ithaca.rehearsal.rehearse import loopback_mesh, out_of_memory, run_scene
from ithaca.rehearsal.scene import Scene

Json = dict[str, Any]
AGAIN = 2  # how often a step that was disturbed is timed again
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
PACKAGES = ("flash-attn-4", "transformers", "liger-kernel", "deepspeed")


def serve(request: Json, pipe: Connection) -> None:
    """Measure what a request asks for and send the result, or the error."""
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    try:
        result = KINDS[request["kind"]](request)
    except IthacaError as problem:
        result = {"error": str(problem)}
    except Exception as problem:  # whatever it is, the next row can still be measured
        traceback.print_exc()
        result = {"error": f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0][:300]}"}
    pipe.send(result)
    pipe.close()


def _end_with(pipe: Connection) -> None:
    """End this process when its parent is gone, because it would keep the device from the next measurement."""
    try:
        pipe.recv()
    except EOFError:
        os._exit(1)
    except OSError:
        return  # closed here: the result is sent


def machine(request: Json) -> Json:
    """The device, the versions, and the attention kernel that the model runs with."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    spec = read_spec(find_config(request["model"])[0])
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "on_cpu": not gpu,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if gpu else None,
        "host_bytes": psutil.virtual_memory().total,
        "kernel": choose_kernel("auto", device, compute_dtype(device), spec.head_size).name,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    if package == "flash-attn-4" and not KERNEL_FACTS["flash4"].installed:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def memory(request: Json) -> Json:
    """A memory-only rehearsal. On a CPU the meter's peak is compared with the cap."""
    scene, grid = _scene(request)
    scene = replace(scene, memory_only=True)
    return _fitting(lambda: run_scene(scene, grid), scene, grid, request["cap"])


def time(request: Json) -> Json:
    """Steps of n layers and of n / 2. With `hold`, absent layers are held under the cap, and memory is watched."""
    scene, grid = _scene(request)
    half = replace(scene, layers=request["layers"] // 2, hold_absent=False, cap=None, once=True)
    if not request["hold"]:
        scene = replace(scene, hold_absent=False, cap=None, once=True)
        # A step at full length, not timed: a first step also waits for compilers and allocations
        warm = _fitting(lambda: run_scene(replace(half, repeats=1), grid), half, grid, request["cap"])
        if not warm["fits"]:
            return warm
        _free(grid)
    report = _fitting(lambda: run_scene(scene, grid), scene, grid, request["cap"])
    if not report["fits"]:
        return report
    _free(grid)
    fewer = run_scene(half, grid)
    taken = [report["seconds"]]
    while len(taken) <= AGAIN and disturbed(min(taken), report["layers"], fewer["seconds"], fewer["layers"]):
        _free(grid)
        taken.append(run_scene(scene, grid)["seconds"])
    report |= {"seconds": min(taken), "seconds_tried": taken}
    return report | {"fewer_layers": fewer["layers"], "fewer_seconds": fewer["seconds"]}


def disturbed(seconds: float, layers: int, fewer_seconds: float, fewer_layers: int) -> bool:
    """Whether a step of n layers takes too long for one of n / 2.

    The step of n / 2 has the embedding, the loss and the optimizer, so n / 2 layers more cannot take longer than it. A
    new machine was seen to take 6.57 s for two layers and 2.74 s for one, another time 5.61 s and 2.72 s, and the
    difference is multiplied by all layers that are missing.
    """
    return (seconds - fewer_seconds) / (layers - fewer_layers) > fewer_seconds / fewer_layers


def _scene(request: Json) -> tuple[Scene, Mesh]:
    grid = loopback_mesh(Axes(**request["axes"]))
    scene = Scene(
        model=request["model"],
        plan=Plan(**request["plan"]),
        tokens=request["tokens"],
        axes=grid.axes,
        layers=request["layers"],
        cap=request["cap"] if grid.gpu else None,
        repeats=request.get("repeats", 1),
    )
    return scene, grid


def _fitting(rehearse: Callable[[], Json], scene: Scene, grid: Mesh, cap: int) -> Json:
    """The report of a rehearsal, and whether it fits."""
    try:
        report = rehearse()
    except RuntimeError as problem:  # libraries have errors of their own for memory that ran out
        if not isinstance(problem, torch.OutOfMemoryError) and not any(word in str(problem) for word in NO_MEMORY):
            raise
        if grid.gpu:
            _check_shared(grid.device, cap)
        return out_of_memory(scene, grid, problem)
    report = {name: value for name, value in report.items() if name not in ("plan", "memory_predicted")}
    if not grid.gpu and report["peak_bytes"] > cap:
        report |= {"fits": False, "why": f"the meter's peak is {report['peak_bytes']} bytes, the cap {cap}"}
    return report


def _check_shared(device: torch.device, cap: int) -> None:
    """Raise an error if memory ran out because other programs have it, and not because of the cap."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - RUNTIME
    if others > 0 and total - others < cap:
        raise RunError(
            f"other programs hold {others / 1e9:.1f} GB of this GPU and leave less than the cap of {cap / 1e9:g} GB: "
            f"stop them, or give --cap {max(total - others, 0) / 1e9:.0f}GB"
        )


def _free(grid: Mesh) -> None:
    gc.collect()  # modules under FSDP2 refer to each other
    if grid.gpu:
        torch.cuda.empty_cache()


def peer(request: Json) -> Json:
    from ithaca.bench.peer_sides import measure_side  # other people's packages

    return measure_side(request)


KINDS: dict[str, Callable[[Json], Json]] = {"machine": machine, "memory": memory, "time": time, "peer": peer}
