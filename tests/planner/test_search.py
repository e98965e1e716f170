"""What the planner promises: published lengths are reached, every answer fits, more of anything is never worse."""

import shlex
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ithaca.base.errors import PlanError
from ithaca.config import read_config
from ithaca.data.preparation.tokenizer import Bytes
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.answer.report import Question, train_line
from ithaca.planner.hardware import MARGIN, RUNTIME, Cluster, read_gpus
from ithaca.planner.meshes import ranked_meshes
from ithaca.planner.search import LONGEST, STEP, Answer, binding, fitting, longest, search, widest_meshes
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory
from ithaca.schedule.variants import SCRATCH, SHORTEST, Effort
from tests import printed

K, M = 2**10, 2**20
GPUS = read_gpus()
TB = 1e12


@lru_cache
def spec_of(model: str) -> Spec:
    return read_spec(find_config(model)[0])


def cluster(text: str = "8xH100-80GB", host: float = 1.9 * TB, disk: float = 0.0) -> Cluster:
    count, name = text.split("x", 1)
    return Cluster(int(count), GPUS[name], host, disk)


# Lengths that others have published, and the project's own
def test_eight_gpus_and_their_host() -> None:
    spec = spec_of("llama3-8b")
    most = longest(spec, cluster())
    assert most >= 5.5 * M
    answer = search(spec, cluster(), most)
    assert answer is not None
    assert answer.recomputed(spec) == 0
    assert binding(spec, cluster(), None, most) == "host"
    assert search(spec, cluster(), 2 * most) is None


def test_eight_gpus_and_a_disk() -> None:
    spec, there = spec_of("llama3-8b"), cluster(disk=28 * TB)
    most = longest(spec, there)
    assert most >= 24 * M
    answer = search(spec, there, most)
    assert answer is not None
    assert answer.memory.disk > 0
    assert answer.plan.disk == SCRATCH


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"),
    [
        ("llama3.2-3b", "8xH100-80GB", 3 * M),
        ("llama3.2-3b", "8xH100-80GB", 5 * M),
        ("qwen3-32b", "16xH100-80GB", 5 * M),
    ],
)
def test_others_that_fit(model: str, gpus: str, tokens: int) -> None:
    assert search(spec_of(model), cluster(gpus), tokens) is not None
    assert longest(spec_of(model), cluster(gpus), recomputing=True) >= tokens


@pytest.mark.parametrize("tokens", [100, 64 * K, 4 * M])
def test_fpdt_keeps_what_its_entry_says(tokens: int) -> None:
    """Only the chunk is chosen; a run takes it, so that it is no longer than the sequence."""
    answer = search(spec_of("llama3-8b"), cluster(), max(tokens, SHORTEST), "fpdt")
    assert answer is not None
    plan = answer.plan.settled()
    assert (plan.x, plan.o, plan.kv, plan.residual) == ("host", "recompute", "host", "host")
    assert plan.chunk == min(max(tokens, SHORTEST), 64 * K)
    assert plan.chunk_of(max(tokens, SHORTEST), shorten=False) == plan.chunk
    assert answer.recomputed(spec_of("llama3-8b")) == 32


@pytest.mark.parametrize(("recipe", "published"), [("ulysses", 3), ("untied", 5)])
def test_published_lengths_within_a_column(recipe: str, published: int) -> None:
    columns = (1, 2, 3, 4, 5, 6)
    most = longest(spec_of("llama3-8b"), cluster(), recipe)
    found = max(column for column in columns if column * M <= most)
    assert abs(columns.index(found) - columns.index(published)) <= 1


# Every answer fits
def check(answer: Answer, spec: Spec, there: Cluster, tokens: int) -> None:
    assert answer.tokens == tokens
    assert answer.axes.size == there.count
    job = Job(spec=spec, plan=answer.plan, tokens=tokens, axes=answer.axes)
    found = step_memory(job)
    assert found == answer.memory
    assert found.total <= there.capacity < there.gpu.memory
    assert found.host * there.machine.gpus < there.host
    assert found.disk * there.machine.gpus <= there.disk
    assert answer.seconds == predict_seconds(job, there.gpu, there.machine)
    assert 0 < answer.rate < there.gpu.flops / spec.flops_per_token(tokens)
    assert answer.plan.entry.allows(answer.axes.ulysses, answer.axes.ring)


CLUSTERS = st.builds(
    Cluster,
    count=st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 48, 64)),
    gpu=st.sampled_from(list(GPUS.values())),
    host=st.sampled_from((1e9, 64e9, 500e9, 1.9e12, 4e12)),
    disk=st.sampled_from((0.0, 0.0, 1e12, 28e12)),
)
MODELS = st.sampled_from(list(PRESETS)).map(spec_of)
CHEAP = settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@CHEAP
@given(
    MODELS,
    CLUSTERS,
    st.integers(SHORTEST, 64 * M) | st.integers(SHORTEST, M),
    st.none() | st.sampled_from(list(RECIPES)),
)
def test_every_answer_fits(spec: Spec, there: Cluster, tokens: int, recipe: str | None) -> None:
    answer = search(spec, there, tokens, recipe)
    if answer is not None:
        check(answer, spec, there, tokens)
        assert recipe in (None, answer.plan.recipe)


