"""A run from its configuration to its last checkpoint. Every rank calls `train`."""

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ithaca.assemble import Model, apply
from ithaca.base.errors import ConfigError, RunError
from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.config import Config
from ithaca.data.sample import sequences
from ithaca.data.tokenfile import TokenFile
from ithaca.model.spec import PEAK_FLOPS
from ithaca.parallel.agree import from_first, together
from ithaca.parallel.balance import RingWork, describe_work, ring_work
from ithaca.parallel.batch import Batch
from ithaca.parallel.hangs import answering, lost_touch, set_timeout, step_seconds, timeout
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.planner.advice import Rank, out_of_memory
from ithaca.train.auto import find_room
from ithaca.train.checkpoint import Checkpoints
from ithaca.train.metrics import Sink, draw_loss, open_sinks
from ithaca.train.optimizer import clip, learning_rate, make_optimizer
from ithaca.train.progress import Progress
from ithaca.train.run_folder import RunFolder, check_shared
from ithaca.train.start import identity, join_free_memory, open_data, open_source, settle
from ithaca.train.stop import StopRequest


def train(config: Config, path: Path, launched: bool = False) -> None:
    """Train in a run folder on this job's ranks, from its last checkpoint on if it has one.

    `launched` ranks leave it to their launcher to end them at once (stop.py).
    """
    join_free_memory()
    grid = mesh(**vars(config.mesh), device=None if config.train.device == "auto" else config.train.device)
    with answering(grid.group):
        _train(config, RunFolder(path), grid, launched)


def _train(config: Config, run: RunFolder, grid: Mesh, launched: bool) -> None:
    lock = together(grid.group, lambda: run.hold() if grid.rank == 0 else None)
    try:
        check_shared(run, lock, grid)
        room = find_room(grid)
        config, (plan, axes, why) = from_first(grid.group, lambda: settle(config, run, grid, room))
        if axes != config.mesh:
            grid = mesh(**vars(axes), device=grid.device.type)
        resumed = from_first(grid.group, run.has_checkpoints)
        data = together(grid.group, lambda: open_data(config))
        source = together(grid.group, lambda: open_source(config, run, resumed, data))
        Run(config, run, apply(source, plan, grid), data, why).go(launched)
    finally:
        if lock:
            lock.close()


