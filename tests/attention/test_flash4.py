"""The kernel `flash4` on a stand-in for its package: layouts, bounds, refusals; on a GPU, the package itself."""

import inspect
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ithaca
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels import flash4
from ithaca.attention.kernels.choose import choose_kernel, explain_kernel, make_kernel
from ithaca.attention.kernels.facts import KERNEL_FACTS, _installed, gpu_kernel
from ithaca.attention.kernels.packed import REMEMBERED
from ithaca.base.errors import PlanError
from tests.attention.flash4_package import _flash_attn_bwd, _flash_attn_fwd, install
from tests.models import make_model, save

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INSTALL = "pip install 'ithaca[flash4]'"


def forget() -> None:
    for remembered in (_installed, flash4._functions, flash4._refusal_of_package):
        remembered.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    yield monkeypatch
    forget()


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    forget()
    monkeypatch.setattr("ithaca.attention.kernels.facts._installed", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    yield monkeypatch
    forget()


@st.composite
def pieces_of(draw: st.DrawFn) -> Pieces:
    """Documents, equal or not, and rectangles."""
    kind = draw(st.sampled_from(("documents", "equal", "rectangle", "rectangles")))
    if kind == "rectangle":
        return Pieces.rectangle(draw(st.integers(1, 20)), draw(st.integers(1, 20)), ragged=draw(st.booleans()))
    if kind == "rectangles":
        sides = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=4))
        q, k = ((0, *np.cumsum(lengths).tolist()) for lengths in zip(*sides, strict=True))
        return Pieces(q, k, causal=False)
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    if kind == "equal":
        lengths = [lengths[0]] * len(lengths)
    return Pieces.documents((0, *np.cumsum(lengths).tolist()))


def tensors(pieces: Pieces, heads: tuple[int, int], size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, keys = pieces.q_bounds[-1], pieces.k_bounds[-1]
    shapes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    return [torch.randn(*shape, size, generator=generator, dtype=torch.float64) for shape in shapes]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=pieces_of(), heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (7, 7)]), seed=st.integers(0, 99))
def test_layouts(package: object, pieces: Pieces, heads: tuple[int, int], seed: int) -> None:  # noqa: ARG001
    q, k, v, do = tensors(pieces, heads, 8, seed)
    twin, kernel = make_kernel("naive"), make_kernel("flash4")
    o, lse = twin.forward(q, k, v, pieces, 0.3)
    wanted = [o, lse, *twin.backward(do, q, k, v, o, lse, pieces, 0.3)]
    found = [*kernel.forward(q, k, v, pieces, 0.3)]
    found += kernel.backward(do, q, k, v, o, lse.T.contiguous().T, pieces, 0.3)  # as a tape gives it back
    for what, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert ours.shape == theirs.shape, what
        assert (ours - theirs).abs().max().item() <= 1e-12, what


