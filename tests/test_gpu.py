"""On a GPU: bf16 no further from float64 than 1.5 × the plain model of transformers is; fused kernels against their
plain twins; copies that are late change nothing, and each wait between streams is seen to be there."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

import ithaca
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.merge import merge
from ithaca.base.tiles import Tiles
from ithaca.checkpoint.snapshot import Snapshot, training_state
from ithaca.model.block import gated, norm_beside
from ithaca.model.decoder import stored_name
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.rotary import Rotation, rotate
from ithaca.optimizer.host_adamw import MOMENTS, HostAdamW
from ithaca.tape.engine import Engine, make_engine
from ithaca.tape.slab import Slab
from ithaca.tape.tape import HostTape, Slots, Tape
from tests.models import SIZES, make_model, relative, save
from tests.tape.disks import disk_tapes

GPU_SIZES = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
HOST = {"x": "host", "o": "host", "lse": "host", "residual": "host", "kv": "host"}
PLANS = {
    "none": {"checkpoint": "none"},
    "selective": {"checkpoint": "selective"},
    "full": {"checkpoint": "full"},
    "alst": {"recipe": "alst", "tile": 250},
    "sweep": {"recipe": "sweep", "chunk": 256, "tile": 100},
    "sweep-host": {"recipe": "sweep", "chunk": 500, "tile": 128} | HOST,
    "sweep-rebuild": {"recipe": "sweep", "chunk": 256, "tile": 100, "x": "rebuild, host, rebuild"},
    "sweep-recompute": {"recipe": "sweep", "chunk": 256, "tile": 100, "o": "recompute"},
    "sweep-disk": {"recipe": "sweep", "chunk": 256, "tile": 100, "x": "disk, rebuild, host", "o": "disk"},
    "sweep-all-on-disk": {"recipe": "sweep", "chunk": 256, "tile": 100} | dict.fromkeys(HOST, "disk"),
    "sweep-device": {"recipe": "sweep", "x": "device", "o": "device", "residual": "device"},
    "fpdt": {"recipe": "fpdt", "chunks": 5, "tile": 100},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "smollm3"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["flash4", "cudnn+flash"])
def test_bf16_error(family: str, plan: str, packed: bool, kernel: str, tmp_path: Path) -> None:
    if not KERNEL_FACTS[kernel].installed:
        pytest.skip(f"{KERNEL_FACTS[kernel].package} is not installed")
    folder = save(make_model(family, torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    lengths = [100, 300, 7, 193] if packed else [600]
    tokens = torch.randint(0, 97, (2, 600))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, 600)

    def theirs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Each document by itself; the mean over all tokens that predict one."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        model.cuda()
        for part in tokens.cuda().split(lengths, dim=1):
            share = (part.shape[1] - 1) / (600 - len(lengths))
            (model(part, labels=part).loss * share).backward()
        return {name: parameter.grad.double() for name, parameter in model.named_parameters()}

    options = PLANS[plan] | {"kernel": kernel} | ({"disk": str(tmp_path)} if "disk" in plan else {})
    model = ithaca.apply(ithaca.load_model(folder, "bfloat16"), ithaca.Plan(**options))
    assert model.kernel.name == kernel
    model(model.shard(tokens, tokens, ids)).backward()
    exact, plain = theirs(torch.float64), theirs(torch.bfloat16)
    ours = {stored_name(n): p.grad.full_tensor().double() for n, p in model.decoder.named_parameters()}

    def error(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(found[name] - exact[name]).norm() / exact[name].norm() for name in exact])

    assert (error(ours) <= 1.5 * error(plain)).all(), torch.stack((error(ours), error(plain)))


def gradients(folder: Path, x: str, delays: bool, seed: int) -> dict[str, torch.Tensor]:
    """Of two passes with every tape on the host, or on the disk; freed slots are NaN, copies may come late."""
    places = HOST | (dict.fromkeys(HOST, "disk") | {"disk": str(folder)} if "disk" in x else {}) | {"x": x}
    plan = ithaca.Plan(recipe="sweep", chunk=512, **places)
    model = ithaca.apply(ithaca.load_model(folder, "bfloat16"), plan)
    model.engine.poison = True
    chance = random.Random(seed)
    if delays:
        model.engine.before_copy = lambda: torch.cuda._sleep(chance.randrange(3_000_000))  # up to 1.5 ms
        model.engine.before_disk = lambda: time.sleep(chance.random() * 0.004)
    torch.manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(0, 97, (1, 4000))
        ids = torch.arange(3).repeat_interleave(torch.tensor([1500, 2000, 500]))[None]
        model(model.shard(tokens, tokens, ids)).backward()
    return {name: p.grad.full_tensor().double() for name, p in model.decoder.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "x", ["host", "rebuild*4, host, rebuild", "device, rebuild, host, rebuild*3", "disk", "disk, rebuild*5"]
)
def test_late_copies(tmp_path: Path, x: str) -> None:
    """Within the spread of equal runs with every x kept: cuDNN's backward is not deterministic."""
    folder = save(make_model("llama3.1", torch.bfloat16, **(GPU_SIZES | {"num_hidden_layers": 6})), tmp_path / "in")
    equal = [gradients(folder, "host", delays=False, seed=0) for _ in range(3)]

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(a[name] - b[name]).norm() / b[name].norm() for name in a])

    spread = torch.stack([distance(equal[i], equal[j]) for i, j in ((0, 1), (0, 2), (1, 2))]).amax(0)
    for seed in range(4):
        late = gradients(folder, x, delays=True, seed=seed)
        assert all(gradient.isfinite().all() for gradient in late.values())
        found = torch.stack([distance(late, other) for other in equal]).amin(0)
        assert (found <= 1.5 * spread.amax()).all(), torch.stack((found, spread))


