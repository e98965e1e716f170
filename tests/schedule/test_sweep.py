"""`sweep` and `alst` against the naive twin in float64: chunks, tiles, documents, GQA, residencies, ranks, copies."""

import gc
import itertools
import random
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ithaca
from ithaca.base.errors import InputError, PlanError, RunError
from ithaca.model.linear import Summed
from tests.models import make_model, relative, save
from tests.sampling import sampled
from tests.schedule.steps import (
    EXACT,
    Rows,
    assert_same,
    compare,
    model_step,
    naive_step,
    random_batch,
)

PLACES = ("device", "host")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Between them everything that a block can have, and 1, 4 and 7 query heads for each key/value head."""
    top = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 2}
    return {
        "tied": save(make_model("smollm3", no_rope_layers=[1, 0], **small), top / "tied"),
        "untied": save(make_model("llama-bias", num_key_value_heads=6, **small), top / "untied"),
        "normed": save(make_model("qwen3", num_attention_heads=4, num_key_value_heads=1, **small), top / "normed"),
        "double": save(
            make_model("qwen2", torch.float64, hidden_size=56, num_attention_heads=7, num_key_value_heads=1, **small),
            top / "double",
        ),
    }


@st.composite
def plans(draw: st.DrawFn, length: int) -> ithaca.Plan:
    """Any chunk, any tile, every tape anywhere."""
    places = {name: draw(st.sampled_from(PLACES)) for name in ("x", "o", "lse", "residual", "kv")}
    chunk = draw(st.none() | st.integers(1, length))
    tile = draw(st.integers(1, chunk or length))
    return ithaca.Plan(recipe="sweep", chunk=chunk, tile=tile, loss_tile=draw(st.sampled_from((5, 4096))), **places)


def of_lengths(lengths: list[int], seed: int) -> Rows:
    """One packed row of documents of these lengths; at least its last tokens are learned."""
    tokens, labels, _ = random_batch(1, sum(lengths), documents=False, ignored=0.2, seed=seed)
    labels[:, -2:] = tokens[:, -2:]
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return tokens, labels, ids


def check_one(folder: Path, data: st.DataObject, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=6))
    plan = data.draw(plans(sum(lengths)))
    batches = [of_lengths([*lengths, 3], seed)]
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan)
    model.engine.poison = True  # a tile that is read too late or too early is NaN
    assert_same(model_step(model, batches), naive_step(folder, batches))


@settings(max_examples=14, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("heads", ["tied", "untied", "normed", "double"])
def test_equals_naive(folders, heads: str, data: st.DataObject, seed: int) -> None:
    check_one(folders[heads], data, seed)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("heads", ["tied", "untied", "normed", "double"])
def test_equals_naive_often(folders, heads: str, data: st.DataObject, seed: int) -> None:
    check_one(folders[heads], data, seed)


KINDS = ["tied", "untied", "double"]


@pytest.mark.parametrize(
    ("heads", "zero", "recipe"),
    sampled(  # each recipe with every kind and with every zero
        itertools.product(KINDS, (1, 2, 3), ("sweep", "alst")),
        lambda heads, zero, recipe: heads == KINDS[(zero + (recipe == "alst")) % 3],
    ),
)
def test_two_ranks_with_accumulation(ranks, folders, heads: str, zero: int, recipe: str) -> None:
    chance = random.Random(f"{heads} {zero} {recipe}")
    if recipe == "sweep":
        places = {name: chance.choice(PLACES) for name in ("x", "o", "lse", "residual", "kv")}
        plan = ithaca.Plan(recipe="sweep", zero=zero, chunk=chance.randint(3, 23), tile=3, loss_tile=7, **places)
    else:
        checkpoint = chance.choice(("selective", "full"))
        plan = ithaca.Plan(recipe="alst", zero=zero, tile=chance.randint(1, 30), checkpoint=checkpoint)
    batches = [
        # Ranks with different numbers of tokens, few valid labels in the one batch and many in the other
        random_batch(3, 23, documents=True, ignored=0.7, seed=chance.randrange(10**6)),
        random_batch(4, 31, documents=False, ignored=0.1, seed=chance.randrange(10**6)),
    ]
    compare(ranks(2), folders[heads], plan, batches)


def test_naive_kernel(ranks, folders) -> None:
    batches = [random_batch(2, 19, documents=True, ignored=0.3, seed=6)]
    compare(ranks(1), folders["normed"], ithaca.Plan(recipe="sweep", kernel="naive", chunk=7), batches)


def test_dense_with_x_on_the_host(ranks, folders) -> None:
    batches = [random_batch(2, 19, documents=True, ignored=0.3, seed=6)]
    compare(ranks(1), folders["normed"], ithaca.Plan(recipe="dense", x="host", checkpoint="selective"), batches)


def random_delays(seed: int, longest: float):
    chance = random.Random(seed)
    return lambda: time.sleep(chance.random() * longest)


RESIDENCIES = [
    {"x": "device", "o": "device", "lse": "device", "residual": "device", "kv": "device"},
    {"x": "host", "o": "host", "lse": "device", "residual": "host", "kv": "device"},
    {"x": "host", "o": "device", "lse": "host", "residual": "device", "kv": "host"},
    {"x": "host", "o": "host", "lse": "host", "residual": "host", "kv": "host"},
    {"x": "device", "o": "recompute", "lse": "device", "residual": "device", "kv": "device"},
    {"x": "host", "o": "recompute", "lse": "device", "residual": "host", "kv": "host"},
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_copies_that_are_late_change_no_bit(folders, seed: int) -> None:
    """Whatever the residency and however late the copies, gradients are the same bits; freed slots are NaN."""
    batches = [of_lengths([31, 2, 40, 8], seed), random_batch(2, 20, documents=False, ignored=0.1, seed=seed)]
    outcomes = []
    for places in RESIDENCIES:
        for delay in (None, random_delays(seed, 0.002)):
            plan = ithaca.Plan(recipe="sweep", chunk=9, tile=4, **places)
            model = ithaca.apply(ithaca.load_model(folders["double"], "float64"), plan)
            model.engine.poison, model.engine.before_copy = True, delay
            outcomes.append(model_step(model, batches))
    for loss, gradients in outcomes[1:]:
        assert loss == outcomes[0][0]
        assert all(torch.equal(gradient, outcomes[0][1][name]) for name, gradient in gradients.items())


def test_late_copies_of_a_whole_block(folders) -> None:
    batches = [of_lengths([31, 2, 40, 8], 0)]
    outcomes = []
    for plan, delay in ((ithaca.Plan(tile=7), None), (ithaca.Plan(recipe="alst", tile=7), random_delays(1, 0.002))):
        model = ithaca.apply(ithaca.load_model(folders["double"], "float64"), plan)
        model.engine.poison, model.engine.before_copy = True, delay
        outcomes.append(model_step(model, batches))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(gradient, outcomes[0][1][name]) for name, gradient in outcomes[1][1].items())


def open_model(folder: Path, **options) -> tuple[ithaca.Model, ithaca.Batch]:
    plan = ithaca.Plan(**({"recipe": "sweep", "chunk": 8} | options))
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan)
    return model, model.shard(*random_batch(1, 37, documents=True, ignored=0.2, seed=3))


@pytest.mark.parametrize("options", [{}, {"recipe": "alst", "chunk": None}])
def test_a_second_forward_before_backward_is_refused(folders, options) -> None:
    model, batch = open_model(folders["tied"], **options)
    loss = model(batch)
    with pytest.raises(InputError, match="a second forward pass began before the backward pass of the first"):
        model(batch)
    with pytest.raises(InputError, match="a second forward pass began"):
        model.allocate(1, 50)
    loss.backward()  # which is still possible
    first = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    model.zero_grad()
    model(batch).backward()
    assert all(torch.equal(p.grad.full_tensor(), old) for p, old in zip(model.parameters(), first, strict=True))


def test_a_loss_that_is_dropped_waits_for_nothing(folders) -> None:
    model, batch = open_model(folders["tied"])
    model(batch)
    gc.collect()
    model(batch).backward()


def test_what_was_summed_over_ranks_holds_no_loss(folders, monkeypatch) -> None:
    """A backend's thread may keep it a moment longer than the caller."""
    summed, sum_up = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda value, **more: summed.append(value) or sum_up(value, **more))
    model, batch = open_model(folders["tied"])
    model(batch)
    assert summed
    model(batch).backward()


