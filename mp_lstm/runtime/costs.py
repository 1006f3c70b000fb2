"""Costs by measurement: every distinct placement row, alone on a device and with all devices of its host busy.

    for each kind of device, each distinct row, each (batch rows, time steps):
      compile   F, B, W of the row as a stage of its own: the very functions that a pipeline compiles
      time      runs enqueued one behind another and waited for once; the median of several such series
      read      what the programs make, hand on and need, from their traces and XLA's account

In a step every task finds weights and activations that other tasks have driven out of the caches, so a series goes
through several copies of its arguments. W is timed as of four chunks, and for less than the whole batch as adding to
the gradient of the micro-batches before. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import statistics
import time as clock
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxlib import xla_client

from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.model import Model, lean_model
from mp_lstm.layers.remat import REMAT
from mp_lstm.planning.costs import Kind, RowMemory, Seconds
from mp_lstm.planning.measured import (
    Link,
    MeasuredCosts,
    MemoryPoint,
    Place,
    PointCache,
    RowUse,
    TaskPoint,
    label_of,
    time_grid,
)
from mp_lstm.planning.plan import Remat
from mp_lstm.runtime import single as singles
from mp_lstm.runtime.memory import nbytes, row_arrays
from mp_lstm.runtime.placement import Device, stage_sharding, structs, transfer
from mp_lstm.runtime.programs import Program
from mp_lstm.runtime.single import Single, Work

COLD_BYTES = 8 << 20  # of the arguments of a series, together: more than the caches of a core
MOST_COPIES = 32
WHOLE_TIMES, SLICED_TIMES = 4, 3  # numbers of time steps measured, for whole batches and for slices of their rows
SERIES_SECONDS = 0.01  # a series takes about as long, where the queue of a device holds so many runs
MOST_RUNS = 30
POINTS_VERSION = 4  # of what a point on disk means: add one when it changes
SMALL, LARGE = 1 << 10, 4 << 20  # bytes of the transfers that tell latency from rate


def measure_costs(
    model: Model,
    batch_size: int,
    lengths: Sequence[int],
    devices: Sequence[Device],
    *,
    microbatches: Sequence[int] = (1, 2),
    optimizer: optax.GradientTransformation | None = None,
    example: Batch | None = None,
    remat: Remat | None = "none",
    cache_dir: str | os.PathLike[str] | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> MeasuredCosts:
    """Measures what every task of a model costs on some devices.

    Args:
      model: the model; its parameters are made up, nothing is trained.
      batch_size: rows of a batch.
      lengths: the buckets' lengths in time steps.
      devices: those to plan for. Devices of one kind are measured once, with all of them on one host busy.
      microbatches: numbers of slices of a batch's rows to measure; others are interpolated.
      optimizer: whose update is timed; None: Adam.
      example: a batch such as will come, of any size; None: padded tokens, as a language model reads.
      remat: that of the plans to be made; None: any. But for "none", heads are measured in their lean variants too.
      cache_dir: where measured points are kept and looked for; None: nowhere.
      repeats: series of which a time is the median.
      progress: called after each point with the number of points there are, and of all.

    Returns:
      The costs, for `make_plan` and `predict`. Their bytes are those on devices of the first kind.

    Raises:
      InputError: an argument is out of range, or the folder cannot be written to.

    Example:
      >>> import jax, mp_lstm
      >>> from mp_lstm.runtime.costs import measure_costs
      >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=1)
      >>> costs = measure_costs(model, 2, (4, 8), jax.devices()[:1], microbatches=(1,), repeats=1)
      >>> costs.memory(1, rows=2, time=4).output  # y [4, 2, 8] in float32
      256
    """
    _check(batch_size, lengths, devices, microbatches, repeats, remat)
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer

    def isolated(model: Model) -> list[tuple[str, Single]]:
        rows = singles.isolate(model, batch_size, optimizer, example or singles.tokens(), devices[0])
        return [(singles.signature(row, batch_size), row) for row in rows]

    plain = lean = isolated(model)
    if any(row.lean is not None for row in model.rows):
        lean = [] if remat == "none" else isolated(lean_model(model))
    distinct = dict([*plain, *lean])
    shapes = [
        (size, time)
        for size in sorted({-(-batch_size // slices) for slices in microbatches}, reverse=True)
        for time in time_grid(max(lengths), WHOLE_TIMES if size == batch_size else SLICED_TIMES)
    ]
    groups, pairs = _groups(devices), _pairs(devices)
    points = len(groups) * (1 + len(distinct) * (1 + len(shapes))) + len(pairs)
    bench = _Bench(PointCache(cache_dir), repeats, points, progress)
    kinds = [_measure_kind(bench, group, distinct, shapes, batch_size, optimizer) for group in groups]
    links = [Link(kind_of(a), kind_of(b), *_link(bench, a, b)) for a, b in pairs]

    def uses(rows: Sequence[tuple[str, Single]]) -> tuple[RowUse, ...]:
        below = [True, *(kinds[0].keeps_y[like] for like, _ in rows[:-1])]
        return tuple(RowUse(like, given) for (like, _), given in zip(rows, below, strict=False))

    return MeasuredCosts(
        label=label_of([kind_of(device) for device in dict.fromkeys(devices)], f"jax {jax.__version__}"),
        rows=uses(plain),
        devices={str(device): Place(kind_of(device), _host(device), _capacity(device)) for device in devices},
        tasks=tuple(task for kind in kinds for task in kind.tasks),
        memories=kinds[0].memories,
        overheads={kind_of(group[0]): kind.overhead for group, kind in zip(groups, kinds, strict=True)},
        links=tuple(links),
        leaner=uses(lean) or None,
    )


def kind_of(device: Device) -> str:
    """The kind of a device, as tables and labels name it.

    Example:
      >>> import jax
      >>> kind_of(jax.devices("cpu")[0])
      'cpu'
    """
    names = dict.fromkeys((device.platform, device.device_kind))
    return " ".join(names)


class _Bench:
    """Takes points from the cache or measures them, and says how far it is."""

    def __init__(self, cache: PointCache, repeats: int, points: int, progress: Callable[[int, int], None] | None):
        self.repeats = repeats
        self._cache, self._points, self._progress = cache, points, progress
        self._done = 0

    def point(self, devices: Sequence[Device], what: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        value = self._cache.get({**what, **_circumstances(devices)}, measure)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._points)
        return value


def _circumstances(devices: Sequence[Device]) -> dict[str, Any]:
    """What times depend on beside the program: devices and how many, versions, XLA's options, the processor."""
    options = xla_client.CompileOptions().SerializeAsString()  # XLA_FLAGS are in it
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "version": POINTS_VERSION,
        "devices": [kind_of(device) for device in devices],
        "jax": jax.__version__,
        "options": hashlib.sha256(options).hexdigest()[:16],
        "processor": [platform.machine(), platform.processor(), usable],
    }


