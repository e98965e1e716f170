"""Sequences to train on: a stream of bytes cut into documents, from which each step draws its own.

A step's sequences depend on the seed and the step alone, so they are the same on any number of ranks.
"""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Bytes:
    """Files laid end to end, each a document, each byte a token."""

    def __init__(self, files: list[Path]):
        contents = [np.frombuffer(file.read_bytes(), dtype=np.uint8) for file in files]
        self.stream = np.concatenate(contents)
        self.starts = np.cumsum([0, *map(len, contents)])[:-1]  # where each document begins

    def sequences(self, rows: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """tokens and document ids [rows, length], from random places of the stream, around its end if need be."""
        chance = np.random.default_rng((seed, step))
        places = chance.integers(0, len(self.stream), (rows, 1)) + np.arange(length)
        places %= len(self.stream)
        documents = np.searchsorted(self.starts, places, side="right")
        return torch.from_numpy(self.stream[places].astype(np.int64)), torch.from_numpy(documents)


def standard_library() -> Bytes:
    """The sources of Python's standard library, which every user has: about 15 MB of text."""
    top = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [file for file in sorted(top.rglob("*.py")) if not left_out & set(file.relative_to(top).parts)]
    return Bytes([file for file in files if file.stat().st_size])