def assert_same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Parameters and states bit for bit; ours lie on the host."""
    pairs = [
        pair
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True)
        for pair in zip(mine["params"], other["params"], strict=True)
    ]
    for mine, other in pairs:
        assert torch.equal(mine.to_local(), other.to_local())
        assert ours.state[mine]["step"] == theirs.state[other]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            found = ours.state[mine][name].to_local()
            assert (found.device.type, found.is_pinned()) == ("cpu", True)
            assert torch.equal(found, theirs.state[other][name].to_local().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [1008, 4096, None])
@pytest.mark.parametrize("delays", [False, True])
def test_optimizer_states_on_the_host(tmp_path: Path, tile: int | None, delays: bool) -> None:
    """Three steps on the gradients of bf16 passes give the bits of torch's AdamW, and snapshots are of their moment."""
    folder = save(make_model("qwen3", torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    ours, theirs = (
        ithaca.apply(ithaca.load_model(folder, "bfloat16"), ithaca.Plan(optimizer=place))
        for place in ("host", "device")
    )
    ours.engine.poison, chance = True, random.Random(0)
    if delays:
        ours.engine.before_copy = lambda: torch.cuda._sleep(chance.randrange(300_000))
    plain = ithaca.make_optimizer(theirs, learning_rate=1e-2)
    hosted = ithaca.make_optimizer(ours, learning_rate=1e-2)
    if tile:
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in hosted.param_groups]
        hosted = HostAdamW(groups, ours.engine, learning_rate=1e-2, betas=(0.9, 0.95), tile=tile)
    snapshot, wanted = Snapshot(training_state(ours, hosted)), {}
    for step in range(3):
        tokens = torch.randint(0, 97, (1, 300))
        theirs(theirs.shard(tokens, tokens)).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = other.grad.clone()  # cuDNN's backward is not deterministic
        snapshot.before_update()
        for optimizer in (hosted, plain):
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()
        if step < 2:
            state = training_state(ours, hosted)
            wanted = {name: shard.local.to("cpu", copy=True) for name, shard in state.items()}
            snapshot.take()
        assert_same_states(hosted, plain)
    with snapshot.finished() as found:
        assert all(torch.equal(found[name].local, tensor) for name, tensor in wanted.items())
    snapshot.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(1, 2), (37, 24), (70_001, 576), (4099, 4096), (300, 9000), (5, 16385), (1, 1, 2), (300, 0, 64), (2049, 9, 80)],
)
@pytest.mark.parametrize("beside", [False, True])
def test_fused_norm(dtype: torch.dtype, shape: tuple[int, ...], beside: bool) -> None:
    """The RMS norm and its gradients against plain torch in float64, with rows that lie apart, as those of q and k.

    `beside`: the input itself has a gradient, too.
    """
    torch.manual_seed(sum(shape))
    spec = replace(read_spec(PRESETS["tiny"]), norm_eps=1e-5)
    given = torch.randn(shape[0], *(size + 2 for size in shape[1:])).to(dtype).cuda()
    given, weight = given[:, 1:-1], torch.randn(shape[-1]).to(dtype).cuda().requires_grad_()
    given = given[..., : shape[-1]].detach().requires_grad_()  # still with the strides of what it is a part of
    assert given.shape == shape
    upstream = torch.randn(*shape[:-1], shape[-1] + 1).to(dtype).cuda()[..., 1:]
    passed, ours = norm_beside(spec, given, weight)
    other = torch.randn(shape).to(dtype).cuda() * beside
    outputs, upstreams = ((ours, passed), (upstream, other)) if beside else ((ours,), (upstream,))
    found = torch.autograd.grad(outputs, (given, weight), upstreams)
    exact = given.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = F.rms_norm(exact[0], shape[-1:], exact[1], spec.norm_eps)
    bound = {torch.bfloat16: 5e-3, torch.float32: 2e-6, torch.float64: 1e-14}[dtype]
    dx, dweight = torch.autograd.grad(wanted, exact, upstream.double())
    for a, b in zip((ours, *found), (wanted, dx + other.double(), dweight), strict=True):
        assert a.dtype == dtype
        assert not b.numel() or not b.any() or relative(a.double(), b) <= bound
        assert b.any() or not a.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 6, 24), (300, 32, 128), (1000, 7, 80)])