def test_backward_twice_is_refused(folders) -> None:
    for options in ({}, {"recipe": "alst", "chunk": None}):
        model, batch = open_model(folders["tied"], **options)
        loss = model(batch)
        loss.backward(retain_graph=True)
        wanted = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        with pytest.raises(InputError, match="backward was called twice on one loss"):
            loss.backward()
        for _ in range(2):  # and nothing is left half done
            model.zero_grad()
            model(batch).backward()
            found = [parameter.grad.full_tensor() for parameter in model.parameters()]
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"recipe": "alst", "chunk": None}, {"recipe": "dense", "chunk": None}])
def test_after_a_backward_pass_that_broke_off_nothing_goes_on_silently(folders, options) -> None:
    """FSDP2 would give no gradients from then on, and no word."""
    model, batch = open_model(folders["tied"], **options)
    loss = model(batch)
    model.kernel.backward = None  # what calls it fails
    with pytest.raises(TypeError):
        loss.backward()
    with pytest.raises(RunError, match="the last backward pass ended in an error"):
        model(batch)


def test_weight_gradients_are_given_up_with_their_pass(folders) -> None:
    """Nothing waits for Python to look for cycles: at 8B, a block's sums are 0.9 GB of the device's memory."""
    model, batch = open_model(folders["tied"])
    alive: list[weakref.ref] = []

    class Watched(Summed):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            alive.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.schedule.pre_post_attention.Summed", Watched)
        gc.disable()
        try:
            model(batch).backward()
            assert len(alive) == 2
            assert [reference() for reference in alive] == [None, None]
        finally:
            gc.enable()


