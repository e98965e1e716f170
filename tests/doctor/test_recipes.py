"""Every recipe against one rank: what is tried, what is allowed, and that a planted mistake is found and named."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.doctor import recipes
from ithaca.doctor.exam import Found
from ithaca.parallel import ring
from ithaca.parallel.axes import Axes
from ithaca.parallel.mesh import mesh
from ithaca.plans.recipes import RECIPES


def test_meshes() -> None:
    def found(recipe: str, ranks: int) -> list[tuple[int, int, int]]:
        return [(axes.shard, axes.ring, axes.ulysses) for axes in recipes.fitting_meshes(recipe, ranks, 10)]

    assert found("dense", 4) == [(4, 1, 1)]
    assert found("ulysses", 8) == [(1, 1, 8)]
    assert found("ulysses", 12) == [(2, 1, 6)]  # 12 Ulysses ranks are more than 10 heads
    assert found("ring", 12) == [(1, 12, 1)]
    assert (
        found("sweep", 4)
        == found("fpdt", 4)
        == found("untied", 4)
        == found("hybrid", 4)
        == [(1, 4, 1), (1, 2, 2), (1, 1, 4)]
    )
    assert all(recipes.fitting_meshes(recipe, 1, 10) == [Axes()] for recipe in RECIPES)


def compare(dtype: str) -> Found:
    """In every rank, with a mistake: gradients of K and V that travel a ring forget the ranks before."""
    honest = ring._TravellingSums.end

    def forget(self: Any) -> None:
        self._coming, self._mine = self._ring.send_recv(self._mine), None

    ring._TravellingSums.end = forget
    try:
        return recipes.compare(mesh(device="cpu"), dtype)
    finally:
        ring._TravellingSums.end = honest


def conclude(told: list[Found]) -> Found:
    return recipes.conclude(SimpleNamespace(grid=SimpleNamespace(size=len(told))), told, {})  # pyrefly: ignore


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_planted_mistake_is_named(ranks, dtype: str) -> None:
    found = conclude(ranks(2).run(compare, dtype))
    wrong = {(entry["recipe"], entry["mesh"]) for entry in found["recipes"] if entry["wrong"]}
    assert wrong == {(recipe, "ring 2") for recipe in ("ring", "hybrid", "untied", "tensor")}
    assert len(found["problems"]) == 4
    assert all("self_attn." in problem for problem in found["problems"])


def fail_on_one_rank() -> Found:
    grid = mesh(device="cpu")

    def step(recipe: str, *_: Any) -> recipes.Outcome:
        if recipe == "alst" and grid.rank == 1:
            raise ValueError("no memory")
        return {}

    before = recipes._recipe_step, recipes.judge
    recipes._recipe_step, recipes.judge = step, lambda *_: {"worst": "a", "distance": 0.0, "allowed": 1.0, "wrong": []}
    try:
        return recipes.compare(grid, "float64")
    finally:
        recipes._recipe_step, recipes.judge = before


def test_an_error_of_another_rank(ranks) -> None:
    found = conclude(ranks(2).run(fail_on_one_rank))
    assert found["problems"] == ["recipe 'alst' on ulysses 2 failed: rank 1: ValueError: no memory"]


def outcome(loss: float, gradient: list[float]) -> recipes.Outcome:
    return {"loss": torch.tensor(loss).double(), "w": torch.tensor(gradient).double()}


def test_what_is_allowed() -> None:
    exact, twin, one = outcome(2.0, [3.0, 4.0]), outcome(2.1, [3.0, 4.5]), outcome(2.02, [3.0, 3.9])
    of_one, of_recipes = recipes.allowances(one, exact, twin, torch.bfloat16)
    assert of_one == pytest.approx({"loss": 1.5 * 0.1 / 2, "w": 1.5 * 0.5 / 5})
    assert of_recipes == pytest.approx({"loss": 1.5 * 0.08 / 2.02, "w": 1.5 * 0.6 / one["w"].norm().item()})
    assert recipes.allowances(one, exact, exact, torch.float64)[1] == {"loss": 1e-10, "w": 1e-10}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_wrong(value: float) -> None:
    found = recipes.judge(outcome(2.0, [3.0, value]), outcome(2.0, [3.0, 4.0]), {"loss": 1.0, "w": 1.0})
    assert (found["worst"], found["distance"], found["wrong"]) == ("w", str(value), ["w"])
    assert recipes._badness(found) > 1
