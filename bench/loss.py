"""The loss on one GPU, final norm and head included, forward and backward: time and memory beside its three GEMMs.

    python -m bench.loss --vocab 128256 --hidden 4096 --tokens 1M

Every tile is tried on --quick-tokens; the Plan's own and the fastest other one then run all tokens. "Bare" are the
three GEMMs alone on the same tiles (logits, dx, and the head's gradient rounded to bf16), "summed" the same with the
head's gradient added up in fp32 by its GEMM. They run before and after the loss, each time over 1 / --share of the
tokens, and are scaled; data is random, since a GPU computes faster on zeros. Memory is what the peak is above inputs,
their gradients and the fp32 sums of the weights' gradients: torch's allocations, with the GEMMs' workspace.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.block import timed
from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.base.tiles import Tiles
from ithaca.model.linear import add_product
from ithaca.model.source import load_model
from ithaca.model.spec import Spec
from ithaca.plans.plan import Plan
from ithaca.schedule.loss import cross_entropy, tiled_loss

BF16 = torch.bfloat16
KERNEL_RUNS = 10  # of the cross-entropy alone


@dataclass(frozen=True)
class Inputs:
    spec: Spec
    x: Tensor
    weight: Tensor
    head: Tensor
    labels: Tensor

    @staticmethod
    def random(spec: Spec, tokens: int) -> "Inputs":
        x = torch.randn(tokens, spec.hidden, device="cuda", dtype=BF16)
        weight = torch.ones(spec.hidden, device="cuda", dtype=BF16)
        head = torch.randn(spec.vocab, spec.hidden, device="cuda", dtype=BF16).mul_(0.02)
        for learned in (weight, head):
            learned.requires_grad_()
            learned.grad_dtype = torch.float32  # as a decoder's weights have it
        return Inputs(spec, x, weight, head, torch.randint(0, spec.vocab, (tokens,), device="cuda"))

    def run(self, tokens: int, tile: int) -> Tensor:
        """Loss and gradients of the first tokens; the mean loss."""
        x = self.x[:tokens].detach().requires_grad_()
        loss = tiled_loss(self.spec, x, self.weight, self.head, self.labels[:tokens], tile) / tokens
        loss.backward()
        self.weight.grad = self.head.grad = None
        return loss.detach()

    def bytes_allowed(self, tokens: int) -> int:
        """Of the inputs, of dx, and of the fp32 sums."""
        inputs = _bytes(self.x, self.weight, self.head, self.labels)
        return inputs + _bytes(self.x[:tokens]) + 4 * (self.weight.numel() + self.head.numel())


class Gemms:
    """The three GEMMs of a tile, on logits and gradients as the loss has them."""

    def __init__(self, inputs: Inputs, tile: int):
        self.x, self.head, self.tile = inputs.x, inputs.head.detach(), tile
        self.labels = inputs.labels[:tile]
        self.logits = self.x[:tile] @ self.head.T
        _, self.dlogits = cross_entropy(self.logits.clone(), self.labels)
        self.dx = torch.empty_like(self.x[:tile])
        self.dhead = torch.empty_like(self.head)
        self.total = torch.zeros_like(self.head, dtype=torch.float32)

    def bytes_held(self) -> int:
        return _bytes(self.logits, self.dlogits, self.dx, self.dhead, self.total)

    def run(self, tokens: int, summed: bool) -> None:
        for rows in Tiles(tokens, self.tile).slices():
            x = self.x[rows]
            logits, dlogits, dx = self.logits[: len(x)], self.dlogits[: len(x)], self.dx[: len(x)]
            torch.mm(x, self.head.T, out=logits)
            if summed:
                add_product(self.total, dlogits.T, x)
            else:
                torch.mm(dlogits.T, x, out=self.dhead)
            torch.mm(dlogits, self.head, out=dx)

    def run_kernel(self) -> None:
        for _ in range(KERNEL_RUNS):
            cross_entropy(self.logits, self.labels)


def measure(inputs: Inputs, tokens: int, tile: int, repeats: int, share: int) -> dict[str, Any]:
    spec, bare_tokens = inputs.spec, max(tokens // share, tile)
    gemms = Gemms(inputs, tile)
    inputs.run(2 * tile, tile)
    gemms.run(tile, summed=False)
    gemms.run(tile, summed=True)
    gemms.run_kernel()
    seconds: dict[str, list[float]] = {"bare": [], "summed": [], "loss": []}
    losses: list[Tensor] = []

    def take_gemms(name: str) -> None:
        taken = timed(lambda: gemms.run(bare_tokens, summed=name == "summed"))
        seconds[name].append(taken * tokens / bare_tokens)

    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        # Symmetric about the loss, so that a clock that falls as the GPU warms favours neither
        take_gemms("bare")
        take_gemms("summed")
        seconds["loss"].append(timed(lambda: losses.append(inputs.run(tokens, tile))))
        take_gemms("summed")
        take_gemms("bare")
    peak = torch.cuda.max_memory_allocated()
    kernel = timed(gemms.run_kernel) / KERNEL_RUNS * tokens / tile
    bare, summed = statistics.mean(seconds["bare"]), statistics.mean(seconds["summed"])
    loss = statistics.mean(seconds["loss"])
    return {
        "vocab": spec.vocab,
        "hidden": spec.hidden,
        "tokens": tokens,
        "tile": tile,
        "seconds": loss,
        "seconds_bare": bare,
        "seconds_summed": summed,
        "seconds_cross_entropy": kernel,
        "bare_tokens": bare_tokens,
        "over_bare": loss / bare,
        "over_summed": loss / summed,
        "tflops": 6 * tokens * spec.vocab * spec.hidden / loss / 1e12,
        "bytes_above": peak - inputs.bytes_allowed(tokens) - gemms.bytes_held(),
        "bytes_logits": 2 * tile * spec.vocab,
        "loss": losses[-1].item(),
    }


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--vocab", default=128256, type=int)
    parser.add_argument("--hidden", default=4096, type=int)
    parser.add_argument("--tokens", default="1M", type=parse_tokens)
    parser.add_argument("--tiles", default="2048,4096,6144,7168", help="tokens in a tile, parted by commas")
    parser.add_argument("--quick-tokens", default="256K", type=parse_tokens, help="every tile is tried on so many")
    parser.add_argument("--share", default=4, type=int, help="the bare GEMMs run over 1 / so much of the tokens")
    parser.add_argument("--repeats", default=1, type=int)
    args = parser.parse_args()
    spec = replace(load_model("llama3-8b").spec, vocab=args.vocab, hidden=args.hidden)
    tiles = [parse_tokens(tile) for tile in args.tiles.split(",")]
    quick = min(args.quick_tokens, args.tokens)
    bound = matmul_tflops()
    inputs = Inputs.random(spec, args.tokens)
    results: list[dict[str, Any]] = []

    def take(tokens: int, tile: int) -> None:
        row = measure(inputs, tokens, tile, args.repeats, args.share)
        results.append({**row, "matmul_tflops": bound})
        print(_line(row), flush=True)

    for tile in tiles:
        take(quick, tile)
    if quick < args.tokens:
        planned = [tile for tile in tiles if tile == Plan().loss_tile]
        others = sorted((row["seconds"], row["tile"]) for row in results if row["tile"] not in planned)
        for tile in (*planned, *(tile for _, tile in others[:1])):
            take(args.tokens, tile)
    name = f"loss-{args.vocab}x{args.hidden}-{format_tokens(args.tokens)}"
    file = record(name, results, args.out, args.commit)
    print(f"vocabulary {args.vocab}, hidden {args.hidden}, matmul bound {bound:.0f} TFLOP/s -> {file}")
    for row in results:
        print(_line(row))


def _line(row: dict[str, Any]) -> str:
    return (
        f"  {format_tokens(row['tokens']):>5} tokens, tile {row['tile']:5}  {row['seconds']:.3f} s  "
        f"{row['over_bare']:.3f} x bare {row['seconds_bare']:.3f} s  "
        f"{row['over_summed']:.3f} x summed {row['seconds_summed']:.3f} s  "
        f"cross-entropy {row['seconds_cross_entropy']:.3f} s  {row['tflops']:.0f} TFLOP/s  "
        f"{format_bytes(row['bytes_above'])} above, logits {format_bytes(row['bytes_logits'])}  loss {row['loss']:.4f}"
    )


if __name__ == "__main__":
    main()
