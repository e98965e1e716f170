"""A short training step of a preset that fits, predicted by the planner and measured on the ranks that are here.

The step is that of a rehearsal, with the real ranks in place of the loopback: a first step warms up, the second is
timed. It is predicted twice, with the rates that the planner assumes and with those that were measured.
"""

from ithaca.base.errors import RunError
from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.doctor.devices import describe_device
from ithaca.doctor.exam import COLLECTIVE_SECONDS, Exam, Found, Section
from ithaca.doctor.rates import cluster, known_gpus, measured_tables
from ithaca.doctor.units import columns
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.parallel.agree import least
from ithaca.parallel.axes import Axes
from ithaca.parallel.hangs import set_timeout
from ithaca.parallel.mesh import mesh
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.rehearsal.measure import compute_dtype
from ithaca.rehearsal.rehearse import run_scene
from ithaca.rehearsal.scene import Scene
from ithaca.schedule.step_memory import step_memory

GPU_PRESETS = ("llama3.2-1b", "smollm2-135m", "tiny")  # the largest first
CPU_PRESETS = ("tiny",)


def examine(exam: Exam) -> Found:
    scene = _fitting_scene(exam)
    axes = scene.axes
    grid = mesh(ulysses=axes.ulysses, ring=axes.ring, shard=axes.shard, device=exam.grid.device.type)
    set_timeout(grid.groups, COLLECTIVE_SECONDS)
    report = run_scene(scene, grid)
    return {name: report[name] for name in ("model", "kernel", "seconds", "peak_bytes", "peak_bytes_predicted")}


def _fitting_scene(exam: Exam) -> Scene:
    """The first preset whose step fits the memory that every rank has free."""
    here = describe_device(exam.grid.device)
    free, host = least(exam.grid.group, here["free"], here["host_free"] // exam.most_on_a_node)
    presets = GPU_PRESETS if exam.grid.gpu else CPU_PRESETS
    for scene in (_scene(exam, preset) for preset in presets):
        memory = step_memory(scene.job(_spec(scene.model), compute_dtype(exam.grid.device), "auto"))
        if memory.total <= free and memory.host <= host:
            return scene
    short = f"{format_bytes(free)} of the device and {format_bytes(host)} of host memory"
    raise RunError(f"{presets[-1]}, the smallest preset, does not fit the {short} that are free")


def _scene(exam: Exam, preset: str) -> Scene:
    """All ranks share a sequence; Ulysses ranks lie on one node."""
    ranks, here, heads = exam.grid.size, exam.most_on_a_node, _spec(preset).heads
    ulysses = max(count for count in range(1, min(here, heads) + 1) if ranks % count == 0 and here % count == 0)
    axes = Axes(ulysses=ulysses, ring=ranks // ulysses)
    return Scene(model=preset, plan=Plan(recipe="sweep"), tokens=exam.sizes.step_tokens, axes=axes)


def _spec(preset: str) -> Spec:
    return read_spec(find_config(preset)[0])


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:
    first, gpus = told[0], known_gpus(exam, measured_tables(exam, findings))
    scene = _scene(exam, first["model"])
    job = scene.job(_spec(first["model"]), compute_dtype(exam.grid.device), first["kernel"])

    def predicted(kind: str) -> float | None:
        return predict_seconds(job, gpus[kind], cluster(exam, gpus[kind]).machine).step if kind in gpus else None

    return {
        "model": first["model"],
        "tokens": scene.tokens,
        "mesh": str(scene.axes),
        "kernel": first["kernel"],
        "seconds": max(found["seconds"] for found in told),
        "seconds_predicted": predicted("measured"),
        "seconds_predicted_assumed": predicted("assumed"),
        "peak_bytes": max(found["peak_bytes"] for found in told),
        "peak_bytes_predicted": first["peak_bytes_predicted"],
    }


def lines(found: Found) -> list[str]:
    what = f"{found['model']}, {format_tokens(found['tokens'])} tokens, {found['mesh']}, kernel {found['kernel']}"
    seconds = [found[name] for name in ("seconds_predicted_assumed", "seconds_predicted", "seconds")]
    peak = found["peak_bytes_predicted"]
    rows = [
        ["", "predicted, assumed rates", "predicted, measured rates", "measured"],
        ["a step", *("–" if each is None else format_seconds(each) for each in seconds)],
        ["memory", "–", "–" if peak is None else format_bytes(peak), format_bytes(found["peak_bytes"])],
    ]
    return [what, *columns(rows)]


SECTION = Section("step", examine, conclude, lines)
