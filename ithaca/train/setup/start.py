"""What a run decides before its first step: the options left open, the Plan, the mesh, the data and the model."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ithaca.attention.kernels.choose import usable_kernels
from ithaca.base.errors import DataError, IthacaError, PlanError, read_option
from ithaca.base.sizes import format_tokens
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import AUTO, Config, DataSection, MeshSection, TrainSection
from ithaca.config.warmup import default_warmup
from ithaca.data.holdout import hold_out
from ithaca.data.misfit import misfit
from ithaca.data.mixture import LIBRARY, Data, Mixture, mix, sources_of
from ithaca.data.packing import Rows, rows_per_epoch
from ithaca.data.preparation.inputs import standard_library
from ithaca.data.reader import TokenFile, open_tokens
from ithaca.data.subset import concatenated
from ithaca.data.synthetic import open_synthetic
from ithaca.model.extend import beyond_context
from ithaca.model.presets import PRESETS
from ithaca.model.source import ModelSource, describe_model, extend_model, load_model
from ithaca.parallel.agree import least, together, together_with
from ithaca.parallel.mesh import Mesh
from ithaca.planner.answer.refusal import refusal
from ithaca.planner.answer.report import Question, explain
from ithaca.planner.documents import Documents, file_documents
from ithaca.planner.hardware import RUNTIME, Cluster, read_gpus
from ithaca.planner.search import binding, longest, search
from ithaca.plans.plan import Plan
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.schedule.variants import SHORTEST
from ithaca.tape.budget import host_budget
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.epochs import STEPS, count_steps
from ithaca.train.setup.learning_rate import default_rate
from ithaca.train.setup.stages import Span, checkpoint_model, resolve_stages, settle_batches, stage_config, stage_seed

CPU_TOKENS, GPU_TOKENS = 8 * 2**10, 64 * 2**10  # default context lengths
ENDS = 65536  # tokens at each end of the data that old checkpoints have a checksum of
LONG = 32 * 2**10  # tokens of a long document, unless data.long is set
UNKNOWN = "A100-80GB"  # the planner uses the rates of this GPU for one that no table describes

Opened = TypeVar("Opened")
Chosen = tuple[Plan, MeshSection, list[str]]  # and the planner's lines about it


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that a run can use on each GPU and on each node."""

    gpu: int
    host: int


