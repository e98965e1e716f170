"""The tiled loss against its twin: the sum and every gradient, at tiles that do not divide; on a GPU also its kernel,
its rounding and its memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.base.precision import at_least_fp32
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.batch import IGNORED
from ithaca.schedule.loss import cross_entropy, naive_loss, plain_cross_entropies, tiled_loss, token_losses
from tests.models import relative

SPEC = read_spec(PRESETS["tiny"])
ALL = (True, True, True)


def make_inputs(tokens: int, vocab: int, hidden: int = 16, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """x, the norm's weight and the head in float64; labels, every fourth ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, hidden), (hidden,), (vocab, hidden))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    return given, labels.masked_fill(torch.arange(tokens) % 4 == 0, IGNORED)


def differentiated(loss: Callable[..., Tensor], given: list[Tensor], learned: tuple[bool, ...]) -> list[Tensor]:
    """The loss, and the gradients of twice its value."""
    leaves = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(given, learned, strict=True)]
    for leaf in leaves:
        leaf.grad_dtype = at_least_fp32(leaf.dtype)  # as a decoder's weights have it
    value = loss(SPEC, *leaves)
    (2 * value).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(given: list[Tensor], labels: Tensor, tile: int, learned: tuple[bool, ...] = ALL) -> None:
    wanted = differentiated(lambda *x: naive_loss(*x, labels), given, learned)
    found = differentiated(lambda *x: tiled_loss(*x, labels, tile), given, learned)
    assert len(found) == 1 + sum(learned)
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) <= 1e-12


@pytest.mark.parametrize("tile", [1, 7, 23, 100])
@pytest.mark.parametrize("learned", [ALL, (True, False, False), (False, True, True), (False, False, True)])
def test_tiles(tile: int, learned: tuple[bool, ...]) -> None:
    check(*make_inputs(23, 31, seed=tile), tile, learned)


@pytest.mark.parametrize("vocab", [1, 2, 97, 1025])
def test_vocabularies(vocab: int) -> None:
    check(*make_inputs(10, vocab), 4)


@pytest.mark.parametrize("label", [IGNORED, 0, 30])
def test_one_token(label: int) -> None:
    check(make_inputs(1, 31)[0], torch.tensor([label]), 4)


def test_large_logits() -> None:
    (x, weight, head), labels = make_inputs(23, 31)
    check([x, weight, 1e4 * head], labels, 7)


@pytest.mark.parametrize("tile", [1, 7, 23])
def test_nothing_to_learn(tile: int) -> None:
    given, labels = make_inputs(23, 31)
    for found in differentiated(lambda *x: tiled_loss(*x, labels.fill_(IGNORED), tile), given, ALL):
        assert torch.equal(found, torch.zeros_like(found))


