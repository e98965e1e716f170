"""Small files that a user or a stranger wrote: configurations, tables, descriptions of models. Memory stays bounded."""

import errno
import os
import stat
from pathlib import Path

MOST = 64 << 20  # bytes; what a person or a program writes as TOML or JSON is far smaller
TO_UTF8 = "if it is Latin-1, convert it with `iconv -f LATIN1 -t UTF-8`"  # iconv without -f takes that of the locale


def read_small(path: Path, most: int = MOST) -> bytes:
    """Return the content of a regular file. Raise ValueError if it is something else, or has more bytes than `most`.

    A device may have no end, and to open a pipe would wait until someone writes to it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is a device or a pipe, not a file")
        content = file.read(most + 1) if found.st_size <= most else b""
    size = max(found.st_size, len(content))
    if size > most:
        raise ValueError(f"it has {size} bytes, and {most} are the most")
    return content
