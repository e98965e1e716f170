"""`ithaca plan`, `ithaca mesh` and `ithaca.plan`: from options to a question, and the answer printed."""

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.base.errors import ModelError, PlanError, read_option, suggestion
from ithaca.base.misuse import check_type
from ithaca.base.sizes import format_count, format_tokens, parse_tokens, read_memory
from ithaca.model.config_json import find_config
from ithaca.model.extend import beyond_context
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.spec import Spec
from ithaca.planner.answer.json_object import as_object
from ithaca.planner.answer.mesh_table import compare_meshes, mesh_lines, mesh_object
from ithaca.planner.answer.picture import check_kind, draw
from ithaca.planner.answer.refusal import refusal
from ithaca.planner.answer.report import Beside, Question, explain, train_line
from ithaca.planner.batch import LATER_PASSES, most_sequences, plan_batch, read_batch
from ithaca.planner.documents import read_documents
from ithaca.planner.hardware import MOST_ON_A_NODE, NODE, Cluster, Gpu, Machine, parse_gpus, read_gpus
from ithaca.planner.lean import leanest
from ithaca.planner.meshes import impossible
from ithaca.planner.search import LEAST_MEMORY, LONGEST, Answer, binding, longest, search, widest_meshes
from ithaca.plans.plan import Plan
from ithaca.schedule.variants import SHORTEST

USUAL = "8xH100-80GB"
MOST_BYTES = 1e18  # of a node's memory, and of its disk


@dataclass(frozen=True)
class Output:
    """How an answer is printed."""

    as_json: bool = False
    verbose: bool = False  # with the list of assumptions
    meshes: bool = False  # the table of meshes instead of the answer
    picture: Path | None = None  # also draw memory and speed over lengths into this file


def run(
    model: str,
    gpus: str | None,
    tokens: str,
    host: str | None,
    disk: str,
    recipe: str | None,
    hardware: Path | None,
    output: Output,
    node_gpus: int | None = None,
    documents: str | None = None,
    lean: bool = False,
    batch: str | None = None,
    kernel: str = "auto",
) -> None:
    """`ithaca plan`. `hardware`: a file of GPUs, given by the user or just written by --measure."""
    if output.picture:
        check_kind(output.picture)
    if output.picture and output.meshes:
        raise PlanError(f"--picture {output.picture} and --meshes cannot be combined: give one of them")
    _check_together(tokens, lean, batch, output)
    length = None if tokens == "max" else read_option("--tokens", parse_tokens, tokens)
    if length is not None and not SHORTEST <= length <= LONGEST:
        raise PlanError(
            f"--tokens {tokens} is out of range: give {SHORTEST} (a tile of attention) to {format_tokens(LONGEST)}"
        )
    if recipe is not None:
        Plan(recipe=recipe)  # an unknown recipe is refused before anything is searched
    cluster = read_cluster(USUAL if gpus is None else gpus, hardware, host, disk, node_gpus, kernel)
    packed = None if documents is None else read_option("--documents", read_documents, documents)
    sequences = read_batch(batch, length) if batch is not None and length is not None else None
    spec = read_spec(find_config(model)[0])
    question = Question(model, spec, cluster, length, recipe, packed, batched=batch is not None)
    most = longest(question.spec, cluster, recipe)
    wanted = length or most
    answer, beside = None, None
    if wanted and lean:
        beside = leanest(spec, cluster, wanted, recipe, packed)
    elif wanted and batch is not None:
        beside = plan_batch(spec, cluster, wanted, sequences, recipe, packed)
    elif wanted:
        answer = search(spec, cluster, wanted, recipe, documents=packed)
    answer = beside.answer if beside else answer
    if answer is None and sequences and most >= wanted:
        _refuse_batch(question, sequences, wanted)
    if answer is None:
        _refuse(question, most, output.as_json)
    _warn_beyond(question, answer, trains=not output.meshes)
    if output.meshes:
        _print_meshes(replace(question, tokens=wanted, recipe=answer.plan.recipe), None, output.as_json)
    else:
        _print_answer(question, answer, most, output, beside)