@settings(max_examples=100, deadline=None)
@given(pieces=pieces_of(), more=st.sampled_from([(0, 0), (1, 0), (0, 1)]))
def test_equal_pieces_are_counted(pieces: Pieces, more: tuple[int, int]) -> None:
    shapes = {(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in pieces.spans()}
    wanted = len(pieces.spans()) if len(shapes) == 1 and more == (0, 0) else 0  # what is outside of pieces is no piece
    assert pieces.equal(pieces.q_bounds[-1] + more[0], pieces.k_bounds[-1] + more[1]) == wanted


def test_bounds_are_copied_once_and_not_kept_for_ever(package: object) -> None:  # noqa: ARG001
    kernel = make_kernel("flash4")
    assert isinstance(kernel, flash4.Flash4)
    pieces = Pieces.documents((0, 3, 8))
    q, k, v, _ = tensors(pieces, (2, 1), 8, 0)
    kernel.forward(q, k, v, pieces, 1.0)
    first = kernel._on_device(pieces.q_bounds, CPU)
    kernel.forward(q, k, v, pieces, 1.0)
    assert kernel._on_device(pieces.q_bounds, CPU) is first
    for split in range(1, REMEMBERED + 5):
        kernel._on_device((0, split, 100), CPU)
    assert len(kernel._bounds) == REMEMBERED


def test_auto_prefers_it(package: pytest.MonkeyPatch) -> None:
    assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "flash4"
    assert choose_kernel("auto", GPU, torch.float16, 256).name == "flash4"
    assert choose_kernel("auto", GPU, torch.float32, 128).name == "naive"
    assert choose_kernel("auto", CPU, torch.bfloat16, 128).name == "torch-cpu"
    package.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "cudnn+flash"


def test_a_wrong_kernel_is_found_before_the_first_step(package: pytest.MonkeyPatch) -> None:
    """As the package was for heads of 80: right outputs, wrong gradients."""

    def backward(q, *args, **options):
        dq, *others = _flash_attn_bwd(q, *args, **options)
        return dq.flip(0), *others

    make_kernel("flash4").prepare(CPU, torch.float32, 4, 2, 32, rectangles=True)
    backward.__signature__ = inspect.signature(_flash_attn_bwd)  # pyrefly: ignore
    install(package, _flash_attn_bwd=backward)
    with pytest.raises(
        PlanError, match=r"wrong on this GPU with heads of 32: its dq is off by 1.*use plan.kernel=cudnn"
    ):
        make_kernel("flash4").prepare(CPU, torch.float32, 4, 2, 32, rectangles=True)
    with pytest.raises(PlanError, match="takes head sizes up to 256 in steps of 32, the model has 80"):
        choose_kernel("flash4", GPU, torch.bfloat16, 80)


def test_a_kernel_that_does_not_compile(package: pytest.MonkeyPatch) -> None:
    """A sentence for the user, not the compiler's traceback; memory that is short stays what it is."""
    for problem, wanted in ((ValueError("no tile fits"), PlanError), (torch.OutOfMemoryError("full"), None)):

        def backward(*_, problem=problem, **__):
            raise problem

        install(package, _flash_attn_bwd=backward)
        with pytest.raises(wanted or type(problem)) as raised:
            make_kernel("flash4").prepare(CPU, torch.float32, 4, 2, 32, rectangles=True)
        if wanted:
            assert "does not run here (ValueError: no tile fits): use plan.kernel=cudnn+flash" in str(raised.value)


def test_keys_outside_of_all_pieces(package: object) -> None:  # noqa: ARG001
    """The package would leave their gradients as they were in memory."""
    pieces = Pieces.documents((0, 3, 8))
    q, k, v, _ = tensors(pieces, (2, 1), 8, 0)
    with pytest.raises(AssertionError, match="keys outside"):
        make_kernel("flash4").forward(q, torch.cat((k, k)), torch.cat((v, v)), pieces, 1.0)


def test_the_cache_has_a_folder(package: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the home, or where the user says; a folder that cannot be made is named, with the way out."""
    file = tmp_path / "file"
    file.write_text("")
    package.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    package.setenv(flash4.CACHE, "")
    package.delenv(flash4.CACHE)
    package.setenv("HOME", str(tmp_path))
    assert choose_kernel("flash4", GPU, torch.bfloat16, 128).name == "flash4"
    assert os.environ[flash4.CACHE] == str(tmp_path / ".cache" / "ithaca" / "flash4")
    for home, words in ((file, "Not a directory"), (None, "home directory")):
        forget()
        package.setenv("HOME", str(home))
        package.delenv(flash4.CACHE, raising=False)
        if home is None:
            package.setattr(Path, "expanduser", no_home)
        with pytest.raises(PlanError, match=words) as refused:
            choose_kernel("flash4", GPU, torch.bfloat16, 128)
        assert "cannot keep what it compiles in ~/.cache/ithaca/flash4" in str(refused.value)
        assert f"set {flash4.CACHE} to a folder that can be written; usable are auto, cudnn" in str(refused.value)
        assert INSTALL not in str(refused.value)  # the package is there
        assert flash4.CACHE not in os.environ
    forget()
    package.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert choose_kernel("flash4", GPU, torch.bfloat16, 128).name == "flash4"


def no_home(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_head_sizes_are_asked_for(package: pytest.MonkeyPatch) -> None:
    """The package says which head sizes it takes on a generation of GPUs."""
    package.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    with pytest.raises(PlanError, match="does not take head size 256 on this GPU"):
        choose_kernel("flash4", GPU, torch.bfloat16, 256)
    assert choose_kernel("auto", GPU, torch.bfloat16, 256).name == "flash"
    assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "flash4"


def test_a_kernel_that_does_not_compute_is_not_loaded(package: pytest.MonkeyPatch) -> None:
    """A memory-only rehearsal needs its facts alone. With `auto`, and to compute, the package must be there whole."""

    @lru_cache
    def broken() -> None:
        raise ImportError("half of it is missing")

    package.setattr(flash4, "_functions", broken)
    flash4._refusal_of_package.cache_clear()
    assert choose_kernel("flash4", GPU, torch.bfloat16, 128, computes=False).name == "flash4"
    with pytest.raises(PlanError, match="steps of 32, the model has 80"):
        choose_kernel("flash4", GPU, torch.bfloat16, 80, computes=False)
    assert choose_kernel("auto", GPU, torch.bfloat16, 128, computes=False).name == "cudnn+flash"
    with pytest.raises(PlanError, match="half of it is missing"):
        choose_kernel("flash4", GPU, torch.bfloat16, 128)


def test_the_install_line_is_in_the_refusal(no_package: pytest.MonkeyPatch) -> None:
    kernel = choose_kernel("auto", GPU, torch.bfloat16, 128)
    assert kernel.name == "cudnn+flash"
    no_package.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(PlanError, match=r"needs a GPU of compute capability 9\.0"):  # no package would help
        choose_kernel("flash4", GPU, torch.bfloat16, 128)
    no_package.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    line = explain_kernel(kernel, GPU, torch.bfloat16, 128)
    assert line == f"cudnn+flash; flash4 is not used: it needs the package flash-attn-4: {INSTALL}"
    with pytest.raises(PlanError, match="needs the package flash-attn-4: pip install") as refused:
        choose_kernel("flash4", GPU, torch.bfloat16, 128)
    assert INSTALL in str(refused.value)
    assert "usable are auto, cudnn+flash" in str(refused.value)


def test_why_not_another(package: pytest.MonkeyPatch) -> None:
    best = choose_kernel("auto", GPU, torch.bfloat16, 128)
    assert explain_kernel(best, GPU, torch.bfloat16, 128) == "flash4"
    named = choose_kernel("cudnn+flash", GPU, torch.bfloat16, 128)
    assert explain_kernel(named, GPU, torch.bfloat16, 128).endswith("flash4 is not used: plan.kernel names another")
    package.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    older = choose_kernel("auto", GPU, torch.bfloat16, 128)
    assert "flash4 is not used: it needs a GPU of compute capability 9.0" in explain_kernel(
        older, GPU, torch.bfloat16, 128
    )
    on_cpu = choose_kernel("auto", CPU, torch.float32, 128)
    assert explain_kernel(on_cpu, CPU, torch.float32, 128) == "torch-cpu"  # no word of kernels for GPUs


def test_another_version_is_refused(package: pytest.MonkeyPatch) -> None:
    def without_lse(q, k, v, softmax_scale=None, causal=False): ...

    for other, words in (
        ({"_flash_attn_fwd": without_lse}, "_flash_attn_fwd of the installed flash-attn-4 has no return_lse"),
        ({"_validate_head_dims": lambda size: None}, "does not take head size 128 on this GPU"),  # noqa: ARG005
        ({"_flash_attn_bwd": None}, "flash-attn-4 cannot be loaded (ImportError"),
    ):
        install(package, **other)
        with pytest.raises(PlanError) as refused:
            choose_kernel("flash4", GPU, torch.bfloat16, 128)
        assert words in str(refused.value)
        assert INSTALL in str(refused.value) or "_validate_head_dims" in other
        assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "cudnn+flash"


def test_gpu_kernel_is_what_auto_takes(package: pytest.MonkeyPatch) -> None:
    for capability in ((7, 5), (8, 0), (9, 0)):
        package.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        for size in (64, 80, 100, 128, 256, 512):
            assert gpu_kernel(size, capability).name == choose_kernel("auto", GPU, torch.bfloat16, size).name


def test_it_is_compiled_when_memory_is_allocated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kinds of calls that a Plan makes, once, before the first step; and the user is told."""
    folder, seen = save(make_model("llama3"), tmp_path / "in"), []

    def forward(q, k, *args, **options):
        pieces = 1 if "cu_seqlens_q" not in options else len(options["cu_seqlens_q"]) - 1
        seen.append((q.shape[-2:], q.shape[-3], k.shape[-3], options["causal"], pieces))
        return _flash_attn_fwd(q, k, *args, **options)

    forward.__signature__ = inspect.signature(_flash_attn_fwd)  # pyrefly: ignore
    install(monkeypatch, _flash_attn_fwd=forward)
    told: list[str] = []

    def model_of(**options: object) -> ithaca.Model:
        model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(**options))
        model.kernel = make_kernel("flash4")
        return model

    dense = model_of()
    dense.allocate(1, 64, told.append)
    dense.allocate(1, 32, told.append)
    heads = dense.spec.heads, dense.spec.head_size
    documents = [(heads, 400, 400, True, count) for count in (1, 2, 257)]  # over 256 documents are a kind of their own
    assert seen == documents
    assert told == ["Compiling attention kernel flash4, or loading it from its cache"]
    seen.clear()
    sweep = model_of(recipe="sweep", chunk=32)
    sweep.allocate(1, 32, told.append)
    assert seen == documents  # one chunk sees no other
    seen.clear()
    sweep.allocate(1, 64, told.append)
    # Also rectangles within a block of the package
    assert seen == documents + [(heads, *side, False, 1) for side in ((400, 400), (400, 40), (40, 400), (40, 40))]
    forget()


@pytest.mark.gpu
@pytest.mark.skipif(not KERNEL_FACTS["flash4"].installed, reason="flash-attn-4 is not installed")
class TestOnGpu:
    """Errors against float64, beside cuDNN's where both run."""

    @staticmethod
    def errors(name: str, given: list[Tensor], pieces: Pieces, wanted: list[Tensor]) -> list[float]:
        q, k, v, do = given
        kernel = make_kernel(name)
        o, lse = kernel.forward(q, k, v, pieces, q.shape[-1] ** -0.5)
        found = [o, lse, *kernel.backward(do, q, k, v, o, lse.T.contiguous().T, pieces, q.shape[-1] ** -0.5)]
        return [((a.double() - b).norm() / b.norm().clamp(min=1e-2)).item() for a, b in zip(found, wanted, strict=True)]

    @staticmethod
    def exact(given: list[Tensor], pieces: Pieces) -> list[Tensor]:
        """Attention and its gradients in float64, a few rows at a time, so that 70,000 tokens fit."""
        q, k, v, do = (x.double() for x in given)
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        o, dq, lse = torch.zeros_like(q), torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in pieces.spans():
            for start in range(rows.start, rows.stop, 512):
                part = slice(start, min(start + 512, rows.stop))
                until = slice(keys.start, keys.start + part.stop - rows.start) if pieces.causal else keys
                for head in range(q.shape[1]):
                    kv = head // group
                    scores = q[part, head] @ k[until, kv].T * scale
                    if pieces.causal:
                        at = torch.arange(part.start - rows.start, part.stop - rows.start, device=q.device)
                        columns = torch.arange(scores.shape[1], device=q.device)
                        scores = scores.masked_fill(columns[None] > at[:, None], -torch.inf)
                    lse[head, part] = scores.logsumexp(-1)
                    weights = (scores - lse[head, part, None]).exp()
                    o[part, head] = weights @ v[until, kv]
                    inner = (do[part, head] * o[part, head]).sum(-1, keepdim=True)
                    dscores = weights * (do[part, head] @ v[until, kv].T - inner) * scale
                    dq[part, head] = dscores @ k[until, kv]
                    dk[until, kv] += dscores.T @ q[part, head]
                    dv[until, kv] += weights.T @ do[part, head]
        return [o, lse, dq, dk, dv]

    # Each kind is compiled, which takes seconds: every group once, the rest with some groups
    @pytest.mark.parametrize(
        ("group", "size", "dtype"),
        [
            *((group, 128, torch.bfloat16) for group in range(1, 9)),
            *((group, 64, torch.bfloat16) for group in (1, 3, 4)),
            (4, 128, torch.float16),
            (1, 64, torch.float16),
        ],
    )
    @pytest.mark.parametrize(
        "pieces",
        [
            Pieces.documents((0, 1000)),
            Pieces.documents((0, 256, 259, 387, 1000)),
            Pieces.documents((0, 250, 500, 750, 1000)),
            Pieces.rectangle(300, 1000, False),
            Pieces.rectangle(999, 130, True),
            Pieces((0, 100, 200, 300), (0, 300, 600, 900), causal=False),
        ],
        ids=["whole", "ragged", "equal", "rectangle", "thin", "rectangles"],
    )
    def test_error(self, group: int, size: int, dtype: torch.dtype, pieces: Pieces) -> None:
        given = [x.to(GPU, dtype) for x in tensors(pieces, (2 * group, 2), size, group)]
        wanted = self.exact(given, pieces)
        ours, theirs = (self.errors(name, given, pieces, wanted) for name in ("flash4", "cudnn"))
        for what, mine, other in zip(("o", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
            assert mine <= max(1.2 * other, 1e-6), (what, mine, other)

    @pytest.mark.parametrize("heads", [(1, 1), (4, 1)])
    def test_ragged_from_1_to_70000(self, heads: tuple[int, int]) -> None:
        lengths = [1, 70000, 3, 129, 1, 9000, 64, 2]
        pieces = Pieces.documents((0, *np.cumsum(lengths).tolist()))
        given = [x.to(GPU, torch.bfloat16) for x in tensors(pieces, heads, 128, 5)]
        wanted = self.exact(given, pieces)
        ours, theirs = (self.errors(name, given, pieces, wanted) for name in ("flash4", "cudnn+flash"))
        for what, mine, other in zip(("o", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
            assert mine <= max(1.2 * other, 1e-6), (what, mine, other)

    @pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 192, 224, 256])
    def test_other_head_sizes(self, size: int) -> None:
        """Every size that is accepted; `prepare` compares with `naive`."""
        pieces = Pieces.documents((0, 100, 300))
        given = [x.to(GPU, torch.bfloat16) for x in tensors(pieces, (4, 2), size, 3)]
        kernel = choose_kernel("flash4", GPU, torch.bfloat16, size)
        assert max(self.errors("flash4", given, pieces, self.exact(given, pieces))) <= 1e-2
        kernel.prepare(GPU, torch.bfloat16, 4, 2, size, rectangles=True)

    def test_strided_inputs_are_not_copied(self) -> None:
        """q, k and v as slices of wider tensors; forward allocates o and lse and nothing else."""
        pieces = Pieces.documents((0, 100, 1024))
        wide = torch.randn(1024, 3, 12, 128, device=GPU, dtype=torch.bfloat16)
        do = torch.randn(8, 1024, 128, device=GPU, dtype=torch.bfloat16).transpose(0, 1)
        given = [wide[:, 0, :8], wide[:, 1, :2], wide[:, 2, 2:4], do]
        assert max(self.errors("flash4", given, pieces, self.exact(given, pieces))) <= 1e-2
        kernel = make_kernel("flash4")
        kernel.forward(*given[:3], pieces, 0.1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o, lse = kernel.forward(*given[:3], pieces, 0.1)
        assert torch.cuda.max_memory_allocated() - before <= o.nbytes + lse.nbytes + 4096

    @pytest.mark.parametrize("group", [1, 4])
    @pytest.mark.parametrize("name", ["flash4", "cudnn"])
    def test_workspace_is_as_the_facts_say(self, name: str, group: int) -> None:
        pieces, kernel = Pieces.documents((0, 16384)), make_kernel(name)
        q, k, v, do = (x.to(GPU, torch.bfloat16) for x in tensors(pieces, (2 * group, 2), 128, 0))
        o, lse = kernel.forward(q, k, v, pieces, 0.1)
        kernel.backward(do, q, k, v, o, lse, pieces, 0.1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kernel.backward(do, q, k, v, o, lse, pieces, 0.1)
        taken = torch.cuda.max_memory_allocated() - before
        wanted = q.nbytes + 2 * k.nbytes + KERNEL_FACTS[name].workspace(q.nbytes, k.nbytes, group, len(q), causal=True)
        assert abs(taken / wanted - 1) <= 0.03