class _Kind(NamedTuple):
    """What was measured on one kind of device."""

    overhead: float
    tasks: tuple[TaskPoint, ...]
    memories: tuple[MemoryPoint, ...]
    keeps_y: dict[str, bool]


def _measure_kind(
    bench: _Bench,
    devices: Sequence[Device],
    distinct: Mapping[str, Single],
    shapes: Sequence[tuple[int, int]],
    batch_size: int,
    optimizer: optax.GradientTransformation,
) -> _Kind:
    """All points of one kind of device; all of `devices` share a processor, or there is but one."""
    kind = kind_of(devices[0])
    overhead = bench.point(devices, {"what": "overhead"}, lambda: _overhead(devices[0], bench.repeats))
    tasks: list[TaskPoint] = []
    memories: list[MemoryPoint] = []
    keeps_y: dict[str, bool] = {}

    def add(like: str, rows: int, time: int, times: Mapping[Kind, Sequence[float]]) -> None:
        for phase, seconds in times.items():  # each program was dispatched too, a stage's is but once
            tasks.append(TaskPoint(like, kind, phase, rows, time, *(max(0.0, value - overhead) for value in seconds)))

    for like, row in distinct.items():
        update = singles.update(row, optimizer)
        what = {"what": "U", "trace": hashlib.sha256(singles.trace(update).encode()).hexdigest()[:16]}
        add(
            like,
            1,
            1,
            bench.point(devices, what, lambda work=update: {"U": _measure([work], devices, bench.repeats)[0][0]}),
        )
        largest = max(map(nbytes, jax.tree.leaves(row.own)), default=0)
        owned = nbytes(row.own), nbytes(update.args[1]) + singles.prepared_bytes(row), largest
        for rows, time in shapes:
            accumulates = rows < batch_size
            what = {"what": "FBW", "like": like, "rows": rows, "time": time, "add": accumulates}
            found = bench.point(
                devices,
                what,
                lambda row=row, shape=(rows, time), add=accumulates: _row(bench, row, *shape, add, devices),
            )
            add(like, rows, time, found["seconds"])
            held = RowMemory(*owned, *found["bytes"])
            if not accumulates:  # what is stated of W is what it needs where it adds
                held = held._replace(scratch_weight=held.scratch_weight + held.parameters)
            memories.append(MemoryPoint(like, rows, time, held))
            keeps_y[like] = found["keeps_y"]
    return _Kind(overhead, tuple(tasks), tuple(memories), keeps_y)


