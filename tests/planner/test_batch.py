"""How many sequences a step has: every answer fits, `max` is the most, tokens of a step stay as they are asked for."""

import shlex
from dataclasses import replace

import pytest

from ithaca.base.errors import PlanError
from ithaca.config import read_config
from ithaca.planner.answer.json_object import as_object
from ithaca.planner.answer.report import Question, train_line
from ithaca.planner.batch import Batch, most_sequences, plan_batch, read_batch
from ithaca.planner.hardware import Cluster
from ithaca.planner.meshes import ranked_meshes
from ithaca.planner.search import fits, search
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory
from ithaca.schedule.variants import Effort
from tests import printed
from tests.planner.test_search import K, M, cluster, spec_of

# What is written


@pytest.mark.parametrize(
    ("text", "tokens", "sequences"),
    [
        ("32", 128 * K, 32),
        (" 1 ", 8 * K, 1),
        ("max", 128 * K, None),
        ("MAX", 128 * K, None),
        ("4M-tokens", 8 * K, 512),
        ("4M-tokens", 128 * K, 32),
        ("4M-tokens", 4 * M, 1),
        ("4Mtokens", 64 * K, 64),
        ("4M tokens", 64 * K, 64),
        ("4194304-Tokens", 64 * K, 64),
        ("1.5M-tokens", 512 * K, 3),
    ],
)
def test_what_is_read(text: str, tokens: int, sequences: int | None) -> None:
    assert read_batch(text, tokens) == sequences