def keep_losses_on_one_rank(folder: Path) -> str:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(recipe="sweep", chunk=8), ithaca.mesh())
    batch = model.shard(*random_batch(2, 19, documents=False, ignored=0.0, seed=0))
    kept = [model(batch)] if model.mesh.rank == 0 else []
    if model.mesh.rank == 1:
        model(batch)
    try:
        model(batch)
    except InputError as error:
        return f"{len(kept)} kept: {error}"
    return "went on"


def test_a_pass_that_waits_on_one_rank_is_refused_on_all(ranks, folders) -> None:
    texts = ranks(2).run(keep_losses_on_one_rank, folders["tied"])
    assert all("a second forward pass began before the backward" in text for text in texts)


def test_without_gradients_nothing_is_kept(folders) -> None:
    """Losses and logits are those of `dense`; a pass without gradients may come at any time."""
    dense = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), ithaca.Plan())
    tokens, labels, ids = random_batch(2, 23, documents=True, ignored=0.2, seed=3)
    for places in RESIDENCIES:
        plan = ithaca.Plan(recipe="sweep", chunk=6, **places)
        model = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), plan)
        model.engine.poison, model.engine.before_copy = True, random_delays(0, 0.001)
        with torch.no_grad():
            wanted = dense(dense.shard(tokens, labels, ids))
            found = model(model.shard(tokens, labels, ids))
        assert relative(found, wanted) <= EXACT
        assert not model.reservation._tapes.get(True), "tapes of a training pass"
        loss = model(model.shard(tokens, labels, ids))
        with torch.no_grad():  # while that one waits
            assert relative(model(model.shard(tokens, labels, ids)), wanted) <= EXACT
        loss.backward()
        with torch.inference_mode():
            assert relative(model(model.shard(tokens, labels, ids)), wanted) <= EXACT
            assert relative(model.logits(tokens, ids), dense.logits(tokens, ids)) <= EXACT
            assert relative(model.logits(tokens[0, :3]), dense.logits(tokens[0, :3])) <= EXACT
        model(model.shard(tokens, labels, ids)).backward()


