"""Compare two trees on one machine: run the same commands by each in turn, and print medians and their ratios.

    python bench/ab.py --trees ../before . --repeats 3 --out ab.json \\
        --command "rehearse llama3-8b --ranks 8 --tokens 1M --layers 1 --recipe sweep --json" \\
        --command "rehearse llama3-8b --ranks 8 --tokens 1M --layers 1 --recipe untied --json"

Each command runs as `python -m ithaca COMMAND` in a process of its own, with the tree as its working directory. The
trees alternate: old, new, old, new. The file is written after every run, so an interrupted comparison keeps its runs.
Give --json to a command: it must print one JSON object. This script needs nothing but Python, so it can compare trees
that have no common modules. It ends with code 1 if a run fails.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("old", "new")
COMPARED = (
    "seconds",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "attention_seconds",
    "peak_bytes",
    "peak_bytes_allocated",
)
MUST_AGREE = ("mesh", "recipe", "tokens", "layers", "device")  # otherwise the trees ran different steps


def run_python(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with a tree's packages. The working directory comes first on the path of `python -m`."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def describe_tree(tree: Path) -> dict[str, str]:
    """The path and commit of a tree. Fails if its `ithaca` is not the one that Python imports there."""
    found = run_python(tree, "-c", "import ithaca; print(ithaca.__file__)")
    if found.returncode or not Path(found.stdout.strip()).resolve().is_relative_to(tree):
        raise SystemExit(f"--trees {tree}: Python imports no ithaca from there\n{found.stdout}{found.stderr}")
    git = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return {"path": str(tree), "commit": git.stdout.strip() or "unknown"}


def describe_machine(tree: Path) -> dict[str, Any] | None:
    """The device and versions, from the tree's bench/record.py; None if it has none."""
    code = "import json; from bench.record import machine; print(json.dumps(machine()))"
    found = run_python(tree, "-c", code)
    return None if found.returncode else json.loads(found.stdout)


def run_once(tree: Path, command: str) -> dict[str, Any]:
    """The JSON object that a command prints, or its error."""
    done = run_python(tree, "-m", "ithaca", *shlex.split(command))
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:], "code": done.returncode}
    return json.loads(done.stdout)


def compare(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Median of each compared number by tree, and the ratio new / old. Failed runs do not count."""
    good = {name: [run for run in runs[name] if "error" not in run] for name in NAMES}
    found: dict[str, dict[str, float]] = {}
    if not all(good.values()):
        return found
    everything = [run for name in NAMES for run in good[name]]
    for key in COMPARED:
        if all(isinstance(run.get(key), int | float) for run in everything):
            old, new = (statistics.median(run[key] for run in good[name]) for name in NAMES)
            found[key] = {"old": old, "new": new, "ratio": new / old if old else float("nan")}
    return found


def differences(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the trees ran differently."""
    found = []
    for key in MUST_AGREE:
        values = {name: [run.get(key) for run in runs[name] if "error" not in run][:1] for name in NAMES}
        if all(values.values()) and values["old"] != values["new"]:
            found.append(f"{key} differs: old {values['old']}, new {values['new']}")
    return found


def print_comparison(command: str, entry: dict[str, Any]) -> None:
    print(f"\n{command}")
    for text in entry["differences"]:
        print(f"  {text}")
    for name in NAMES:
        failed = [run["error"] for run in entry["runs"][name] if "error" in run]
        if failed:
            print(f"  {name}: {len(failed)} of {len(entry['runs'][name])} runs failed: {failed[-1].splitlines()[-1:]}")
    if not entry["medians"]:
        return
    print(f"  {'median':25} {'old':>12} {'new':>12} {'new / old':>10}   spread of old, of new")
    for key, row in entry["medians"].items():
        values = {name: [run[key] for run in entry["runs"][name] if key in run] for name in NAMES}
        scale, digits = (2**30, 3) if key.startswith("peak_bytes") else (1, 4)
        spreads = ", ".join(f"{(max(values[name]) / min(values[name]) - 1):.2%}" for name in NAMES)
        label = f"{key}, GiB" if scale > 1 else key
        old, new = (f"{row[name] / scale:12.{digits}f}" for name in NAMES)
        print(f"  {label:25} {old} {new} {row['ratio']:10.4f}   {spreads}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, type=Path, required=True, metavar=("OLD", "NEW"))
    parser.add_argument("--command", action="append", required=True, help="words after `python -m ithaca`; repeatable")
    parser.add_argument("--repeats", default=3, type=int, help="runs of each command by each tree")
    parser.add_argument("--out", type=Path, help="a JSON file for all runs and medians")
    args = parser.parse_args()
    trees = dict(zip(NAMES, (tree.resolve() for tree in args.trees), strict=True))
    result: dict[str, Any] = {
        "trees": {name: describe_tree(tree) for name, tree in trees.items()},
        "machine": describe_machine(trees["new"]),
        "repeats": args.repeats,
        "commands": {},
    }
    failed = False
    for command in args.command:
        entry: dict[str, Any] = {"runs": {name: [] for name in NAMES}}
        result["commands"][command] = entry
        for number in range(args.repeats):
            for name in NAMES:
                run = run_once(trees[name], command)
                entry["runs"][name].append(run)
                entry |= {"medians": compare(entry["runs"]), "differences": differences(entry["runs"])}
                seconds = f"{run['seconds']:.3f} s" if "seconds" in run else run.get("error", "done")
                print(f"{name} {number + 1}/{args.repeats}: {seconds}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps(result, indent=2) + "\n")
        print_comparison(command, entry)
        failed |= any("error" in run for runs in entry["runs"].values() for run in runs)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
