"""Scores of samples under a Plan: the likelihood of the right answer among others, and a greedy answer.

A prompt is read once (`Model.read_prompts`). All candidates and the greedy answer then continue it side by side, one
token a step, from its K and V. Several short samples go through one pass, as many as fill the longest length.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ithaca.assemble import Model
from ithaca.assemble.decode import agree_tokens
from ithaca.base.precision import at_least_fp32
from ithaca.evaluate.tasks import Sample
from ithaca.parallel.agree import together_with
from ithaca.parallel.batch import batch_rows

MOST_ROWS = 16  # samples of a data rank in one pass


@dataclass(frozen=True)
class Scored:
    """A model's answers to one sample."""

    likelihoods: list[float]  # the log-probability of each candidate
    likeliest: int  # the candidate with the highest
    answer: list[int]  # greedy tokens
    share: float  # of the items that the greedy answer has


def score(
    model: Model,
    samples: Sequence[Sample],
    longest: int,
    slack: int,
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Scored] | None:
    """Score samples of one length, the same list on every rank. Collective.

    `longest`: tokens that a pass of one data rank may have. `slack`: tokens of an answer beyond those expected.
    `watch` is entered for each pass. `stopped` is called before each; if it is True, on all ranks, return None.
    """
    grid, length = model.mesh, len(samples[0].prompt) + len(samples[0].answer)
    rows = min(MOST_ROWS, max(longest // length, 1)) * grid.data_ranks
    found: list[Scored] = []
    for first in range(0, len(samples), rows):
        if stopped():
            return None
        part = samples[first : first + rows]
        # Every data rank needs as many rows, so that all passes have one shape: the last ones are repeated
        padded = [*part, *[part[-1]] * (rows - len(part))]
        with watch():
            found += _score_pass(model, padded, slack)[: len(part)]
    return found


def _score_pass(model: Model, samples: list[Sample], slack: int) -> list[Scored]:
    """Score as many samples as all data ranks take at once."""
    prompts = [sample.prompt for sample in samples]
    shortest = min(map(len, prompts))
    if any(len(prompt) > shortest for prompt in prompts):  # answers of other lengths: each prompt by itself
        groups = sorted({len(prompt) for prompt in prompts})
        return _in_groups(model, samples, groups, slack)
    tokens = torch.from_numpy(np.stack(prompts))
    own = batch_rows(model.mesh, len(samples))
    mine = samples[own.start : own.stop]
    steps = max(len(ids) for sample in samples for ids in sample.candidates)
    greedy_steps = max(len(sample.answer) for sample in samples) + slack
    reading = model.read_prompts(tokens)
    copies = len(samples[0].candidates) + 1  # the last one is the greedy answer
    reading.begin(copies, max(steps, greedy_steps))
    forced = _candidate_tokens(mine, max(steps, greedy_steps)).to(model.mesh.device)  # [rows, copies, steps]
    feed = tokens[own.start : own.stop, -1:].expand(-1, copies).to(model.mesh.device)
    sums, answers = 0.0, []
    for at in range(forced.shape[2]):
        logits = reading.step(feed.flatten()).view(len(mine), copies, -1)
        sums = sums + _log_likelihoods(logits[:, :-1], forced[:, :-1, at])
        chosen = logits[:, -1].argmax(-1)
        agree_tokens(model.mesh, chosen)
        answers.append(chosen)
        feed = torch.cat((forced[:, :-1, at].clamp(min=0), chosen[:, None]), 1)
    scored = [
        _scored(sample, likelihoods, answer[:greedy_steps])
        for sample, likelihoods, answer in zip(
            mine, torch.as_tensor(sums).tolist(), torch.stack(answers, 1).tolist(), strict=True
        )
    ]
    parts = together_with(model.mesh.group, lambda: scored, lambda found: found)[1]
    return [one for part in parts[:: model.mesh.context_ranks] for one in part]


def _in_groups(model: Model, samples: list[Sample], groups: list[int], slack: int) -> list[Scored]:
    """Score samples whose prompts have several lengths, those of one length at a time."""
    found: dict[int, Scored] = {}
    for length in groups:
        numbers = [number for number, sample in enumerate(samples) if len(sample.prompt) == length]
        more = -len(numbers) % model.mesh.data_ranks
        part = [samples[number] for number in [*numbers, *[numbers[-1]] * more]]
        found |= dict(zip(numbers, _score_pass(model, part, slack), strict=False))
    return [found[number] for number in range(len(samples))]


def _candidate_tokens(samples: Sequence[Sample], steps: int) -> Tensor:
    """[rows, candidates + 1, steps]: the tokens of all candidates, -1 behind the end of each and for the greedy one."""
    tokens = torch.full((len(samples), len(samples[0].candidates) + 1, steps), -1, dtype=torch.int64)
    for row, sample in enumerate(samples):
        for number, ids in enumerate(sample.candidates):
            tokens[row, number, : len(ids)] = torch.tensor(ids)
    return tokens


def _log_likelihoods(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token, 0 where there is none, in float64."""
    log_p = logits.to(at_least_fp32(logits.dtype)).log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return torch.where(tokens >= 0, log_p, 0.0).double()


def _scored(sample: Sample, likelihoods: list[float], answer: list[int]) -> Scored:
    return Scored(likelihoods, int(np.argmax(likelihoods)), answer, sample.share_found(answer))