def test_fused_kernels(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Rotation and gate with their gradients, and the merge, against plain torch in float64."""
    tokens, heads, size = shape
    bound = {torch.bfloat16: 5e-3, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]

    def random(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.randn(sizes, dtype=torch.float64).to(dtype).cuda()
        return given.requires_grad_(), given.detach().double().requires_grad_()

    def check(ours: torch.Tensor, wanted: torch.Tensor, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        upstream = torch.randn_like(wanted)
        found = torch.autograd.grad(ours, [pair[0] for pair in inputs], upstream.to(dtype))
        exact = torch.autograd.grad(wanted, [pair[1] for pair in inputs], upstream.to(dtype).double())
        for a, b in zip((ours, *found), (wanted, *exact), strict=True):
            assert a.dtype == dtype
            assert relative(a.double(), b) <= bound

    (wide, wide_exact), (cos, cos_exact), (sin, sin_exact) = (
        random(*s) for s in ((tokens, heads + 2, size), (tokens, 1, size // 2), (tokens, 1, size // 2))
    )
    x, x_exact = wide[:, 1:-1], wide_exact[:, 1:-1]  # strides that are not those of a dense tensor
    first, second = x_exact.chunk(2, -1)
    turned = torch.cat((first * cos_exact - second * sin_exact, second * cos_exact + first * sin_exact), -1)
    check(rotate(x, Rotation(cos.detach(), sin.detach())), turned, [(wide, wide_exact)])
    gate, up = random(tokens, heads * size), random(tokens, heads * size)
    check(gated(gate[0], up[0]), F.silu(gate[1]) * up[1], [gate, up])

    high = torch.float64 if dtype == torch.float64 else torch.float32
    o, part = random(tokens, heads, size)[1].detach(), random(tokens, heads, size)[1].detach()
    lse, lse_part = (torch.randn(heads, tokens + 5, dtype=torch.float64).cuda()[:, :tokens] * 30 for _ in range(2))
    o_sum, lse_sum = o.to(high).clone(), lse.to(high).clone()
    merge(o_sum, lse_sum, part.to(dtype), lse_part.to(high))
    total = torch.logaddexp(lse.to(high).double(), lse_part.to(high).double())
    weights = [(x.to(high).double() - total).exp().T[..., None] for x in (lse, lse_part)]
    assert relative(lse_sum.double(), total) <= (1e-14 if dtype == torch.float64 else 1e-6)
    wanted = o.to(high).double() * weights[0] + part.to(dtype).double() * weights[1]
    assert relative(o_sum.double(), wanted) <= (1e-13 if dtype == torch.float64 else 1e-5)


# One stream sleeps, in cycles of the GPU's clock, about 0.1 s: a copy or a computation that does not wait for it comes
# first and finds what was there before. Before that all runs once without the sleep: at their first use torch loads
# kernels and allocates memory, which can wait for the whole device.
LATE = 200_000_000
TILES, FEATURES = Tiles(1024, 256), (64,)


def numbered_tape(place: str, slots: int, folder: Path) -> tuple[Tape, Engine]:
    """A tape whose tiles are full of 0, 1, 2, 3. Slots and staging are NaN before their use."""
    engine = make_engine(torch.device("cuda", torch.cuda.current_device()))
    engine.poison = True
    content = torch.arange(4.0).repeat_interleave(TILES.size)[:, None].repeat(1, *FEATURES)
    on_device = Slots(engine, TILES.size, FEATURES, torch.float32, slots)
    if place == "disk":
        return disk_tapes([content], TILES, on_device, folder, staged=1)[0], engine
    slab = Slab([content.nbytes], engine.device, lambda _: None)
    tape = HostTape(slab.parts[0].view(torch.float32).view(content.shape).copy_(content), TILES, on_device)
    slab.belong_to(tape, engine)
    return tape, engine


def delay_first_copy(engine: Engine, cycles: int) -> None:
    left = [cycles]
    engine.before_copy = lambda: torch.cuda._sleep(left.pop() if left else 1)


def computed_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:  # noqa: ARG001
    """A tile is copied out after it is computed; the disk writes it after it was copied."""
    tile = tape.blank(0)
    torch.cuda._sleep(cycles)
    tape.write(0, tile.fill_(7))
    torch.cuda.synchronize()
    return tape.read(0).clone()


def arrives_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:
    """The computation uses a tile after it has arrived in its slot."""
    delay_first_copy(engine, cycles)
    return tape.read(1).clone()


def written_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:
    """A tile is read again after it was last written out."""
    delay_first_copy(engine, cycles)
    tape.write(0, tape.blank(0).fill_(7))
    return tape.read(0).clone()


def used_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:  # noqa: ARG001
    """Another tile arrives in a slot after the computation has used the one in it."""
    tile = tape.read(2)
    torch.cuda._sleep(cycles)
    found = tile.clone()
    tape.release(tile)
    tape.read(1)
    return found


def emptied_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:
    """The computation fills a slot again after the tile in it was copied out."""
    delay_first_copy(engine, cycles)
    tape.write(0, tape.blank(0).fill_(7))
    tape.write(1, tape.blank(1).fill_(8))
    torch.cuda.synchronize()
    return tape.read(0).clone()


def staged_late(tape: Tape, engine: Engine, cycles: int) -> torch.Tensor:
    """The disk fills a piece of staging again after the tile in it was copied to the device."""
    delay_first_copy(engine, cycles)
    tile = tape.read(3)
    tape.read(1)
    return tile.clone()


# slots, and the number that is found
LATE_CASES: dict[Callable[[Tape, Engine, int], torch.Tensor], tuple[int, float]] = {
    computed_late: (1, 7),
    arrives_late: (1, 1),
    written_late: (2, 7),
    used_late: (1, 2),
    emptied_late: (1, 7),
    staged_late: (2, 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another stream"])
@pytest.mark.parametrize("case", LATE_CASES, ids=[case.__name__ for case in LATE_CASES])
def test_a_tape_waits(tmp_path: Path, case: Callable[..., torch.Tensor], side: bool, place: str) -> None:
    slots, wanted = LATE_CASES[case]
    for cycles in (1, LATE):
        tape, engine = numbered_tape(place, slots, tmp_path)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
            found = case(tape, engine, cycles)
            torch.cuda.synchronize()
        assert found.unique().tolist() == [wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["computation", "copies"])
def test_states_on_the_host_wait(tmp_path: Path, late: str) -> None:
    """A step of AdamW gives the same bits, and its moments are in host memory when it returns."""
    folder = save(make_model("qwen3", torch.bfloat16, **GPU_SIZES), tmp_path / "in")

    def step(cycles: int, wait: bool = False) -> list[torch.Tensor]:
        model = ithaca.apply(ithaca.load_model(folder, "bfloat16"), ithaca.Plan(optimizer="host"))
        model.engine.poison = True
        optimizer = ithaca.make_optimizer(model, learning_rate=1e-2)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        torch.cuda.synchronize()
        if late == "copies":
            model.engine.before_copy = lambda: torch.cuda._sleep(cycles // 20)
        else:
            torch.cuda._sleep(cycles)
        optimizer.step()
        if wait:
            torch.cuda.synchronize()
        moments = [optimizer.state[parameter][name].to_local().clone() for parameter in parameters for name in MOMENTS]
        return [*moments, *(parameter.to_local().detach().cpu() for parameter in parameters)]

    wanted = step(1, wait=True)
    assert all(torch.equal(a, b) for a, b in zip(step(LATE), wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["computation", "copy"])
def test_a_snapshot_waits(tmp_path: Path, late: str) -> None:
    """It has what was computed before `take`, and nothing of what an optimizer does after `before_update`."""
    folder = save(make_model("qwen3", torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    model = ithaca.apply(ithaca.load_model(folder, "bfloat16"), ithaca.Plan())
    state = training_state(model, ithaca.make_optimizer(model, learning_rate=1e-2))
    snapshot = Snapshot(state)

    def fill(value: float) -> None:
        for shard in state.values():
            shard.local.fill_(value)

    for value, cycles in ((1.0, 1), (2.0, LATE)):
        fill(-1)
        torch.cuda.synchronize()
        if late == "computation":
            torch.cuda._sleep(cycles)
            fill(value)
            snapshot.take()
        else:
            fill(value)
            with torch.cuda.stream(snapshot._stream):
                torch.cuda._sleep(cycles)
            snapshot.take()
            snapshot.before_update()
            fill(-2)
        with snapshot.finished() as copies:
            found = {number for copy in copies.values() for number in copy.local.unique().tolist()}
        assert found == {value}
        torch.cuda.synchronize()
    snapshot.close()
