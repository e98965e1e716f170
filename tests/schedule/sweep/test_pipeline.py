"""Chunks in stages: which one goes on when."""

from collections.abc import Iterator

import pytest

from ithaca.schedule.sweep.run import run_chunks


def chunk(name: str, stages: int, seen: list[str]) -> Iterator[None]:
    for stage in range(stages):
        if stage:
            yield
        seen.append(f"{name}{stage}")


def order(stages: list[int], staggered: bool) -> str:
    seen: list[str] = []
    run_chunks((chunk(name, count, seen) for name, count in zip("abcd", stages, strict=False)), staggered)
    return " ".join(seen)


def test_one_after_the_other() -> None:
    assert order([3, 3, 3], staggered=False) == "a0 a1 a2 b0 b1 b2 c0 c1 c2"


def test_staggered_a_chunk_begins_before_its_forerunner_goes_on() -> None:
    assert order([3, 3, 3], staggered=True) == "a0 b0 a1 c0 b1 a2 c1 b2 c2"


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("stages", [[], [3], [1, 1], [3, 3], [3, 3, 3, 3], [2, 2, 2, 2], [3, 1, 2]], ids=str)
def test_every_stage_once_and_each_in_the_order_of_chunks(stages: list[int], staggered: bool) -> None:
    seen = order(stages, staggered).split()
    assert sorted(seen) == sorted(
        f"{name}{stage}" for name, count in zip("abcd", stages, strict=False) for stage in range(count)
    )
    for name in "abcd":
        own = [entry for entry in seen if entry[0] == name]
        assert own == sorted(own)
    if len(set(stages)) == 1:
        for stage in "012":
            same = [entry for entry in seen if entry[1] == stage]
            assert same == sorted(same)


def test_a_chunk_is_made_only_when_it_begins() -> None:
    """A generator of chunks is asked for one at a time, and no chunk runs before its turn."""
    seen: list[str] = []

    def chunks() -> Iterator[Iterator[None]]:
        for name in "ab":
            seen.append(f"make {name}")
            yield chunk(name, 2, seen)

    run_chunks(chunks(), staggered=True)
    assert seen == ["make a", "a0", "make b", "b0", "a1", "b1"]


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_a_chunk_ends_the_run(staggered: bool, stage: int) -> None:
    seen: list[str] = []

    def failing() -> Iterator[None]:
        for number in range(3):
            if number:
                yield
            if number == stage:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_chunks(iter([chunk("a", 3, seen), failing(), chunk("c", 3, seen)]), staggered)
    assert "c2" not in seen
