"""Placement from budgets: within them, the cheapest work first, and what fits nowhere is said."""

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ithaca
from ithaca.base.errors import PlanError
from ithaca.parallel.axes import Axes
from ithaca.plans.places import RECOMPUTE
from ithaca.schedule.job import Job
from ithaca.schedule.sweep.rebuild import LONGEST_PASSING, passing_layers, rebuild_passes, rebuilds_of
from ithaca.tape.spec import device_bytes, disk_bytes, host_bytes

SPEC = ithaca.load_model("llama3-8b").spec
TOKENS = 2**17


def taken(plan: ithaca.Plan, tokens: int = TOKENS, ranks: int = 1) -> tuple[int, int]:
    """By the first rank, which has as many heads as any."""
    job = Job(spec=SPEC, plan=plan, tokens=tokens, axes=Axes(ulysses=ranks), rank=0)
    hosted = sum(tape.bytes_of(job.tiles.length) for tape in job.tapes if tape.place == "host")
    return device_bytes(job.tapes, job.tiles) + job.costs.passing_bytes(job), hosted


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
    assert passing_layers(rebuilds_of(plan, SPEC)) < LONGEST_PASSING
    if "host" in plan.placement(32).x + plan.placement(32).o:  # then the device is full, but for slots of what left
        assert used[0] + 1.5 * 2**30 > device


def test_place_prefers_o_to_x_and_the_device_to_the_host() -> None:
    given_plan, gib = ithaca.Plan(recipe="sweep", chunk=2**14), 2**30

    def place(device: int, host: int) -> ithaca.Plan:
        return ithaca.place(given_plan, SPEC, TOKENS, device=device, host=host)

    assert (place(100 * gib, 0).x, place(100 * gib, 0).o) == ("device", "device")
    assert (place(4 * gib, 70 * gib).x, place(4 * gib, 70 * gib).o) == ("host", "host")
    assert (place(5 * gib, 70 * gib).residual, place(7 * gib // 2, 70 * gib).residual) == ("device", "host")
    lean = place(4 * gib, 37 * gib)
    assert lean.o == "host"
    assert lean.placement(32).x.count("host") == 4
    assert rebuild_passes(lean.placement(32), SPEC) == 27  # and layer 0 is looked up


def placed(disk: str | int, tokens: int = TOKENS, **options) -> ithaca.Plan:
    plan = ithaca.Plan(recipe="sweep", chunk=2**14)
    budgets = {"device": "5GiB", "host": "20GiB", "folder": "/d"} | options
    return ithaca.place(plan, SPEC, tokens, disk=disk, **budgets)


@settings(max_examples=10, deadline=None)
@given(host=st.integers(2**30, 60 * 2**30), disk=st.integers(1, 60 * 2**30))
def test_place_stays_within_its_budgets_on_the_disk_too(host: int, disk: int) -> None:
    try:
        plan = placed(disk, host=host)
    except PlanError:
        assert host + disk < 40 * 2**30
        return
    job = Job(spec=SPEC, plan=plan, tokens=TOKENS)
    assert host_bytes(job.tapes, job.tiles, gpu=True) <= host
    assert disk_bytes(job.tapes, job.tiles) <= disk
    assert (plan.disk is not None) == (disk_bytes(job.tapes, job.tiles) > 0)


def test_place_uses_the_disk_last_and_before_attention_runs_again() -> None:
    assert placed("1TiB", host="70GiB") == placed(0, host="70GiB")
    long, little = 2**20, {"device": "40GiB", "host": "60GiB"}
    spilled = placed("1TiB", long, **little).placement(32)
    assert RECOMPUTE not in spilled.o
    on_disk = [layer for layer, word in enumerate(spilled.o) if word == "disk"]
    assert on_disk
    assert on_disk == [*range(len(on_disk))]  # what is needed last
    assert "disk" not in spilled.x  # which output projection and MLP give in less time than a disk
    with pytest.raises(PlanError, match="no room in device=40 GiB and host=60 GiB, even"):
        placed(0, long, **little)
    with pytest.raises(PlanError, match="no room in device=40 GiB and host=60 GiB and disk=1 GiB, even"):
        placed("1GiB", long, **little)
    with pytest.raises(PlanError, match="disk=1 GiB needs a folder: name one, as folder='/scratch'"):
        placed("1GiB", folder=None)


def test_place_knows_that_a_device_alone_needs_no_slots() -> None:
    plan = ithaca.Plan(recipe="sweep")
    everything = taken(ithaca.Plan(recipe="sweep", x="device", o="device", residual="device"))[0]
    placed = ithaca.place(plan, SPEC, TOKENS, device=everything, host=0)
    assert (placed.x, placed.o, placed.residual) == ("device", "device", "device")
    lean = ithaca.place(plan, SPEC, "1M", device="300GiB", host=0)
    assert lean.o == "device"


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_place_for_ranks_that_share(ranks: int) -> None:
    """With more ranks than key/value heads, K and V of a rank do not shrink any more."""
    plan = ithaca.place(ithaca.Plan(recipe="sweep"), SPEC, "5M", device="40GB", host="400GB", ulysses=ranks)
    device, host = taken(plan, 5 * 2**20, ranks)
    assert device <= 40e9 < device + SPEC.hidden * 2 * 5 * 2**20 / ranks + 1e9  # the next o or x would not fit
    assert host <= 400e9


def test_place_weighs_work_against_work() -> None:
    """A pass through output projection and MLP costs more than attention at 1K tokens, and far less at 1M."""
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
    with pytest.raises(PlanError, match="recipe 'dense' saves no o"):
        ithaca.place(ithaca.Plan(), SPEC, TOKENS, device="5GiB", host="9GiB")


def test_a_model_of_one_layer() -> None:
    """Its only x is looked up and its o made again, so that no tape can move to the disk."""
    spec = replace(SPEC, layers=1)
    plan = ithaca.Plan(recipe="sweep", chunk=2**10, lse="host", residual="host")
    for size in (2**20, 2**22, 2**24, 2**26, 2**28, 2**30):
        with contextlib.suppress(PlanError):
            ithaca.place(plan, spec, 2**14, device=2**30, host=size, disk=2**30, folder="/d")


@pytest.mark.parametrize("device", [2**25, 2**26, 2**28, 2**30])
def test_tokens_that_are_named_have_room(device: int) -> None:
    plan, spec = ithaca.Plan(recipe="sweep", chunk=2**14), replace(SPEC, layers=2)

    def place(plan: ithaca.Plan, tokens: int) -> ithaca.Plan:
        return ithaca.place(plan, spec, tokens, device=device, host="64MiB")

    with pytest.raises(PlanError, match=r" tokens( with chunk=[0-9]+)? have$") as refused:
        place(plan, 2**20)
    found = re.search(r"(\d+) tokens(?: with chunk=(\d+))? have$", str(refused.value))
    assert found
    place(replace(plan, chunk=int(found[2])) if found[2] else plan, int(found[1]))
