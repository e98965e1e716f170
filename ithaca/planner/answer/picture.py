"""A picture of memory and speed over the context length, for several recipes."""

from pathlib import Path

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_tokens
from ithaca.model.spec import Spec
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import Cluster
from ithaca.planner.search import STEP, search

SHOWN = ("sweep", "untied", "ulysses")  # the recipes that are compared
FIRST = STEP // 2  # tokens: the shortest length


def check_kind(file: Path) -> None:
    """Refuse a file that cannot be drawn, before anything is planned."""
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PlanError(f"--picture {file} cannot be drawn: use a name that ends with .png, .svg or .pdf")


def draw(model: str, spec: Spec, cluster: Cluster, most: int, file: Path, documents: Documents | None = None) -> None:
    """Draw lengths up to `most` tokens, doubled each time, into the file."""
    import matplotlib as mpl  # only when needed: it takes long to load

    mpl.use("agg")
    from matplotlib import pyplot

    lengths = [length for length in (FIRST * 2**power for power in range(32)) if length < most] + [most]
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for recipe in SHOWN:
        found = (search(spec, cluster, length, recipe, documents=documents) for length in lengths)
        answers = [answer for answer in found if answer]
        if not answers:
            continue
        x = [answer.tokens for answer in answers]
        memory.plot(x, [answer.memory.total / 2**30 for answer in answers], marker="o", label=recipe)
        speed.plot(x, [answer.rate for answer in answers], marker="o", label=recipe)
    memory.axhline(cluster.capacity / 2**30, color="gray", linestyle="--", linewidth=1)
    memory.set_ylabel("GiB of each GPU")
    speed.set_ylabel("tokens/s per GPU")
    speed.set_yscale("log")
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [format_tokens(length) for length in lengths], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("context length")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{model} on {cluster.count} × {cluster.gpu.name}, predicted")
    try:
        figure.savefig(file, dpi=150)
    except OSError as problem:
        raise PlanError(f"--picture {file} cannot be written ({problem.strerror})") from None
    pyplot.close(figure)