def _check_together(tokens: str, lean: bool, batch: str | None, output: Output) -> None:
    """Raise an error for options that answer different questions."""
    if batch is not None and tokens == "max":
        raise PlanError(f"--batch {batch} needs the length of a sequence: give it, as --tokens 128K")
    given = {"--lean": lean, f"--batch {batch}": batch is not None}
    others = {"--meshes": output.meshes, f"--picture {output.picture}": output.picture}
    mine = [name for name, is_given in given.items() if is_given]
    if len(mine) > 1:
        raise PlanError(f"--lean asks for the least memory, --batch {batch} for the fastest step: give one of them")
    for name in (name for name, is_given in others.items() if is_given and mine):
        raise PlanError(
            f"{name} compares Plans for one sequence and cannot be combined with {mine[0]}: give one of them"
        )


def _warn_beyond(question: Question, answer: Answer, trains: bool) -> None:
    """Warn if a folder's model is not made for documents of this many tokens. A preset has no trained weights.

    `trains`: the output ends with a command that trains, if there are data for it.
    """
    if question.model in PRESETS:
        return
    tokens = answer.tokens
    reached = question.documents.longest(tokens) if question.documents else tokens
    follows = trains and train_line(question, answer)
    remedy = "the command below extends it" if follows else "ithaca train extends it with --set model.rope=auto"
    if warning := beyond_context(question.spec, reached, tokens, remedy):
        print(f"Warning: {warning}", file=sys.stderr)