def test_a_pass_that_breaks_off_leaves_the_model_usable(folders) -> None:
    model, batch = open_model(folders["normed"], kv="host", lse="host")
    model(batch).backward()
    wanted = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    model.zero_grad()
    kernel = model.kernel

    class Breaking:
        """A kernel whose n-th forward call fails. (After a backward pass that fails, FSDP2 itself is of no use.)"""

        name = "breaking"

        def __init__(self, call: int):
            self.calls_left = call

        def forward(self, *args):
            self.calls_left -= 1
            if self.calls_left == 0:
                raise RuntimeError("out of memory")
            return kernel.forward(*args)

    for call in (1, 3, 9):
        model.kernel = Breaking(call)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(batch)
    model.kernel = kernel
    model(batch).backward()
    assert all(torch.equal(p.grad.full_tensor(), old) for p, old in zip(model.parameters(), wanted, strict=True))


def freeze(folder: Path, options: dict, frozen: str) -> dict[str, Tensor | None]:
    plan = ithaca.Plan(**options)
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    for seed in (3, 4):
        model(model.shard(*random_batch(2, 19, documents=True, ignored=0.2, seed=seed))).backward()
    return {name: p.grad if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def nothing_frozen(ranks, folders) -> dict[str, Tensor]:
    return ranks(2).run(freeze, folders["untied"], {}, "nothing")[0]


@pytest.mark.parametrize("frozen", ["self_attn", "mlp", "embedding", "head", "norm", "blocks.0", "blocks.1"])
def test_frozen_weights(ranks, folders, nothing_frozen, frozen: str) -> None:
    for options in ({"recipe": "sweep", "chunk": 5, "zero": 1}, {"recipe": "alst", "tile": 4}):
        for name, gradient in ranks(2).run(freeze, folders["untied"], options, frozen)[0].items():
            if frozen in name:
                assert gradient is None
            else:
                assert relative(gradient, nothing_frozen[name]) <= EXACT, name


def test_a_short_batch_after_a_long_one(folders) -> None:
    plan = ithaca.Plan(recipe="sweep", tile=4)
    model = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), plan)
    batches = [random_batch(1, length, documents=True, ignored=0.1, seed=length) for length in (31, 5, 44)]
    assert_same(model_step(model, batches), naive_step(folders["tied"], batches))


def test_transformers(folders) -> None:
    """Not ours: the loss and gradients of transformers in float32 norms, documents by their own rows."""
    model = make_model(
        "qwen2", torch.float64, num_hidden_layers=2, hidden_size=56, num_attention_heads=7, num_key_value_heads=1
    )
    tokens = random_batch(2, 23, documents=False, ignored=0.0, seed=1)[0]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    plan = ithaca.Plan(recipe="sweep", chunk=9, tile=5, kv="host")
    found = model_step(
        ithaca.apply(ithaca.load_model(folders["double"], "float64"), plan),
        [(tokens, tokens, torch.zeros_like(tokens))],
    )
    theirs = {name: theirs[name] for name in found[1]}
    assert_same(found, (loss.item(), theirs), 1e-6)