def test_without_gradients_only_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation would take three GEMMs instead of one, and the head once more in fp32."""
    given, labels = make_inputs(23, 31)
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    wanted = naive_loss(SPEC, *leaves, labels)
    monkeypatch.setattr("ithaca.schedule.loss.add_product", None)
    with torch.no_grad():
        assert relative(tiled_loss(SPEC, *leaves, labels, 7), wanted) <= 1e-12


@pytest.mark.parametrize("tile", [1, 7, 99])
def test_the_loss_of_each_token(tile: int) -> None:
    given, labels = make_inputs(23, 31)
    found = token_losses(SPEC, *given, labels, tile)
    for token in range(23):
        wanted = naive_loss(SPEC, given[0][token : token + 1], *given[1:], labels[token : token + 1])
        assert abs(found[token] - wanted) <= 1e-12
    assert relative(found.sum(), naive_loss(SPEC, *given, labels)) <= 1e-12


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_ignored_token_counts_for_nothing_whatever_its_logits(bad: float) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64)
    logits[1, 2] = bad
    losses, gradient = plain_cross_entropies(logits, torch.tensor([4, IGNORED, 0]))
    wanted, others = plain_cross_entropies(logits[[0, 2]], torch.tensor([4, 0]))
    assert torch.equal(losses[[0, 2]], wanted)
    assert losses[1] == 0
    assert torch.equal(gradient[[0, 2]], others)
    assert torch.equal(gradient[1], torch.zeros(5, dtype=torch.float64))


def test_gradients_of_the_head_are_summed_in_fp32() -> None:
    """The later tiles add 2⁻¹² of what the first one adds: in fp16 the sum would stay as it is."""
    x = torch.tensor([[1.0, 0.0], *64 * [[2**-12, 1.0]]], dtype=torch.float16)
    given, labels = (
        [x, torch.ones(2, dtype=x.dtype), torch.zeros(3, 2, dtype=x.dtype)],
        torch.zeros(65, dtype=torch.long),
    )
    wanted = differentiated(lambda *x: naive_loss(*x, labels), [tensor.double() for tensor in given], ALL)[-1]
    found = differentiated(lambda *x: tiled_loss(*x, labels, 1), given, ALL)[-1]
    assert relative(found[:, 0].double(), wanted[:, 0]) <= 2**-9


@pytest.mark.parametrize("recipe", ["dense", "sweep"])
def test_no_more_logits_than_the_plan_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    watched = lambda logits, labels: rows.append(len(logits)) or cross_entropy(logits, labels)  # noqa: E731
    monkeypatch.setattr("ithaca.schedule.loss.cross_entropy", watched)
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(recipe=recipe, loss_tile=5))
    model(model.shard(torch.arange(13), torch.arange(13)))
    assert rows == [5, 5, 3]


def test_tied_head() -> None:
    """A table that is also looked up gets both gradients."""
    (_, weight, table), labels = make_inputs(23, 31)
    tokens = torch.arange(23)

    def tied(loss: Callable[..., Tensor]) -> list[Tensor]:
        return differentiated(lambda spec, w, table: loss(spec, table[tokens], w, table), [weight, table], (True, True))

    found, wanted = tied(lambda *x: tiled_loss(*x, labels, 7)), tied(lambda *x: naive_loss(*x, labels))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) <= 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 5, 31, 4097, 32768, 128256])
@pytest.mark.parametrize("tokens", [1, 3, 257])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.bfloat16, 3.0), (torch.bfloat16, 300.0), (torch.float16, 3.0), (torch.float32, 3.0), (torch.float32, 6e4)],
)
def test_kernel(vocab: int, tokens: int, dtype: torch.dtype, scale: float) -> None:
    """Against its plain twin in float64 on the same logits; rows lie apart, and what lies between stays."""
    torch.manual_seed(vocab)
    wide = (torch.randn(tokens, vocab + 8, device="cuda") * scale).to(dtype)
    logits, between = wide[:, :vocab], wide[:, vocab:].clone()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[-1] = vocab - 1
    labels[1::3] = IGNORED
    losses, wanted = plain_cross_entropies(logits.double(), labels)
    wanted_loss = losses.sum()
    loss, gradient = cross_entropy(logits, labels)
    assert gradient.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, vocab:], between)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - wanted_loss.item()) <= 1e-5 * wanted_loss.item() + 1e-6
    assert not gradient[labels == IGNORED].any()
    # One rounding to the dtype, beside those of probabilities in fp32
    valid = labels != IGNORED
    error = (gradient.double() - wanted).abs()[valid]
    probability = wanted[valid]
    probability[torch.arange(len(probability), device="cuda"), labels[valid]] += 1
    allowed = torch.finfo(dtype).eps / 2 * wanted[valid].abs() + 5e-6 * probability + 2**-24
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.gpu
def test_kernel_of_ignored_tokens() -> None:
    logits = torch.full((5, 1000), 3e38, device="cuda")
    logits[:, ::2] = -3e38
    loss, gradient = cross_entropy(logits, torch.full((5,), IGNORED, device="cuda"))
    assert loss.item() == 0
    assert not gradient.any()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [997, 8192])
def test_bf16_error(vocab: int) -> None:
    """No further from float64 than 1.5 × the plain loss in bf16 is."""
    given, labels = make_inputs(1000, vocab, hidden=256)
    given = [tensor.to("cuda", torch.bfloat16) for tensor in (given[0], given[1], 0.1 * given[2])]
    labels = labels.cuda()
    exact = differentiated(lambda *x: naive_loss(*x, labels), [tensor.double() for tensor in given], ALL)
    plain = differentiated(lambda *x: naive_loss(*x, labels), given, ALL)
    found = differentiated(lambda *x: tiled_loss(*x, labels, 300), given, ALL)
    errors = [[relative(a.double(), b) for a, b in zip(values, exact, strict=True)] for values in (found, plain)]
    assert errors[0][0] <= 1e-4, errors  # one number, whose error may be small by chance
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(*(row[1:] for row in errors), strict=True)), errors


@pytest.mark.gpu
def test_memory() -> None:
    """One tile's logits above inputs, gradients and sums: no fp32 copy of them, and none of the tile before."""
    tokens, vocab, hidden, tile = 8192, 64000, 128, 2048
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * 0.1).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    tiled_loss(SPEC, x[:tile], weight, head, labels[:tile], tile).backward()  # cuBLAS takes its workspace
    x.grad = weight.grad = head.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tiled_loss(SPEC, x, weight, head, labels, tile).backward()
    gradients = 2 * x.numel() + 4 * weight.numel() + 4 * head.numel()
    above = torch.cuda.max_memory_allocated() - before - gradients
    logits, states = 2 * tile * vocab, 4 * tile * hidden
    assert above <= 1.2 * logits + 8 * states, f"{above} bytes, {above / logits:.2f} x a tile's logits"
