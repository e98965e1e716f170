"""The loss on one GPU, with final norm and head, forward and backward: time and memory beside its three products.

    python -m bench.loss --vocab 128256 --hidden 4096 --tokens 1M

Every tile size runs over --quick-tokens. The Plan's own tile and the fastest other one then run over all tokens.
`bare` is the time of the three matrix products alone, on the same tiles: logits, dx, and the head's gradient rounded to
bf16. `summed` is the same, but the product adds the head's gradient in fp32. Both run before and after the loss, over
1 / --share of the tokens, and are scaled. Data is random because a GPU computes faster on zeros. Memory is the peak of
torch's allocations above the inputs, their gradients and the fp32 sums of the weights' gradients; the workspace of
matrix products is part of it.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.base.tiles import Tiles
from ithaca.model.linear import add_product
from ithaca.model.source import load_model
from ithaca.model.spec import Spec
from ithaca.plans.plan import Plan
from ithaca.rehearsal.kernel_bound import seconds_of
from ithaca.schedule.loss import cross_entropy, tiled_loss

BF16, DEVICE = torch.bfloat16, torch.device("cuda")
KERNEL_RUNS = 10  # runs of the cross-entropy alone


@dataclass(frozen=True)
class Inputs:
    """A random hidden state with the weights and labels of a loss."""

    spec: Spec
    x: Tensor
    weight: Tensor
    head: Tensor
    labels: Tensor

    @staticmethod
    def random(spec: Spec, tokens: int) -> "Inputs":
        x = torch.randn(tokens, spec.hidden, device=DEVICE, dtype=BF16)
        weight = torch.ones(spec.hidden, device=DEVICE, dtype=BF16)
        head = torch.randn(spec.vocab, spec.hidden, device=DEVICE, dtype=BF16).mul_(0.02)
        for learned in (weight, head):
            learned.requires_grad_()
            learned.grad_dtype = torch.float32  # as in a decoder
        return Inputs(spec, x, weight, head, torch.randint(0, spec.vocab, (tokens,), device=DEVICE))

    def run(self, tokens: int, tile: int) -> Tensor:
        """Compute loss and gradients of the first tokens and return the mean loss."""
        x = self.x[:tokens].detach().requires_grad_()
        loss = tiled_loss(self.spec, x, self.weight, self.head, self.labels[:tokens], tile) / tokens
        loss.backward()
        self.weight.grad = self.head.grad = None
        return loss.detach()

    def bytes_allowed(self, tokens: int) -> int:
        """Bytes of the inputs, of dx, and of the fp32 sums."""
        inputs = _bytes(self.x, self.weight, self.head, self.labels)
        return inputs + _bytes(self.x[:tokens]) + 4 * (self.weight.numel() + self.head.numel())


class MatrixProducts:
    """The three matrix products of a tile, on the loss's own logits and gradients."""

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
    """Time and memory of the loss over `tokens` tokens in tiles of `tile`."""
    spec, bare_tokens = inputs.spec, max(tokens // share, tile)
    products = MatrixProducts(inputs, tile)
    inputs.run(2 * tile, tile)  # all of this warms up
    products.run(tile, summed=False)
    products.run(tile, summed=True)
    products.run_kernel()
    seconds: dict[str, list[float]] = {"bare": [], "summed": [], "loss": []}
    losses: list[Tensor] = []

    def time_products(name: str) -> None:
        taken = seconds_of(lambda: products.run(bare_tokens, summed=name == "summed"), DEVICE)
        seconds[name].append(taken * tokens / bare_tokens)

    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        # The order is symmetric about the loss, because the clock falls as the GPU warms
        time_products("bare")
        time_products("summed")
        seconds["loss"].append(seconds_of(lambda: losses.append(inputs.run(tokens, tile)), DEVICE))
        time_products("summed")
        time_products("bare")
    peak = torch.cuda.max_memory_allocated()
    kernel = seconds_of(products.run_kernel, DEVICE) / KERNEL_RUNS * tokens / tile
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
        "bytes_above": peak - inputs.bytes_allowed(tokens) - products.bytes_held(),
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
    parser.add_argument(
        "--tiles", default="2048,4096,6144,7168", help="tokens in a tile, with commas between the sizes"
    )
    parser.add_argument(
        "--quick-tokens", default="256K", type=parse_tokens, help="tokens that every tile size runs over first"
    )
    parser.add_argument("--share", default=4, type=int, help="the products alone run over 1 / SHARE of the tokens")
    parser.add_argument("--repeats", default=1, type=int)
    args = parser.parse_args()
    spec = replace(load_model("llama3-8b").spec, vocab=args.vocab, hidden=args.hidden)
    tiles = [parse_tokens(tile) for tile in args.tiles.split(",")]
    quick = min(args.quick_tokens, args.tokens)
    bound = matmul_tflops(DEVICE)
    inputs = Inputs.random(spec, args.tokens)
    results: list[dict[str, Any]] = []

    def add(tokens: int, tile: int) -> None:
        row = measure(inputs, tokens, tile, args.repeats, args.share)
        results.append({**row, "matmul_tflops": bound})
        print(_line(row), flush=True)

    for tile in tiles:
        add(quick, tile)
    if quick < args.tokens:
        planned = [tile for tile in tiles if tile == Plan().loss_tile]
        others = sorted((row["seconds"], row["tile"]) for row in results if row["tile"] not in planned)
        for tile in (*planned, *(tile for _, tile in others[:1])):
            add(args.tokens, tile)
    name = f"loss-{args.vocab}x{args.hidden}-{format_tokens(args.tokens)}"
    file = record(name, results, args.out, args.commit)
    print(f"A square bf16 matrix product: {bound:.0f} TFLOP/s. Results in {file}")


def _line(row: dict[str, Any]) -> str:
    return (
        f"  {format_tokens(row['tokens']):>5} tokens, tile {row['tile']:5}  {row['seconds']:.3f} s  "
        f"{row['over_bare']:.3f} × bare {row['seconds_bare']:.3f} s  "
        f"{row['over_summed']:.3f} × summed {row['seconds_summed']:.3f} s  "
        f"cross-entropy {row['seconds_cross_entropy']:.3f} s  {row['tflops']:.0f} TFLOP/s  "
        f"{format_bytes(row['bytes_above'])} above the inputs, of it "
        f"logits {format_bytes(row['bytes_logits'])}  loss {row['loss']:.4f}"
    )


if __name__ == "__main__":
    main()
