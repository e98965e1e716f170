"""Processes that end with the one that started them, however that one ends. Linux."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent does end. Return False if process `parent` has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
