"""Training steps beside `transformers` with Liger's kernels, on one GPU: the same models, tokens and optimizer.

    python -m bench.peers                          Llama3.2-1B and 4 layers of Llama3-8B at 8K, 32K and 64K tokens
    python -m bench.peers --only 8K --fp32
    python -m bench.peers --smoke                  tiny, on a CPU; without Liger, which needs a GPU

Ours: the Plan that the planner picks for this GPU, timed before theirs and again after it, and `dense` without
checkpointing. fp32 shards, computation in bf16, gradients in fp32.
Theirs: LlamaForCausalLM in bf16 (weights, gradients and moments), Liger's rope, RMSNorm, SwiGLU and fused loss, each
attention implementation that is accepted, without gradient checkpointing if that fits, otherwise with it. The fastest
counts. --fp32 adds rows with fp32 weights under autocast, whose numbers are like ours.
Both: one sequence of the same random tokens, gradients clipped to 1, fused AdamW. Peaks are what torch's allocator
reserved; causal MFU is relative to the GPU's peak, without credit for recomputation.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ithaca
from bench.points import Row, attempt, cluster_here, free_memory, peaks, points_command_line, print_table, run_points
from bench.step import Steps, read_source
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.optimizer.adamw import clip
from ithaca.planner.hardware import causal_mfu
from ithaca.planner.search import search
from ithaca.rehearsal.kernel_bound import synchronize

MODELS = (("llama3.2-1b", None), ("llama3-8b", 4))
LENGTHS = "8K,32K,64K"
ATTENTION = ("sdpa", "sdpa with cuDNN", "flash_attention_4")
REPEATS = ((0.5, 5), (1.2, 3), (float("inf"), 2))  # seconds of a step below which so many are timed
LOSS_TOLERANCE = 0.3  # of the first loss, in nats
DEVIATION = 0.02  # of random weights, on both sides
LEARNING_RATE = 1e-5


class Side(Protocol):
    """A model with its optimizer and its batch."""

    def forward_backward(self) -> Tensor:
        """Run both passes and return the loss."""
        ...

    def update(self) -> None:
        """Clip the gradients and run the optimizer."""
        ...

    def describe(self) -> Row: ...


class Ours:
    """Ithaca under a Plan."""

    def __init__(self, model: str, layers: int | None, plan: ithaca.Plan, ids: Tensor):
        self.steps = Steps(read_source(model, layers, "auto"), plan)
        self.steps.model.allocate(1, ids.shape[1])
        self.batch = self.steps.model.shard(ids, ids)

    def forward_backward(self) -> Tensor:
        loss = self.steps.model(self.batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        clip(self.steps.model, 1.0, self.steps.optimizer)
        self.steps.optimizer.step()
        self.steps.optimizer.zero_grad()

    def describe(self) -> Row:
        model = self.steps.model
        gradient = next(p.grad for p in model.parameters() if p.grad is not None)
        return {
            "plan": {name: value for name, value in vars(model.plan).items() if value is not None},
            "attention": model.kernel.name,
            "computation": str(model.dtype),
            "weights": str(next(model.parameters()).dtype),
            "gradients": str(gradient.dtype),
        }


class Theirs:
    """`transformers` with Liger's kernels, if `use_liger` has put them in."""

    def __init__(self, config: Row, attention: str, checkpoint: bool, dtype: torch.dtype, ids: Tensor, place: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.attention, self.checkpoint, self.gpu = attention, checkpoint, place == "cuda"
        self.autocast = self.gpu and dtype == torch.float32
        settings = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
        settings.use_cache = False
        with torch.device(place):
            self.model = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=attention.removesuffix(" with cuDNN")
            )
        if checkpoint:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.ids = ids.to(place)

    def forward_backward(self) -> Tensor:
        # Checkpointing runs attention again in backward, by the same kernel
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.attention.endswith("cuDNN") else nullcontext():
            with torch.autocast("cuda", torch.bfloat16) if self.autocast else nullcontext():
                loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def describe(self) -> Row:
        weight = next(self.model.parameters())
        assert weight.grad is not None
        return {
            "attention": self.attention,
            "checkpoint": "full" if self.checkpoint else "none",
            "computation": "torch.bfloat16, autocast" if self.autocast else str(weight.dtype),
            "weights": str(weight.dtype),
            "gradients": str(weight.grad.dtype),
        }


