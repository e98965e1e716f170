"""Documents held out of a token file: two views of it, one to train on and one to validate on.

A hash of a document's number decides, and nothing else: every rank, every start and any number of ranks hold out the
same documents. Both views have the interface of a TokenFile (subset.py), so samplers need not know.
"""

import numpy as np

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_count
from ithaca.data.reader import TokenFile
from ithaca.data.subset import Subset
from ithaca.data.tokenfile import quoted

SEED = 0x17ACA  # fixed: with another one a run would train on what its last start held out


def hold_out(data: TokenFile, share: float) -> tuple[Subset, Subset]:
    """Return the documents to train on, and a share of them to validate on: at least one of each."""
    count = max(round(share * data.documents), 1)
    if count >= data.documents:
        raise DataError(
            f"{quoted(data.path)} has {format_count(data.documents, 'document')}, and data.validation={share:g} would "
            f"hold out {count}, which leaves none to train on: {_instead(data.documents)}"
        )
    held = np.zeros(data.documents, bool)
    held[np.argpartition(_hashes(data.documents), count)[:count]] = True
    bounds = data.bounds()
    validation = Subset(data, held, bounds)
    return Subset(data, ~held, bounds, data.header.labels - validation.header.labels), validation


def _instead(documents: int) -> str:
    if documents == 1:
        return "name a token file of other documents as data.validation"
    return f"{1 / documents:.2g} holds out one"


def _hashes(count: int) -> np.ndarray:
    """Return a hash of each number below `count`; numbers that differ have hashes that differ (splitmix64)."""
    with np.errstate(over="ignore"):
        words = (np.arange(count, dtype=np.uint64) + np.uint64(SEED)) * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
