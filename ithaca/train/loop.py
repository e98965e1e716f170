"""The steps of a run, or of a stage of it, from its start to its end, with its checkpoints in between."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from ithaca.assemble import Model
from ithaca.base.errors import ConfigError, RunError
from ithaca.base.shell import continue_command
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.checkpoint.files import own_validation
from ithaca.config import Config
from ithaca.data.mixture import Data
from ithaca.data.packing import Rows
from ithaca.data.windows import Windows
from ithaca.optimizer.adamw import clip, make_optimizer
from ithaca.parallel.agree import from_first, together
from ithaca.parallel.balance import describe_work
from ithaca.parallel.batch import Batch, check_rows
from ithaca.parallel.hangs import Roll, is_collective_error, set_timeout, step_seconds, timeout
from ithaca.parallel.joining import TORCH_SECONDS
from ithaca.parallel.mesh import Mesh
from ithaca.schedule.marks import OPTIMIZER, StepMarks, make_marks
from ithaca.train.disk import check_disks
from ithaca.train.folder.record import check_record, list_changes, make_record
from ithaca.train.folder.run_folder import VALIDATION, RunFolder
from ithaca.train.loader import Loader
from ithaca.train.measurements import evaluate, make_validation, measure_start, notes, validate
from ithaca.train.ranks.stop import StopRequest, write_error
from ithaca.train.report.announce import describe_run
from ithaca.train.report.conclusion import stopped_at_once, tell_conclusion
from ithaca.train.report.live_line import LiveLine
from ithaca.train.report.loss_watch import LossWatch
from ithaca.train.report.metrics import explain_out_of_memory, gpu_peak_flops, step_metrics, step_ring_work
from ithaca.train.report.report import Progress
from ithaca.train.report.sinks import Sinks, open_sinks
from ithaca.train.report.unlearned import Unlearned, with_labels
from ithaca.train.setup.learning_rate import is_settled, learning_rate
from ithaca.train.setup.origin import Origin, adopt, warn_of_seen_documents
from ithaca.train.setup.stages import OtherStage, Span, span_of
from ithaca.train.setup.start import describe_rope
from ithaca.train.step_profile import StepProfile, check_step
from ithaca.train.tasks import Tasks


class TrainingRun:
    """One run on one rank: the state that its steps share."""

    marks: StepMarks | None = None  # on rank 0, which shows the progress of steps

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        model: Model,
        data: Data,
        rows: Rows,
        why: Sequence[str] = (),
        origin: Origin | None = None,
        held_out: Windows | None = None,
        profile: StepProfile | None = None,
        span: Span | None = None,
        tasks: Tasks | None = None,
    ):
        """`why`: the planner's lines about a Plan that it chose. `origin`: the run that a new run starts from.

        `held_out`: what to validate on, if the run does. `profile`: of one of its steps. `span`: the stage, if any.
        `tasks`: to run between steps.
        """
        self.config, self.folder, self.model, self.data = config, folder, model, data
        assert is_settled(config.train)
        self.span = span or span_of(config, 0)
        self.steps = self.span.total
        self.mesh: Mesh = model.mesh
        self.first = self.mesh.rank == 0
        check_step(config.run.profile_step, self.steps)
        self.profile = profile or StepProfile(None, folder.path, self.mesh.device, model.dtype)
        check_rows(self.pass_size()[0], self.mesh)
        model.check_memory(*self.pass_size())
        self.tasks = tasks
        if tasks:
            tasks.check_memory(model)
        self.disk_seconds, slow = check_disks(model, config, data)
        # The tapes are allocated last: until then, nothing else may take their memory
        tape_bytes = model.host_bytes(*self.pass_size())
        options = config.train
        with self.profile.building():
            self.optimizer = make_optimizer(
                model,
                learning_rate=options.learning_rate,  # pyrefly: ignore
                betas=(options.beta1, options.beta2),
                weight_decay=options.weight_decay,
                reserved_bytes=tape_bytes,
            )
        self.why, self.early_warnings = why, slow  # printed when there is a log to print them to
        self.announced = False
        keep = config.run.keep
        self.checkpoints = Checkpoints(
            folder.checkpoints, model, self.optimizer, keep, self.warn, tape_bytes, folder.lost
        )
        self.checkpoints.clean()
        manifest = self.checkpoints.load()
        self.begun = self.done = self.saved = manifest["step"] if manifest else 0  # counts of steps
        if not self.span.first <= self.done <= self.span.last and self.span.count > 1:
            self.checkpoints.close()
            raise OtherStage(*self.early_warnings)
        self.unlearned = Unlearned(manifest or {})
        self.validated = own_validation(manifest) is not None  # whether the checkpoint's own step was
        self.validation = make_validation(self, held_out, manifest or {}) if held_out else None
        if tasks:
            tasks.resume(manifest or {})
        self.past: dict[str, Any] = {
            key: manifest[key] for key in ("origin", "history") if manifest and key in manifest
        }
        self.changes = list[list[Any]]()  # since the checkpoint; the next step's metrics have them
        if manifest:
            self._check_resumed(manifest)
        elif origin:
            self.past["origin"] = adopt(origin, self.checkpoints, self.mesh.group)
            if text := warn_of_seen_documents(origin, config):
                self.warn(text)
        came_from, described = self.past.get("origin"), model.source.unextended if config.train.stages else model.source
        together(
            self.mesh.group, lambda: folder.begin(config, described, model.dtype, came_from) if self.first else None
        )
        self.peak_flops = gpu_peak_flops(self.mesh.device)
        self.rows, self.loader = rows, Loader(rows, options, model)
        log = folder.log if self.first else None
        every = config.run.log_every
        self.progress = together(self.mesh.group, lambda: Progress(log, self.done, self.steps, folder.lost, every))
        if self.first:
            self.marks = make_marks(self.mesh.device)
        self.sinks = Sinks([], folder, self.progress.warn)

    def pass_size(self) -> tuple[int, int]:
        """Return the number of sequences in a pass, over all ranks, and the tokens of each."""
        options = self.config.train
        return options.micro_batch or options.batch, options.tokens  # pyrefly: ignore

    def _check_resumed(self, manifest: dict[str, Any]) -> None:
        """Raise an error unless this run can continue from the checkpoint. Warn of what has changed."""
        for text in check_record(manifest, self.config, self.data, self.model):
            self.warn(text)
        self.changes = list_changes(manifest, self.config)
        if self.changes:
            self.past["history"] = [*self.past.get("history", []), *self.changes]
        if self.done > self.steps:
            raise ConfigError(
                f"the run has done {self.done} steps already, and train.steps is {self.steps}: "
                f"{self.done} or more continues it"
            )

    def go(self, launched: bool, roll: Roll) -> bool:
        """Do all steps that are left, save, and release everything, also after an error. Return whether it stopped."""
        known = self.validated, self.tasks is None or self.tasks.last == self.done
        together(self.mesh.group, lambda: self.folder.cut_metrics(self.done, *known) if self.first else None)
        self.loss_watch = LossWatch(self.config.train, self.folder.read_metrics("loss", "labels") if self.first else ())
        self.sinks = together(
            self.mesh.group, lambda: open_sinks(self.folder, self.config.run.report, self.first, self.progress.warn)
        )
        self.live_line = LiveLine(self.marks, self.progress, self.mesh.device) if self.marks else None
        seconds_left, say = (lambda: None), write_error
        if self.live_line:
            seconds_left, say = self.live_line.seconds_left, self.live_line.announce
        self.stop = StopRequest(self.mesh, launched, seconds_left, self._stopped_at_once, say)
        self.timeout = self.config.run.timeout or timeout(self._step_seconds() + self.disk_seconds)
        self._announce()
        try:
            self._allocate()
            self.checkpoints.prune()  # not before: until here the start may be refused, and must lose nothing
            # While one rank draws a picture or reads the data of the next stage, the others wait as long as torch lets
            # them. This timeout is made for steps
            set_timeout(self.mesh.groups, self.timeout)
            with roll.watch(self.timeout):
                measure_start(self, roll)
                stopped = self._steps(roll)
                set_timeout(self.mesh.groups, TORCH_SECONDS)
                self.profile.finish(self)
                self._save()
                self.checkpoints.wait()
                self._report_problem(final=True)
                self._conclude(stopped)
            return stopped
        except torch.OutOfMemoryError as error:
            raise RunError(explain_out_of_memory(self.model, *self.pass_size(), error)) from None
        except RuntimeError as error:
            if is_collective_error(error):
                self.stop.ignore()
                self.checkpoints.abandon()
            raise
        finally:
            if self.live_line:
                self.live_line.close()
            self.loader.close()
            self.checkpoints.close()
            self.sinks.close()
            self.progress.close()
            self.stop.close()

    def _step_seconds(self) -> float:
        """Return an upper bound for the seconds of a step on the rank with the most sequences."""
        rows, tokens = self.pass_size()
        passes = self.config.train.batch // rows  # pyrefly: ignore
        sequences = passes * math.ceil(rows / self.mesh.data_ranks)
        flops = self.model.spec.flops_per_token(tokens) * sequences * tokens / self.mesh.context_ranks
        return step_seconds(flops, self.mesh.device, torch.get_num_threads())

    def _allocate(self) -> None:
        """Allocate the Plan's tapes before the first step."""
        with self.profile.building():
            self.model.allocate(*self.pass_size(), self.progress.live)
        for line in self.model.describe_tapes():
            self.progress.say(line)

    def _steps(self, roll: Roll) -> bool:
        """Train until the last step (return False) or until a user asks to stop (return True)."""
        every = self.config.run.checkpoint_every
        self.folder.begin_steps()
        self.profile.begin(self)
        if (self.validation or self.tasks) and self.done < self.span.last and self.stop.agreed():
            return True  # a user stopped a measurement before the first step
        while self.done < self.span.last:
            with roll.limit(self.timeout), self.profile.watch(self):
                metrics = self._step()
            self._publish(metrics)
            self.profile.add(self, metrics)
            self._report_problem(final=False)
            best = validate(self, roll)
            evaluate(self, roll)
            if self.stop.agreed() and self.done < self.steps:
                return True
            if best or (every and self.done % every == 0 and self.done < self.span.last):
                self._save()
        return False

    def _publish(self, metrics: dict[str, Any]) -> None:
        """Show and write the metrics of a step. If the run folder is lost, ask all ranks to stop."""
        known = self.validation.last if self.validation else None
        self.progress.step(metrics | ({VALIDATION: known[1]} if known else {}))
        if risen := self.loss_watch.add(metrics):
            self.progress.warn(risen)
        if mended := self.folder.mend(self.config):
            self.progress.warn(mended)
        if self.folder.lost():
            self.stop.ask()  # the checkpoint that follows tells all ranks why (Checkpoints.save)
            return
        self.sinks.write(metrics)

    def _step(self) -> dict[str, Any]:
        options, began = self.config.train, time.perf_counter()
        in_stage = self.done - self.span.first
        batches = self.loader.batches(in_stage)
        work = step_ring_work(self.model, batches)
        if work and self.done == self.begun:
            self.progress.say(f"In this step {describe_work(work)}")
        rate = learning_rate(options, in_stage)
        with self._marked(with_labels(batches)):
            loss, norm = self._update(batches, rate) if with_labels(batches) else (None, None)
        self.done += 1
        for text in self.unlearned.add(self.done, batches):
            self.progress.warn(text)
        seconds = time.perf_counter() - began
        changed = {"changed": {name: [old, new] for _, name, old, new in self.changes}} if self.changes else {}
        self.changes = []
        return {
            "step": self.done,
            "loss": loss,  # None, as the norm, if the step had no label
            "gradient_norm": norm,
            "learning_rate": rate,
            **step_metrics(self.model, in_stage + 1, batches, seconds, self.peak_flops, self.span.tokens_before),
            "ring_waiting": round(work.waiting, 4) if work else None,
            **self.rows.metrics(self._rows_done()),
            **({"stage": self.span.number + 1} if self.span.count > 1 else {}),
            **changed,
        }

    def _marked(self, batches: list[Batch]) -> AbstractContextManager[None]:
        """Let the live line follow a step of these passes."""
        flops = [self.model.spec.flops_per_token(batch.attended) * batch.total_tokens for batch in batches]
        return self.marks.step(self.done + 1, flops) if self.marks else nullcontext()

    def _update(self, batches: list[Batch], rate: float) -> tuple[float, float]:
        """Update the weights. Return the step's loss and the norm of its gradients."""
        total = self._backward(batches)
        if self.marks:
            self.marks.mark(OPTIMIZER)
        tensors = total, clip(self.model, self.config.train.clip, self.optimizer)
        loss, norm = (tensor.item() for tensor in tensors)  # the host waits for the GPU here, after clipping is queued
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.fail(f"the loss of step {self.done + 1} is {loss} (gradient norm {norm})")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.checkpoints.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _backward(self, batches: list[Batch]) -> torch.Tensor:
        """Return the step's loss, 0-dim, and leave its gradients on the parameters, both as of one large batch.

        Passes without a label are left out: their loss and gradients are zero.
        """
        passes, batches = batches, with_labels(batches)
        valid = sum(batch.valid_tokens for batch in batches)
        losses = []
        for number, batch in enumerate(batches, start=1):
            loss = self.model(batch, valid_tokens=valid, last=number == len(batches), marks=self.marks)
            loss.backward()
            losses.append(loss.detach())
        # Zeros in the places of the passes left out, so that the sum rounds as if they had run
        zero, found = torch.zeros_like(losses[0]), iter(losses)
        return torch.stack([next(found) if batch.valid_tokens else zero for batch in passes]).sum()

    def _rows_done(self) -> int:
        """Return the sequences that this run, or this stage of it, has seen."""
        return (self.done - self.span.first) * self.config.train.batch  # pyrefly: ignore

    def _save(self) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        if self.saved != self.done:
            record = make_record(self.config, self.data, self.model)
            self.checkpoints.save(self.done, record | self.unlearned.note(self.done) | self.past | notes(self))
            self.saved = self.done

    def _report_problem(self, final: bool) -> None:
        """Warn about a checkpoint that could not be written; at the end of the run raise an error instead."""
        problem = self.checkpoints.problem()
        if problem is None:
            return
        step, reason, lost = problem
        if self.validation and self.first:
            self.validation.best = self.checkpoints.best(self.validation.data)  # it may be the one that failed
        if lost and final:
            raise RunError(
                f"{reason}: the run stopped at step {self.done} and could not save it; if the folder has another name "
                "now, ithaca train --run continues there from its last checkpoint"
            )
        text = f"the checkpoint of step {step} could not be written ({reason}); {self.checkpoints.last_good()}"
        if final:
            raise RunError(f"{text}: fix the cause and continue with {continue_command(self.folder.path)}")
        self.progress.warn(f"{text}; training continues")

    def fail(self, what: str) -> NoReturn:
        """Raise an error about a number that is not finite, once the last checkpoint is written."""
        self.checkpoints.wait()
        raise RunError(f"{what}: {self.checkpoints.last_good()}; a lower train.learning_rate or train.clip may help")

    def warn(self, text: str) -> None:
        """Print a warning, as soon as there is a log."""
        self.progress.warn(text) if self.announced else self.early_warnings.append(text)

    def _announce(self) -> None:
        """Say what the run does, and the warnings that waited for a log. Collective."""
        lines, warnings = list[str](), list[str]()
        if self.done == self.span.first:
            source = self.model.source
            lines, warnings = from_first(self.mesh.group, lambda: describe_rope(self.config, source, self.folder))
        for text in (*describe_run(self), *lines, *self.rows.describe(), *self.why):
            self.progress.say(text)
        for text in (*warnings, *self.early_warnings):
            self.progress.warn(text)
        self.announced = True

    def _stopped_at_once(self) -> str:
        self.progress.silence()
        return stopped_at_once(self.folder, self.done)

    def _conclude(self, stopped: bool) -> None:
        """Say how the run ended. Raise an error on all ranks if the files of the run cannot be used."""

        def tell_end() -> None:
            for text in self.unlearned.totals(self.done):
                self.progress.warn(text)
            concluded = self.validation.conclude(self.folder.path) if self.validation else []
            for text in (*self.rows.conclude(self._rows_done()), *concluded):
                self.progress.say(text)
            if not stopped and not self.span.is_last:
                self.progress.end_live()
                return
            staged = self.span.count > 1
            tell_conclusion(self.folder, self.progress, self.begun, self.done, self.saved, stopped, staged)

        together(self.mesh.group, lambda: tell_end() if self.first else None)
