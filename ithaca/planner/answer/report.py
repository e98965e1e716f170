"""The planner's answer in words: lines to read. What does not fit is refused in refusal.py.

The lines give the verdict first, then memory, time, limits and alternatives, and last the command that trains so.
Numbers that a user can check are printed as arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ithaca.base import owners
from ithaca.base.errors import PlanError
from ithaca.base.shell import set_options
from ithaca.base.sizes import format_bytes, format_count, format_number, format_seconds, format_tokens
from ithaca.model.spec import Spec
from ithaca.planner.answer.assumptions import assumptions, kernel_text, used_numbers
from ithaca.planner.answer.next_command import Trial, next_command, next_lines, plan_settings
from ithaca.planner.answer.slow_disk import slow_disk, slow_disk_line
from ithaca.planner.answer.tensor_line import tensor_lines
from ithaca.planner.balance import Balance, balance, describe
from ithaca.planner.batch import Batch
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import MOST_GPUS, Cluster, causal_mfu
from ithaca.planner.lean import Lean
from ithaca.planner.search import LEAST_MEMORY, Answer, longest, search
from ithaca.plans.places import REBUILD, RECOMPUTE
from ithaca.plans.recipes import RECIPES

LOOK_UP = "look-up"  # x of layer 0 if it is not saved
PLACES = {
    "device": "on the GPU",
    "host": "in host memory",
    "disk": "on disk",
    REBUILD: "recomputed from attention outputs",
    LOOK_UP: "recomputed from the embedding",
    RECOMPUTE: "recomputed",
}
LIMITS = {
    "GPU": "GPU memory",
    "host": "host memory (--host)",
    "disk": "the disk (--disk)",
    "planner": "the planner's range",
}
OWNERS = {
    owners.GRADIENTS: "this GPU's share, and those being reduced",
    owners.GATHERED: "weights of the running blocks",
    owners.KEYS: "of one layer, with their gradients",
    owners.TAPES: "saved activations, and slots for those saved elsewhere",
    owners.BLOCKS: "activations of blocks, weight gradients of the running one",
    owners.ATTENTION: "gradients and workspace of the kernel",
    owners.EXCHANGE: "q, K, V and o as they are sent and received",
    owners.LOSS: "a tile of logits, the head's gradient",
    owners.BATCH: "token ids, labels, positions",
    owners.KERNELS: "cuBLAS",
    owners.ALLOCATOR: "freed memory that PyTorch keeps",
    owners.OTHER: "the embedding's gradient",
}
Beside = Lean | Batch

SHOWN = 1000  # an owner with less than this part of the total is left out
HIDDEN = 0.005  # share of a step: if computing waits for less than this, the rest is called hidden


@dataclass(frozen=True)
class Question:
    """A question to the planner."""

    model: str  # as the user names it
    spec: Spec
    cluster: Cluster
    tokens: int | None  # None: the longest context that fits
    recipe: str | None  # None: the fastest
    documents: Documents | None = None  # what each sequence is packed with; None: it is one document
    running: bool = False  # a run asks while it starts, not `ithaca plan`
    batched: bool = False  # the sequences of a step were named, so that a command to train names them too

    @property
    def gpus(self) -> str:
        """The GPUs as --gpus takes them: '8xH100-80GB'"""
        return self.cluster.gpus

    def name_limit(self, limit: str) -> str:
        """A limit in words, with the option of `ithaca plan` that sets it."""
        return LIMITS[limit].split(" (")[0] if self.running else LIMITS[limit]


# As lines


def explain(
    question: Question, answer: Answer, most: int, limit: str, verbose: bool = False, beside: Beside | None = None
) -> list[str]:
    """The answer in lines. `most`, `limit`: the longest context and what limits it; `verbose`: with assumptions.

    `beside`: what the answer is compared with, if the question was for the least memory or for a batch.
    """
    return [
        f"{question.model} at {format_tokens(answer.tokens)} tokens on {question.gpus}: fits with recipe "
        f"'{answer.plan.recipe}'{_sharing(answer)}",
        *([f"Documents: {question.documents.describe(answer.tokens)}"] if question.documents else []),
        *(beside.lines() if beside else []),
        "",
        *_memory_lines(question, answer),
        *saved_lines(question.spec, answer),
        *_again_lines(question, answer, most, beside),
        *_fetch_lines(question, answer),
        "",
        *_time_lines(question, answer),
        "",
        *_limit_lines(question, answer, most, limit),
        "",
        *_assumption_lines(question, answer, verbose),
        *train_lines(question, answer),
    ]


def _sharing(answer: Answer) -> str:
    """'; 8 GPUs share each sequence'"""
    axes = answer.axes
    if axes.context == 1:
        own = "its own sequence" if answer.rows == 1 else f"{answer.rows} sequences of its own"
        return f"; each GPU has {own}" if axes.data > 1 else ""
    mesh = f" ({axes.ulysses} Ulysses × {axes.ring} ring ranks)" if axes.ring > 1 else ""
    if axes.tensor > 1:
        mesh = f" ({axes.tensor} tensor{f' × {axes.ring} ring' if axes.ring > 1 else ''} ranks)"
    several = f", {answer.sequences} sequences at a time" if answer.sequences > 1 else ""
    return f"; {axes.context} GPUs share each sequence{mesh}{several}"


def _memory_lines(question: Question, answer: Answer) -> list[str]:
    cluster, memory, gpus = question.cluster, answer.memory, question.cluster.machine.gpus
    shown = {owner: size for owner, size in memory.parts.items() if size >= memory.total / SHOWN}
    width, notes = max(map(len, shown)), OWNERS | _arithmetic(question, answer)
    used = f"{format_bytes(memory.host * gpus)} of {format_bytes(cluster.budget.host * gpus)}"
    lines = [
        f"GPU memory: {format_bytes(memory.total)} of {format_bytes(cluster.capacity)} at the peak ({memory.phase})",
        *(
            f"  {owner:{width}}  {format_bytes(size):>9}  {notes[owner]}"
            for owner, size in sorted(shown.items(), key=lambda item: -item[1])
        ),
        f"Host memory: {used}" + (" on each node" if cluster.machine.nodes > 1 else ""),
    ]
    if cluster.disk:
        lines.append(f"Disk: {format_bytes(memory.disk * gpus)} of {format_bytes(cluster.disk)}")
    return lines


def _arithmetic(question: Question, answer: Answer) -> dict[str, str]:
    """Owners whose size a user can check, with the arithmetic."""
    memory, count = answer.memory, f"{question.spec.parameters():,} parameters"
    each, moments = (12, " and optimizer moments") if answer.plan.optimizer == "device" else (4, "")
    found = {owners.STATES: f"weights{moments}, fp32: {count} × {each} bytes / {question.cluster.count}"}
    if answer.plan.zero < 3:
        found[owners.GATHERED] = f"all weights, bf16: {count} × 2 bytes"
    kv = next((tape for tape in memory.tapes if tape.name == "kv" and tape.place == "device"), None)
    if kv:
        tokens, (heads, size) = memory.tiles.length * kv.ranks, kv.features
        sizes = f"{tokens:,} tokens × {format_count(heads, 'head')} × {size} × 2 × (2 + 4) bytes"
        whose = f"of one layer and {answer.plan.heads} query heads at a time" if answer.plan.heads else "of one layer"
        found[owners.KEYS] = f"{whose}, with their gradients: {sizes}"
    return found


def saved_lines(spec: Spec, answer: Answer) -> list[str]:
    """What blocks save for their backward pass, where, and whether attention runs again."""
    plan = answer.plan.settled()
    placement = plan.placement(spec.layers)
    if plan.checkpoint == "none":
        lines = [f"Saved activations: all of {spec.layers} layers on the GPU"]
    else:
        first = LOOK_UP if placement.x[0] == REBUILD else placement.x[0]
        lines = [f"Saved block inputs: {_by_place((first, *placement.x[1:]))}"]
    if plan.checkpoint == "selective":
        lines.append(f"Saved attention outputs: {_by_place(('device',) * spec.layers)}")
    elif "o" in plan.entry.options:
        lines.append(f"Saved attention outputs: {_by_place(placement.o)}")
    again = answer.recomputed(spec)
    lines.append(
        f"Attention: recomputed in backward in {again} of {spec.layers} layers" if again else "Attention: runs once"
    )
    if plan.cuda_graph:
        lines.append("GPU operations: launched as CUDA graphs, all of a pass at once")
    return lines


def _again_lines(question: Question, answer: Answer, most: int, beside: Beside | None) -> list[str]:
    """A line if attention is recomputed only because that is faster: saving its outputs would also fit."""
    fits_once = answer.tokens <= most and beside is None and not question.running  # a run may have set its mesh
    if not (fits_once and _recomputes(question, answer)):
        return []
    return ["  faster here than saving the outputs of every layer, which also fits"]


def _recomputes(question: Question, answer: Answer) -> bool:
    """Whether attention runs again where the planner could have saved its outputs."""
    return answer.plan.entry.places and answer.recomputed(question.spec) > 0


def _fetch_lines(question: Question, answer: Answer) -> list[str]:
    """Why the chunk is large enough, if K and V live off the GPU and are fetched by later chunks."""
    found = fetched(question, answer)
    return [f"K and V: {PLACES[found[0]]}. {describe(found[1], found[2])}"] if found else []


def fetched(question: Question, answer: Answer) -> tuple[str, Balance, int] | None:
    """Where K and V live, the balance chunk there, and the chunk; None if nothing is fetched."""
    job = answer.job(question.spec)
    if not job.plan.sweeps or job.plan.kv in (None, "device") or job.chunks == 1:
        return None
    return job.plan.kv, balance(job, question.cluster.gpu, question.cluster.machine), job.layout.chunks.size


def _by_place(words: Sequence[str]) -> str:
    """'18 layers in host memory, 13 recomputed from attention outputs'"""
    counts = [(words.count(word), PLACES[word]) for word in dict.fromkeys(words)]
    first, *rest = sorted(counts, reverse=True)
    return ", ".join([f"{format_count(first[0], 'layer')} {first[1]}", *(f"{count} {place}" for count, place in rest)])


def _time_lines(question: Question, answer: Answer) -> list[str]:
    seconds = answer.seconds
    computing = {
        "attention forward": seconds.attention_forward,
        "attention backward": seconds.attention_backward,
        "matrix products": seconds.linear,
        "optimizer": seconds.optimizer,
    }
    beside = {
        "launching GPU operations": seconds.launching,
        "messages": seconds.exchange,
        "copies to and from " + ("host and disk" if question.cluster.disk else "the host"): seconds.copies,
        "gathering weights": seconds.weights,
    }
    waits = seconds.step - seconds.computing - seconds.optimizer
    if waits < HIDDEN * seconds.step:
        together = f"Hidden behind it: {_parts(beside, seconds.step)}"
    else:
        together = (
            f"At the same time: {_parts(beside, seconds.step)}; computing waits {format_seconds(waits)} for these"
        )
    lines = [
        f"A step: {format_seconds(seconds.step)} for {format_count(answer.batch, 'sequence')}; "
        f"{format_number(answer.rate)} tokens/s per GPU, {100 * mfu(question, answer):.1f} % causal MFU",
        f"  Computing: {_parts(computing, seconds.step)}",
    ]
    lines += [f"  {together}"] if any(beside.values()) else []
    return [*lines, *_slow_disk_lines(question, answer), *tensor_lines(question, answer, HIDDEN)]


def _slow_disk_lines(question: Question, answer: Answer) -> list[str]:
    """A line if the step waits for the disk."""
    cluster, job = question.cluster, answer.job(question.spec, question.documents)
    slow = slow_disk(job, cluster.gpu, cluster.machine, passes=answer.passes)
    return [f"  {slow_disk_line(slow, cluster.gpu)}"] if slow else []


def _parts(seconds: dict[str, float], step: float) -> str:
    """The parts of a step, without those of less than a hundred-thousandth of it."""
    return ", ".join(f"{name} {format_seconds(value)}" for name, value in seconds.items() if value > 1e-5 * step)


def _limit_lines(question: Question, answer: Answer, most: int, limit: str) -> list[str]:
    most = longest_known(question, answer, most)
    once = " if attention runs once" if _recomputes(question, answer) else ""
    return [
        f"Longest context{once}: {format_tokens(most)} tokens, limited by {question.name_limit(limit)}",
        *(f"  {text}" for text in alternatives(question, answer, most)),
    ]


def longest_known(question: Question, answer: Answer, most: int) -> int:
    """The longest context: `most`, which is found in whole steps, or the length that was asked for and fits.

    If attention runs again only because this length does not fit otherwise, `most` stays the longest.
    """
    return most if _recomputes(question, answer) else max(most, answer.tokens)


def alternatives(question: Question, answer: Answer, most: int) -> list[str]:
    """The nearest other answers: a longer context, more GPUs, fewer GPUs."""
    spec, cluster = question.spec, question.cluster
    found = []
    furthest = _search_longest(question, most) if most > answer.tokens else answer
    if furthest and furthest is not answer:
        found.append(f"{format_tokens(most)} take {format_seconds(furthest.seconds.step)} a step")
    if (again := longest_recomputed(question, most)) > 1.01 * most:
        slower = "" if furthest and furthest.recomputed(spec) else " (slower)"
        found.append(f"Up to {format_tokens(again)} if attention is recomputed in backward{slower}")
    now = answer.seconds.step / answer.batch
    for count, more in ((2 * cluster.count, True), (cluster.count // 2, False)):
        if not 1 <= count <= MOST_GPUS or (count > cluster.node_gpus and count % cluster.node_gpus):
            continue
        there = cluster.resized(count)
        other = search(spec, there, answer.tokens, question.recipe, documents=question.documents)
        each = other.seconds.step / other.sequences if other else 0.0
        if other and (not more or each < now):
            word = "Faster" if more else "Fewer GPUs"
            times = f"{format_seconds(each)} a sequence instead of {format_seconds(now)}"
            found.append(f"{word}: {there.gpus}, {times}")
        if not other and not more:
            found.append(f"Fewer GPUs: does not fit on {there.gpus}")
    return found


def longest_recomputed(question: Question, most: int) -> int:
    """The longest context if attention may run again; 0 if nothing fits, or no recipe asked for can choose that."""
    if not most or not RECIPES[question.recipe or LEAST_MEMORY].places:
        return 0
    return longest(question.spec, question.cluster, question.recipe, recomputing=True, from_=most)


def _search_longest(question: Question, most: int) -> Answer | None:
    try:
        return search(question.spec, question.cluster, most, question.recipe, documents=question.documents)
    except PlanError:  # it has more documents than the planner counts
        return None


def mfu(question: Question, answer: Answer) -> float:
    """Causal MFU of the answer, by this GPU's own peak."""
    attended = question.documents.attended(answer.tokens) if question.documents else answer.tokens
    return causal_mfu(question.spec, attended, answer.rate, question.cluster.gpu.flops)


