"""What models are used for between training steps, against the naive twin: losses, logits, decoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ithaca
from ithaca.schedule import reference as naive
from tests.models import relative
from tests.schedule.steps import EXACT, Rows, read_weights

LOSS, TOKEN_LOSSES, LOGITS, DECODING = USES = ("loss", "token losses", "logits", "decoding")
NEW = 3  # tokens that are decoded behind each row


@torch.no_grad()
def naive_uses(folder: Path, batches: list[Rows]) -> dict[str, Any]:
    """What the naive twin finds, of the first batch; the loss is of all."""
    spec, weights = read_weights(folder)
    losses = [sum(naive.loss(spec, weights, *row) for row in zip(*rows, strict=True)) for rows in batches]
    tokens, _, ids = batches[0]
    rows = list(zip(tokens, ids, strict=True))
    return {
        LOSS: sum(losses),
        TOKEN_LOSSES: losses[0],
        LOGITS: torch.stack([naive.logits(spec, weights, *row) for row in rows]),
        DECODING: torch.stack([_continued(spec, weights, *row) for row in rows]),
    }


def _continued(spec: ithaca.Spec, weights: dict[str, Tensor], tokens: Tensor, ids: Tensor) -> Tensor:
    """The likeliest tokens behind a row, which belong to its last document."""
    for _ in range(NEW):
        following = naive.logits(spec, weights, tokens, ids)[-1].argmax()
        tokens, ids = torch.cat((tokens, following[None])), torch.cat((ids, ids[-1:]))
    return tokens[-NEW:]


def judge_uses(
    model: ithaca.Model, uses: tuple[str, ...], batches: list[Rows], wanted: dict[str, Any]
) -> Iterator[str]:
    """Use a model in these ways, in every rank, and compare."""
    tokens, _, ids = batches[0]
    for use in uses:
        if use == LOSS:
            with torch.no_grad():
                found = sum(model(model.shard(*rows), valid_tokens=1) for rows in batches)
        elif use == TOKEN_LOSSES:
            found = model.token_losses(model.shard(*batches[0])).sum()
            dist.all_reduce(found)
        elif use == LOGITS:
            found = model.logits(tokens, ids)
        else:
            found = model.greedy_decode(tokens, NEW, ids)
        if not relative(found.double(), wanted[use].double(), floor=1.0) <= EXACT:
            yield f"the {use} without gradients is not the naive twin's"