@settings(CHEAP, max_examples=6)
@given(MODELS, CLUSTERS, st.none() | st.sampled_from(list(RECIPES)))
def test_the_longest_fits_and_twice_that_does_not(spec: Spec, there: Cluster, recipe: str | None) -> None:
    most = longest(spec, there, recipe)
    assert 0 <= most <= LONGEST
    if most:
        answer = search(spec, there, most, recipe)
        assert answer is not None
        check(answer, spec, there, most)
    again = longest(spec, there, recipe, recomputing=True)
    assert again >= most
    assume(2 * again <= LONGEST)
    assert search(spec, there, max(2 * again, 2 * SHORTEST), recipe) is None


@pytest.mark.parametrize(
    ("model", "gpus", "host", "disk"),
    [
        pytest.param("qwen3-8b", "64xA100-80GB", 4 * TB, 0.0, marks=pytest.mark.full),
        pytest.param("llama3-70b", "64xH100-80GB", 1.9 * TB, 0.0, marks=pytest.mark.full),
        ("tiny", "4xRTX4090-24GB", 64e9, 0.0),
        ("llama3-8b", "32xB200-180GB", 1.9 * TB, 28 * TB),
    ],
)
def test_attention_runs_once_where_another_placement_has_room(model: str, gpus: str, host: float, disk: float) -> None:
    """Log-sum-exps or moments go to the host before an o is given up.

    But not at any price: the longest context of the 70B model is saved in chunks of 8K alone, whose many launches take
    three times as long as attending again.
    """
    spec, there = spec_of(model), cluster(gpus, host, disk)
    most = longest(spec, there)
    for tokens in (most * 9 // 10, most):
        answer = search(spec, there, tokens)
        assert answer is not None
        if answer.recomputed(spec):
            assert tokens == most
            mesh = widest_meshes(spec, there, "sweep", STEP)[0]
            once = [*fitting(spec, there, tokens, "sweep", mesh, Effort.LEAST_ONCE)]
            assert min(other.seconds.step for other in once) > 2 * answer.seconds.step


def test_more_gpus_share_a_sequence_where_attention_then_runs_once() -> None:
    """One GPU alone would hold 192K of a 70B model, but only by attending twice."""
    spec, there = spec_of("llama3-70b"), cluster("64xH100-80GB")
    found, alone = (search(spec, there, 192 * K, mesh=mesh) for mesh in (None, (1, 1)))
    assert found is not None
    assert alone is not None
    assert (found.recomputed(spec), alone.recomputed(spec)) == (0, 80)
    assert found.rate > 1.1 * alone.rate


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8b", 64 * K), ("qwen3-32b", 8 * K), ("llama3.2-1b", 64 * K)])
def test_the_fastest_of_all_that_can_share_a_sequence(model: str, tokens: int) -> None:
    """Also where two are slower than one, and eight faster again."""
    spec, found = spec_of(model), search(spec_of(model), cluster(), tokens)
    others = (search(spec, cluster(), tokens, mesh=mesh) for mesh in ((1, 1), (2, 1), (4, 1), (2, 2), (8, 1), (4, 2)))
    assert found is not None
    assert all(found.rate * 1.02 >= other.rate for other in others if other)


def test_another_mesh_where_the_best_one_has_no_room() -> None:
    """Meshes are ranked by speed; under `hybrid` K and V of other ring ranks take memory that Ulysses ranks do not."""
    spec, there = spec_of("qwen3-32b"), cluster("16xH100-80GB")
    tokens = 14 * M // 4
    first = ranked_meshes(spec, there, "hybrid", tokens, 16)[0]
    assert first == (8, 2)
    assert search(spec, there, tokens, "hybrid", mesh=first) is None
    answer = search(spec, there, tokens, "hybrid")
    assert answer is not None
    assert answer.axes == Axes(ulysses=16)
    assert longest(spec, there, "hybrid") >= tokens


def test_a_mesh_on_which_attention_runs_once() -> None:
    """Eight of two nodes' GPUs fit a sequence only by attending twice, all sixteen by attending once."""
    spec = spec_of("llama3-8b")
    answer = search(spec, cluster("16xH100-80GB"), M, "hybrid")
    assert answer is not None
    assert answer.recomputed(spec) == 0


def test_where_the_gpu_binds_no_x_is_made_in_passing() -> None:
    """Which would take the weights of several layers: with every x on the host there is room."""
    assert longest(spec_of("qwen3-32b"), cluster("8xL40S-48GB")) >= 64 * K


def test_a_recipe_for_fewer_ranks_than_there_are() -> None:
    """64 GPUs and 32 heads: pairs of sequences, each on 32."""
    spec, there = spec_of("llama3-8b"), cluster("64xH100-80GB")
    most = longest(spec, there, "ulysses")
    answer = search(spec, there, most, "ulysses")
    assert answer is not None
    assert (answer.axes.ulysses, answer.axes.shard) == (32, 2)


def test_less_than_a_step() -> None:
    spec = spec_of("llama3.2-1b")
    memories = range(15_500_000_000, 17_500_000_000, 250_000_000)
    found = [longest(spec, Cluster(1, replace(GPUS["RTX4090-24GB"], memory=float(size)), 64e9)) for size in memories]
    assert found == sorted(found)
    assert found[0] == 0
    assert {length for length in found if 0 < length < STEP} <= {STEP >> halved for halved in range(1, 10)}
    assert any(0 < length < STEP for length in found)


def test_a_host_without_memory() -> None:
    """All of it can lie on the GPUs: a length that fits so is not too long for `max`."""
    spec, there = spec_of("llama3-8b"), cluster(host=1.0)
    most = longest(spec, there)
    assert most >= M
    answer = search(spec, there, most)
    assert answer is not None
    assert (answer.memory.host, answer.plan.recipe) == (0, "sweep")


def test_no_longer_than_can_be_asked_for() -> None:
    there = cluster("64xB200-180GB", host=1e15, disk=1e16)
    assert longest(spec_of("tiny"), there) == LONGEST
    assert binding(spec_of("tiny"), there, None, LONGEST) == "planner"


# More is never worse
@settings(CHEAP, max_examples=4)
@given(MODELS, CLUSTERS, st.sampled_from((None, "ulysses", "untied")))
def test_more_of_anything_never_shortens(spec: Spec, there: Cluster, recipe: str | None) -> None:
    most = longest(spec, there, recipe)
    gpu = there.gpu
    for more in (
        replace(there, host=1.3 * there.host),
        replace(there, disk=there.disk + 5e12),
        replace(there, gpu=replace(gpu, memory=1.1 * gpu.memory)),
    ):
        assert longest(spec, more, recipe) >= most * (1 - 1 / 256) - STEP


@settings(CHEAP, max_examples=3)
@given(MODELS, st.sampled_from(list(GPUS.values())), st.sampled_from((0.1e12, 1.9e12)))
def test_more_gpus_never_shorten(spec: Spec, gpu, host: float) -> None:
    """With the memory of a node, or more nodes."""
    found = [longest(spec, Cluster(count, gpu, host)) for count in (2, 4, 8, 16, 32)]
    for fewer, more in pairwise(found):
        assert more >= fewer * (1 - 1 / 256) - STEP


def test_thousands_of_gpus_share_a_sequence() -> None:
    """A ring rank gathers the queries of a chunk: one that grew with the ranks would at last not fit."""
    spec = spec_of("llama3-8b")
    some, many = (longest(spec, cluster(f"{count}xH100-80GB")) for count in (1024, 4096))
    assert many == pytest.approx(4 * some, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "host", "disk", "recipe", "limit"),
    [
        ("8xH100-80GB", 1.9e12, 0.0, None, "host"),
        pytest.param("8xH100-80GB", 1.9e12, 1e12, None, "host", marks=pytest.mark.full),
        ("8xH100-80GB", 1.9e12, 8e12, None, "disk"),
        ("8xH100-80GB", 1.9e12, 0.0, "ulysses", "GPU"),
        ("1xH200-141GB", 0.2e12, 0.0, None, "host"),
        ("16xA100-40GB", 0.1e12, 0.0, None, "GPU"),
    ],
)
def test_what_binds_is_what_helps(gpus: str, host: float, disk: float, recipe: str | None, limit: str) -> None:
    spec, there = spec_of("llama3-8b"), cluster(gpus, host, disk)
    most = longest(spec, there, recipe)
    assert binding(spec, there, recipe, most) == limit
    gpu = replace(there.gpu, memory=1.1 * there.gpu.memory)
    more = {
        "GPU": replace(there, gpu=gpu),
        "host": replace(there, host=1.1 * host),
        "disk": replace(there, disk=1.1 * disk),
    }
    helped = {name: longest(spec, other, recipe) for name, other in more.items()}
    assert helped[limit] > most * 1.02
    assert helped[limit] == max(helped.values())


