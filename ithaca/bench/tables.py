"""The rows of every table, as data: techniques as Plans, and what is published beside them. No torch.

Published figures are those of the papers and talks that each names. Their MFU differs in convention (some count the
full square of attention, or recomputation), so it stands beside ours and is not compared.
"""

from ithaca.bench.rows import Options, Published, Row

K, M = 2**10, 2**20

LADDER_8B = "FPDT (Yao et al.), its ladder: Llama3-8B on 8 GPUs of 80 GB"
ALST = "ALST (Bekman et al.): Llama-8B on 8 × H100-80GB"
UPIPE = "UPipe (untied Ulysses), Llama3-8B on 8 × H100-80GB"
TALK = "the talk on untied Ulysses: Llama 3B sizes on 8 × H100"


def _fpdt(tokens: int, gigabytes: float, mfu: float) -> Published:
    return Published(source=LADDER_8B, tokens=tokens, gigabytes=gigabytes, mfu=mfu)


def _talk(note: str, tokens: int | None = None, gigabytes: float | None = None) -> Published:
    return Published(source=TALK, tokens=tokens, gigabytes=gigabytes, note=note)


_TENSOR: Options = {"recipe": "tensor", "zero": 1}
_NONE: Options = {"recipe": "ulysses", "checkpoint": "none"}
_OFFLOAD: Options = {"recipe": "ulysses", "checkpoint": "full", "x": "host"}
_AWAY: Options = {"recipe": "sweep", "lse": "host", "kv": "host", "optimizer": "host"}

# "How we get here": each row has what the rows before it lead to. The loss is in tiles everywhere
LADDER = (
    Row(
        name="Tensor parallel",
        adds="Megatron's tensor parallelism with sequence parallelism",
        plans=({**_TENSOR, "checkpoint": "none"},),
        published={"llama3-8b": _fpdt(32 * K, 64.3, 9.4)},
    ),
    Row(
        name="Tensor parallel + checkpointing",
        adds="activation checkpointing",
        plans=({**_TENSOR, "checkpoint": "full"},),
        published={"llama3-8b": _fpdt(128 * K, 61.2, 19.4)},
    ),
    Row(
        name="Tensor parallel + checkpointing + offload",
        adds="checkpoints in host memory",
        plans=({**_TENSOR, "checkpoint": "full", "x": "host"},),
        published={"llama3-8b": _fpdt(512 * K, 78.7, 32.7)},
    ),
    Row(
        name="ZeRO-3 alone",
        adds="every rank has its own sequence, parameters are sharded",
        plans=({"recipe": "dense", "checkpoint": "none"},),
        shares=False,
        begins=True,
        published={"llama3.2-3b": _talk("3M tokens do not fit with FSDP alone")},
    ),
    Row(
        name="Ulysses + ZeRO-1",
        adds="ranks share a sequence by heads",
        plans=({**_NONE, "zero": 1},),
        published={"llama3-8b": _fpdt(64 * K, 58.9, 15.3)},
    ),
    Row(
        name="Ulysses + ZeRO-2",
        adds="gradients sharded over passes",
        plans=({**_NONE, "zero": 2},),
        published={"llama3-8b": _fpdt(64 * K, 54.5, 15.3)},
    ),
    Row(
        name="Ulysses + ZeRO-3",
        adds="parameters sharded",
        plans=(_NONE,),
        published={
            "llama3-8b": _fpdt(64 * K, 52.3, 21.0),
            "llama3.2-3b": _talk("Ulysses cuts activations about 8 ×"),
        },
    ),
    Row(
        name="+ checkpointing",
        adds="activation checkpointing",
        plans=({"recipe": "ulysses", "checkpoint": "full"},),
        published={"llama3.2-3b": _talk("checkpointing cuts activations about 8 × more")},
    ),
    Row(
        name="+ offload, ZeRO-1",
        adds="checkpoints in host memory",
        plans=({**_OFFLOAD, "zero": 1},),
        published={"llama3-8b": _fpdt(512 * K, 65.5, 46.8)},
    ),
    Row(
        name="+ offload, ZeRO-2",
        adds="gradients sharded over passes",
        plans=({**_OFFLOAD, "zero": 2},),
        published={"llama3-8b": _fpdt(512 * K, 65.5, 46.8)},
    ),
    Row(
        name="+ offload, ZeRO-3",
        adds="parameters sharded",
        plans=(_OFFLOAD,),
        published={
            "llama3-8b": _fpdt(512 * K, 60.1, 47.2),
            "llama3.2-3b": _talk("offload brings the GPU to about 37 GB", gigabytes=37),
        },
    ),
    Row(
        name="+ tiled MLP (ALST)",
        adds="the MLP in tiles",
        plans=({"recipe": "alst"},),
        published={
            "llama3-8b": Published(source=ALST, tokens=3700 * K, note="limited by 1.9 TB of host memory"),
            "llama3.2-3b": _talk("tiling reaches 3M", tokens=3 * M),
        },
    ),
    Row(
        name="FPDT",
        adds="chunks of a sequence, K and V in host memory",
        plans=({"recipe": "fpdt"},),
        published={"llama3-8b": _fpdt(4 * M, 68.0, 55.7)},
    ),
    Row(
        name="Untied Ulysses (UPipe)",
        adds="a few heads at a time",
        plans=({"recipe": "untied"},),
        published={
            "llama3-8b": Published(source=UPIPE, tokens=5 * M, note="98 tokens/s/GPU, 41.4 % causal MFU"),
            "llama3.2-3b": _talk("untied Ulysses reaches 5M", tokens=5 * M),
        },
    ),
    Row(
        name="Sweep",
        adds="one causal sweep over chunks; of all tokens only K, V and their gradients on the GPU",
        plans=({"recipe": "sweep", "o": "recompute"},),
    ),
    Row(
        name="Sweep, keep o",
        adds="attention outputs saved instead of attention run again; every second x rebuilt",
        plans=({"recipe": "sweep", "x": "host, rebuild"},),
        layers=4,
    ),
    Row(
        name="Sweep, K and V on the host",
        adds="K, V, log-sum-exps and AdamW's moments in host memory",
        plans=({**_AWAY, "o": "recompute"},),
    ),
    Row(
        name="Sweep, disk",
        adds="x, o and the residual on the node's disk",
        plans=({**_AWAY, "x": "disk", "o": "disk", "residual": "disk", "disk": "/var/tmp"},),
    ),
)

