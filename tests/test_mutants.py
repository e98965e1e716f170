"""The mutants of tests/mutants still fit the code; `make mutants` tries whether the tests catch them."""

import re
from pathlib import Path

import pytest

from tests.mutants.run import CAUGHT, EXPLAINED, NOT_CAUGHT, Mutant, judge, read_mutant, read_mutants, refusal
from tests.test_layers import ROOMS

ROOT = Path(__file__).parent.parent
MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_patch_applies_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert not refusal(mutant)
    assert mutant.sentence.endswith(".")
    for test in mutant.caught_by:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test


def test_every_room_has_a_mutant() -> None:
    patches = "".join(mutant.path.read_text(encoding="utf-8") for mutant in MUTANTS)
    assert {*ROOMS} - {*re.findall(r"^\+\+\+ b/ithaca/(\w+)", patches, re.MULTILINE)} == set()


HEAD = "Something is wrong.\ncaught-by: tests/a.py tests/b.py::test_it\n"
DIFFERENCE = "\ndiff --git a/x b/x\n"


@pytest.mark.parametrize(
    ("head", "survives", "needs_gpu"),
    [
        (HEAD, "", False),
        (HEAD + "needs: gpu\n", "", True),
        (
            HEAD + "survives: the sum is 0 either way: nothing is added\n",
            "the sum is 0 either way: nothing is added",
            False,
        ),
    ],
)
def test_the_head_of_a_patch(tmp_path: Path, head: str, survives: str, needs_gpu: bool) -> None:
    path = tmp_path / "slip.patch"
    path.write_text(head + DIFFERENCE, encoding="utf-8")
    assert read_mutant(path) == Mutant(
        path, "Something is wrong.", ("tests/a.py", "tests/b.py::test_it"), survives, needs_gpu
    )


@pytest.mark.parametrize("head", ["", "Something is wrong.\n", HEAD + "needs: luck\n", HEAD + "survive: never\n"])
def test_a_head_that_cannot_be_read(tmp_path: Path, head: str) -> None:
    path = tmp_path / "slip.patch"
    path.write_text(head + DIFFERENCE, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"slip\.patch must begin with a sentence"):
        read_mutant(path)


def test_verdicts() -> None:
    plain = Mutant(Path("slip.patch"), "Something is wrong.", ("tests/a.py",))
    explained = Mutant(Path("slip.patch"), "Something is wrong.", ("tests/a.py",), "it is the same")
    said = "F\n=== FAILURES ===\nFAILED tests/a.py::test_it[x - y] - assert 1 == 2\n1 failed"
    assert judge(plain, 1, said) == (CAUGHT, "by tests/a.py::test_it[x - y]")
    assert judge(explained, 1, said)[0] == CAUGHT
    assert judge(plain, 0, "1 passed") == (NOT_CAUGHT, "1 passed")
    assert judge(explained, 0, "1 passed") == (EXPLAINED, "it is the same")
    assert judge(plain, 1, "ERROR tests/a.py::test_it\n1 error") == (CAUGHT, "by tests/a.py::test_it")
    assert judge(explained, 4, "no such test")[0] == "TESTS DID NOT RUN"
    assert judge(plain, 1, "ERROR tests/a.py - SyntaxError")[0] == "TESTS DID NOT RUN"
