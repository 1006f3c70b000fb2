"""The training loop: it dispatches the next step before it looks at what the last one found.

    host      place k+1   step k+1   read k   place k+2   step k+2   read k+1  ...
    devices   ... step k ........... | step k+1 ............ | step k+2 ...

Reading waits for step k while the devices have step k+1 to do, so they never run dry. Only where the state itself is
wanted (validation, a checkpoint, the end) is the last step read at once. So nothing that is not finite is ever saved.

What must survive the run is in a `State` and `Notes`, both values; checkpoints keep them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Array

from mp_lstm.data import BatchSource, Position, iterate
from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.model import step_shape
from mp_lstm.runtime import Metrics, State, processes
from mp_lstm.training import checkpoint
from mp_lstm.training.evaluate import evaluate
from mp_lstm.training.metrics import MetricsWriter, Silent, Sums, perplexity
from mp_lstm.training.notes import LastStep, Notes, Validation
from mp_lstm.training.progress import Progress, Report
from mp_lstm.training.setup import Setup
from mp_lstm.training.warm_up import WarmUp


def windows(
    source: BatchSource, start: Position, *, epochs: int, every_k: int
) -> Iterator[tuple[Position, list[Batch]]]:
    """Goes through the windows of a run: `every_k` batches each, fewer at the end of an epoch.

    Args:
      source: of the batches.
      start: position of the first batch.
      epochs: of the whole run.
      every_k: batches of a window.

    Returns:
      An iterator over the position after each window, and its batches.

    Example:
      >>> from mp_lstm.data import ContiguousBatches, load_austen
      >>> source = ContiguousBatches(load_austen().valid, length=20, batch_size=1000)
      >>> [(after, len(batches)) for after, batches in windows(source, (0, 0), epochs=2, every_k=2)]
      [((0, 2), 2), ((1, 0), 1), ((1, 2), 2), ((2, 0), 1)]
    """
    window: list[Batch] = []
    for after, batch in iterate(source, start=start, epochs=epochs):
        window.append(batch)
        if len(window) == every_k or after[1] == 0:
            yield after, window
            window = []


def epoch_of(position: Position) -> int:
    """The epoch, counted from 1, of the batch before a position.

    Example:
      >>> epoch_of((0, 3)), epoch_of((1, 0)), epoch_of((1, 1))
      (1, 1, 2)
    """
    epoch, index = position
    return epoch + (index > 0)


def is_non_monotone(losses: Sequence[float], loss: float, after: int) -> bool:
    """Whether a validation is worse than the best of all but the last `after` before it.

    References:
      Merity, Keskar and Socher 2017, algorithm 1 (https://arxiv.org/abs/1708.02182).

    Example:
      >>> is_non_monotone([5.0, 4.0, 4.5], 4.2, after=1), is_non_monotone([5.0, 4.0, 4.5], 4.2, after=2)
      (True, False)
    """
    return len(losses) > after and loss > min(losses[: len(losses) - after])


class _Unread(NamedTuple):
    """A step that has been dispatched: where it is in the run, what it will have found, and a signal to stop."""

    step: int
    epoch: int
    learning_rate: float
    metrics: Metrics
    signal: Any


class Trainer:
    """One run of the loop; `state` and `notes` are what it has come to.

    Args:
      setup: of the run.
      run_dir: where checkpoints go.
      state, notes: where to start.
      total: updates of the whole run.
      began: when this part of the run did, by time.perf_counter.
      warm_up: what is to be compiled before steps and validations.
      writer: of metrics.
      shown: of progress.
    """

    def __init__(
        self,
        setup: Setup,
        run_dir: Path,
        state: State,
        notes: Notes,
        *,
        total: int,
        began: float,
        warm_up: WarmUp,
        writer: MetricsWriter | Silent,
        shown: Progress,
    ):
        self.state = state
        self.notes = notes
        self._setup = setup
        self._run_dir = run_dir
        self._total = total
        self._writer = writer
        self._shown = shown
        self._warm_up = warm_up
        self._unread: _Unread | None = None
        self._signal = 0  # the number of the one to stop, of any process
        self._began = began
        self._clock = time.perf_counter()
        self._seconds_before = notes.seconds
        self._measured = Sums()  # of this process; its weight counts steps

    @property
    def seconds(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self._seconds_before + time.perf_counter() - self._began

    def train(self, stop: Callable[[], int | None]) -> int | None:
        """Trains to the end of the run, or until it is told to stop; then the state is saved.

        Args:
          stop: gives the number of the signal that says so, else None.

        Returns:
          That number, None at the end of the run.
        """
        config, pipe = self._setup.config.train, self._setup.pipe
        source = self._setup.sources.train
        if self._is_stuck():
            self._shown.say("it had stopped early: raise train.patience to go on training")
            return None
        for after, batches in windows(source, self.notes.position, epochs=config.epochs, every_k=pipe.every_k):
            if self.state.step >= self._total:
                break
            self._step(after, batches, stop() or 0)
            step, epoch_ends, number = self.state.step, after[1] == 0, self._stopped(stop)
            improved = False
            if epoch_ends or _due(config.eval_every, step):
                improved = self._validate(judge=epoch_ends)
            # The last step's is left to `finish`, where the end of an epoch has not made it one of the run's own.
            interval = _due(config.checkpoint_every, step) and step < self._total
            stuck = self._is_stuck()
            if stuck:  # told before it is saved: a run that goes on from there does not tell it again
                waited = f"validations without a better one: {self.notes.waited}"
                self._shown.say(f"stopped early after step {step}, {waited} (train.patience)")
                self._writer.write("stop", step=step, epoch=epoch_of(after), waited=self.notes.waited)
            if epoch_ends or improved or interval or number is not None:
                self._save()
            if number is not None or stuck:
                return number
        return None

    def _is_stuck(self) -> bool:
        """Whether validations have not improved for as long as the configuration has patience."""
        patience = self._setup.config.train.patience
        return patience is not None and self.notes.waited >= patience

    def finish(self) -> None:
        """Ends the run: the last validation, checkpoint and line of metrics.

        A run that goes on from here later should be as if it had not stopped. So the checkpoint does not know of a
        validation, nor of a line, that are only here because the run ends: the validation is noted apart, to tell which
        parameters are best, and its step may have been saved before, by a run that was killed after it or told to stop.
        """
        self._read()
        self._compile(self._warm_up.before_evaluation)  # also where no validation is left, there is the test
        saved, valid = self.notes._replace(metrics_size=self._writer.size), self.notes.valid
        if self.notes.best is None or valid is None or valid.step != self.state.step:
            self._validate(judge=False)
            saved = saved._replace(at_end=self.notes.valid)
        self._save(saved)
        if self.notes.sums.tokens:
            self._log()

    def _stopped(self, stop: Callable[[], int | None]) -> int | None:
        """The signal to stop after this step. Several processes stop alike: by what all of them knew a step ago."""
        return self._signal or None if processes.are_several() else stop()

    def _step(self, after: Position, batches: list[Batch], number: int) -> None:
        """Dispatches a step, then reads the one before; `number` is that of a signal to stop, else 0."""
        self._compile(lambda: self._warm_up.before_step(batches))
        pipe, update, lasting = self._setup.pipe, self.state.step, self.state.rate
        rate = lasting * self._relative_length(batches)
        window = pipe.place(batches)
        state, metrics = pipe.step(dataclasses.replace(self.state, rate=rate), window)
        self.state = dataclasses.replace(state, rate=lasting)
        self._read()
        self.notes = self.notes._replace(position=after, at_end=None)
        learning_rate = self._setup.learning_rate(update) * rate
        signal = processes.largest(number)
        self._unread = _Unread(self.state.step, epoch_of(after), learning_rate, metrics, signal)

    def _compile(self, compile_next: Callable[[], None]) -> None:
        """Compiles, with nothing in flight, so that no step is timed meanwhile; says so when all is compiled."""
        if self._warm_up.done:
            return
        self._read()
        compile_next()
        if self._warm_up.done:
            self._shown.say(str(self._setup.pipe.programs.report()))
        self._clock = time.perf_counter()

    def _relative_length(self, batches: Sequence[Batch]) -> float:
        """Factor on the rate where lengths are random: that of the batches by the configured one."""
        data = self._setup.config.data
        if data.random_length is None:
            return 1.0
        return sum(step_shape(batch)[0] for batch in batches) / (len(batches) * data.length)

    def _read(self) -> None:
        """Waits for the step that was dispatched last, if it has not been read, and takes what it found."""
        if self._unread is None:
            return
        (step, epoch, rate, metrics, signal), self._unread = self._unread, None
        loss, norm, self._signal = float(metrics.loss), _number(metrics.grad_norm), int(signal)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise InputError(self._not_finite(step, metrics))
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._measured = self._measured.add(0.0, weight=1, tokens=metrics.tokens, seconds=seconds)
        sums = self.notes.sums.add(loss, weight=metrics.weight, tokens=metrics.tokens, seconds=seconds)
        self.notes = self.notes._replace(sums=sums, last=LastStep(step, epoch, norm, rate))
        self._shown.step(step)
        if step % self._setup.config.train.log_every == 0:
            self._log()

    def _log(self) -> None:
        """Writes the line of the steps since the one before."""
        last, sums = self.notes.last, self.notes.sums
        assert last is not None, "there are sums, so there was a step"
        speed = sums.tokens / sums.seconds if sums.seconds else 0.0
        self._writer.write(
            "train",
            step=last.step,
            epoch=last.epoch,
            loss=sums.mean,
            perplexity=perplexity(sums.mean),
            tokens=sums.tokens,
            tokens_per_second=speed,
            grad_norm=last.grad_norm,
            learning_rate=last.learning_rate,
        )
        left = None
        if self._measured.weight:
            left = (self._total - last.step) * self._measured.seconds / self._measured.weight
        self._shown.report(Report(last.step, last.epoch, sums.mean, speed, left))
        self.notes = self.notes._replace(sums=Sums())

    def _validate(self, *, judge: bool) -> bool:
        """Validates and says whether it is the best so far; `judge` lets the plateau schedule act on it."""
        self._read()
        self._compile(self._warm_up.before_evaluation)
        step, epoch = self.state.step, epoch_of(self.notes.position)
        result = evaluate(self._setup, self.state, "valid")
        if not math.isfinite(result.loss):
            raise InputError(f"the validation loss after step {step} is {result.loss}: {self._remedy()}")
        best = self.notes.best
        is_best = best is None or result.loss < best.loss
        found = Validation(step, *result)
        waited = 0 if is_best else self.notes.waited + 1
        self.notes = self.notes._replace(valid=found, best=found if is_best else best, waited=waited)
        self._writer.write("valid", step=step, epoch=epoch, **result._asdict())
        self._shown.say(
            f"epoch {epoch}  step {step}  valid loss {result.loss:.4f}  perplexity {result.perplexity:,.2f}"
            f"{'  (best)' if is_best else ''}"
        )
        optimizer = self._setup.config.optimizer
        if judge and optimizer.rate_schedule == "plateau":
            self._judge(result.loss)
        if judge and optimizer.average:
            self._start_average(result.loss)
        self._clock = time.perf_counter()
        return is_best

    def _judge(self, loss: float) -> None:
        """The plateau schedule: lowers the rate where a validation is no better than the best before."""
        optimizer, best = self._setup.config.optimizer, self.notes.plateau
        if best is None or loss < best * (1 - optimizer.plateau_threshold):
            self.notes = self.notes._replace(plateau=loss)
            return
        self.state = dataclasses.replace(self.state, rate=self.state.rate * optimizer.rate_factor)
        self._shown.say(f"no better than {best:.4f}: learning rate times {self.state.rate:g}")

    def _start_average(self, loss: float) -> None:
        """Begins to average the parameters where validations have stopped improving."""
        losses, after = self.notes.losses, self._setup.config.optimizer.average_after
        if self.notes.averages:
            return
        begins = is_non_monotone(losses, loss, after)
        self.notes = self.notes._replace(losses=(*losses, loss), averages=begins)
        if begins:
            self.state = self._setup.pipe.start_average(self.state)
            self._shown.say(f"worse than the best but for the last {after}: parameters are averaged from here on")

    def _save(self, notes: Notes | None = None) -> None:
        """Saves the state with the notes, by default those of now."""
        self._read()
        notes = self.notes._replace(metrics_size=self._writer.size) if notes is None else notes
        checkpoint.save(self._run_dir, self._setup.pipe, self.state, notes._replace(seconds=self.seconds))
        self._clock = time.perf_counter()

    def _not_finite(self, step: int, metrics: Metrics) -> str:
        """Which stages are at fault, and what to do."""
        plan = self._setup.plan
        stages = [
            f"stage {s} ({', '.join(plan.rows[i].name for i in plan.stages[s])}) on {plan.devices[s]}"
            for s in metrics.not_finite()
        ]
        where = f"in {' and '.join(stages)}" if stages else "in the norm over all stages"
        found = f"loss {float(metrics.loss)}, gradient norm {_number(metrics.grad_norm)}"
        return f"step {step}: {found}, not finite {where}; the step changed no parameters: {self._remedy()}"

    def _remedy(self) -> str:
        last = checkpoint.latest(self._run_dir)
        kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is of step {last}"
        advice = "train with a lower optimizer.learning_rate or optimizer.max_norm"
        return f"{kept}, in {self._run_dir}: {advice}"


def _number(value: Array | None) -> float:
    """A device's scalar that is there; waits for it."""
    assert value is not None, "a step has a gradient"
    return float(value)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
