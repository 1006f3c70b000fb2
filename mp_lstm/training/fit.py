"""A training run: from a setup and an empty directory to a trained model, or on from where a run stopped.

    begin       parameters are drawn, or a checkpoint is read
    train       steps, validations, checkpoints: see `loop`; programs are compiled as they come to be needed: `warm_up`
    at the end  the last validation, the test with the best parameters, loss.png

The run directory then holds config.toml, vocabulary.txt, checkpoints/, metrics.jsonl and loss.png. Of several
processes, which all see that directory, the first one writes all but the checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mp_lstm.data import iterate
from mp_lstm.errors import InputError
from mp_lstm.layers.model import step_shape
from mp_lstm.planning import BucketPlan
from mp_lstm.runtime import processes
from mp_lstm.training import checkpoint
from mp_lstm.training.checkpoint import Restored
from mp_lstm.training.config import save
from mp_lstm.training.evaluate import SplitResult, evaluate
from mp_lstm.training.files import writing
from mp_lstm.training.interrupt import stop_signal
from mp_lstm.training.loop import Trainer, epoch_of
from mp_lstm.training.metrics import FILE, counted_compilations, metrics_writer, read_metrics
from mp_lstm.training.notes import Notes, Validation
from mp_lstm.training.plots import plot_losses
from mp_lstm.training.progress import progress
from mp_lstm.training.run_directory import CONFIG, VOCABULARY, check_writable, held
from mp_lstm.training.setup import Setup, resolved
from mp_lstm.training.warm_up import WarmUp, complete_together

__all__ = ["FitResult", "SplitResult", "evaluate", "fit"]

SAMPLE = 100  # batches that show which bucket is the commonest


class FitResult(NamedTuple):
    """What came of a run.

    Args:
      steps: updates done.
      seconds: of the run, compilation and what came before it was resumed included.
      valid: the last validation.
      best: the best one, and the step whose parameters it is of.
      test: with those parameters; None where the run was interrupted.
      signal: number of the signal that interrupted it, for the exit status; None: it came to its end.
    """

    steps: int
    seconds: float
    valid: Validation | None
    best: Validation | None
    test: SplitResult | None
    signal: int | None = None


def fit(setup: Setup, run_dir: str | os.PathLike[str], *, resume: bool = False) -> FitResult:
    """Trains a model, and tests it.

    Prints what is placed where and how training goes. Ctrl-C and SIGTERM end it after the step in flight: the state is
    saved, and how to go on is printed.

    Args:
      setup: of the run.
      run_dir: where it is kept; made if need be.
      resume: go on from its last checkpoint, exactly as if it had never stopped.

    Returns:
      The result.

    Raises:
      InputError: the directory holds another run, or none to resume, or cannot be written to, or is being trained; the
        loss or the gradient is not finite.
    """
    began = time.perf_counter()
    run_dir = Path(run_dir)
    with contextlib.ExitStack() as ours:
        processes.by_the_first(lambda: _take_directory(setup, run_dir, resume, ours))
        result = _train(setup, run_dir, began, resume=resume)
        if processes.is_first():
            save(resolved(setup), run_dir / CONFIG)  # what a resumed run changed is its own only now that it has worked
            _plot(run_dir)
    return result


def _train(setup: Setup, run_dir: Path, began: float, *, resume: bool) -> FitResult:
    """`fit` in a directory that is ours."""
    state, notes = _begin(setup, run_dir)
    total = _total(setup, state.step, notes)
    keep = notes.metrics_size if resume else None
    with metrics_writer(run_dir / FILE, keep=keep) as writer:
        writer.write("start", **_start(setup))
        print(_announcement(setup))
        if resume:
            print(_resumed(state.step, total, notes.at_end))
        print("compiling the programs of each bucket before the first step that needs them ...", flush=True)
        with counted_compilations() as compiled, progress(total, done=state.step) as shown:
            warm_up = WarmUp(setup, compiled)
            if processes.are_several():
                complete_together(warm_up)
                shown.say(str(setup.pipe.programs.report()))
            trainer = Trainer(
                setup,
                run_dir,
                state,
                notes,
                total=total,
                began=began,
                warm_up=warm_up,
                writer=writer,
                shown=shown,
            )
            del state  # the trainer's: nothing else must hold what steps donate
            with stop_signal() as stop:
                number = trainer.train(stop)
            if number is not None:
                shown.say(_interrupted(number, trainer.state.step, run_dir))
                return _result(trainer, None, number)
            trainer.finish()
            test, step = _test(setup, run_dir, trainer)
            writer.write("test", step=step, epoch=epoch_of(trainer.notes.position), **test._asdict())
            shown.say(f"the best validation came after step {step}: its parameters are tested")
            shown.say(f"test loss {test.loss:.4f}  perplexity {test.perplexity:,.2f}")
            result = _result(trainer, test)
            writer.write(
                "done",
                steps=result.steps,
                seconds=result.seconds,
                programs=len(setup.pipe.programs),
                compiled_after_warmup=warm_up.unforeseen,
            )
    return result


def _take_directory(setup: Setup, run_dir: Path, resume: bool, ours: contextlib.ExitStack) -> str:
    """Begins a new run in its directory; refuses to mix runs. Returns it, held until `ours` is closed."""
    if resume and not run_dir.is_dir():
        raise InputError(f"{run_dir} is no run directory, so there is nothing to resume: train without --resume")
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    ours.enter_context(held(run_dir))
    check_writable(run_dir)
    if resume:
        _check_not_lost(run_dir)
        return str(run_dir)
    if any((run_dir / name).exists() for name in (CONFIG, FILE)) or checkpoint.latest(run_dir) is not None:
        raise InputError(f"{run_dir} holds another run: pass --resume to continue it, or another --run-dir")
    with writing(run_dir):
        setup.corpus.vocabulary.save(run_dir / VOCABULARY)
    save(resolved(setup), run_dir / CONFIG)  # the last: with it there is a run, which can be resumed
    return str(run_dir)


def _check_not_lost(run_dir: Path) -> None:
    """Refuses to begin anew, over the metrics of a run that had checkpoints: its first validation is saved at once."""
    if checkpoint.latest(run_dir) is not None:
        return
    kinds = [event["event"] for event in read_metrics(run_dir / FILE)]
    if kinds.count("valid") > 1 or "test" in kinds:
        raise InputError(
            f"{run_dir} has no checkpoint any more, though its {FILE} tells of {kinds.count('valid')} validations: put "
            f"{checkpoint.FOLDER}/ back, or begin anew with another --run-dir"
        )


def _begin(setup: Setup, run_dir: Path) -> Restored:
    """The last checkpoint, or the beginning where there is none: a run may be killed before its first."""
    if checkpoint.latest(run_dir) is not None:
        return checkpoint.restore(setup.pipe, run_dir)
    return Restored(setup.pipe.init(jax.random.key(setup.config.train.seed)), Notes())


def _total(setup: Setup, done: int, notes: Notes) -> int:
    """Updates of the run: those that are done, and as many as the batches from there on make."""
    train, batches, every_k = setup.config.train, setup.sources.train.num_batches(), setup.pipe.every_k
    epoch, index = notes.position
    epochs = train.epochs - epoch
    total = done
    if epochs > 0:
        total += -(-(batches - index) // every_k) + (epochs - 1) * -(-batches // every_k)
    return total if train.max_steps is None else min(total, train.max_steps)


def _start(setup: Setup) -> dict[str, Any]:
    """The fields of the event `start`."""
    plan = setup.plan
    placement = [
        {
            "layer": plan.rows[row].name,
            "kind": plan.rows[row].kind,
            "stage": stage,
            "device": str(plan.devices[stage]),
            "parameters": plan.rows[row].parameters,
        }
        for stage, rows in enumerate(plan.stages)
        for row in rows
    ]
    return {
        "placement": placement,
        "parameters": sum(row.parameters for row in plan.rows),
        "vocab": len(setup.corpus.vocabulary),
        "buckets": list(plan.buckets),
        "schedule": plan.schedule_name,
        "chunk": [bucket.chunk for bucket in plan.buckets.values()],
        "dropped": setup.sources.train.dropped.sentences,
    }


def _announcement(setup: Setup) -> str:
    """The text, the placement table, the timetable of the commonest bucket, and what is left out."""
    plan, source, corpus = setup.plan, setup.sources.train, setup.corpus
    text = f"text: {corpus.name}, {len(corpus.train.tokens):,} tokens, {len(corpus.vocabulary):,} words"
    sample = islice(iterate(source, epochs=1), SAMPLE)
    lengths = Counter(plan.bucket_for(step_shape(batch)[0]).length for _, batch in sample)
    length = max(lengths, key=lengths.__getitem__)
    title = f"{plan.schedule_name}, bucket {length}, the commonest: {_cut(plan.buckets[length])}"
    return f"{text}\n\n{plan}\n\n{title}\n{plan.schedule((length,))}\n\n{source.dropped}\n"


def _cut(bucket: BucketPlan) -> str:
    """How a batch is cut, in time and in rows."""
    cuts = [f"{bucket.chunks} chunks of {bucket.chunk} steps"] if bucket.chunks > 1 else []
    if bucket.microbatches > 1:
        cuts.append(f"{bucket.microbatches} micro-batches of {bucket.rows_per_microbatch} rows")
    return " and ".join(cuts) or "uncut"


def _test(setup: Setup, run_dir: Path, trainer: Trainer) -> tuple[SplitResult, int]:
    """Tests the best parameters; also says of which step they are."""
    best = trainer.notes.best
    assert best is not None, "a run ends with a validation"
    state = trainer.state
    if best.step != state.step:
        del trainer.state, state  # room for the best
        state = checkpoint.restore(setup.pipe, run_dir, best.step).state
    return evaluate(setup, state, "test"), state.step


def _result(trainer: Trainer, test: SplitResult | None, number: int | None = None) -> FitResult:
    notes = trainer.notes
    steps = notes.last.step if notes.last else 0
    return FitResult(steps, trainer.seconds, notes.valid, notes.best, test, number)


def _resumed(step: int, total: int, at_end: Validation | None) -> str:
    if step == 0:
        return "there is no checkpoint yet: begun anew"
    if step < total and at_end is not None:
        return (
            f"resumed after step {step}; the validation there (perplexity {at_end.perplexity:,.2f}) was made because "
            "the run had ended, so it counts no more"
        )
    if step < total:
        return f"resumed after step {step}"
    return f"resumed after step {step}, the last of the run: raise train.epochs or train.max_steps to go on training"


def _interrupted(number: int, step: int, run_dir: Path) -> str:
    name, directory = signal.Signals(number).name, shlex.quote(str(run_dir))
    return f"{name}: stopped and saved after step {step}; go on with: mp-lstm train --run-dir {directory} --resume"


def _plot(run_dir: Path) -> None:
    """Draws loss.png, or says why not: a run does not fail for want of a picture."""
    try:
        plot_losses(read_metrics(run_dir / FILE), run_dir / "loss.png")
    except InputError as error:
        print(error)
