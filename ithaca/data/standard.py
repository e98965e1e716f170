"""Text that every user has: the sources of Python's standard library, about 15 MB, each file a document of bytes.

Read into memory in well under a second; nothing is written.
"""

import sysconfig
from pathlib import Path

import numpy as np

from ithaca.data.tokenfile import INT64, TokenFile

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TABLES = {"encodings", "pydoc_data", "msilib"}  # numbers and listings, not programs: a model of minutes learns none


def standard_library() -> TokenFile:
    """The sources of Python's standard library, tests and tables left out."""
    top = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(top.rglob("*.py")) if not (_LEFT_OUT | _TABLES) & set(file.relative_to(top).parts)]
    contents = [content for file in files if (content := file.read_bytes())]
    bounds = np.cumsum([0, *map(len, contents)], dtype=INT64)
    return TokenFile(None, np.frombuffer(b"".join(contents), np.uint8), bounds, None, "bytes", 256)
