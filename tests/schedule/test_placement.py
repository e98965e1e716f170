"""x and o of each layer on the device, on the host, rebuilt or recomputed: the same bits, wherever they are."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ithaca
from ithaca.errors import PlanError
from ithaca.schedule.needs import device_bytes, has_room_for_x, needs, tiles_of
from ithaca.schedule.places import KEPT, REBUILD, RECOMPUTE, Placement, over_layers, read_places, spell
from ithaca.schedule.rebuild import LONGEST_PASSING, layers_to_keep, passing_layers, plan_rebuilds, rebuild_passes
from tests.models import make_model, save
from tests.schedule.steps import Outcome, assert_same, compare, model_step, naive_step, random_batch

LAYERS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Deep models; o is wider than x in `wide`, and in `narrow` too narrow for its tapes to take an x."""
    top, deep = tmp_path_factory.mktemp("deep"), {"num_hidden_layers": LAYERS}
    return {
        "untied": save(make_model("llama-bias", **deep), top / "untied"),
        "tied": save(make_model("qwen2", torch.float64, **deep), top / "tied"),
        "wide": save(make_model("qwen3", head_dim=14, **deep), top / "wide"),
        "narrow": save(make_model("qwen3", head_dim=6, **deep), top / "narrow"),
    }


@st.composite
def placements(draw: st.DrawFn, layers: int = LAYERS) -> Placement:
    """Any that can be had."""
    o = tuple(draw(st.sampled_from((*KEPT, RECOMPUTE))) for _ in range(layers))
    x = [draw(st.sampled_from(KEPT))]
    for layer in range(1, layers):
        x.append(draw(st.sampled_from(KEPT if o[layer - 1] == RECOMPUTE else (*KEPT, REBUILD, REBUILD))))
    return Placement(tuple(x), o)


def swept(placement: Placement, **options) -> ithaca.Plan:
    return ithaca.Plan(recipe="sweep", x=spell(placement.x), o=spell(placement.o), **options)


def step(folder: Path, plan: ithaca.Plan, batches: list) -> Outcome:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan)
    model.engine.poison = True  # a tile that is read too late or too early is NaN
    return model_step(model, batches)


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == wanted[0]
    for name, gradient in found[1].items():
        assert torch.equal(gradient, wanted[1][name]), name


HARD = [  # x only in passing, on tapes of o here and there, through layers that are not kept; attention again between
    ("host, rebuild*5", "host"),
    ("device, rebuild*5", "device"),
    ("host, rebuild*2, host, rebuild*2", "device, host"),
    ("host, rebuild*5", "host*5, recompute"),
    ("host, rebuild*2, host*2, rebuild", "host*3, recompute, host*2"),
]


@pytest.mark.parametrize(("x", "o"), HARD)
@pytest.mark.parametrize("kind", ["untied", "wide", "narrow"])
def test_hard_ones(folders, kind: str, x: str, o: str) -> None:
    batches, cut = [random_batch(1, 30, documents=True, ignored=0.2, seed=7)], {"chunk": 4, "tile": 3}
    plain = step(folders[kind], ithaca.Plan(recipe="sweep", **cut), batches)
    assert_same_bits(step(folders[kind], ithaca.Plan(recipe="sweep", x=x, o=o, **cut), batches), plain)


FIRST_KEPT = Placement(("host",) + (REBUILD,) * (LAYERS - 1), ("host",) * LAYERS)


