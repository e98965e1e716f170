"""Joining a job: every rank signs in at the job's store before torch's process groups begin.

torch waits 10 to 30 minutes for a rank that does not come, and does not say which one it is. Here a rank waits for
`JOIN_SECONDS`, then looks who has not signed in and tells the others, so that all name the same ranks. The time-out
also holds for the start of the process groups: a rank may end after it has signed in.

The store is the one that torch would use: its address is in MASTER_ADDR and MASTER_PORT, and rank 0 opens it unless
the launcher has done so (TORCHELASTIC_USE_AGENT_STORE). Waiting costs each rank ten small requests a second.

**Attempts.** torchrun keeps its store over restarts, with the addresses of ranks that are gone. So each attempt has a
part of the store for itself. Rank 0 names it: torchrun's run id and restart count, and a random number. The number is
needed because each node counts its own restarts, and a node that only follows another one does not count. The other
ranks take the newest name. A rank that finds its own rank signed in there belongs to a later attempt, and waits for the
next name.
"""

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ithaca.base.errors import LostRankError, PlanError, RunError, first_line
from ithaca.base.sizes import MOST_SECONDS, format_seconds
from ithaca.parallel.hangs import named, own_output, roll_call, without_key

JOIN_SECONDS = 300.0  # ranks that start together come within seconds; this leaves time for slow disks and machines
POLL_SECONDS = 0.2
TOLD_SECONDS = 1.0  # for which a store stays after its rank has given up, so that the others read why
LONGER = "a larger run.timeout, or timeout of ithaca.mesh, waits longer"
TORCH_SECONDS = default_pg_timeout.total_seconds()  # torch's own timeout of a group, once the job has begun

# Keys of the store. All but the first are in an attempt's own part of it
_ATTEMPT = "ithaca/attempt"  # the name of the newest one
_JOINED = "ithaca/joined/"  # + rank
_ALL = "ithaca/joined"  # set by rank 0 when it has seen all of them
_GIVEN_UP = "ithaca/given-up"


@dataclass(frozen=True)
class Job:
    """A job as the environment describes it."""

    rank: int
    ranks: int
    host: str
    port: int
    launcher: bool  # whether the store is the launcher's
    attempt: str = "0"  # torchrun's run id and restart count, as this node has them

    @property
    def hosts(self) -> bool:
        """Whether this rank opens the store."""
        return self.rank == 0 and not self.launcher


def join_job(backend: str, seconds: float) -> None:
    """Join the job that the environment describes. Raise a LostRankError if other ranks do not come in time."""
    job, until = read_job(), time.monotonic() + seconds
    store = _sign_in(_open_store(job, seconds, until), job, seconds, until)
    limit = timedelta(seconds=seconds)
    try:
        with roll_call(list(range(job.ranks)), job.rank, store):
            dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks, timeout=limit)
    except RuntimeError as problem:
        text = f"rank {job.rank} of {job.ranks} cannot connect to the other ranks ({first_line(problem)})"
        raise LostRankError(text, []) from None
    store.set_timeout(default_pg_timeout)


def checked_seconds(seconds: float | None) -> float:
    """Return how long to wait for other ranks."""
    if seconds is None:
        return JOIN_SECONDS
    if not 0 < seconds <= MOST_SECONDS:
        raise PlanError(f"timeout must be above 0 and at most {MOST_SECONDS} seconds; it is {seconds:g}")
    return seconds


