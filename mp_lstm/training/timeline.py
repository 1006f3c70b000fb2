"""Measured beside predicted: some steps of every bucket are run, and each is held against its prediction.

Steps are on one batch of the text, whatever `every_k` is, because that is what `predict` predicts. Where steps differ,
the median counts: the first of a bucket begins on idle devices, and on a shared machine some are disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from mp_lstm.data import BatchSource
from mp_lstm.layers.batch import Batch
from mp_lstm.planning import predict
from mp_lstm.planning.costs import CostModel
from mp_lstm.planning.plan import Plan
from mp_lstm.planning.schedule import Schedule
from mp_lstm.planning.simulate import Timeline
from mp_lstm.runtime.measure import measure_steps
from mp_lstm.runtime.perfetto import trace_events
from mp_lstm.training.setup import Setup
from mp_lstm.training.timeline_plot import timeline_picture

PICTURE, TRACE = "timeline.png", "trace.json"
HEADER = "bucket    measured   predicted  error  idle, measured / predicted"


class Comparison(NamedTuple):
    """A step of one bucket, as it was and as it was predicted.

    Args:
      length: the bucket's.
      schedule: what both did.
      measured: the step of median length; predicted: in seconds too.
    """

    length: int
    schedule: Schedule
    measured: Timeline
    predicted: Timeline


def batches_by_length(source: BatchSource) -> dict[int, list[Batch]]:
    """The batches of the first epoch by the length of their bucket, in increasing order.

    Example:
      >>> from mp_lstm.data import SentenceBatches, load_austen
      >>> source = SentenceBatches(load_austen().test, buckets=(32, 64), batch_size=100, policy="split")
      >>> {length: len(batches) for length, batches in batches_by_length(source).items()}
      {32: 12, 64: 7}
    """
    found: dict[int, list[Batch]] = {}
    for index in range(source.num_batches()):
        batch = source.batch(0, index)
        found.setdefault(batch.inputs.shape[0], []).append(batch)
    return dict(sorted(found.items()))


def compare(setup: Setup, batches: Sequence[Batch], costs: CostModel, *, steps: int) -> Iterator[Comparison]:
    """Runs steps on each batch under the profiler, from freshly drawn parameters.

    Args:
      setup: of the run; nothing is kept of what it learns here.
      batches: one for each bucket.
      costs: to predict with.
      steps: to measure on each batch.

    Returns:
      An iterator over the comparisons, each given as soon as it is measured.

    Raises:
      InputError: the profile of so many steps is incomplete.
    """
    pipe, plan = setup.pipe, setup.plan
    state = pipe.init(jax.random.key(setup.config.train.seed))
    for batch in batches:
        window = pipe.place([batch])
        (length,) = window.lengths
        state, _ = pipe.step(state, window)  # once unmeasured: it compiles, and allocates what stays
        state, measured = measure_steps(pipe, state, [window] * steps)
        predicted = predict(plan, setup.model, costs, length)
        yield Comparison(length, plan.schedule((length,)), measured.median, predicted)


def device_names(plan: Plan) -> list[str]:
    """The names of a plan's devices, by device index.

    Example:
      >>> from mp_lstm.planning import BucketPlan, Row
      >>> rows = (Row("embed", "embedding", 10, 0.5), Row("head", "head", 10, 0.5))
      >>> device_names(Plan(rows, (1, 1), ("cpu:1", "cpu:0"), 4, {8: BucketPlan(8, 8, 1, 1, 4)}, "serial"))
      ['cpu:1', 'cpu:0']
    """
    return [str(device) for device in dict(zip(plan.device_indices, plan.devices, strict=True)).values()]


def comparison_line(comparison: Comparison, names: Sequence[str]) -> str:
    """A line of the table below `HEADER`.

    Example:
      >>> measured, predicted = (Timeline({}, {}, time, {0: 0.1}, {0: 1 - 0.1 / time}) for time in (0.2, 0.16))
      >>> print(HEADER)
      bucket    measured   predicted  error  idle, measured / predicted
      >>> print(comparison_line(Comparison(32, None, measured, predicted), ["cpu:0"]))
          32     200.0 ms     160.0 ms   -20%  cpu:0 50% / 38%
    """
    length, _, measured, predicted = comparison
    idle = (f"{name} {measured.idle[i]:.0%} / {predicted.idle[i]:.0%}" for i, name in enumerate(names))
    return f"{length:>6}  {time_columns(measured.makespan, predicted.makespan)}  {', '.join(idle)}"


def time_columns(measured: float, predicted: float) -> str:
    """Two times given in seconds, and by how much of the first the second misses it.

    Example:
      >>> time_columns(2.0, 2.1)
      ' 2,000.0 ms   2,100.0 ms    +5%'
    """
    return f"{measured * 1e3:>8,.1f} ms  {predicted * 1e3:>8,.1f} ms  {predicted / measured - 1:>+5.0%}"


def mean_line(comparisons: Sequence[Comparison], counts: Sequence[int]) -> str:
    """The line of a step on average, each bucket counting as often as it occurs.

    Args:
      comparisons: of all buckets.
      counts: batches of each.

    Example:
      >>> steps = [Timeline({}, {}, makespan, {}, {}) for makespan in (0.1, 0.2, 0.4, 0.8)]
      >>> mean_line([Comparison(8, None, *steps[:2]), Comparison(16, None, *steps[2:])], [3, 1])
      '  mean     175.0 ms     350.0 ms  +100%'
    """
    measured, predicted = (
        sum(count * getattr(part, what).makespan for part, count in zip(comparisons, counts, strict=True)) / sum(counts)
        for what in ("measured", "predicted")
    )
    return f"{'mean':>6}  {time_columns(measured, predicted)}"


def write(folder: Path, comparison: Comparison, names: Sequence[str], title: str) -> Iterator[Path]:
    """Writes a comparison as a trace for ui.perfetto.dev or chrome://tracing, and as a picture.

    Args:
      folder: where; it exists.
      comparison: what.
      names: of the devices, by device index.
      title: of the picture.

    Returns:
      An iterator over the files, each given when it is written; the trace first, which needs no library.

    Raises:
      InputError: matplotlib is not installed, or the picture cannot be written.

    Example:
      >>> import tempfile
      >>> from mp_lstm.planning import serial, simulate
      >>> schedule = serial((0,), (1,))
      >>> step = simulate(schedule, lambda task: 0.1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     files = write(Path(folder), Comparison(8, schedule, step, step), ["cpu:0"], "bucket 8")
      ...     [path.name for path in files]
      ['trace.json', 'timeline.png']
    """
    _, schedule, measured, predicted = comparison
    trace = trace_events({"measured": measured, "predicted": predicted}, schedule, names)
    (folder / TRACE).write_text(json.dumps(trace))
    yield folder / TRACE
    timeline_picture(folder / PICTURE, measured, predicted, schedule, names, title)
    yield folder / PICTURE