@settings(max_examples=12, deadline=None)
@given(placement=placements(), others=st.data(), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("kind", ["untied", "tied", "wide", "narrow"])
def test_every_mix_gives_the_same_bits(folders, kind: str, placement: Placement, others, seed: int) -> None:
    places = {name: others.draw(st.sampled_from(KEPT)) for name in ("lse", "gradient", "kv")}
    chunk = others.draw(st.sampled_from((4, 9, 30)))
    batches = [random_batch(1, 30, documents=True, ignored=0.2, seed=seed), random_batch(1, 23, True, 0.2, seed + 1)]
    cut = {"chunk": min(chunk, 23), "tile": min(chunk, 5)}
    plain = step(folders[kind], ithaca.Plan(recipe="sweep", **cut), batches)
    assert_same(plain, naive_step(folders[kind], batches))
    assert_same_bits(step(folders[kind], swept(placement, **places, **cut), batches), plain)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", ["untied", "tied", "wide", "narrow"])
def test_two_ranks_with_accumulation(ranks, folders, kind: str, zero: int) -> None:
    """Ranks with different numbers of tokens, which gather the weights of other layers equally often."""
    words = ["host, rebuild*5", "device, rebuild*2, host, rebuild*2", "host*2, rebuild, device, rebuild*2"]
    plan = ithaca.Plan(recipe="sweep", x=words[zero - 1], o="host*2, device", zero=zero, chunk=7, tile=3, loss_tile=7)
    batches = [random_batch(3, 23, True, 0.7, seed=zero), random_batch(4, 31, False, 0.1, seed=zero + 5)]
    compare(ranks(2), folders[kind], plan, batches)


@pytest.mark.parametrize("zero", [1, 3])
def test_recomputed_on_two_ranks(ranks, folders, zero: int) -> None:
    plan = ithaca.Plan(recipe="sweep", x="host", o="recompute", zero=zero, chunk=7, tile=3)
    compare(ranks(2), folders["untied"], plan, [random_batch(3, 23, documents=True, ignored=0.2, seed=zero)])


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_late_copies_change_no_bit(folders, kind: str) -> None:
    batches = [random_batch(1, 41, documents=True, ignored=0.1, seed=1)] * 2
    plain = step(folders[kind], ithaca.Plan(recipe="sweep", chunk=9, tile=4), batches)
    for seed, words in enumerate(("host, rebuild*5", "host*2, rebuild, host, rebuild*2", "device, rebuild*5")):
        plan = ithaca.Plan(recipe="sweep", x=words, lse="host", kv="host", chunk=9, tile=4)
        model, chance = ithaca.apply(ithaca.load_model(folders[kind], "float64"), plan), random.Random(seed)
        model.engine.poison = True
        model.engine.before_copy = lambda chance=chance: time.sleep(chance.random() * 0.002)
        assert_same_bits(model_step(model, batches), plain)


@pytest.mark.parametrize("recipe", ["alst", "dense"])
def test_whole_blocks_with_x_of_some_layers_on_the_host(ranks, folders, recipe: str) -> None:
    plan = ithaca.Plan(recipe=recipe, x="device, host*2", tile=7)
    compare(ranks(2), folders["tied"], plan, [random_batch(3, 23, documents=True, ignored=0.2, seed=2)])
    model = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), plan)
    model.reserve(1, 64)
    assert model.describe_tapes()[1] == f"tapes: on the host x of 4 layers {4 * 64 * 48 * 8 / 1024:.3g} KiB"


def test_what_is_made_again_is_said(folders) -> None:
    plan = ithaca.Plan(recipe="sweep", x="host*2, rebuild*4", o="recompute, host*5", chunk=32)
    model = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan)
    model.reserve(1, 64)
    lines = model.describe_tapes()
    assert "x of 2 layers" in lines[1]
    assert "o of 5 layers" in lines[1]
    assert lines[2] == "backward rebuilds x of 4 layers from o, in 6 passes through mix and feed"
    assert lines[3] == "backward runs the attention of 1 of 6 layers again"


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from((*KEPT, REBUILD)), min_size=1, max_size=40))
def test_spelling(words: list[str]) -> None:
    assert over_layers("x", read_places("x", spell(words), (*KEPT, REBUILD)), len(words)) == tuple(words)


