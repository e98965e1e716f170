"""The warm-up of a run, or of a stage, that sets none."""

import math

SHARE, SHORTEST, LONGEST = 0.03, 4, 2000


def default_warmup(steps: int) -> int:
    """Return its steps: a share of all, within bounds, and never more than there are."""
    return min(max(math.ceil(SHARE * steps), SHORTEST), LONGEST, steps)