def _assumption_lines(question: Question, answer: Answer, verbose: bool) -> list[str]:
    spec, cluster, documents = question.spec, question.cluster, question.documents
    sources = {cluster.gpu.sources[name] for name in used_numbers(spec, cluster, answer)}
    kernel = f"Attention kernel: {kernel_text(spec, cluster, answer, documents)}"
    lines = [] if question.running else [kernel]  # a run says what kernel it has
    if verbose:
        published = ("data sheet", "table of CUDA GPUs")
        found = assumptions(spec, cluster, answer)
        texts = [text for text in found if not any(words in text for words in published)]
        return [*lines, "Assumed, or measured on another GPU:", *(f"  {text}" for text in texts), ""]
    if len(sources) == 1:
        return [*lines, f"The speed of this GPU is {sources.pop()}", ""]
    return [] if question.running else [*lines, "Some speeds and reserves are assumed: --verbose lists them", ""]


def train_lines(question: Question, answer: Answer) -> list[str]:
    """How to train with this answer; for a run, how to name its Plan."""
    if question.running:
        return [f"To name this Plan yourself: {set_options(plan_settings(answer.plan, answer.axes))}"]
    return next_lines(_trial(question, answer))


def train_line(question: Question, answer: Answer) -> str | None:
    """The command that trains with this Plan and mesh; None if there are no data that the model can learn."""
    return next_command(_trial(question, answer))


def _trial(question: Question, answer: Answer) -> Trial:
    return Trial(
        model=question.model,
        spec=question.spec,
        tokens=answer.tokens,
        plan=answer.plan,
        axes=answer.axes,
        nodes=question.cluster.machine.nodes,
        documents=question.documents,
        batch=answer.batch if question.batched else None,
        micro_batch=answer.sequences if question.batched and answer.passes > 1 else None,
    )