@pytest.mark.parametrize(("tokens", "chunks", "size"), [(10, 4, 3), (12, 4, 3), (37, 37, 1), (10, 6, 2), (5, 1, 5)])
def test_a_number_of_chunks(tokens: int, chunks: int, size: int) -> None:
    plan = ithaca.Plan(recipe="fpdt", chunks=chunks)
    assert plan.chunk_of(tokens, shorten=False) == size
    assert -(-tokens // size) <= chunks


REFUSED = [
    ({"recipe": "sweep", "chunk": 100}, "chunk=100 is longer than the 37 tokens of a sequence: use chunk=37"),
    ({"recipe": "sweep", "chunk": 8, "tile": 9}, "tile=9 is longer than chunk=8: a tile of 8 fits"),
    ({"recipe": "sweep", "chunk": 0}, "chunk must be a number of tokens, e.g. 65536; it is 0"),
    (
        {"recipe": "sweep", "chunks": 4},
        "chunks=4 has no effect under recipe 'sweep': leave it out, or use recipe 'fpdt'",
    ),
    ({"recipe": "fpdt", "chunks": 38}, "chunks=38 is more than the 37 tokens of a sequence: use 37"),
    ({"recipe": "fpdt", "chunks": 0}, "chunks must be a number of chunks, e.g. 16; it is 0"),
    ({"recipe": "fpdt", "chunks": "4"}, "chunks must be a number of chunks, e.g. 16; it is 4"),
    ({"recipe": "fpdt", "chunks": 4, "chunk": 8}, "chunk=8 and chunks=4 both say how a sequence is cut: leave one out"),
    ({"recipe": "sweep", "tile": -3}, "tile must be a number of tokens, e.g. 8192; it is -3"),
    ({"recipe": "sweep", "o": "hots"}, "o=hots does not exist: did you mean 'host'"),
    ({"recipe": "sweep", "checkpoint": "full"}, "checkpoint=full has no effect under recipe 'sweep'"),
    (
        {"recipe": "dense", "kv": "host"},
        "kv=host has no effect under recipe 'dense': leave it out",
    ),
    ({"recipe": "alst", "checkpoint": "none"}, "x='host' of recipe 'alst' has no effect with checkpoint='none'"),
    ({"recipe": "dense", "checkpoint": "none", "tile": 8}, "tile=8 saves nothing with checkpoint='none'"),
    ({"recipe": "sweep", "kernel": "fa9"}, "kernel 'fa9' does not exist"),
    ({"recipe": "sweep", "kernel": "cudnn"}, "kernel 'cudnn' cannot be used here: it runs on a CUDA GPU"),
    (
        {"recipe": "sweep", "host_memory": 1000},
        "plan.host_memory is 1000 B: .* are missing; .* a smaller plan.chunk",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(folders, options: dict, sentence: str) -> None:
    def run() -> None:
        model = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), ithaca.Plan(**options))
        model(model.shard(*random_batch(1, 37, documents=False, ignored=0.0, seed=0)))

    with pytest.raises(PlanError, match=sentence):
        run()


def too_little_memory(folder: Path) -> str:
    """Memory for the tapes of one rank and a half: each would fit, both do not; every rank hears of it."""
    source, grid = ithaca.load_model(folder, "float64"), ithaca.mesh()
    both = ithaca.apply(source, ithaca.Plan(recipe="sweep"), grid).host_bytes(2, 37)
    model = ithaca.apply(source, ithaca.Plan(recipe="sweep", host_memory=both * 3 // 4), grid)
    try:
        model.check_memory(2, 37)
    except PlanError as error:
        return str(error)
    return "fits"


def test_ranks_of_a_node_share_its_memory(ranks, folders) -> None:
    for text in ranks(2).run(too_little_memory, folders["tied"]):
        assert "for the 2 ranks of this node, and plan.host_memory is" in text


def has_tapes_for_its_rows(rows: int) -> tuple[int, bool]:
    """This rank's tokens of a pass, and whether the tapes that were allocated before it are the ones it uses."""
    plan = ithaca.Plan(recipe="sweep", chunk=8)
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), plan, ithaca.mesh(device="cpu"))
    model.allocate(rows, 16)
    tokens = torch.arange(16).repeat(rows, 1)
    batch = model.shard(tokens, tokens)
    return len(batch.tokens), model.reservation.find(batch.layout.tokens, training=True) is not None


def test_tapes_are_allocated_for_the_rows_of_each_rank(ranks) -> None:
    """Five rows over three ranks: a pass that found other tapes would allocate them again, unchecked by the start."""
    assert ranks(3).run(has_tapes_for_its_rows, 5) == [(16, True), (32, True), (32, True)]