@settings(max_examples=300, deadline=None)
@example(placement=FIRST_KEPT, roomy=True)
@given(placement=st.integers(1, 20).flatmap(placements), roomy=st.booleans())
def test_a_rebuilt_x_overwrites_nothing_that_is_needed(placement: Placement, roomy: bool) -> None:
    rebuilds, last = plan_rebuilds(placement, roomy), len(placement.x) - 1
    holds: dict[tuple[str, int], int] = {("x", n): n for n, word in enumerate(placement.x) if word != REBUILD}
    for layer in reversed(range(last + 1)):
        if layer not in holds.values():
            rebuild = rebuilds.pop(layer)
            assert rebuild.source in holds.values()
            assert all(placement.o[below] != RECOMPUTE for below in range(rebuild.source, layer))
            for above, home in rebuild.homes.items():
                kind, owner = home
                assert rebuild.source < above <= layer
                assert kind == "x" or (roomy and placement.o[owner] != RECOMPUTE)
                # Of a layer that is done; or its own o, as it is used up, where K and V ask for no x before
                assert owner > layer or (home == ("o", layer) and above == layer - 1 and layer == last)
                assert home not in holds, "an x that is still needed"
                holds[home] = above
        holds = {home: held for home, held in holds.items() if held < layer}
    assert not rebuilds


@pytest.mark.parametrize("layers", [1, 4, 16, 28, 32, 61, 80])
def test_few_kept_x_rebuild_each_other_once(layers: int) -> None:
    for count in range(1, layers + 1):
        kept = layers_to_keep(layers, count)
        assert len(kept) == count
        assert 0 in kept
        placement = Placement(tuple("host" if n in kept else REBUILD for n in range(layers)), ("host",) * layers)
        passes = rebuild_passes(placement, roomy=True)
        assert passes >= layers - count
        if 2 ** (count + 1) - 2 >= layers:
            assert passes == layers - count
        if count > 1:
            assert passing_layers(plan_rebuilds(placement, roomy=True)) < LONGEST_PASSING


SPEC = ithaca.load_model("llama3-8b").spec
TOKENS = 2**17


def taken(plan: ithaca.Plan, tokens: int = TOKENS) -> tuple[int, int]:
    asked = needs(plan.settled(), SPEC, torch.bfloat16)
    hosted = sum(need.bytes_of(tokens) for need in asked if need.place == "host")
    return device_bytes(asked, tiles_of(plan, tokens)), hosted


@settings(max_examples=40, deadline=None)
@given(device=st.integers(5 * 2**30, 90 * 2**30), host=st.integers(0, 90 * 2**30))
def test_place_stays_within_its_budgets(device: int, host: int) -> None:
    given_plan = ithaca.Plan(recipe="sweep", chunk=2**14)
    try:
        plan = ithaca.place(given_plan, SPEC, TOKENS, device=device, host=host)
    except PlanError:
        assert device + host < 39 * 2**30  # all x, K and V with their sums, gradient, slots, and what a place has left
        return
    used = taken(plan)
    assert used[0] <= device
    assert used[1] <= host
    if "host" in plan.placement(32).x + plan.placement(32).o:  # then the device is full, but for slots of what left
        assert used[0] + 1.5 * 2**30 > device