def read_job() -> Job:
    """Return the job in torchrun's variables."""
    rank = os.environ["RANK"]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise PlanError(
                f"the environment has RANK={rank}, as torchrun sets it, but no {name}: "
                "unset RANK to use this machine's devices alone"
            )
    ranks, port = os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
    if not (_is_number(rank) and _is_number(ranks) and int(rank) < int(ranks)):
        raise PlanError(
            f"the environment has RANK={rank} and WORLD_SIZE={ranks}, which is not a rank of a job: "
            "unset both to use this machine's devices alone"
        )
    if not (_is_number(port) and int(port) < 2**16):
        raise PlanError(f"the environment has MASTER_PORT={port}, which is not a port: 1 to 65535 are, as 29500")
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    names = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
    attempt = "/".join(name for name in names if name)
    return Job(int(rank), int(ranks), os.environ["MASTER_ADDR"], int(port), launcher, attempt)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _open_store(job: Job, seconds: float, until: float) -> dist.TCPStore:
    if not job.hosts:
        _wait_for_host(job, seconds, until)
    limit = timedelta(seconds=max(until - time.monotonic(), POLL_SECONDS))
    try:
        return dist.TCPStore(
            job.host, job.port, is_master=job.hosts, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except (OSError, RuntimeError) as problem:  # torch's own errors are RuntimeErrors
        reason, verb = first_line(problem), "open" if job.hosts else "reach"
        raise RunError(
            f"rank {job.rank} cannot {verb} the job's store at {job.host}:{job.port} ({reason}): "
            "another MASTER_PORT may be free"
        ) from None


def _wait_for_host(job: Job, seconds: float, until: float) -> None:
    """Wait until the store's address accepts connections. torch's own waiting prints C++ tracebacks."""
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((job.host, job.port), timeout=max(left, POLL_SECONDS)).close()
            return
        except OSError as problem:
            if left > 0:
                time.sleep(POLL_SECONDS)
                continue
            who = "the launcher" if job.launcher else f"rank 0 of {job.ranks}"
            raise LostRankError(
                f"{who} did not open the job's store at {job.host}:{job.port} within {format_seconds(seconds)} "
                f"({problem}): its own output says why, and {LONGER}",
                [] if job.launcher else [0],
            ) from None


def _sign_in(store: dist.Store, job: Job, seconds: float, until: float) -> dist.Store:
    """Sign in to the newest attempt, and wait until all ranks have. Return the attempt's part of the store."""
    try:
        if job.rank == 0:
            store.set(_ATTEMPT, f"{job.attempt}/{secrets.token_hex(4)}")
        name, part, own = "", None, False
        while True:
            newest = store.get(_ATTEMPT).decode() if store.check([_ATTEMPT]) else ""
            if newest != name:
                name = newest
                part = dist.PrefixStore(f"default_pg/{name}", store)  # below torch's own prefix
                own = part.add(f"{_JOINED}{job.rank}", 1) == 1
            if part and own:
                if _all_joined(part, job):
                    return part
                if part.check([_GIVEN_UP]):
                    raise LostRankError(**json.loads(part.get(_GIVEN_UP)))
            if time.monotonic() > until:
                _give_up(part if own else None, job, seconds)
            time.sleep(POLL_SECONDS)
    except RuntimeError:  # the store does not respond
        who = "the launcher" if job.launcher else f"rank 0 of {job.ranks}"
        raise LostRankError(
            f"{who}, where the job's store is, ended while the ranks joined: its own output says why",
            [] if job.launcher else [0],
        ) from None


def _all_joined(store: dist.Store, job: Job) -> bool:
    """Rank 0 asks for all keys, the others whether it has found them: a thousand ranks would ask for a million."""
    if job.rank != 0:
        return store.check([_ALL])
    if not store.check([f"{_JOINED}{rank}" for rank in range(job.ranks)]):
        return False
    store.set(_ALL, "-")
    return True


def _give_up(store: dist.Store | None, job: Job, seconds: float) -> None:
    """Raise an error that names the ranks that have not signed in, here and on the other ranks."""
    if store is None:
        raise LostRankError(
            f"rank 0 of {job.ranks} did not join the job within {format_seconds(seconds)}: its own output says why, "
            f"and {LONGER}",
            [0],
        )
    missing = without_key(store, _JOINED, list(range(job.ranks)))
    if not missing:
        return  # the last one has come right now
    text = (
        f"{job.ranks - len(missing)} of {job.ranks} ranks joined the job within {format_seconds(seconds)}, and "
        f"{named(missing)} did not: {own_output(missing)} says why, and {LONGER}"
    )
    store.set(_GIVEN_UP, json.dumps({"text": text, "ranks": missing}))
    if job.hosts:
        time.sleep(TOLD_SECONDS)
    raise LostRankError(text, missing)
