"""What a schedule's cost says that a block sends over the Ulysses ranks, against what leaves a rank."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.schedule.costs import Traffic
from tests.sampling import sampled
from tests.schedule.contexts import LAYERS, head_counts, open_model, save_models
from tests.schedule.counting import sent_messages, stated_messages

LOCAL = 6  # tokens of each rank: no padding
BYTES = 8  # of a number

PLANS = {
    "ulysses-none": {"recipe": "ulysses", "checkpoint": "none"},
    "ulysses-selective": {"recipe": "ulysses", "checkpoint": "selective"},
    "ulysses-full": {"recipe": "ulysses", "checkpoint": "full"},
    "alst": {"recipe": "alst", "tile": 4},
    "untied": {"recipe": "untied"},
}
CHUNKS = {1: 6, 2: 3, 3: 2, 5: 1}  # how many -> a rank's tokens in each; 5 of 5 tokens
SWEEPS = {
    f"sweep-{kept}-{count}": {"recipe": "sweep", "o": kept, "chunks": count}
    for kept, count in itertools.product(("host", "recompute"), CHUNKS)
}
SWEEPS |= {"fpdt-3": {"recipe": "fpdt", "chunks": 3}}
MIXED = {"sweep-mixed-3": {"recipe": "sweep", "o": "recompute, host, recompute", "chunks": 3}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def sequence(options: dict, world: int) -> tuple[ithaca.Plan, int, int]:
    """The Plan, the tokens of a rank, and the chunks."""
    options = dict(options)
    count = options.pop("chunks", 1)
    local = 5 if count == 5 else LOCAL
    if options["recipe"] in ("sweep", "fpdt"):
        options |= {"chunk": CHUNKS[count] * world, "tile": 1}
    return ithaca.Plan(**options), local, count


def sent(
    folder: Path, plan: ithaca.Plan, tokens: int, document: int | None = None
) -> tuple[list[Traffic], list[Traffic]]:
    """Forward and backward: all-to-alls and the bytes of their parts for other ranks; and what is said of them.

    `document`: tokens of each document; None: all.
    """
    model, row = open_model(folder, plan, {"ulysses": dist.get_world_size()}), torch.arange(tokens) % 97
    batch = model.shard(row, row, torch.arange(tokens) // (document or tokens))
    assert batch.layout.padded == tokens
    lengths = tuple(end - start for start, end in itertools.pairwise(batch.bounds))
    return sent_messages(model, batch), stated_messages(model, tokens, lengths)


FEW = ("ulysses-selective", "alst", "untied", "sweep-host-2", "sweep-recompute-3", "sweep-mixed-3", "fpdt-3")


@pytest.mark.parametrize(
    ("name", "heads", "world"),
    sampled(
        itertools.product(PLANS | SWEEPS | MIXED, ("8/8", "8/2", "8/1", "14/2", "6/3"), (2, 3, 4)),
        lambda name, heads, world: name in FEW and (heads, world) in (("14/2", 2), ("6/3", 3)),
    ),
)
def test_what_is_said_is_sent(ranks, folders, name: str, heads: str, world: int) -> None:
    plan, local, _ = sequence((PLANS | SWEEPS | MIXED)[name], world)
    for found, said in ranks(world).run(sent, folders[heads], plan, local * world):
        assert found == said


def closed_form(name: str, options: dict, heads: str, ranks: int, head_size: int) -> tuple[Traffic, Traffic]:
    """The table of the module, over all layers."""
    plan, n, chunks = sequence(options, ranks)
    queries, keys = head_counts(heads)
    q = n * queries * head_size * BYTES * (ranks - 1) // ranks
    kv = 2 * n * max(keys, ranks) * head_size * BYTES * (ranks - 1) // ranks
    forward = Traffic(2, 2 * q + kv)
    if plan.sweeps:
        recomputed = plan.settled().o == "recompute"
        forward = Traffic(2 * chunks, 2 * q + kv)
        messages = 5 * chunks - 2 if recomputed else 3 * chunks - 2
        if chunks == 1:
            messages += 1  # one chunk sends its K and V with its queries
        last = Traffic((4 if recomputed else 2) * chunks, 4 * q + kv)
        each = Traffic(messages, 4 * q + 2 * kv)
        return times(forward, LAYERS), times(each, LAYERS - 1) + last
    rounds = queries // ranks if name == "untied" else 1
    groups = max(keys, ranks) // ranks if name == "untied" else 0
    groups = 0 if rounds == groups else groups  # K and V go with the queries where one round alone reads them
    backward = {
        "ulysses-none": Traffic(2, 2 * q + kv),
        "ulysses-selective": Traffic(2, 4 * q + 2 * kv),
        "ulysses-full": Traffic(4, 4 * q + 2 * kv),
        "alst": Traffic(4, 4 * q + 2 * kv),
        "untied": Traffic(4 * rounds + 3 * groups, 6 * q + 3 * kv),
    }[name]
    return times(Traffic(2 * rounds + groups, forward.bytes), LAYERS), times(backward, LAYERS)


def times(traffic: Traffic, count: int) -> Traffic:
    return Traffic(traffic.messages * count, traffic.bytes * count)


@pytest.mark.parametrize(
    ("name", "heads", "world"),
    sampled(
        itertools.product(PLANS | SWEEPS, ("8/8", "8/2", "8/1"), (2, 4)),
        lambda name, *others: others == ("8/2", 2) or (name, *others) == ("untied", "8/8", 2),
    ),
)
def test_the_table(ranks, folders, name: str, heads: str, world: int) -> None:
    options = (PLANS | SWEEPS)[name]
    plan, local, _ = sequence(options, world)
    size = ithaca.load_model(folders[heads], "float64").spec.head_size
    wanted = list(closed_form(name, options, heads, world, size))
    for found, said in ranks(world).run(sent, folders[heads], plan, local * world):
        assert found == said == wanted


def test_documents_send_the_same_bytes_in_fewer_messages(ranks, folders) -> None:
    """K and V that no later chunk asks for travel with the queries of their own."""
    plan, local, _ = sequence(SWEEPS["sweep-host-3"], 2)
    whole = ranks(2).run(sent, folders["8/2"], plan, 2 * local)[0][0]
    parts, stated = ranks(2).run(sent, folders["8/2"], plan, 2 * local, 4)[0]
    assert parts == stated
    assert parts[0] == whole[0]
    assert parts[1].bytes == whole[1].bytes
    assert parts[1].messages < whole[1].messages