def test_place_prefers_o_to_x_and_the_device_to_the_host() -> None:
    given_plan, gib = ithaca.Plan(recipe="sweep", chunk=2**14), 2**30

    def place(device: int, host: int) -> ithaca.Plan:
        return ithaca.place(given_plan, SPEC, TOKENS, device=device, host=host)

    assert (place(100 * gib, 0).x, place(100 * gib, 0).o) == ("device", "device")
    assert (place(4 * gib, 70 * gib).x, place(4 * gib, 70 * gib).o) == ("host", "host")
    assert (place(5 * gib, 70 * gib).gradient, place(7 * gib // 2, 70 * gib).gradient) == ("device", None)
    lean = place(7 * gib // 2, 37 * gib)
    assert lean.o == "host"
    assert lean.placement(32).x.count("host") == 4
    assert rebuild_passes(lean.placement(32), has_room_for_x(SPEC)) == 28


def test_place_knows_that_a_device_alone_needs_no_slots() -> None:
    plan = ithaca.Plan(recipe="sweep")
    everything = taken(ithaca.Plan(recipe="sweep", x="device", o="device", gradient="device"))[0]
    placed = ithaca.place(plan, SPEC, TOKENS, device=everything, host=0)
    assert (placed.x, placed.o, placed.gradient) == ("device", "device", "device")
    lean = ithaca.place(plan, SPEC, "128K", device="37GiB", host=0)
    assert lean.o == "device"


def test_place_weighs_work_against_work() -> None:
    """A pass through mix and feed costs more than attention at 1K tokens, and far less at 1M."""
    narrow, plan = replace(SPEC, heads=16), ithaca.Plan(recipe="sweep", chunk=64)
    for tokens, recomputed in ((2**10, 31), (2**20, 0)):
        placed = ithaca.place(plan, narrow, tokens, device=32 * 2**10 * tokens, host=300 * 2**10 * tokens)
        assert placed.placement(32).o.count(RECOMPUTE) == recomputed


def test_place_refuses_what_fits_nowhere() -> None:
    plan = ithaca.Plan(recipe="sweep", chunk=2**14)
    with pytest.raises(PlanError, match="no room in device=5 GiB and host=9 GiB") as refused:
        ithaca.place(plan, SPEC, TOKENS, device="5GiB", host="9GiB")
    (most,) = (int(word) for word in str(refused.value).rpartition(": ")[2].split() if word.isdecimal())
    assert TOKENS / 8 < most < TOKENS / 2
    ithaca.place(plan, SPEC, most, device="5GiB", host="9GiB")
    with pytest.raises(PlanError, match="no room"):
        ithaca.place(plan, SPEC, most + most // 50, device="5GiB", host="9GiB")
    for wrong, sentence in (({"tokens": 0}, "'0' is not a number of tokens"), ({"dtype": "fp8"}, "dtype 'fp8' is not")):
        with pytest.raises(ithaca.IthacaError, match=sentence):
            ithaca.place(plan, SPEC, **({"tokens": TOKENS, "device": 0, "host": 0} | wrong))
    with pytest.raises(PlanError, match="recipe 'dense' keeps no o"):
        ithaca.place(ithaca.Plan(), SPEC, TOKENS, device="5GiB", host="9GiB")


REFUSED = [
    ({"x": "rebuild"}, "x='rebuild' keeps nothing that layer 0 could be rebuilt from: begin with 'host'"),
    ({"x": "host, rebuild*0"}, "has no number of layers in 'rebuild\\*0': write rebuild\\*7"),
    ({"x": "host, rebild*3"}, "x=host, rebild\\*3 does not exist: did you mean 'rebuild'?"),
    ({"o": "rebuild"}, "o=rebuild does not exist: known are device, host, recompute"),
    ({"o": "host*7"}, "o names 7 layers, but the model has 6: name 6, or fewer, to be repeated"),
    ({"x": "host, rebuild", "o": "recompute"}, "x of layer 1 is to be rebuilt from o of layer 0, which is not kept"),
    ({"recipe": "alst", "x": "host, rebuild"}, "x=host, rebuild means nothing under recipe 'alst'"),
    ({"recipe": "dense", "x": "host, device", "checkpoint": "none"}, "x='host' .* means nothing with checkpoint"),
    ({"x": "host*" + "9" * 5000}, "has no number of layers in 'host"),
    ({"host_memory": 1000}, "plan.x='host, rebuild\\*3' frees 96 KiB"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(folders, options: dict, sentence: str) -> None:
    def run() -> None:
        plan = ithaca.Plan(**({"recipe": "sweep"} | options))
        ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan).reserve(1, 64)

    with pytest.raises(PlanError, match=sentence):
        run()