def _refuse_batch(question: Question, sequences: int, tokens: int) -> NoReturn:
    """Raise the error for a batch that does not fit, though one sequence of each group of GPUs does."""
    spec, cluster, recipe = question.spec, question.cluster, question.recipe
    batch = f"{format_count(sequences, 'sequence')} of {format_tokens(tokens)} tokens of {question.model}"
    ulysses, ring = widest_meshes(spec, cluster, recipe or LEAST_MEMORY, tokens)[0]
    sharing = ulysses * ring
    if recipe and sequences < (fewest := cluster.count // sharing):
        shares = f"shares one among at most {sharing}" if sharing > 1 else "cannot share one among"
        raise PlanError(
            f"a step of {batch} is too small for {question.gpus}: recipe '{recipe}' {shares} GPUs, so a step needs at "
            f"least {fewest} sequences; --batch {fewest} fits"
        )
    at_once = most_sequences(spec, cluster, tokens, recipe)
    raise PlanError(f"{batch} on {question.gpus} do not fit: {LATER_PASSES}; --batch {at_once} fits in one pass")


def _refuse(question: Question, most: int, as_json: bool) -> NoReturn:
    text = refusal(question, most)
    if not as_json:
        raise PlanError(text)
    print(json.dumps({"fits": False, "tokens": question.tokens, "max_tokens": most, "why": text}, indent=2))
    raise SystemExit(PlanError.code)


def _print_answer(question: Question, answer: Answer, most: int, output: Output, beside: Beside | None = None) -> None:
    limit = binding(question.spec, question.cluster, question.recipe, most)
    if output.picture:
        draw(question.model, question.spec, question.cluster, most, output.picture, question.documents)
    if output.as_json:
        print(json.dumps(as_object(question, answer, most, limit, beside), indent=2))
    else:
        print("\n".join(explain(question, answer, most, limit, output.verbose, beside)))


def _print_meshes(question: Question, sharing: int | None, as_json: bool) -> None:
    assert question.tokens is not None
    assert question.recipe is not None
    spec, cluster, plan = question.spec, question.cluster, Plan(recipe=question.recipe)
    compared = compare_meshes(spec, cluster, question.tokens, question.recipe, sharing, question.documents)
    reasons = [*impossible(spec, plan, cluster.machine, sharing)]
    if as_json:
        print(json.dumps(mesh_object(question, compared, reasons), indent=2))
    else:
        print("\n".join(mesh_lines(question, compared, reasons)))


def run_mesh(
    model: str, machine: Machine, tokens: int, recipe: str, sharing: int | None = None, as_json: bool = False
) -> None:
    """`ithaca mesh`, the old name of `ithaca plan --meshes`: H100 with the links of a machine."""
    notice = (
        "ithaca mesh is now `ithaca plan --meshes`; without --share it compares every number of GPUs that can share"
    )
    print(f"{notice} a sequence", file=sys.stderr)
    gpu = replace(parse_gpus(USUAL, read_gpus())[1], inside=machine.inside, across=machine.across)
    cluster = Cluster(machine.ranks, gpu, gpu.ram * machine.gpus, node_gpus=machine.gpus)
    if not Plan(recipe=recipe).shares:
        raise PlanError(f"recipe '{recipe}' cannot share a sequence among GPUs: use recipe 'sweep'")
    _print_meshes(Question(model, read_spec(find_config(model)[0]), cluster, tokens, recipe), sharing, as_json)


def plan(
    spec: Spec,
    gpus: str = USUAL,
    *,
    tokens: int | str,
    host: str | None = None,
    disk: str = "0",
    recipe: str | None = None,
    kernel: str = "auto",
) -> Plan:
    """The fastest Plan for a context of `tokens` tokens on some GPUs, as `ithaca plan` finds it.

    Raises PlanError if nothing fits. `host` and `disk` are the memory and disk of each node, as 1.9TB; by default the
    usual memory of such a node, and no disk. `kernel` is the attention kernel where it trains; by default the fastest
    that is installed here. `ithaca plan` also shows the mesh.
    """
    check_type(spec, Spec, ModelError, "plan takes a model's Spec first: ithaca.load_model(folder).spec")
    check_type(gpus, str, PlanError, "plan takes the GPUs second, as text: '8xH100-80GB'")
    check_type(kernel, str, PlanError, "plan takes the name of a kernel: kernel='flash4', or 'auto'")
    if recipe is not None:
        Plan(recipe=recipe)
    cluster, length = read_cluster(gpus, None, host, disk, kernel=kernel), parse_tokens(tokens)
    answer = search(spec, cluster, length, recipe)
    if answer is None:
        question = Question(spec.family, spec, cluster, length, recipe)
        raise PlanError(refusal(question, longest(spec, cluster, recipe)))
    return answer.plan


def read_cluster(
    gpus: str, hardware: Path | None, host: str | None, disk: str, node_gpus: int | None = None, kernel: str = "auto"
) -> Cluster:
    """The GPUs as the options describe them: '16xH100-80GB' on nodes of 8, or '4x4xH100-80GB' on 4 nodes of 4."""
    nodes = re.fullmatch(r"\s*(\d{1,20})\s*[xX×]\s*(\d{1,20})\s*[xX×]\s*(.+)", gpus)
    if nodes and node_gpus not in (None, int(nodes[2])):
        raise PlanError(f"--gpus {gpus} has {nodes[2]} GPUs on a node, but --node-gpus is {node_gpus}: leave it out")
    if nodes:
        node_gpus, gpus = int(nodes[2]), f"{int(nodes[1]) * int(nodes[2])}x{nodes[3]}"
    node_gpus = NODE if node_gpus is None else node_gpus
    if not 1 <= node_gpus <= MOST_ON_A_NODE:
        raise PlanError(f"{node_gpus} GPUs on a node are out of range: give 1 to {MOST_ON_A_NODE}")
    count, gpu = parse_gpus(gpus, read_gpus(hardware))
    if kernel != "auto" and kernel not in KERNEL_FACTS:
        raise PlanError(f"--kernel {kernel} does not exist: {suggestion(kernel, ('auto', *KERNEL_FACTS))}")
    memory = _node_bytes(min(count, node_gpus), gpu, host, disk)
    return Cluster(count, gpu, memory["host"], memory["disk"], node_gpus, kernel=kernel, usual=host is None)


def _node_bytes(gpus: int, gpu: Gpu, host: str | None, disk: str) -> dict[str, float]:
    """Memory and disk of each node; if no memory is given, the usual memory for this many GPUs."""
    sizes = {
        "host": gpu.ram * gpus if host is None else read_memory("--host", host),
        "disk": 0.0 if disk == "0" else read_memory("--disk", disk),
    }
    for name, size in sizes.items():
        if size > MOST_BYTES:
            given, most = (f"{number / 1e12:.7g}TB" for number in (size, MOST_BYTES))
            raise PlanError(f"--{name} {given} is out of range: give at most {most}")
    return sizes
