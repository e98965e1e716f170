"""The sweep in head rounds: against the naive twin in float64, the same bits wherever tapes live, and its costs."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ithaca
from ithaca.base.errors import PlanError
from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE, KEYS
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit, head_rounds, split_heads, usable_rounds
from ithaca.schedule.job import Job
from ithaca.schedule.marks import BACKWARD, PassWork, Reached, Step, pass_work
from ithaca.schedule.step_memory import phases, step_memory
from ithaca.schedule.sweep.copies import copies
from ithaca.schedule.sweep.rebuild import rebuild_passes
from ithaca.train.report.live_line import describe
from tests.models import make_model, relative, save
from tests.schedule.contexts import Options, context_step, packed, random_delays
from tests.schedule.steps import EXACT, Outcome, Rows, assert_same, model_step, naive_step, random_batch
from tests.schedule.sweep.test_copies import DEVICE, TOKENS, counted
from tests.schedule.test_context_uses import assert_nothing_depends_on_time, assert_same_bits, losses
from tests.schedule.test_ring import sent

LAYERS = 3
PLACES = ("x", "o", "lse", "residual", "kv")
# query/kv heads -> family and keys: bias, norms of q and k, layers without rope, groups of 2 and 7, an o that is wider
# than x and one that is narrower
MODELS = {
    "8/8": ("llama-bias", {"head_dim": 4, "hidden_size": 32, "tie_word_embeddings": False}),
    "16/16": ("qwen3", {"head_dim": 2, "hidden_size": 24, "tie_word_embeddings": False}),
    "4/4": ("smollm3", {"head_dim": 4, "hidden_size": 24, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "14/2": ("qwen2", {"hidden_size": 56, "tie_word_embeddings": True}),
    "6/3": ("llama3", {"head_dim": 4, "hidden_size": 36}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top, found = tmp_path_factory.mktemp("models"), {}
    for number, (name, (family, keys)) in enumerate(MODELS.items()):
        heads, kv_heads = map(int, name.split("/"))
        counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
        model = make_model(family, torch.float64, seed=number, intermediate_size=40, **counts, **keys)
        found[name] = save(model, top / name.replace("/", "-"))
    return found


def split_of(name: str, ulysses: int) -> HeadSplit:
    heads, kv_heads = map(int, name.split("/"))
    return split_heads(heads, kv_heads, ulysses)


def plan_of(heads: int, chunk: int = 9, **options: str) -> ithaca.Plan:
    return ithaca.Plan(recipe="sweep", heads=heads, chunk=chunk, tile=4, **options)


WHERE: dict[str, Options] = {
    "default": {},
    "device": dict.fromkeys(PLACES, "device"),
    "host": dict.fromkeys(PLACES, "host"),
    "rebuild": {"x": "host, rebuild*2", "o": "device, host*2", "residual": "device"},
}
SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (1, 2), (1, 4), (2, 2), (2, 3), (4, 2))
# Ulysses × ring ranks, model, heads: run by default. Some ranks have no head in the last round of 3, 5 and 2 × 2
ALWAYS = {
    (1, 1, "14/2", 7): "default",
    (1, 1, "6/3", 4): "rebuild",
    (2, 1, "4/4", 2): "host",
    (2, 1, "8/8", 6): "rebuild",
    (3, 1, "8/8", 3): "device",
    (4, 1, "16/16", 8): "rebuild",
    (5, 1, "8/8", 5): "host",
    (8, 1, "16/16", 8): "default",
    (1, 2, "6/3", 2): "rebuild",
    (2, 2, "6/3", 4): "host",
    (4, 2, "8/8", 4): "default",
}


def matrix() -> Iterator[object]:
    for ulysses, ring in SHAPES:
        for name in MODELS:
            if ulysses > int(name.split("/")[0]):
                continue
            for heads in usable_rounds(split_of(name, ulysses), whole_groups=True)[:-1]:
                always = ALWAYS.get((ulysses, ring, name, heads))
                for where in WHERE:
                    marks = () if where == always else (pytest.mark.full,)
                    case = f"{ulysses}x{ring}-{name}-{heads}-{where}"
                    yield pytest.param(ulysses, ring, name, heads, where, id=case, marks=marks)


def test_the_cases_that_always_run_exist() -> None:
    found = {case.values[:4] for case in matrix()}  # pyrefly: ignore
    assert found >= ALWAYS.keys()


@pytest.mark.parametrize(("ulysses", "ring", "name", "heads", "where"), list(matrix()))
def test_equals_naive(ranks, folders, ulysses: int, ring: int, name: str, heads: int, where: str) -> None:
    chance = random.Random(f"{ulysses} {ring} {name} {heads} {where}")
    batches = [
        packed(chance.choice((37, 41, 53)), chance.choice((1, 2, 5, 20)), chance),
        random_batch(2, 23, documents=False, ignored=0.8, seed=chance.randrange(10**6)),
    ]
    plan = replace(
        plan_of(heads, chance.randint(5, 37), **WHERE[where]),
        zero=chance.choice((1, 2, 3)),
        loss_tile=chance.choice((5, 64)),
    )
    wanted, late = naive_step(folders[name], batches), chance.choice((None, chance.randrange(10**6)))
    mesh = {"ulysses": ulysses, "ring": ring}
    for outcome in ranks(ulysses * ring).run(context_step, folders[name], plan, mesh, batches, late):
        assert_same(outcome, wanted)


def step(folder: Path, plan: ithaca.Plan, batches: list[Rows], late: int | None = None) -> Outcome:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan)
    model.engine.poison = True
    if late is not None:
        model.engine.before_copy = model.engine.before_disk = random_delays(late)
    return model_step(model, batches)


@pytest.mark.parametrize(("name", "heads"), [("8/8", 3), pytest.param("6/3", 2, marks=pytest.mark.full)])
def test_where_tapes_are_changes_no_bit(folders, tmp_path: Path, name: str, heads: int) -> None:
    """Device, host and disk, x rebuilt on tapes and in passing, late copies, slots that are NaN when they are free."""
    batches = [packed(41, 4, random.Random(name)), random_batch(2, 13, documents=False, ignored=0.1, seed=2)]
    others: list[dict] = [
        WHERE["device"],
        WHERE["host"],
        {"x": "disk", "o": "disk", "disk": str(tmp_path), "lse": "host"},
        {"x": "host, rebuild*2", "o": "host", "kv": "host"},
        {"x": "disk, rebuild*2", "o": "disk, device*2", "disk": str(tmp_path), "residual": "device"},
    ]
    for chunk in (9, 26):  # in the second batch one chunk alone
        plain = step(folders[name], plan_of(heads, chunk), batches)
        assert_same(plain, naive_step(folders[name], batches))
        for seed, options in enumerate(others):
            assert_same_bits(step(folders[name], plan_of(heads, chunk, **options), batches, seed), plain)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.full)])
def test_what_is_late_changes_no_bit(ranks, folders, ulysses: int, ring: int) -> None:
    """Copies and messages; and chunks that overlap, against chunks one after the other."""
    batches = [packed(53, 5, random.Random(1))]
    mesh = {"ulysses": ulysses, "ring": ring}
    assert_nothing_depends_on_time(ranks, folders["6/3"], plan_of(4, **WHERE["host"]), mesh, batches, 3)


def test_evaluation(ranks, folders) -> None:
    """Passes without gradients, before, beside and after those with: o waits between rounds there, too."""
    batch = random_batch(2, 23, documents=True, ignored=0.3, seed=3)
    (wanted,) = {tuple(found) for found in ranks(2).run(losses, folders["8/8"], plan_of(4, 11), batch)}
    assert all(abs(loss - wanted[0]) <= EXACT * wanted[0] for loss in wanted)
    assert len(set(wanted[:3])) == len(set(wanted[3:])) == 1


def test_logits_without_a_training_pass(folders) -> None:
    tokens, _, ids = random_batch(2, 19, documents=True, ignored=0.0, seed=3)
    dense = ithaca.apply(ithaca.load_model(folders["6/3"], "float64"), ithaca.Plan())
    model = ithaca.apply(ithaca.load_model(folders["6/3"], "float64"), plan_of(2, 7))
    assert relative(model.logits(tokens, ids), dense.logits(tokens, ids)) <= EXACT


def test_all_heads_are_one_round(folders) -> None:
    """The same bits and tapes as without the option."""
    batches = [packed(37, 3, random.Random(1))]
    plain, named = ithaca.Plan(recipe="sweep", chunk=9, tile=4), plan_of(6)
    assert_same_bits(step(folders["6/3"], named, batches), step(folders["6/3"], plain, batches))
    spec = ithaca.load_model(folders["6/3"], "float64").spec
    jobs = [Job(spec=spec, plan=plan, tokens=64) for plan in (plain, named)]
    assert jobs[0].tapes == jobs[1].tapes
    assert jobs[0].costs.work(jobs[0]) == jobs[1].costs.work(jobs[1])


@pytest.mark.parametrize(
    ("counts", "usable"),
    [
        ((32, 32, 8), [8, 16, 24, 32]),
        ((32, 8, 2), [8, 16, 24, 32]),
        ((32, 8, 8), [32]),  # one K/V head each: nothing to divide
        ((14, 2, 1), [7, 14]),
        ((14, 2, 4), [14]),  # a K/V head on two ranks
        ((8, 8, 3), [3, 6, 8]),
        ((8, 2, 3), [8]),
    ],
)
def test_rounds_take_whole_groups(counts: tuple[int, int, int], usable: list[int]) -> None:
    split = split_heads(*counts)
    assert usable_rounds(split, whole_groups=True) == usable
    for at_once in usable:
        rounds = head_rounds(split, at_once, whole_groups=True)
        assert all(len(group) == 1 for group in rounds)
        for rank in range(counts[2]):
            assert [head for (part,) in rounds for head in part.q[rank]] == list(split.q[rank])
            assert [head for (part,) in rounds for head in part.kv[rank]] == list(split.kv[rank])
            assert max(len(part.kv[rank]) for (part,) in rounds) == len(rounds[0][0].kv[rank])


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "6/3",
            {"heads": 3},
            r"heads=3 is not usable with 6 query heads on 1 Ulysses ranks, in rounds of .*: 2, 4, 6 are",
        ),
        ("14/2", {"heads": 2}, r"heads=2 is not usable with 14 query heads on 1 Ulysses ranks.*: 7, 14 are"),
        ("6/3", {"heads": 12}, "heads=12 is not usable with 6 query heads"),
        ("6/3", {"heads": 0}, "heads must be a number of heads, e.g. 8; it is 0"),
        (
            "6/3",
            {"heads": 2, "o": "recompute"},
            "heads=2 needs the o of every layer .* o='recompute' does not save: use o=",
        ),
        ("6/3", {"heads": 2, "o": "host*2, recompute"}, "heads=2 needs the o of every layer"),
    ],
)
def test_refused(folders, name: str, options: dict, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        ithaca.apply(ithaca.load_model(folders[name], "float64"), ithaca.Plan(recipe="sweep", **options))


def test_a_plan_with_rounds_is_placed() -> None:
    """`place` gives up x, but no o; with nothing left to give up it refuses."""
    spec = read_spec(find_config("llama3.2-1b")[0])
    plan = ithaca.Plan(recipe="sweep", heads=8)
    placed = ithaca.place(plan, spec, "256K", device="6GB", host="20GB")
    assert placed.heads == 8
    assert "recompute" not in str(placed.o)
    with pytest.raises(PlanError, match="have no room"):
        ithaca.place(plan, spec, "256K", device="6GB", host="9GB")


# Costs
@pytest.mark.parametrize(
    ("ulysses", "ring", "name", "heads"),
    [
        (2, 1, "8/8", 2),
        (3, 1, "8/8", 3),
        (2, 2, "8/8", 4),
        pytest.param(1, 2, "6/3", 4, marks=pytest.mark.full),
        pytest.param(4, 1, "16/16", 8, marks=pytest.mark.full),
    ],
)
def test_what_is_said_is_sent(ranks, folders, ulysses: int, ring: int, name: str, heads: int) -> None:
    world = ulysses * ring
    for chunk in (4 * world, 20 * world):
        plan, mesh = replace(plan_of(heads, chunk), tile=2), {"ulysses": ulysses, "ring": ring}
        for found, said in ranks(world).run(sent, folders[name], plan, mesh, 20 * world):
            assert found == said


COPIED: dict[str, dict[str, str]] = {
    **{name: {name: "host"} for name in PLACES},
    "x recomputed": {"x": "host, rebuild*2", "o": "host"},
    "every second x": {"x": "host, rebuild", "o": "host", "residual": "host"},
    "everything": dict.fromkeys(PLACES, "host"),
}


@pytest.mark.parametrize("chunk", [32, TOKENS])
@pytest.mark.parametrize("heads", [3, 1])  # rounds of 3 and 1, or four of 1
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_a_step(folders, name: str, heads: int, chunk: int) -> None:
    into, out, job = counted(plan_of(heads, chunk, **DEVICE | COPIED[name]), folders["4/4"])
    assert len(job.rounds) == {3: 2, 1: 4}[heads]
    stated = copies(job, ("host", "disk"))
    assert (stated.into, stated.out) == (into, out)


@pytest.mark.parametrize("kv", ["host", "disk"])
def test_copies_of_a_rank_without_heads_in_the_last_round(ranks, folders, tmp_path: Path, kv: str) -> None:
    """Of three K/V heads on two ranks, the second rank has none in the last round: it adds to no sums there."""
    options = DEVICE | {"kv": kv} | ({"disk": str(tmp_path)} if kv == "disk" else {})
    for into, out, job in ranks(2).run(counted, plan_of(4, 32, **options), folders["6/3"], 2):
        assert [len(split.kv[1]) for (split,) in job.rounds] == [1, 0]
        stated = copies(job, ("host", "disk"))
        assert (stated.into, stated.out) == (into, out)


def llama2(heads: int | None, tokens: int = 4 * 2**20, **options) -> Job:
    spec = read_spec(find_config("llama2-7b")[0])
    plan = ithaca.Plan(recipe="sweep", kernel="flash4", heads=heads, **options)
    return Job(spec=spec, plan=plan, tokens=tokens, axes=Axes(ulysses=8))


def test_memory_by_hand() -> None:
    """llama2-7b has 32 query and K/V heads of 128, four on each of 8 ranks; 4096 features; an MLP of 11008."""
    all_heads, one_head = llama2(None), llama2(8)
    S, n, T = 4 * 2**20, 2**19, 8192
    assert step_memory(all_heads).parts[KEYS] == S * 4 * 128 * 2 * (2 + 4)
    assert step_memory(one_head).parts[KEYS] == S * 128 * 2 * (2 + 4)
    # o between the rounds is a tape beside the residual
    assert step_memory(one_head).host - step_memory(all_heads).host == n * 4096 * 2
    found = dict(phases(one_head))
    own, sent = 8 * T * 128 * 2, T * 8 * 128 * 2  # q of one head and all tokens of a chunk; of 8 heads and its own
    exchange = 3 * sent + 3 * own + 2 * 3 * own
    block = 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    hidden, tile = T * 4096 * 2, one_head.tile
    mlp = found["the MLP of the last block"]
    assert mlp[BLOCKS] == 5 * tile * 11008 * 2 + 3 * tile * 4096 * 2 + hidden + 2 * hidden + block
    assert mlp[EXCHANGE] == exchange
    attention = found["attention of the last block"]
    assert attention[BLOCKS] == 3 * hidden + block
    assert attention[EXCHANGE] == exchange + 3 * own
    assert attention[ATTENTION] == dict(phases(all_heads))["attention of the last block"][ATTENTION] / 4


def test_work_of_rounds() -> None:
    """The same products and attention; norms run again, and everything is launched once for each round."""
    jobs = [llama2(heads, 2**20) for heads in (None, 16, 8)]
    once, twice, often = (job.costs.work(job) for job in jobs)
    assert once.linear == twice.linear == often.linear
    assert once.attention == twice.attention == often.attention
    assert once.merged == often.merged
    assert once.moved < twice.moved < often.moved < 1.5 * once.moved
    assert 1.5 * once.launches < twice.launches < often.launches < 4 * once.launches
    assert often.python == 4 * once.python
    # x, o, the residual and what waits between rounds are read in every round
    assert once.host.most < twice.host.most < often.host.most < 6 * once.host.most


def test_an_x_in_passing_is_rebuilt_in_every_round() -> None:
    """Of the last layer once less, because K and V of its first round are there."""
    spec = read_spec(find_config("llama3-8b")[0]).with_layers(6)
    roomy, narrow = spec, replace(spec, hidden=2 * spec.hidden)
    placement = ithaca.Plan(recipe="sweep", x="host, rebuild*5").placement(6)
    assert rebuild_passes(placement, roomy, 1) == 5 + 3 + 1  # the others are on tapes by then
    assert rebuild_passes(placement, roomy, 3) - rebuild_passes(placement, roomy, 1) == 4 * 5
    assert rebuild_passes(placement, narrow, 3) == 5 * 5 + 6 * (4 + 3 + 2 + 1)


@pytest.mark.parametrize("heads", [None, 3, 2])
def test_marks_follow_the_rounds(heads: int | None) -> None:
    """Rounds one after the other; the last one runs the MLP, and comes first in backward."""
    spec = replace(read_spec(find_config("tiny")[0]), heads=4, kv_heads=4)
    job = Job(spec=spec, plan=ithaca.Plan(recipe="sweep", heads=heads, chunk=1024), tokens=4096)
    work, found = job.costs.work(job), pass_work(job, job.layout, (0, 4096))
    rounds = 1 if heads is None else 2
    assert found.rounds == rounds
    assert len(found.forward) == len(found.backward) == rounds * job.chunks
    assert found.total == pytest.approx(work.linear + (2.5 + work.attention_runs) * work.attention)
    assert min(*found.forward, *found.backward) > 0
    if heads == 2:
        assert sum(found.forward[:4]) < sum(found.forward[4:])
    if heads == 3:  # and one head in the last round
        assert found.forward[3] - found.forward[0] == pytest.approx(3 * (found.forward[7] - found.forward[4]))


def test_the_live_line_names_the_round() -> None:
    work = PassWork(2, (1.0,) * 8, 1.0, (2.0,) * 8, rounds=2)
    reached = Reached(Step(1, [1.0]), 0, lambda: work, BACKWARD, 1, 6)
    assert describe(reached) == "backward, layer 2 of 2, heads 2 of 2, chunk 3 of 4"
    assert reached.share() == pytest.approx((16 + 1 + 2) / work.total)


def test_rounds_are_said(folders) -> None:
    model = ithaca.apply(ithaca.load_model(folders["8/8"], "float64"), plan_of(3))
    model.allocate(1, 64)
    lines = model.describe_tapes()
    assert f"between rounds {64 * 32 * 8 // 1024} KiB" in lines[1]
    assert lines[2] == "Each block runs over its tiles 3 times: K and V of 3 of 8 key/value heads at a time"
