"""Steps under `plan.cuda_graph` on a CPU, with the recorder and the kernel of schedule/test_cuda_graph.py."""

from collections.abc import Callable
from typing import Any

import torch

from ithaca.assemble import Model, model
from ithaca.schedule.cuda_graph import GraphedPasses
from tests.schedule.test_cuda_graph import ReadsBounds, Rerun


def graphs_on_a_cpu() -> None:
    """Let every model of this process replay. Nothing is put back: for a process of its own."""
    model.graph_passes = lambda decoder, _mesh, dtype, _kernel: GraphedPasses(decoder, dtype, Rerun)
    model.choose_kernel = lambda *_: ReadsBounds()


def kind(of: Model) -> str:
    """How the last training pass ran: 'eager', or as which replay of its graph. A capture ends with replay 1."""
    graph = of._graphs._graph if of._graphs else None
    return f"replay {graph._number}" if graph else "eager"


def noting(run_step: Callable[..., dict[str, float]], said: list[str]) -> Callable[..., dict[str, float]]:
    """`run_step`, which notes of each step how it ran and who watched it. Its parts take as long as its number says."""

    def step(of: Model, *args: Any, **more: Any) -> dict[str, float]:
        watchers = {
            "metered": torch._C._len_torch_dispatch_stack() > 0,
            "profiled": torch._C._autograd._profiler_enabled(),
        }
        seconds = run_step(of, *args, **more)
        said.append(", ".join([kind(of), *(name for name, watches in watchers.items() if watches)]))
        number = sum(each.startswith(("eager", "replay")) for each in said)
        return dict.fromkeys(seconds, float(number))

    return step