def free_memory(grid: Mesh) -> FreeMemory:
    """Return the free memory of the fullest GPU and of the fullest node. Collective."""
    free, total = torch.cuda.mem_get_info(grid.device) if grid.device.type == "cuda" else (0, 0)
    # The planner itself keeps back the driver's memory for this process (Cluster.capacity), so it is added here
    mine = min(total // grid.gpu_ranks, free // grid.gpu_ranks + RUNTIME)
    return FreeMemory(*least(grid.group, mine, host_budget()[0]))


def settle(
    config: Config,
    run: RunFolder,
    grid: Mesh,
    memory: FreeMemory,
    described: Path | None = None,
    resumed: bool = False,
) -> tuple[Config, Chosen]:
    """Return the configuration with the options of [train] that are open filled in, and the Plan and mesh of the run.

    An open option takes its value from the run's last checkpoint or earlier start, else the default for these ranks,
    this model and these data. `described`, `resumed`: see `load_source`.
    """
    config = _open_stage(config, run, described)
    record = run.record() or config
    saved = record.train
    if config.data.packing == AUTO:
        config = replace(config, data=replace(config.data, packing=record.data.packing))
    if record.model.source != config.model.source:
        saved = replace(saved, learning_rate=None)  # it was for another model, in a start that failed
    default = GPU_TOKENS if grid.device.type == "cuda" else CPU_TOKENS
    tokens = config.train.tokens or saved.tokens or default
    batch = config.train.batch or saved.batch
    config = replace(config, train=replace(config.train, tokens=tokens, batch=batch))
    source = load_source(config, described, resumed)
    _check_ropes(config, source)
    spec = source.spec
    chosen = choose_plan(config, source, grid, tokens, memory, lambda: _documents(config, run))
    sharing = chosen[1].ring * chosen[1].ulysses * chosen[1].tensor
    batch = batch or (config.train.micro_batch or 1) * (grid.size // sharing)
    config = settle_batches(replace(config, train=replace(config.train, batch=batch)), batch)
    steps = count_steps(config.train, _epoch_rows(config, run)) if config.train.epochs else None
    rate = default_rate(spec.parameters(), has_random_weights(config, described))
    config = replace(config, train=_settle_rate(config.train, saved, steps, rate))
    run.check(config)
    return config, chosen


def _check_ropes(config: Config, source: ModelSource) -> None:
    """Raise an error if a later stage has a rope that this model cannot have: it would end the run there."""
    for number, stage in enumerate(config.train.stages or (), start=1):
        if stage.rope:
            try:
                extend_model(source.unextended, stage.rope, stage.tokens)
            except IthacaError as problem:
                raise type(problem)(f"stage {number}: {problem}") from None


def _open_stage(config: Config, run: RunFolder, described: Path | None) -> Config:
    """Return the configuration of the stage that the run is in, if it has stages."""

    def find_rate() -> float:
        return default_rate(load_source(config, described).spec.parameters(), has_random_weights(config, described))

    record = run.record() if run.begun() else None
    return stage_config(resolve_stages(config, record, find_rate), run.last_checkpoint())


def _settle_rate(options: TrainSection, saved: TrainSection, steps: int | None, rate: float) -> TrainSection:
    """Return the options with steps, learning rate and warm-up; `saved` are those of the last checkpoint.

    `steps`: those of train.epochs, if it is set. `rate`: the default for the model.
    """
    steps = steps or options.steps or saved.steps or STEPS
    warmup = saved.warmup if options.warmup is None else options.warmup
    return replace(
        options,
        steps=steps,
        epochs=None,
        learning_rate=options.learning_rate or saved.learning_rate or rate,
        warmup=default_warmup(steps) if warmup is None else warmup,
    )


def has_random_weights(config: Config, checkpoint: object) -> bool:
    """Return whether a run begins with random weights: those of a preset, unless it has those of a `checkpoint`."""
    return not checkpoint and config.model.source in PRESETS


def load_source(config: Config, described: Path | None = None, resumed: bool = False) -> ModelSource:
    """Return the model that a run trains, with the rope that is asked for if the context length is known.

    `described`: the folder that describes a model whose weights a checkpoint has. That of a run that is `resumed` has
    its rope already.
    """
    model, tokens = config.model, config.train.tokens
    if described and not resumed:
        files = CheckpointFolder(RunFolder(described.parent).checkpoints)  # of the run that this one starts from
        source = checkpoint_model(described, files.manifest(max(files.steps(), default=0)) or {}, model.dtype)
        source = replace(source, config_before=None)  # that rope is the new run's own, before its stages
    elif described:
        source = describe_model(described, model.dtype)
    else:
        source = load_model(model.source, model.dtype, model.seed)
    # The description of a run with stages has the rope from before them
    extends = model.rope and tokens and (not resumed or config.train.stages)
    return extend_model(source, model.rope, tokens) if extends else source  # pyrefly: ignore


def describe_rope(config: Config, source: ModelSource, run: RunFolder) -> tuple[list[str], list[str]]:
    """Return lines about the rope of a run that begins, and warnings.

    Positions count from the beginning of a document, so short documents in a long sequence are no reason to warn.
    """
    assert config.train.tokens is not None
    if config.model.rope:
        return [source.rope_line], []
    tokens = config.train.tokens
    if not beyond_context(source.spec, tokens, tokens):
        return [], []
    warning = beyond_context(source.spec, _documents(config, run).longest(tokens), tokens)
    return [], [warning] if warning else []


def _epoch_rows(config: Config, run: RunFolder) -> int:
    assert config.train.tokens
    data, _ = read_data(config.data, run.path)
    return rows_per_epoch(data, config.train.tokens, config.data.packing, config.data.too_long)


def _documents(config: Config, run: RunFolder) -> Documents:
    """Return the documents of the data, for the planner."""
    return file_documents(read_data(config.data, run.path)[0], config.data.packing, config.data.too_long)


def choose_plan(
    config: Config,
    source: ModelSource,
    grid: Mesh,
    tokens: int,
    memory: FreeMemory,
    find_documents: Callable[[], Documents | None] = lambda: None,
) -> Chosen:
    """Return the configured Plan and mesh. The planner chooses the Plan if none is set, and the mesh if none is."""
    if config.plan is not None:
        return config.plan, config.mesh, []
    mesh = config.mesh
    if grid.device.type != "cuda" or tokens < SHORTEST:
        # The planner knows GPUs and lengths from SHORTEST on
        by_mesh = "tensor" if mesh.tensor > 1 else "sweep" if mesh.ring * mesh.ulysses > 1 else "dense"
        return Plan(recipe=by_mesh), mesh, []
    batch, micro = config.train.batch or 1, config.train.micro_batch
    spec = source.spec
    kernels = usable_kernels(grid.device, source.compute_dtype(grid.device), spec.head_size)
    cluster = _cluster(grid, mesh.replicate, memory)
    cluster = replace(cluster, passes=-(-batch // micro) if micro else 1, kernels=kernels)
    axes = None if mesh == MeshSection() else (mesh.ulysses * mesh.tensor, mesh.ring)
    recipe = "tensor" if mesh.tensor > 1 else None
    given = config.train.micro_batch or config.train.batch
    sequences = -(-given // mesh.replicate) if given else None  # None: one for each group of ranks that share one
    documents = find_documents()
    answer = search(spec, cluster, tokens, recipe, axes, sequences, documents)
    most = longest(spec, cluster)
    asked = Question(config.model.source, spec, cluster, tokens, None, documents, running=True)
    if answer is None:
        raise PlanError(_refusal(asked, most, mesh, given))
    lines = explain(asked, answer, most, binding(spec, cluster, None, most))
    if axes is None:
        mesh = replace(mesh, ulysses=answer.axes.ulysses, ring=answer.axes.ring, tensor=answer.axes.tensor)
    return answer.plan, mesh, lines


def _refusal(asked: Question, most: int, mesh: MeshSection, sequences: int | None) -> str:
    """Return why no Plan fits. `most`: the longest context of one sequence on all GPUs."""
    tokens, cluster = asked.tokens or most, asked.cluster
    heads = f"mesh.tensor={mesh.tensor}" if mesh.tensor > 1 else f"mesh.ulysses={mesh.ulysses}"
    given = [f"{heads} and mesh.ring={mesh.ring}"] if mesh != MeshSection() else []
    given += [f"{sequences} sequences in a pass"] if sequences and sequences > 1 else []
    if most < tokens:
        alone = ", with train.micro_batch=1 and without options of mesh" if given and most else ""
        return refusal(asked, most) + alone
    return (
        f"{format_tokens(tokens)} tokens of {asked.model} on {cluster.count}x{cluster.gpu.name} do not fit with "
        f"{', and '.join(given)}: train.micro_batch=1 without options of mesh does"
    )


def _cluster(grid: Mesh, copies: int, memory: FreeMemory) -> Cluster:
    """Return the GPUs of one copy of the parameters, with their share of the nodes' memory.

    The planner keeps back a part of the free host memory (Cluster.budget): loading the model takes some before the
    tapes are allocated.
    """
    gpu = known_gpu(grid.device)
    if gpu is None:
        # The rates hardly change which Plan is fastest, and never whether it fits
        name, like = torch.cuda.get_device_properties(grid.device).name, read_gpus()[UNKNOWN]
        why = f"assumed to be that of the {UNKNOWN}, because {name} is not a known GPU"
        gpu = replace(like, name=name, sources=dict.fromkeys(like.sources, why))
    count, node = grid.size // copies, grid.node_ranks or grid.size
    gpus = math.gcd(count, node)
    gpu = replace(gpu, memory=float(memory.gpu))
    return Cluster(count, gpu, memory.host * gpus / node, node_gpus=gpus, copies=copies)


def open_data(config: Config, run: RunFolder, grid: Mesh) -> tuple[Data, TokenFile | None]:
    """Open the data to train on, and the documents that are held out of them, if any (`read_data`). Collective."""
    return open_together(lambda: read_data(config.data, run.path), grid)


def open_file(path: Path, indexes: Path | None, grid: Mesh) -> TokenFile:
    """Open a token file; `indexes` as in `open_tokens`. Collective."""
    return open_together(lambda: open_tokens(path, indexes), grid)


def open_together(opens: Callable[[], Opened], grid: Mesh) -> Opened:
    """Open token files on every rank. Collective.

    The first rank of a node computes the checksums of an old file; the others find them.
    """
    first = together(grid.group, lambda: opens() if grid.first_on_node else None)
    return together(grid.group, lambda: first or opens())


def read_data(options: DataSection, indexes: Path) -> tuple[Data, TokenFile | None]:
    """Return the data to train on, and the documents that data.validation holds out of each file, if it is a share.

    Without a file, the source code of Python's standard library. `indexes`: a folder for the checksums of old files.
    """
    named = options.mix or ({options.source: 1.0} if options.source else {})
    option = "data.mix" if options.mix else "data.source"
    files: dict[str, tuple[float, TokenFile]] = {}
    for name, weight in named.items():
        data = read_option(option, lambda name: open_synthetic(name) or open_tokens(Path(name), indexes), name)
        files[name] = weight, data
    files, held = files or {LIBRARY: (1.0, standard_library())}, None
    if options.share is not None:
        both = {name: hold_out(data, options.share) for name, (_, data) in files.items()}
        files = {name: (files[name][0], kept) for name, (kept, _) in both.items()}
        held = concatenated([part for _, part in both.values()])
    return mix(files, options.long or LONG, options.long_share), held


def open_rows(config: Config, data: Data, span: Span | None = None) -> Rows:
    """Return the sequences that a run, or a stage of it, draws from its data."""
    assert config.train.tokens
    seed = stage_seed(config.train.seed, span) if span else config.train.seed
    return Rows(data, config.train.tokens, seed, config.data.packing, config.data.too_long)


def check_data(data: Data, grid: Mesh, option: str = "data.source") -> None:
    """Raise an error on all ranks if the data cannot be learned, or differ between ranks. Collective.

    Each rank reads its own rows only, so nothing would notice later that a node has another file. The identity is a
    digest of every block's checksum, and each block is compared with its checksum when it is read.
    """
    sources = sources_of(data)
    name = "data.mix" if len(sources) > 1 else sources[0].title
    _, found = together_with(grid.group, data.identity, lambda mine: mine)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise DataError(
                f"rank {rank} reads other data than rank 0 from {name} ({describe_data(theirs)}, "
                f"rank 0 {describe_data(found[0])}): {option} must be the same file on all nodes"
            )
    for source in sources:
        if source.data.header.labels == 0:
            raise DataError(
                f"{source.title} has 0 labels in its {source.data.tokens} tokens: none counts in the loss and has a "
                "token of its document before it; prepare documents of 2 tokens or more, with completions"
            )


def describe_data(identity: dict[str, Any]) -> str:
    """Return the data's identity in a few words."""
    if sources := identity.get("mix"):
        return " + ".join(f"{source['share']:.1%} of {describe_data(source)}" for source in sources)
    digest = str(identity["sha256"])[:12]
    return f"{identity['tokens']} tokens in {identity['documents']} documents, sha256 {digest}"


def data_change(seen: Any, data: Data) -> str | None:
    """Return how the data differ from those that a checkpoint records; None if they are the same."""
    if isinstance(seen, list) and not isinstance(data, Mixture):
        # An old checkpoint: counts, tokenizer, and a checksum of both ends
        ends = [data.read(0, min(ENDS, data.tokens)), data.read(max(data.tokens - ENDS, 0), data.tokens)]
        crc32 = zlib.crc32(np.concatenate([window.tokens for window in ends]).data)
        now = [data.tokens, data.documents, data.tokenizer, crc32]
        return None if seen == now else f"it saw {seen}, now there are {now}"
    if seen == data.identity():
        return None
    before = seen if isinstance(seen, list) else describe_data(seen)
    return f"it saw {before}, now there are {describe_data(data.identity())}"


def open_source(config: Config, described: Path | None, resumed: bool, data: Data) -> ModelSource:
    """Return the model that a run trains (`load_source`), if the data's tokens are its own."""
    source = load_source(config, described, resumed)
    check_vocabulary(source, data)
    return source


def check_vocabulary(source: ModelSource, data: Data) -> None:
    """Raise an error if the data have tokens that the model does not know, or are of another tokenizer."""
    if problem := misfit(data, f"'{data.path}'", source.spec.vocab, source.folder):
        raise DataError(problem)