class Run:
    """One run on one rank: what its steps share."""

    def __init__(self, config: Config, folder: RunFolder, model: Model, data: TokenFile, why: Sequence[str] = ()):
        """`why`: what the planner says of the Plan, where it chose it."""
        self.config, self.folder, self.model, self.data = config, folder, model, data
        self.mesh: Mesh = model.mesh
        self.first = self.mesh.rank == 0
        model.check_memory(*self._pass_size())
        tapes = model.host_bytes(*self._pass_size())  # taken last, and kept free until then
        options = config.train
        self.optimizer = make_optimizer(
            model,
            learning_rate=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            reserved_bytes=tapes,
        )
        self.why, self.notes = why, list[str]()  # said once there is someone to say it
        self.announced = False
        self.checkpoints = Checkpoints(folder.checkpoints, model, self.optimizer, config.run.keep, self._note, tapes)
        self.checkpoints.clean()
        manifest = self.checkpoints.load(self._note, repair=True)
        self.begun = self.done = self.saved = manifest["step"] if manifest else 0  # steps
        if manifest:
            self._check_resumed(manifest)
        together(self.mesh.group, lambda: folder.begin(config, model.source, model.dtype) if self.first else None)
        self.progress = Progress(folder.log if self.first else None, self.done, config.train.steps)
        self.sinks: list[Sink] = []

    def _pass_size(self) -> tuple[int, int]:
        """Sequences in a pass, and the tokens of each."""
        options = self.config.train
        return options.micro_batch or options.batch, options.tokens  # pyrefly: ignore

    def _check_resumed(self, manifest: dict[str, Any]) -> None:
        if manifest["data"] != identity(self.data):
            raise ConfigError(
                f"the data have changed since the checkpoint of step {self.done}: it saw {manifest['data']}, "
                f"now there are {identity(self.data)}; name a new --run"
            )
        if self.done > self.config.train.steps:
            raise ConfigError(
                f"the run has done {self.done} steps already, and train.steps is {self.config.train.steps}: "
                "a larger number goes on"
            )

    def go(self, launched: bool) -> None:
        """All steps that are left, whatever ends them."""
        if self.first:
            self.folder.cut_metrics(self.done)
        self.sinks = together(self.mesh.group, lambda: open_sinks(self.folder, self.config.run.report, self.first))
        self.stop = StopRequest(self.mesh, launched)
        self.timeout = self.config.run.timeout or timeout(self._step_seconds())
        set_timeout(self.mesh.groups, self.timeout)
        self._announce()
        try:
            self._allocate()
            stopped = self._steps()
            self._save()
            self.checkpoints.wait()
            self._report_problem(final=True)
            self._conclude(stopped)
        except torch.OutOfMemoryError as error:
            raise RunError(self._out_of_memory(error)) from None
        except RuntimeError as error:
            if lost_touch(error):
                self.checkpoints.abandon()
            raise
        finally:
            self.checkpoints.close()
            for sink in self.sinks:
                with contextlib.suppress(OSError):
                    sink.close()
            self.progress.close()
            self.stop.close()

    def _out_of_memory(self, error: Exception) -> str:
        grid, (rows, tokens) = self.mesh, self._pass_size()
        sequences = math.ceil(rows / grid.data_ranks)
        spec, plan = self.model.spec, self.model.plan
        rank = Rank(spec, plan, sequences * tokens, grid.ulysses, grid.ring, grid.parameter_ranks // grid.context_ranks)
        first = next((words for words in str(error).split(". ") if "Tried" in words), str(error).split(". ")[0])
        total = torch.cuda.mem_get_info(grid.device)[1]
        return out_of_memory(rank, first, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total)

    def _step_seconds(self) -> float:
        """What a step should take at most on the rank that has the most sequences."""
        rows, tokens = self._pass_size()
        passes = self.config.train.batch // rows  # pyrefly: ignore
        sequences = passes * math.ceil(rows / self.mesh.data_ranks)
        flops = self.model.spec.flops_per_token(tokens) * sequences * tokens / self.mesh.context_ranks
        return step_seconds(flops, self.mesh.device, torch.get_num_threads())

    def _allocate(self) -> None:
        """Take the memory of the Plan's tapes before the first step."""
        self.model.allocate(*self._pass_size(), self.progress.live)
        for line in self.model.describe_tapes():
            self.progress.say(line)

    def _steps(self) -> bool:
        """Train until the last step (False) or until someone asks to stop (True)."""
        every = self.config.run.checkpoint_every
        while self.done < self.config.train.steps:
            metrics = self._step()
            self._publish(metrics)
            self._report_problem(final=False)
            if self.stop.agreed() and self.done < self.config.train.steps:
                return True
            if every and self.done % every == 0 and self.done < self.config.train.steps:
                self._save()
        return False

    def _publish(self, metrics: dict[str, Any]) -> None:
        self.progress.step(metrics)
        for sink in self.sinks:
            try:
                sink.write(metrics)
            except OSError as problem:
                self.progress.warn(
                    f"the metrics of step {self.done} could not be written ({problem}); training goes on"
                )

    def _step(self) -> dict[str, Any]:
        options, began = self.config.train, time.perf_counter()
        batches = self._batches()
        work = self._ring_work(batches)
        if work and self.done == self.begun:
            self.progress.say(f"in this step {describe_work(work)}")
        loss = self._backward(batches)
        norm = clip(self.model, options.clip)
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._fail(loss, norm)
        rate = learning_rate(options, self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.checkpoints.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        seconds = time.perf_counter() - began
        return self._metrics(batches, loss, norm, rate, seconds) | {
            "ring_waiting": round(work.waiting, 4) if work else None
        }

    def _batches(self) -> list[Batch]:
        """The step's sequences, this rank's part of each pass."""
        options = self.config.train
        drawn = sequences(self.data, options.batch, options.tokens, options.seed, self.done)  # pyrefly: ignore
        parts = zip(*(tensor.split(options.micro_batch or len(tensor)) for tensor in drawn), strict=True)
        return [self.model.shard(tokens, labels, documents) for tokens, labels, documents in parts]

    def _backward(self, batches: list[Batch]) -> float:
        """The step's loss, its gradients left on the parameters: those of one large batch."""
        valid = sum(batch.valid_tokens for batch in batches)
        losses = []
        for number, batch in enumerate(batches, start=1):
            loss = self.model(batch, valid_tokens=valid, last=number == len(batches))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum().item()

    def _ring_work(self, batches: list[Batch]) -> RingWork | None:
        """What the ring ranks of this rank's sequences attend to; None where there is no ring."""
        if self.mesh.ring == 1:
            return None
        return sum((ring_work(batch.layout, batch.bounds, self.model.plan.sweeps) for batch in batches), RingWork([]))

    def _metrics(self, batches: list[Batch], loss: float, norm: float, rate: float, seconds: float) -> dict[str, Any]:
        ranks, tokens = self.mesh.size, sum(batch.total_tokens for batch in batches)
        flops = sum(self.model.spec.flops_per_token(batch.attended) * batch.total_tokens for batch in batches)
        gpu = self.mesh.device.type == "cuda"
        return {
            "step": self.done,
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": rate,
            "tokens": self.done * tokens,
            "seconds": round(seconds, 4),
            "tokens_per_second_per_rank": round(tokens / seconds / ranks, 1),
            "mfu_causal": round(flops / seconds / ranks / PEAK_FLOPS, 4) if gpu else None,
            "gpu_bytes": torch.cuda.max_memory_reserved() if gpu else None,
            "host_bytes": psutil.Process().memory_info().rss,
        }

    def _save(self) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        if self.saved != self.done:
            self.checkpoints.save(self.done, {"data": identity(self.data), "config": self.config.toml()})
            self.saved = self.done

    def _report_problem(self, final: bool) -> None:
        """A checkpoint that could not be written: go on, loudly; at the end of the run it is an error."""
        problem = self.checkpoints.problem()
        if problem is None:
            return
        step, reason = problem
        good = self.checkpoints.steps()
        last = f"the last good one is of step {good[-1]}" if good else "there is none yet"
        free, needed = shutil.disk_usage(self.folder.path).free, self.checkpoints.size()
        room = f"it takes {format_bytes(needed)}, and {format_bytes(free)} are free on its disk"
        text = f"the checkpoint of step {step} could not be written ({reason}; {room}); {last}"
        if final:
            raise RunError(f"{text}: mend the cause and start again, ithaca train --run {self.folder.path}")
        self.progress.warn(f"{text}; training goes on")

    def _fail(self, loss: float, norm: float) -> None:
        self.checkpoints.wait()
        good = self.checkpoints.steps()
        last = f"the last good checkpoint is of step {good[-1]}" if good else "there is no checkpoint yet"
        raise RunError(
            f"the loss of step {self.done + 1} is {loss} (gradient norm {norm}): {last}; "
            "a lower train.learning_rate or train.clip may help"
        )

    def _note(self, text: str) -> None:
        self.progress.warn(text) if self.announced else self.notes.append(text)

    def _announce(self) -> None:
        model, options = self.model, self.config.train
        passes = f" in {options.batch // options.micro_batch} passes" if options.micro_batch else ""  # pyrefly: ignore
        dtype = str(model.dtype).removeprefix("torch.")
        self.progress.say(
            f"{model.spec.family}, {model.spec.parameters() / 1e6:.1f}M parameters, on {self.mesh.size} "
            f"{self.mesh.device.type} ranks in {dtype}, attention by {model.kernel.name}"
        )
        self.progress.say(
            f"{options.batch} sequences of {format_tokens(options.tokens)} tokens a step{passes}, "  # pyrefly: ignore
            f"{options.steps} steps, run folder {self.folder.path}"
        )
        for line in model.describe_ranks():
            self.progress.say(line)
        if self.mesh.size > 1:
            self.progress.say(f"a rank that the others wait for is given up after {format_seconds(self.timeout)}")
        if self.done:
            self.progress.say(f"going on from the checkpoint of step {self.done}")
        for text in self.why:
            self.progress.say(text)
        for text in self.notes:
            self.progress.warn(text)
        self.announced = True

    def _conclude(self, stopped: bool) -> None:
        if not self.first:
            return
        self.progress.end_live()
        metrics = self.folder.read_metrics()
        if not metrics:  # someone has removed them
            return
        draw_loss(metrics, self.folder.picture)
        path = self.folder.path
        if stopped:
            self.progress.say(f"stopped after step {self.done}; go on with: ithaca train --run {path}")
            return
        self.progress.say(
            f"done: loss {metrics[0]['loss']:.3f} -> {metrics[-1]['loss']:.3f} over {self.done} steps\n"
            f"  run folder   {path}\n"
            f"  loss curve   {self.folder.picture}\n"
            f"  next         ithaca export {path} {path}-model"
        )
