"""x and o of each layer on the device, on the host, rebuilt or recomputed: the same bits, wherever they are."""

import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ithaca
from ithaca.errors import PlanError
from ithaca.plans.places import KEPT, Placement, spell
from tests.models import make_model, save
from tests.plans.placements import placements
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


@settings(max_examples=8, deadline=None)
@given(placement=placements(LAYERS), others=st.data(), seed=st.integers(0, 10**6))
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
