"""The samples of a conversation, and what is learned in them: the assistant's text, as spans of characters.

Where the template does not mark it, a turn's span is what it adds to the prompt before it: the rendering up to and with
the turn, less the rendering before it with the generation prompt. Both must be beginnings of the sample's text. So
training has the same prompts as generation.

Some templates write a turn differently once others follow (Qwen3 drops the thinking). No text holds all their turns, so
they become several samples. Turns that agree share one: an agent's trajectory of hundreds of calls stays one sample.

A conversation with n turns to learn is rendered 2 n + 1 times, so the time grows with the square of its turns. No more
than two renderings are in memory at a time, and each sample is encoded once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

GROWTH = 16  # samples may be this many times as long as their conversation, unless `--chat turns` allows more

Span = tuple[int, int]  # characters, from … up to
Render = Callable[[int, bool], str]  # the text of the first n messages; True adds the generation prompt


class NoSpan(Exception):
    """The span of a turn cannot be found; the message says why."""


@dataclass
class _Sample:
    messages: int  # those that are rendered
    length: int  # in characters
    spans: list[Span]


def samples(render: Render, count: int, turns: Sequence[int], choice: str) -> Iterator[tuple[str, list[Span]]]:
    """Yield the text and learned spans of each sample of a conversation of `count` messages.

    `turns`: the messages to learn, rising. `choice`: `whole` raises an error if one sample cannot hold them all,
    `turns` makes as many as it takes; otherwise they may not be much longer together than the conversation.
    """
    text = render(count, False)
    plan = _plan(render, text, count, turns)
    differs = "writes a turn of the assistant differently once others follow"
    if choice == "whole" and (len(plan) > 1 or plan[0].messages != count):
        raise NoSpan(
            f"{differs}, so no single text teaches all of them: --chat turns makes several samples of such a chat"
        )
    if choice != "turns" and sum(sample.length for sample in plan) > GROWTH * len(text):
        raise NoSpan(
            f"{differs}, and this would become {len(plan)} samples, over {GROWTH} times as long together: mark "
            "what the assistant writes with {% generation %} in a copy for --chat-template, or use --chat turns"
        )
    for sample in reversed(plan):
        yield text if sample.messages == count else render(sample.messages, False), sample.spans


def _plan(render: Render, text: str, count: int, turns: Sequence[int]) -> list[_Sample]:
    """Return the samples, last first."""
    plan = [_Sample(count, len(text), [])]
    for turn in reversed(turns):
        prompt = _prompt(render, turn)
        answer = text if plan[-1].messages == turn + 1 else render(turn + 1, False)
        if not answer.startswith(prompt):
            raise NoSpan(
                f"does not write message {turn + 1} behind its own generation prompt, {_end(prompt)}: "
                "mark what the assistant writes with {% generation %} in a copy, and name it with --chat-template"
            )
        if not text.startswith(answer):
            text = answer
            plan = [sample for sample in plan if sample.spans]  # a sample without a learned turn teaches nothing
            plan.append(_Sample(turn + 1, len(text), []))
        plan[-1].spans.insert(0, (len(prompt), len(answer)))
    return plan


def _prompt(render: Render, turn: int) -> str:
    if turn:
        return render(turn, True)
    try:
        return render(0, True)
    except Exception as problem:  # a template may assume a first message in any way
        raise NoSpan(
            "cannot write a conversation that begins with the assistant: put a message of the user first, or set "
            "'train' of message 1 to false"
        ) from problem


def _end(text: str) -> str:
    return repr(text[-40:])
