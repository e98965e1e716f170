"""Predictions against rehearsals: peak memory and seconds of a step, one rank of several on one GPU.

    ithaca plan llama3-8b --measure rates.toml                          measure the rates that predictions use
    python -m bench.rehearsals --rates rates.toml --points tuned,fresh  the table of predictions and measurements
    python -m bench.rehearsals --rates rates.toml --points long         5M tokens, against their lower bound
    python -m bench.rehearsals --points race                            sweep against untied at 2M
    python -m bench.rehearsals --points memory                          memory alone at 5M, 8M and 24M

The planner's formulas were fitted to the points `tuned`. The points `fresh` were never used for that. Each point is one
`ithaca rehearse` in a process of its own: a step of the layers that run, with embedding, loss and optimizer. Messages
come back to the rank that sends them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.record import command_line, record

CAP = ["--cap", "80GB"]
POINTS: dict[str, dict[str, list[str]]] = {
    "tuned": {
        "8B sweep 512K of 8": ["llama3-8b", "--ranks", "8", "--tokens", "512K", "--layers", "2"],
        "8B untied 512K of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "512K", "--layers", "2", "--recipe", "untied",
        ],
        "8B alst 256K of 8": ["llama3-8b", "--ranks", "8", "--tokens", "256K", "--layers", "2", "--recipe", "alst"],
        "1B dense 32K of 8": ["llama3.2-1b", "--ranks", "8", "--tokens", "32K", "--layers", "4", "--recipe", "dense"],
        "32B sweep 256K of 16": ["qwen3-32b", "--ranks", "16", "--tokens", "256K", "--layers", "2"],
        "3B sweep, o recomputed, 256K of 8": [
            "llama3.2-3b", "--ranks", "8", "--tokens", "256K", "--layers", "2", "--set", "plan.o=recompute",
        ],
        "1B sweep 128K of 4": ["llama3.2-1b", "--ranks", "4", "--tokens", "128K", "--layers", "4"],
        "3B sweep 1M of 8": ["llama3.2-3b", "--ranks", "8", "--tokens", "1M", "--layers", "2"],
    },
    "fresh": {
        "1B sweep 256K of 8": ["llama3.2-1b", "--ranks", "8", "--tokens", "256K", "--layers", "4"],
        "3B hybrid 256K of 4 x 2": [
            "llama3.2-3b", "--ranks", "8", "--tokens", "256K", "--layers", "2", "--recipe", "hybrid",
            "--set", "mesh.ulysses=4", "--set", "mesh.ring=2",
        ],
        "8B ulysses, selective, 128K of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "128K", "--layers", "4", "--recipe", "ulysses",
            "--set", "plan.checkpoint=selective",
        ],
        "32B sweep 256K of 8": ["qwen3-32b", "--ranks", "8", "--tokens", "256K", "--layers", "2"],
        "8B ulysses, x on the host, 256K of 4": [
            "llama3-8b", "--ranks", "4", "--tokens", "256K", "--layers", "2", "--recipe", "ulysses",
            "--set", "plan.x=host",
        ],
        "8B sweep, x rebuilt, 512K of 16": [
            "llama3-8b", "--ranks", "16", "--tokens", "512K", "--layers", "4", "--set", "plan.x=host, rebuild",
            "--set", "plan.chunk=128K",
        ],
        "3B untied 512K of 8": [
            "llama3.2-3b", "--ranks", "8", "--tokens", "512K", "--layers", "2", "--recipe", "untied",
        ],
        "3B sweep 512K of 4": ["llama3.2-3b", "--ranks", "4", "--tokens", "512K", "--layers", "2"],
    },
    "long": {
        "8B sweep 5M of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "5M", "--layers", "1", "--bare", *CAP,
            "--set", "plan.lse=host", "--set", "plan.tile=4096", "--set", "plan.chunk=32K",
        ],
    },
    "race": {
        "8B sweep 2M of 8": ["llama3-8b", "--ranks", "8", "--tokens", "2M", "--layers", "1", "--bare", *CAP],
        "8B untied 2M of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "2M", "--layers", "1", *CAP, "--recipe", "untied",
        ],
    },
    "memory": {
        "8B sweep 5M of 8": ["llama3-8b", "--ranks", "8", "--tokens", "5M", "--layers", "1", "--memory-only", *CAP],
        "8B untied 5M of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "5M", "--layers", "1", "--memory-only", *CAP, "--recipe", "untied",
        ],
        "8B sweep 8M of 8": ["llama3-8b", "--ranks", "8", "--tokens", "8M", "--layers", "1", "--memory-only", *CAP],
        "8B sweep 24M of 8": [
            "llama3-8b", "--ranks", "8", "--tokens", "24M", "--layers", "1", "--memory-only", *CAP,
            "--set", "plan.lse=host",
        ],
        "32B sweep 5M of 16": ["qwen3-32b", "--ranks", "16", "--tokens", "5M", "--layers", "1", "--memory-only", *CAP],
    },
}  # fmt: skip


def rehearse(options: list[str], rates: Path | None) -> dict[str, Any]:
    """The JSON of one `ithaca rehearse`, or its error."""
    hardware = ["--hardware", str(rates)] if rates else []
    done = subprocess.run(
        [sys.executable, "-m", "ithaca", "rehearse", *options, "--json", *hardware],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout)


def _line(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name:38} {row['error']}"
    text = f"{name:38} {row['peak_bytes'] / 2**30:6.2f} GiB" + _predicted(row, "peak_bytes", 2**30)
    if "seconds" in row:
        text += f"   {row['seconds']:8.3f} s" + _predicted(row, "seconds", 1)
    if "over_bare" in row:
        text += f"   {row['over_bare']:.3f} × bare"
    return text


def _predicted(row: dict[str, Any], name: str, unit: int) -> str:
    """The prediction and its error; nothing on a CPU, for which there is none."""
    predicted = row[f"{name}_predicted"]
    return "" if predicted is None else f", predicted {predicted / unit:.2f} ({predicted / row[name] - 1:+.1%})"


def _race(rows: dict[str, dict[str, Any]]) -> str:
    """The speedup of sweep over untied, and the most that one attention forward pass in place of two can give."""
    sweep, untied = rows.values()
    forward, backward = (sweep[f"bare_attention_{way}_seconds"] for way in ("forward", "backward"))
    bound, faster = (2 * forward + backward) / (forward + backward), untied["seconds"] / sweep["seconds"]
    sweep |= {"faster": faster, "faster_bound": bound}
    return f"sweep is {faster:.3f} × as fast; attention allows (2F + B) / (F + B) = {bound:.3f} ×"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--points", default="tuned,fresh", help="some of " + ", ".join(POINTS))
    parser.add_argument("--rates", type=Path, help="a file that ithaca plan --measure wrote")
    args = parser.parse_args()
    for kind in args.points.split(","):
        rows = {}
        for name, options in POINTS[kind].items():
            rows[name] = rehearse(options, args.rates)
            print(_line(name, rows[name]), flush=True)
            if kind == "race" and len(rows) == 2 and not any("error" in row for row in rows.values()):
                print(_race(rows))
            results = [{"point": point, "options": " ".join(POINTS[kind][point]), **row} for point, row in rows.items()]
            record(f"rehearsals-{kind}", results, args.out, args.commit)


if __name__ == "__main__":
    main()
