"""The command `ithaca doctor`: the sections in their order, printed as they end, and what the exit code is.

Code 0: all checks passed. Code 1: a recipe differs from one rank, versions differ, or a section failed. Code 2: a
mistake in the options.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ithaca import __version__
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.errors import ConfigError, RunError
from ithaca.base.sizes import format_count
from ithaca.doctor import devices, disk, links, meaning, recipes, step, versions
from ithaca.doctor.exam import Exam, Found, Section, begin, run_sections
from ithaca.doctor.rates import Tables, gpus_option, measured_tables
from ithaca.model.config_json import find_config
from ithaca.parallel.mesh import mesh
from ithaca.plans.places import split_folders
from ithaca.rehearsal.measure import write_rates

SECTIONS = (
    versions.SECTION,
    devices.SECTION,
    links.SECTION,
    disk.SECTION,
    recipes.SECTION,
    step.SECTION,
    meaning.SECTION,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command."""

    model: str | None = None
    disk: str | None = None  # a folder, or several with commas
    out: Path | None = None
    quick: bool = False
    as_json: bool = False
    device: str | None = None
    share_gpus: bool = False


def check(options: Options) -> None:
    """Raise an error for options that cannot work, before any process starts."""
    if options.model is not None:
        find_config(options.model)
    if options.device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {options.device} is not known: cpu and cuda are")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA GPU, and there is none here: --device cpu works")
    for folder in _folders(options):
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            raise ConfigError(f"--disk {folder} is not a folder where a file can be made: name one, as --disk /tmp")
    # Only the first rank writes, and other nodes may not have the folder
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if first and options.out and (options.out.is_dir() or not os.access(options.out.parent, os.W_OK)):
        raise ConfigError(f"--out {options.out} cannot be written: name a file in a folder that exists")


def examine_ranks(options: Options) -> None:
    """Run the examination as one rank of this job. Raise RunError if something is wrong."""
    use_expandable_segments()  # as training does, so that the memory of a step is that of training
    grid = mesh(device=options.device, share_gpus=options.share_gpus)
    exam = begin(grid, options.quick, options.model, _folders(options))
    say = _print_section if exam.first and not options.as_json else lambda *_: None
    if exam.first and not options.as_json:
        print(_title(exam), flush=True)
    findings = run_sections(exam, SECTIONS, say)
    if not exam.first:
        return
    tables = measured_tables(exam, findings)
    if options.out and tables:
        write_rates(options.out, tables)
    if options.as_json:
        print(json.dumps(as_object(exam, findings, options.out if tables else None), indent=2))
    elif options.out:
        print(f"\n{_written(exam, options.out, tables)}")
    bad = failed_sections(findings)
    if bad:
        raise RunError(f"{len(bad)} of {len(findings)} checks failed: {', '.join(bad)}")
    if not options.as_json:
        print("\nAll checks passed.")


def _folders(options: Options) -> tuple[str, ...]:
    return split_folders(options.disk) if options.disk is not None else ()


def failed_sections(findings: dict[str, Found]) -> list[str]:
    """The sections that failed or found something wrong."""
    return [name for name, found in findings.items() if found["status"] in ("wrong", "failed")]


def as_object(exam: Exam, findings: dict[str, Found], written: Path | None) -> Found:
    """The object of `--json`."""
    return {
        "ithaca": __version__,
        "right": not failed_sections(findings),
        "ranks": exam.grid.size,
        "nodes": {node: [rank for rank, name in enumerate(exam.nodes) if name == node] for node in exam.nodes},
        "device": exam.grid.device.type,
        "out": str(written) if written else None,
        "sections": findings,
    }


def _title(exam: Exam) -> str:
    nodes, kind = len(set(exam.nodes)), "GPU, NCCL" if exam.grid.gpu else "CPU, gloo"
    return f"ithaca doctor: {format_count(exam.grid.size, 'rank')} on {format_count(nodes, 'node')} ({kind})"


def _print_section(section: Section, found: Found) -> None:
    print(f"\n{section.name}: {found['status']} ({found['took']:.1f} s)")
    text = [found["skipped"]] if found["status"] == "skipped" else []
    text += section.lines(found) if found["status"] in ("right", "wrong") else []
    for line in (*text, *(f"! {problem}" for problem in found.get("problems", ()))):
        print(f"  {line}".rstrip(), flush=True)


def _written(exam: Exam, out: Path, tables: Tables) -> str:
    if not tables:
        return f"Nothing was written to {out}: the device was not measured"
    gpus = gpus_option(exam, next(iter(tables)).strip('"'))
    return f"Wrote {out}, for: ithaca plan {exam.model} --gpus {gpus} --hardware {out}"