def test_what_binds_where_a_tenth_more_is_less_than_a_step() -> None:
    spec, there = spec_of("llama2-7b"), cluster("64xA100-40GB", host=0.3 * TB)
    most = longest(spec, there, "dense")
    gpu = replace(there.gpu, memory=1.1 * there.gpu.memory)
    for more in (replace(there, gpu=gpu), replace(there, host=1.1 * there.host)):
        assert longest(spec, more, "dense") == most
    assert longest(spec, replace(there, host=2 * there.host), "dense") > most
    assert binding(spec, there, "dense", most) == "host"


# What is found can be used
@settings(CHEAP, max_examples=20)
@given(MODELS, CLUSTERS, st.integers(SHORTEST, 8 * M), st.none() | st.sampled_from(list(RECIPES)))
def test_the_train_line_says_the_same(spec: Spec, there: Cluster, tokens: int, recipe: str | None) -> None:
    assume(spec.vocab >= Bytes.vocab)  # otherwise the default data cannot be learned, and there is no such line
    answer = search(spec, there, tokens, recipe)
    assume(answer is not None)
    assert answer is not None
    line = shlex.split(train_line(Question("some folder/it's", spec, there, tokens, recipe), answer) or "")
    assert line[:2] == ["ithaca", "train"]
    assert set(line[2::2]) == {"--set", "--ranks" if there.machine.nodes == 1 else "--run"}
    config = read_config(None, printed.settings(line))
    assert config.plan == answer.plan
    assert (config.mesh.ulysses, config.mesh.ring, config.mesh.shard) == (answer.axes.ulysses, answer.axes.ring, None)
    assert (config.train.tokens, config.model.source) == (tokens, "some folder/it's")
    assert config.plan == Plan(**vars(config.plan))
    config.plan.placement(spec.layers)


