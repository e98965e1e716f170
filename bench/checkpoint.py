"""How much an asynchronous checkpoint slows training down while it is written.

    python -m bench.checkpoint --model llama3.2-1b --tokens 32K

Each round times steps without a checkpoint, then steps from the start of a checkpoint until it is on disk. The cost is
the extra time of a step while the checkpoint is written, as a share of a plain step's time.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ithaca
from bench.record import command_line, record
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.checkpoint.snapshot import local_bytes, training_state
from ithaca.optimizer.adamw import clip
from ithaca.rehearsal.kernel_bound import synchronize


def measure(model_name: str, tokens: int, rounds: int, plain_steps: int, folder: Path) -> dict[str, Any]:
    """Time `rounds` checkpoints, each after `plain_steps` steps without one."""
    model = ithaca.apply(ithaca.load_model(model_name, "bfloat16"), ithaca.Plan(checkpoint="full"))
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-5)
    checkpoints = Checkpoints(folder, model, optimizer, keep=1)
    ids = torch.randint(0, model.spec.vocab, (1, tokens))
    batch = model.shard(ids, ids)

    def step() -> float:
        began = time.perf_counter()
        model(batch).backward()
        clip(model, 1.0, optimizer)
        checkpoints.before_update()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(model.mesh.device)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    plain, during, write_seconds = [], [], []
    for number in range(rounds):
        plain += [step() for _ in range(plain_steps)]
        began = time.perf_counter()
        checkpoints.save(number + 1, {})
        step()
        steps = 1
        while checkpoints.writing():
            step()
            steps += 1
        write_seconds.append(time.perf_counter() - began)
        during.append(write_seconds[-1] / steps)
        checkpoints.wait()
        assert checkpoints.problem() is None
    size = local_bytes(training_state(model, optimizer))
    checkpoints.close()
    base = statistics.median(plain)
    return {
        "model": model_name,
        "tokens": tokens,
        "state_bytes": size,
        "plain_step_seconds": base,
        "plain_spread": [min(plain), max(plain)],
        "step_seconds_while_writing": during,
        "write_seconds": write_seconds,
        "cost": [seconds / base - 1 for seconds in during],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--tokens", default="32K", type=parse_tokens)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--plain-steps", default=8, type=int)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ithaca-bench-"))
    try:
        row = measure(args.model, args.tokens, args.rounds, args.plain_steps, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    file = record(f"checkpoint-{args.model}-{format_tokens(args.tokens)}", [row], args.out, args.commit)
    print(f"{args.model}, {format_tokens(args.tokens)} tokens, state {format_bytes(row['state_bytes'])}")
    least, most = row["plain_spread"]
    print(f"  plain step {row['plain_step_seconds']:.3f} s ({least:.3f} to {most:.3f})")
    for seconds, wrote, cost in zip(row["step_seconds_while_writing"], row["write_seconds"], row["cost"], strict=True):
        print(f"  step while writing {seconds:.3f} s, {100 * cost:+.1f} %; on disk after {wrote:.1f} s")
    print(f"Results in {file}")


if __name__ == "__main__":
    main()