def _row(bench: _Bench, row: Single, rows: int, time: int, add: bool, devices: Sequence[Device]) -> dict[str, Any]:
    """One point: seconds of F, B and W, and the row's bytes, as `RowMemory` has them behind the first three."""
    works = [singles.forward(row, rows, time), *singles.backward_and_weight(row, rows, time, add=add)]
    (f, forward), (b, backward), (w, weight) = _measure(works, devices, bench.repeats)
    arrays = row_arrays(forward, backward, works[0].args, works[1].args)
    scratch = [program.memory().temp_size_in_bytes for program in (forward, backward, weight)]
    if len(works[2].args[2]) > 1:  # joined copies: they are the stage's, whose rows' are all there at once
        scratch[2] = max(0, scratch[2] - arrays.kept - arrays.tape - arrays.input)
    sizes = [arrays.saved, arrays.kept, arrays.tape, arrays.input, arrays.output, scratch[0]]
    sizes += [scratch[1] + arrays.summed, scratch[2] + arrays.summed]  # one array a micro-batch, while it has a B or W
    return {"seconds": {"F": f, "B": b, "W": w}, "bytes": sizes, "keeps_y": arrays.keeps_y}


def _measure(works: Sequence[Work], devices: Sequence[Device], repeats: int) -> list[tuple[Seconds, Program]]:
    """Seconds of some tasks, and their programs on the first device."""
    shardings = [stage_sharding(device) for device in devices]

    def compiled(work: Work, sharding: Any) -> Program:
        args = structs(work.args, sharding)
        return Program(f"stage0_{work.phase}", work.function, args, work.donate, work.phase)

    programs = [[compiled(work, sharding) for sharding in shardings] for work in works]
    for row in programs:
        for program in row:
            program.wait()  # none is timed while others are compiled
    found = []
    for work, row in zip(works, programs, strict=True):
        series = [_Series(program, work, sharding) for program, sharding in zip(row, shardings, strict=True)]
        alone = _seconds(series[:1], repeats)
        shared = _seconds(series, repeats) if len(series) > 1 else alone
        found.append((Seconds(alone, max(alone, shared)), row[0]))
    return found


class _Series:
    """Runs of a program on one device, each with other copies of the arguments than the one before."""

    def __init__(self, program: Program, work: Work, sharding: Any):
        self._program, self._again = program, work.again
        self.copies = min(MOST_COPIES, max(2, math.ceil(COLD_BYTES / max(1, nbytes(work.args)))))
        self._args = [singles.filled(work.args, sharding) for _ in range(self.copies)]
        self._turn, self._last = 0, None

    def enqueue(self) -> None:
        turn = self._turn % self.copies
        self._turn += 1
        self._last = self._program(*self._args[turn])
        self._args[turn] = self._again(self._args[turn], self._last)

    def wait(self) -> None:
        jax.block_until_ready(self._last)