def test_a_settled_mesh_and_several_sequences() -> None:
    spec, there = spec_of("llama3-8b"), cluster()
    given_mesh = search(spec, there, 64 * K, mesh=(2, 2))
    assert given_mesh is not None
    axes = Axes(shard=2, ring=2, ulysses=2)
    assert given_mesh.axes == axes
    for sequences, rows in ((8, 4), (3, 2), (2, 1)):  # of a pass, over two groups of four GPUs
        found = search(spec, there, 64 * K, mesh=(2, 2), sequences=sequences)
        assert found is not None
        assert (found.tokens, found.rows) == (64 * K, rows)
        assert found.memory == step_memory(Job(spec=spec, plan=found.plan, tokens=rows * 64 * K, axes=axes))


@pytest.mark.parametrize("tokens", [0, 127, LONGEST + 1])
def test_lengths_that_cannot_be_planned_for(tokens: int) -> None:
    with pytest.raises(
        PlanError, match=rf"--tokens {tokens} is out of range: give 128 \(a tile of attention\) to 4294967296"
    ):
        search(spec_of("tiny"), cluster(), tokens)


@pytest.mark.parametrize(
    ("count", "node_gpus", "sentence"),
    [
        (0, 8, "--gpus 0xH100-80GB is out of range: give 1 to 1048576 GPUs"),
        (2**20 + 8, 8, "--gpus 1048584xH100-80GB is out of range: give 1 to 1048576 GPUs"),
        (
            12,
            8,
            "--gpus 12xH100-80GB does not fill nodes of 8 GPUs: use 8 or 16, or give nodes and GPUs per node, as 2x6x",
        ),
    ],
)
def test_gpus_that_cannot_be_planned_for(count: int, node_gpus: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Cluster(count, GPUS["H100-80GB"], 1e12, node_gpus=node_gpus)


@pytest.mark.parametrize("recipe", ["dense", "sweep"])
def test_one_gpu_keeps_its_weights_where_they_fit(recipe: str) -> None:
    """ZeRO-2 does without FSDP2 there. It is tried beside ZeRO-3 for the same choice of all else."""
    spec, there = spec_of("llama3.2-3b"), cluster("1xH100-80GB")
    answer = search(spec, there, 8 * K, recipe)
    assert answer is not None
    assert answer.plan.zero == 2
    twin = Job(spec=spec, plan=replace(answer.plan, zero=3), tokens=8 * K)
    # What ZeRO-2 needs beyond ZeRO-3 is taken away
    least = step_memory(replace(twin, plan=replace(twin.plan, kernel=answer.kernel)))
    assert least.total < answer.memory.total
    memory = (least.total + 1 + RUNTIME) / (1 - MARGIN)
    smaller = replace(there, gpu=replace(there.gpu, memory=memory))
    assert least.total <= smaller.capacity < answer.memory.total
    less = search(spec, smaller, 8 * K, recipe)
    assert less is not None
    assert less.plan.settled() == twin.plan
    # Copies of the parameters average their gradients, and several GPUs share them
    for other in (replace(there, copies=2), cluster("2xH100-80GB")):
        several = search(spec, other, 8 * K, recipe)
        assert several is not None
        assert several.plan.zero == 3
