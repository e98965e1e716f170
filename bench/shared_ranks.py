"""`ithaca train` on several ranks that share a GPU over NCCL, and on one rank: the losses of both.

    python -m bench.shared_ranks                  4 layers of Llama3.2-1B, 64K tokens, 20 steps, ulysses 2 × ring 2
    python -m bench.shared_ranks --smoke          tiny sizes on a CPU over gloo, to try the script

Needs a NCCL that lets ranks share a GPU (docs/doctor.md). The ranks take turns or run side by side under NVIDIA's MPS,
so the seconds say nothing. Both runs write a checkpoint in the middle and at the end.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ithaca
from bench.points import points_command_line
from bench.record import record
from bench.step import read_source

RANKS = 4


def losses(
    folder: Path, model: Path, ranks: int, tokens: str, steps: int, device: str, options: list[str]
) -> dict[str, Any]:
    """Train in `folder` and return the losses of the steps, and the seconds of the whole command."""
    sets = [f"model.source={model}", f"train.tokens={tokens}", f"train.steps={steps}", f"train.device={device}"]
    sets += [f"run.checkpoint_every={steps // 2}", "plan.recipe=sweep", "train.learning_rate=3e-4", *options]
    command = [sys.executable, "-m", "ithaca", "train", "--run", str(folder), "--ranks", str(ranks)]
    began = time.perf_counter()
    subprocess.run([*command, *(word for item in sets for word in ("--set", item))], check=True)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {"losses": [row["loss"] for row in rows if "loss" in row], "seconds": time.perf_counter() - began}


def save_first_layers(name: str, layers: int, folder: Path) -> None:
    """Write a Hugging Face folder with random weights for a preset's first layers."""
    ithaca.save_model(ithaca.apply(read_source(name, layers, "float32"), ithaca.Plan()), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers}))


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--layers", default=4, type=int)
    parser.add_argument("--tokens", default="64K")
    parser.add_argument("--steps", default=20, type=int)
    args = parser.parse_args()
    if args.smoke:
        args.model, args.layers, args.tokens, args.steps = "tiny", 2, "256", 4
    sizes = args.tokens, args.steps, "cpu" if args.smoke else "cuda"
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        save_first_layers(args.model, args.layers, folder / "model")
        mesh = ["mesh.ulysses=2", "mesh.ring=2"] + ["run.share_gpus=true"] * (not args.smoke)
        several = losses(folder / "several", folder / "model", RANKS, *sizes, mesh)
        one = losses(folder / "one", folder / "model", 1, *sizes, [])
    pairs = zip(several["losses"], one["losses"], strict=True)
    row = {
        "model": args.model,
        "layers": args.layers,
        "tokens": args.tokens,
        "ranks": RANKS,
        "several": several,
        "one": one,
    }
    row["largest_difference"] = max(abs(a - b) for a, b in pairs)
    name = "shared-ranks" + "-smoke" * args.smoke
    print(
        f"{args.steps} steps, loss {one['losses'][0]:.3f} to {one['losses'][-1]:.3f}; {RANKS} ranks and one differ by",
        end=" ",
    )
    print(f"{row['largest_difference']:.2g} at most. Results in {record(name, [row], args.out, args.commit)}")


if __name__ == "__main__":
    main()