def _seconds(series: Sequence[_Series], repeats: int) -> float:
    """Time of one run, all devices of the series doing the same: median of `repeats` series."""

    def elapsed(runs: int) -> float:
        began = clock.perf_counter()
        for _ in range(runs):
            for each in series:
                each.enqueue()
        for each in series:
            each.wait()
        return (clock.perf_counter() - began) / runs

    copies = series[0].copies
    elapsed(copies)  # the first runs touch new memory
    runs = min(MOST_RUNS, max(copies, math.ceil(SERIES_SECONDS / elapsed(copies))))
    return statistics.median(elapsed(runs) for _ in range(repeats))


def _overhead(device: Device, repeats: int) -> float:
    """Time of an almost empty program; a loop, since a program without one may be run by whoever enqueues it."""

    def loop(turns: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, x: x + 1, x)

    work = Work("overhead", loop, (np.ones((), np.int32), np.ones(8, np.float32)))
    return _measure([work], [device], repeats)[0][0].alone


def _link(bench: _Bench, source: Device, target: Device) -> tuple[float, float]:
    """Latency in seconds, and bytes a second, of transfers between two devices."""

    def seconds(size: int) -> float:
        copies = [singles.filled(jax.ShapeDtypeStruct((size,), jnp.uint8), stage_sharding(source)) for _ in range(4)]
        jax.block_until_ready(copies)
        taken = []
        for copy in copies * bench.repeats:
            began = clock.perf_counter()
            jax.block_until_ready(transfer(copy, stage_sharding(target)))
            taken.append(clock.perf_counter() - began)
        return statistics.median(taken)

    def measure() -> list[float]:
        small, large = seconds(SMALL), seconds(LARGE)
        rate = (LARGE - SMALL) / max(large - small, 1e-9)
        return [max(0.0, small - SMALL / rate), rate]

    latency, rate = bench.point((source, target), {"what": "link"}, measure)
    return latency, rate


def _groups(devices: Sequence[Device]) -> list[list[Device]]:
    """For each kind of device those to measure together: all on the first one's host."""
    first: dict[str, Device] = {}
    for device in devices:
        first.setdefault(kind_of(device), device)
    return [
        [other for other in dict.fromkeys(devices) if (kind_of(other), _host(other)) == (kind, _host(device))]
        for kind, device in first.items()
    ]


def _pairs(devices: Sequence[Device]) -> list[tuple[Device, Device]]:
    """Two different devices for each two kinds, in both directions."""
    found: dict[tuple[str, str], tuple[Device, Device]] = {}
    for source in devices:
        for target in devices:
            if source != target:
                found.setdefault((kind_of(source), kind_of(target)), (source, target))
    return list(found.values())


def _host(device: Device) -> str:
    """CPU devices of one process share its cores; any other device has a processor of its own."""
    return f"process {device.process_index}" if device.platform == "cpu" else str(device)


def _capacity(device: Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _check(
    batch_size: int,
    lengths: Sequence[int],
    devices: Sequence[Device],
    microbatches: Sequence[int],
    repeats: int,
    remat: Remat | None,
) -> None:
    if not devices:
        raise InputError("measure_costs: devices is empty, wanted those to plan for: pass e.g. jax.devices()")
    for name, values in (("lengths", lengths), ("microbatches", microbatches)):
        if not len(values):
            raise InputError(f"measure_costs: {name} is empty, wanted whole numbers: pass e.g. {name}=(1, 2)")
    numbers = {"batch_size": [batch_size], "lengths": lengths, "microbatches": microbatches, "repeats": [repeats]}
    for name, values in numbers.items():
        for value in values:
            if not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"measure_costs: {name} has {value!r}, wanted a whole number of at least 1: pass one")
    if max(microbatches) > batch_size:
        raise InputError(
            f"measure_costs: microbatches has {max(microbatches)}, the batch has {batch_size} rows: pass at most those"
        )
    if remat not in (*REMAT, None):
        known = ", ".join(map(repr, REMAT))
        raise InputError(f"measure_costs: remat is {remat!r}, wanted one of {known}, or None: pass that of the plan")
