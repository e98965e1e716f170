"""The command `ithaca profile`: a scene from its options, as of a rehearsal; its profile as a folder and as lines."""

import json
import re
from pathlib import Path

from ithaca.base.errors import RunError
from ithaca.base.sizes import format_tokens
from ithaca.rehearsal.command import does_not_fit, scene_words


def run(
    model: str,
    ranks: int,
    tokens: int,
    layers: int | None,
    recipe: str,
    sets: list[str],
    cap: int | None,
    hardware: Path | None,
    documents: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run `ithaca profile MODEL --ranks P --tokens S`, write its folder and print its tables."""
    words, packed = scene_words(model, ranks, tokens, layers, recipe, sets, cap, hardware, documents)
    import torch  # which takes seconds

    from ithaca.profile.files import profile_folder, write_profile
    from ithaca.profile.profile import profile_scene
    from ithaca.profile.tables import report_lines
    from ithaca.rehearsal.rehearse import loopback_mesh, out_of_memory
    from ithaca.rehearsal.scene import Scene

    scene = Scene(**words)
    with profile_folder(out or default_folder(model, tokens, recipe)) as folder:
        grid = loopback_mesh(scene.axes)
        try:
            report, recording = profile_scene(scene, grid)
        except torch.OutOfMemoryError as problem:
            raise RunError(does_not_fit(out_of_memory(scene, grid, problem))) from None
        if packed:
            report["documents_packed"] = packed.describe(tokens)
        report = write_profile(folder, report, recording)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        files = report["files"]
        where = f"Wrote {files['page']} (open it in a browser) and {files['trace']} (for ui.perfetto.dev)"
        print("\n".join([*report_lines(report), "", where]))


def default_folder(model: str, tokens: int, recipe: str) -> Path:
    """Return the folder of a profile if none is given: profiles/llama3-8b-1M-sweep."""
    name = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
    return Path("profiles", f"{name}-{format_tokens(tokens)}-{recipe}")