def use_liger() -> str | None:
    """Put Liger's kernels into Llama of `transformers`; the reason if that is not possible."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyrefly: ignore

        apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, cross_entropy=False
        )
    except ImportError as problem:
        return f"Liger is not here ({problem}): pip install liger-kernel"
    return None


class Beside:
    """One model at one length: ours and theirs in turn."""

    def __init__(self, model: str, layers: int | None, tokens: int, args: argparse.Namespace, liger: str | None):
        self.model, self.layers, self.tokens, self.args, self.liger = model, layers, tokens, args, liger
        config, spec = dict(find_config(model)[0]), read_spec(find_config(model)[0])
        self.config = config | {"num_hidden_layers": layers or spec.layers}
        self.spec: Spec = spec.with_layers(layers) if layers else spec
        self.place = "cpu" if args.smoke else "cuda"
        self.cluster = cluster_here(args.hardware)
        self.ids = torch.randint(0, spec.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))

    def run(self) -> Row:
        """All sides, and how much longer theirs takes than ours."""
        answer = search(self.spec, self.cluster, self.tokens)
        assert answer is not None, "nothing fits"
        planned = answer.plan
        dense = ithaca.Plan(recipe="dense", checkpoint="none", zero=planned.zero)
        first = self._time("ours, planned", partial(Ours, self.model, self.layers, planned, self.ids))
        theirs = self._theirs()
        others = []
        if planned.settled() != dense.settled():
            others.append(self._time("ours, dense none", partial(Ours, self.model, self.layers, dense, self.ids)))
        again = self._time("ours, planned, again", partial(Ours, self.model, self.layers, planned, self.ids))
        row: Row = {"model": self.model, "layers": self.spec.layers, "tokens": self.tokens, "liger": self.liger}
        row |= {"sides": [first, *theirs, *others, again]}
        ours = [side for side in (first, again) if "error" not in side]
        compared = "torch.float32" if self.args.smoke else "torch.bfloat16"
        good = [side for side in theirs if "error" not in side and side["weights"] == compared]
        if not (ours and good):
            failed = next(side for side in (first, again, *theirs) if "error" in side)
            return row | {"missing": f"{failed['side']}: {failed['error']}"}
        best = min(good, key=lambda side: side["seconds"])
        return row | {
            "ours_seconds": statistics.median(side["seconds"] for side in ours),
            "ours_forward_backward": statistics.median(side["forward_backward"] for side in ours),
            "theirs": best["side"],
            "theirs_seconds": best["seconds"],
            "theirs_forward_backward": best["forward_backward"],
            "theirs_over_ours": _over(best, ours, "seconds"),
            "theirs_over_ours_forward_backward": _over(best, ours, "forward_backward"),
        }

    def _theirs(self) -> list[Row]:
        """Every attention implementation, without checkpointing or, where that does not fit, with it."""
        if self.liger and not self.args.smoke:
            return [{"side": "theirs", "error": self.liger}]
        dtypes = [torch.float32] if self.args.smoke else [torch.bfloat16, *[torch.float32] * self.args.fp32]
        rows = []
        for dtype in dtypes:
            for attention in ("sdpa",) if self.args.smoke else ATTENTION:
                for checkpoint in (False, True):
                    name = f"theirs, {attention}{', checkpointing' * checkpoint}{', fp32' * (dtype == torch.float32)}"
                    make = partial(Theirs, self.config, attention, checkpoint, dtype, self.ids, self.place)
                    rows.append(self._time(name, make))
                    if not rows[-1].get("out_of_memory"):
                        break
        return rows

    def _time(self, name: str, make: Callable[[], Side]) -> Row:
        row = {"side": name, **attempt(partial(self._timed, make))}
        print(f"  {name}: {row['error'] if 'error' in row else _side_line(row)}", flush=True)
        return row

    def _timed(self, make: Callable[[], Side]) -> Row:
        side = make()
        free_memory()
        first = side.forward_backward().item()
        described = side.describe()
        side.update()
        expected = math.log(self.spec.vocab) + self.spec.hidden * DEVIATION**2 / 2
        if abs(first - expected) > LOSS_TOLERANCE:
            raise AssertionError(f"the first loss is {first:.3f}, and {expected:.3f} was expected of random weights")
        warm = self._step(side)
        if warm[1] < REPEATS[0][0]:
            self._step(side)
        repeats = 1 if self.args.smoke else next(count for most, count in REPEATS if warm[1] < most)
        taken = [self._step(side) for _ in range(repeats)]
        both, whole = (statistics.median(part) for part in zip(*taken, strict=True))
        rate = self.tokens / whole
        return {
            **described,
            "first_loss": first,
            "forward_backward": both,
            "seconds": whole,
            "all_seconds": [step for _, step in taken],
            "tokens_per_second": rate,
            "mfu_causal": None if self.args.smoke else causal_mfu(self.spec, self.tokens, rate, self.cluster.gpu.flops),
            **peaks(),
        }

    def _step(self, side: Side) -> tuple[float, float]:
        """Seconds of forward and backward, and of the whole step."""
        device = torch.device(self.place)
        synchronize(device)
        began = time.perf_counter()
        side.forward_backward()
        synchronize(device)
        middle = time.perf_counter()
        side.update()
        synchronize(device)
        return middle - began, time.perf_counter() - began


def _over(theirs: Row, ours: list[Row], key: str) -> float:
    return theirs[key] / statistics.median(side[key] for side in ours)


def _mfu(side: Row) -> str:
    return "–" if side["mfu_causal"] is None else f"{100 * side['mfu_causal']:.1f} %"


def _side_line(side: Row) -> str:
    return (
        f"{side['seconds']:.4f} s (forward and backward {side['forward_backward']:.4f}), "
        f"causal MFU {_mfu(side)}, {side['peak_bytes'] / 2**30:.1f} GiB, loss {side['first_loss']:.3f}"
    )


def _line(row: Row) -> str:
    if "missing" in row:
        return f"{row['point']}: {row['missing']}"
    return f"{row['point']}: theirs / ours {row['theirs_over_ours']:.3f} ({row['theirs']})"


HEADER = ("", "s", "forward+backward s", "tokens/s", "MFU", "GiB", "theirs/ours", "forward+backward")


def table(rows: list[Row]) -> list[list[str]]:
    """A line for each side, the ratios beside the fastest of theirs."""
    lines = []
    for row in rows:
        for side in row.get("sides", ()):
            name = f"{row['point']}: {side['side']}"
            if "error" in side:
                lines.append([name, side["error"][:60], *[""] * 6])
                continue
            ratios = ["", ""]
            if side["side"] == row.get("theirs"):
                ratios = [f"{row['theirs_over_ours']:.3f}", f"{row['theirs_over_ours_forward_backward']:.3f}"]
            lines.append(
                [
                    name,
                    f"{side['seconds']:.4f}",
                    f"{side['forward_backward']:.4f}",
                    f"{side['tokens_per_second']:.0f}",
                    _mfu(side),
                    f"{side['peak_bytes'] / 2**30:.1f}",
                    *ratios,
                ]
            )
    return lines


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--tokens", default=LENGTHS, help="lengths with commas between them")
    parser.add_argument("--fp32", action="store_true", help="also theirs with fp32 weights under autocast")
    parser.add_argument("--hardware", help="a file that ithaca plan --measure wrote")
    args = parser.parse_args()
    use_expandable_segments()
    liger = "left out: Liger needs a GPU" if args.smoke else use_liger()
    models, lengths = ((("tiny", None),), "256") if args.smoke else (MODELS, args.tokens)
    points = []
    for model, layers in models:
        for tokens in map(parse_tokens, lengths.split(",")):
            name = f"{model}{f', {layers} layers' if layers else ''}, {format_tokens(tokens)}"
            points.append((name, partial(_beside, model, layers, tokens, args, liger)))
    rows = run_points("peers", points, args, _line)
    print_table(f"Beside transformers{'' if liger else ' and Liger'}", HEADER, table(rows))


def _beside(model: str, layers: int | None, tokens: int, args: argparse.Namespace, liger: str | None) -> Row:
    return Beside(model, layers, tokens, args, liger).run()


if __name__ == "__main__":
    main()