# Models of which memory is also asked for at one length: what the talk says of 3M tokens
PEAK_AT = {"llama3.2-3b": 3 * M}

# The full stack, and the same without one component at a time
_FULL: Options = {**_AWAY, "o": "recompute", "residual": "host"}


def _without(name: str, adds: str, shares: bool = True, **changes: object) -> Row:
    return Row(name=f"without {name}", adds=adds, plans=({**_FULL, **changes},), shares=shares)


ABLATION = (
    Row(name="full stack", adds="sweep, Ulysses, ZeRO-3; x, residual, K, V and moments in host memory", plans=(_FULL,)),
    _without("context parallelism", "every rank has its own sequence", shares=False),
    Row(
        name="without chunks",
        adds="blocks run over all tokens of a rank at once (recipe alst)",
        plans=({"recipe": "alst", "optimizer": "host"},),
    ),
    Row(
        name="without chunks and tiles",
        adds="the MLP of all tokens of a rank at once (recipe ulysses)",
        plans=({**_OFFLOAD, "optimizer": "host"},),
    ),
    _without("offloaded block inputs", "x on the GPU", x="device"),
    _without("offloaded residual", "the residual on the GPU", residual="device"),
    _without("offloaded K and V", "K, V and their gradients on the GPU", kv="device"),
    _without("offloaded moments", "AdamW's moments on the GPU", optimizer="device"),
    _without("sharded parameters", "ZeRO-2 in place of ZeRO-3", zero=2),
    _without("recomputation", "attention outputs saved in host memory, so that attention runs once", o="host"),
)

# With and without context parallelism, the fastest Plan that fits at each length
WITHOUT_SHARING = Row(
    name="without",
    adds="every rank has its own sequence: dense",
    plans=(
        {"recipe": "dense", "checkpoint": "none"},
        {"recipe": "dense", "checkpoint": "selective"},
        {"recipe": "dense", "checkpoint": "full"},
        {"recipe": "dense", "checkpoint": "full", "x": "host", "tile": 8 * K},
    ),
    shares=False,
)
WITH_SHARING = Row(
    name="with",
    adds="all ranks share one sequence: Ulysses, then the sweep",
    plans=(
        {"recipe": "ulysses", "checkpoint": "none"},
        {"recipe": "ulysses", "checkpoint": "selective"},
        {"recipe": "sweep"},
    ),
)

# The dial: chunk sizes and heads at a time. Predicted for these GPUs beside the one that is here
CHUNKS = tuple(8 * K << doubled for doubled in range(6))  # 8K … 256K
HEADS_EACH = (1, 2, 4)  # query heads of each rank that attend at a time, under `untied`
GPUS = ("A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")


def dial_rows(ranks: int, tokens: int, heads: int) -> list[Row]:
    """Return the settings of the dial for one length and a model with this many query heads."""
    chunks = [chunk for chunk in CHUNKS if chunk <= tokens] or [tokens]
    rows = [
        Row(name=f"chunk {chunk}", adds="tokens of a chunk", plans=({"recipe": "sweep", "chunk": chunk},))
        for chunk in chunks
    ]
    return rows + [
        Row(name=f"heads {each * ranks}", adds="heads at a time", plans=({"recipe": "untied", "heads": each * ranks},))
        for each in HEADS_EACH
        if each * ranks <= heads
    ]


# What checkpointing costs in time and gives in memory
RECOMPUTE = (
    Row(name="none", adds="everything is kept", plans=({"recipe": "ulysses", "checkpoint": "none"},)),
    Row(
        name="selective",
        adds="x and o are kept, attention runs once",
        plans=({"recipe": "ulysses", "checkpoint": "selective"},),
    ),
    Row(name="full", adds="x is kept", plans=({"recipe": "ulysses", "checkpoint": "full"},)),
    Row(name="full, on the host", adds="x is kept in host memory", plans=({"recipe": "ulysses", "x": "host"},)),
    Row(
        name="sweep, o recomputed",
        adds="x is kept in host memory, attention runs again",
        plans=({"recipe": "sweep", "o": "recompute"},),
    ),
    Row(
        name="sweep, keep o",
        adds="o is kept in host memory, every second x is rebuilt from it",
        plans=({"recipe": "sweep", "x": "host, rebuild"},),
        layers=4,
    ),
    Row(name="sweep, keep both", adds="x and o are kept in host memory", plans=({"recipe": "sweep"},)),
)
