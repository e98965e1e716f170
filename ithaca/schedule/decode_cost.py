"""The memory of prompts and their new tokens: the K/V cache, and the peak of an evaluation by owner. No torch.

    cache        K and V of every layer: 2 · Hkv · D numbers for each local token and layer, with all key/value heads.
                 On the device, or in host memory with `SLOTS` tiles on the device (kv_cache.py allocates from this)
    new tokens   the same numbers for each new token of each continuation, on every context rank, on the device
    logits       of one new token of each continuation, and their log-softmax in at least fp32

An evaluation takes no more than a training step under the same Plan and as many tokens: it needs none of the tapes that
only a backward pass reads, no gradients, and no workspace of a backward kernel. The cache is on the device only if that
stays so (`cache_place`); else it is in host memory, where x and o of training would be.
"""

from collections import Counter
from collections.abc import Iterator

from ithaca.base.owners import BATCH, BLOCKS, GATHERED, KERNELS, KEYS, LOSS, STATES, TAPES
from ithaca.schedule.job import Bytes, Job
from ithaca.schedule.step_memory import (
    LIBRARIES,
    PER_TOKEN,
    Memory,
    block_parameters,
    gathered_weights,
    kept_weights,
    left_over,
    rank_states,
    step_memory,
)
from ithaca.tape.spec import TapeSpec, device_bytes, device_tape_bytes, disk_bytes, host_bytes

CACHE = "cache"  # the name of the tapes
SLOTS = 3  # tiles on the device if the tapes are in host memory: one in use, one arriving, one leaving


def cache_tapes(job: Job, place: str) -> TapeSpec:
    """The tapes of a cache: this rank's tokens with all key/value heads, for every layer."""
    spec = job.spec
    features = 2, spec.kv_heads, spec.head_size
    return TapeSpec(CACHE, CACHE, place, tuple(range(spec.layers)), features, job.itemsize, False, SLOTS, False)


def prompt_tapes(job: Job, place: str) -> list[TapeSpec]:
    """All tapes of an evaluation: those of a pass without gradients, and the cache."""
    return [*(tape for tape in job.tapes if not tape.training), cache_tapes(job, place)]


def new_token_bytes(job: Job, continuations: int, new: int) -> int:
    """K and V of `new` tokens of each continuation."""
    return job.spec.layers * continuations * new * 2 * job.spec.kv_heads * job.spec.head_size * job.itemsize


def evaluation_memory(job: Job, place: str, continuations: int = 0, new: int = 0, moments: bool = True) -> Memory:
    """The peak of reading prompts and decoding `new` tokens of some continuations of them.

    `job`: a pass over the prompts. `place`: of the cache. `moments`: the optimizer's are there, as during training.
    """
    tapes, always = prompt_tapes(job, place), _resident(job, place, moments)
    peaks = {name: always + phase for name, phase in _phases(job, continuations, new)}
    name = max(peaks, key=lambda name: peaks[name].total())
    parts = {owner: round(size) for owner, size in peaks[name].items() if size}
    parts |= left_over(job, reads=True)
    host = host_bytes(tapes, job.tiles, gpu=True)
    return Memory(parts, name, host, disk_bytes(tapes, job.tiles), tapes, job.tiles)


def cache_place(job: Job) -> str:
    """Where the cache lives: on the device if an evaluation then takes no more of it than a training step does."""
    return "device" if evaluation_memory(job, "device").total <= step_memory(job).total else "host"


def absent_in_evaluation(job: Job, running: Job, place: str) -> Bytes:
    """Bytes that an evaluation holds for layers that `running`, the same job with fewer layers, does not have."""
    return Counter(
        {
            STATES: rank_states(job, moments=True)[0] - rank_states(running, moments=True)[0],
            KEYS: sum(
                sign * device_tape_bytes([cache_tapes(which, place)], which.tiles)
                for which, sign in ((job, 1), (running, -1))
            ),
            GATHERED: kept_weights(job) - kept_weights(running),
        }
    )


def _resident(job: Job, place: str, moments: bool) -> Bytes:
    """Bytes that are on the device during the whole evaluation."""
    keys, others = (
        [tape for tape in prompt_tapes(job, place) if (tape.option in ("kv", CACHE)) == wanted]
        for wanted in (True, False)
    )
    states, slots = rank_states(job, moments)
    return Counter(
        {
            STATES: states,
            KEYS: device_bytes(keys, job.tiles),
            TAPES: device_bytes(others, job.tiles) + slots,
            GATHERED: kept_weights(job),
            BATCH: PER_TOKEN * job.tiles.length,
            KERNELS: LIBRARIES,
        }
    )


def _phases(job: Job, continuations: int, new: int) -> Iterator[tuple[str, Bytes]]:
    """The phases of an evaluation that can be its peak, with what each holds beside `_resident`."""
    # Going forward FSDP2 holds a block, and the next one as it was gathered and as it is used
    copied = job.itemsize * block_parameters(job).all if job.plan.zero == 3 and job.axes.parameter > 1 else 0
    gathered = Counter({GATHERED: gathered_weights(job) + copied})
    for name, peak in job.costs.reading(job).items():
        yield f"{name} of a prompt", peak + gathered
    spec, high = job.spec, job.high
    logits = continuations * spec.vocab * (job.itemsize + 2 * high)
    head = 0 if spec.tied or job.plan.zero < 3 else job.itemsize * spec.vocab * spec.hidden
    yield (
        "new tokens",
        gathered + Counter({BLOCKS: new_token_bytes(job, continuations, new), LOSS: logits, GATHERED: head}),
    )