@pytest.mark.parametrize(
    ("text", "tokens", "sentence"),
    [
        ("0", 8 * K, "--batch 0 is not a number of sequences: write 32 (sequences), 4M-tokens, or max"),
        ("-3", 8 * K, "--batch -3 is not a number of sequences: write 32 (sequences), 4M-tokens, or max"),
        ("many", 8 * K, "--batch many is not a number of sequences: write"),
        ("", 8 * K, "--batch  is not a number of sequences: write"),
        ("1.5", 8 * K, "--batch 1.5 is not a number of sequences: write"),
        ("4M", 8 * K, "--batch 4M could be sequences or tokens: write 4M-tokens for tokens, or a whole number"),
        ("64K", 8 * K, "--batch 64K could be sequences or tokens: write 64K-tokens for tokens"),
        ("tokens", 8 * K, "--batch tokens is not a number of tokens: write 4M-tokens"),
        ("4GB-tokens", 8 * K, "--batch 4GB-tokens is not a number of tokens: write 4M-tokens"),
        ("4M-tokens", 96 * K, "not a whole number of sequences of 96K tokens: 4128K-tokens (43 of them) works"),
        ("4M-tokens", 5 * M, "not a whole number of sequences of 5M tokens: 5M-tokens (1 of them) works"),
        ("1048577", 4 * K, "--batch 1048577 is out of range for sequences of 4K tokens: give at most 1048576"),
        ("9999", M, "--batch 9999 is out of range for sequences of 1M tokens: give at most 4096"),
        ("99999999999999999999", M, "is out of range for sequences of 1M tokens: give at most 4096"),
    ],
)
def test_what_is_refused(text: str, tokens: int, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        read_batch(text, tokens)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


# What is found


def checked(model: str, there: Cluster, tokens: int, batch: Batch | None, sequences: int) -> Batch:
    """The batch, if it has these sequences and fits."""
    assert batch is not None
    answer = batch.answer
    assert answer.batch == answer.passes * answer.sequences == sequences
    assert answer.rows == -(-answer.sequences // answer.axes.data)
    job = Job(spec=spec_of(model), plan=answer.plan, tokens=answer.rows * tokens, axes=answer.axes)
    memory = step_memory(replace(job, passes=answer.passes))
    assert memory == answer.memory
    assert memory.total <= there.capacity
    assert memory.host * there.machine.gpus <= there.host
    assert answer.rate == pytest.approx(sequences * tokens / answer.seconds.step / there.count)
    return batch


@pytest.mark.parametrize(
    ("model", "there", "tokens"),
    [
        ("llama3-8b", cluster(), 128 * K),
        ("llama3.2-1b", cluster("1xRTX4090-24GB", 64e9), 8 * K),
        ("llama2-7b", cluster("4xA100-80GB", 0.3e12), 100_000),
    ],
)
def test_the_most_that_fit_at_once(model: str, there: Cluster, tokens: int) -> None:
    spec = spec_of(model)
    most = most_sequences(spec, there, tokens)
    assert most >= 1
    found = checked(model, there, tokens, plan_batch(spec, there, tokens, None), most)
    for sharing in there.sharing():
        rows = most * sharing // there.count + 1
        for mesh in ranked_meshes(spec, there, "sweep", tokens, sharing):
            assert not fits(spec, there, rows * tokens, "sweep", mesh, Effort.LEAST_ONCE)
    if found.faster:
        assert found.faster.sequences < most
        assert found.faster.rate > found.answer.rate


def test_passes_where_a_batch_does_not_fit_at_once() -> None:
    spec, there = spec_of("llama3-8b"), cluster()
    most = most_sequences(spec, there, 128 * K)
    for sequences in (2 * most, 97):
        found = checked("llama3-8b", there, 128 * K, plan_batch(spec, there, 128 * K, sequences), sequences)
        assert found.answer.passes > 1
        assert found.answer.sequences <= most


def test_no_number_of_passes_is_faster() -> None:
    spec, there = spec_of("llama3-8b"), cluster("4xH100-80GB")
    found = checked("llama3-8b", there, 64 * K, plan_batch(spec, there, 64 * K, 24), 24)
    for count in (1, 2, 3, 4, 6, 8, 12, 24):
        several = replace(there, passes=24 // count)
        other = search(spec, several, 64 * K, sequences=count)
        if other:
            seconds = other.seconds.repeated(24 // count).step
            assert found.answer.seconds.step <= 1.0021 * seconds


def test_the_tokens_of_a_step_stay_as_the_context_grows() -> None:
    spec, there = spec_of("llama3.2-1b"), cluster()
    for tokens in (64 * K, 512 * K, 4 * M):
        found = plan_batch(spec, there, tokens, read_batch("4M-tokens", tokens))
        assert checked("llama3.2-1b", there, tokens, found, 4 * M // tokens).answer.batch * tokens == 4 * M


def test_a_step_of_several_passes_updates_once() -> None:
    answer = search(spec_of("tiny"), cluster("1xH100-80GB"), 8 * K)
    assert answer is not None
    one, three = answer.seconds, answer.seconds.repeated(3)
    assert three.optimizer == one.optimizer
    assert three.step == pytest.approx(3 * (one.step - one.optimizer) + one.optimizer)
    assert three.linear == pytest.approx(3 * one.linear)
    assert one.repeated(1) == one


# What is said


@pytest.mark.parametrize("sequences", [32, 256])
def test_the_arithmetic_and_the_command(sequences: int) -> None:
    spec, there = spec_of("llama3-8b"), cluster()
    found = plan_batch(spec, there, 128 * K, sequences)
    assert found is not None
    answer = found.answer
    passes = f"{answer.passes} passes of {answer.sequences}" if answer.passes > 1 else "one pass"
    total = {32: "4M", 256: "32M"}[sequences]
    assert found.lines()[0] == f"Batch: {total} tokens a step: {sequences} sequences of 128K, in {passes}"
    assert f"{answer.rows} for each of" in found.lines()[1] or "shared by 8 GPUs" in found.lines()[1]
    assert "× the rate of one sequence a step" in found.lines()[2]
    question = Question("llama3-8b", spec, there, 128 * K, None, batched=True)
    config = read_config(None, printed.settings(shlex.split(train_line(question, answer) or "")))
    assert config.train.batch == sequences
    assert config.train.micro_batch == (answer.sequences if answer.passes > 1 else None)
    told = as_object(question, answer, 8 * M, "host", found)["batch"]
    assert (told["sequences"], told["tokens"]) == (sequences, sequences * 128 * K)
    assert told["passes"] * told["sequences_per_pass"] == sequences
    assert told["rate_over_one"] == found.over_one


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"), [("qwen3-8b", "1xH100-80GB", 5000), ("llama3.2-1b", "2xH100-80GB", 64 * K)]
)
def test_more_than_fit_at_once(model: str, gpus: str, tokens: int) -> None:
    """Several passes are offered where they fit. For 8B parameters on one GPU, gradients leave no room for a pass."""
    spec, there = spec_of(model), cluster(gpus)
    found = plan_batch(spec, there, tokens, None)
    assert found is not None
    assert found.most
    fits_in_passes = plan_batch(spec, there, tokens, 2 * found.most) is not None
    assert fits_in_passes == (model == "llama3.2-1b")
    (line,) = (line for line in found.lines() if "at once" in line and "the most" in line)
    option = f"(--batch {2 * found.most})"
    assert (f"more take several passes {option}" in line) == fits_in_passes
    assert (f"more {option} do not fit: from the second pass on" in line) != fits_in_passes
