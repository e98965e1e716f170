"""The GPU of this machine, as the tables of the planner describe it. The planner itself never loads torch."""

from pathlib import Path

import torch

from ithaca.planner.hardware import Gpu, find_gpu, read_gpus


def known_gpu(device: torch.device, hardware: Path | None = None) -> Gpu | None:
    """Return the GPU of a device; None on a CPU and for a GPU that no table describes.

    `hardware`: a file of the user's that adds GPUs or replaces their rates.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory, read_gpus(hardware))
