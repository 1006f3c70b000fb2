"""What a plan's step takes, in seconds and in bytes, by a cost model: the numbers that the search minimises.

A stage's time is the sum over its rows, and each task costs its dispatch once. A stage's memory is what its rows hold,
each array counted once: between two rows of a stage, y of the lower one is x of the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import STATE_BYTES, CostModel, Kind, RowMemory, Seconds
from mp_lstm.planning.grouped import costs_of
from mp_lstm.planning.memory import StageMemory, peak_bytes
from mp_lstm.planning.schedule import Task
from mp_lstm.planning.simulate import Timeline, simulate

if TYPE_CHECKING:
    from mp_lstm.planning.plan import BucketPlan, Plan, PlannedModel


def predict(plan: Plan, model: PlannedModel, costs: CostModel, length: int) -> Timeline:
    """Predicts a step on one batch.

    Args:
      plan: a plan of the model.
      model: the model.
      costs: of the model's tasks.
      length: the batch's bucket length.

    Returns:
      The simulated timeline, in seconds.

    Raises:
      InputError: the plan has no bucket of this length, or is of another model.

    Example:
      Two devices of 1 teraflop/s:

      >>> from collections import namedtuple
      >>> from mp_lstm.planning import Calibration, Cost, DeviceRates, make_plan
      >>> Layer = namedtuple("Layer", "name kind chunkable cost")
      >>> cost = lambda batch_size, time: Cost(*[1e7 * batch_size * time] * 3, 1_000_000, 4_000_000, 0, 6400 * time)
      >>> model = namedtuple("Model", "rows")([Layer(f"lstm {i}", "lstm", True, cost) for i in (1, 2)])
      >>> costs = Calibration({f"gpu:{i}": DeviceRates(1e12, 1e10) for i in (0, 1)}).costs(model)
      >>> plan = make_plan(
      ...     model, batch_size=20, lengths=(32,), devices=("gpu:0", "gpu:1"), chunk=8, microbatches=1, costs=costs
      ... )
      >>> print(f"{predict(plan, model, costs, 32).makespan * 1e3:.1f} ms")
      30.5 ms
    """
    check_model(plan, model)
    costs = costs_of(plan, costs)
    schedule = plan.schedule((length,))
    bucket = plan.buckets[length]
    times = [stage_seconds(plan, costs, bucket, stage) for stage in range(len(plan.partition))]
    sent = [
        costs.memory(indices[-1], bucket.rows_per_microbatch, bucket.chunk).output if len(indices) else 0
        for indices in plan.stages
    ]

    def transfer(task: Task, source: int, target: int) -> float:
        # F sends its output up, B the gradient of that output down, W its part of the norm.
        nbytes = STATE_BYTES if task.kind == "W" else sent[min(source, target)]
        return costs.transfer(nbytes, plan.devices[source], plan.devices[target])

    return simulate(
        schedule, lambda task: times[task.stage][task.kind], transfer=transfer, hosts=shared_hosts(plan, costs)
    )


def predicted_memory(plan: Plan, model: PlannedModel, costs: CostModel) -> dict[int, int]:
    """Predicts the most bytes that each device holds during a step on one batch of any bucket.

    Args:
      plan: a plan of the model.
      model: the model.
      costs: of the model's tasks.

    Returns:
      Bytes by device index (`plan.device_indices`).

    Raises:
      InputError: the plan is of another model.

    Example:
      >>> from collections import namedtuple
      >>> from mp_lstm.planning import Cost, default_calibration, make_plan
      >>> Layer = namedtuple("Layer", "name kind chunkable cost")
      >>> cost = lambda batch_size, time: Cost(*[1e7 * batch_size * time] * 3, 1_000_000, 4_000_000, 0, 0)
      >>> model = namedtuple("Model", "rows")([Layer(f"lstm {i}", "lstm", True, cost) for i in (1, 2)])
      >>> costs = default_calibration().costs(model)
      >>> plan = make_plan(model, batch_size=20, lengths=(32,), devices=("cpu:0", "cpu:1"), stages=2)
      >>> predicted_memory(plan, model, costs)  # parameters, two optimiser values, gradients, a second micro-batch's
      {0: 20000000, 1: 20000000}
    """
    check_model(plan, model)
    costs = costs_of(plan, costs)
    peaks: dict[int, int] = dict.fromkeys(sorted(set(plan.device_indices)), 0)
    for length, bucket in plan.buckets.items():
        held = [stage_memory(costs, indices, bucket, plan.remat) for indices in plan.stages]
        schedule = plan.schedule((length,))
        for device, nbytes in peak_bytes(schedule, [[memory] * bucket.microbatches for memory in held]).items():
            peaks[device] = max(peaks[device], nbytes)
    return peaks


def check_model(plan: Plan, model: PlannedModel) -> None:
    """Checks that a plan is one of a model.

    Raises:
      InputError: they have different numbers of rows.
    """
    if len(plan.rows) != len(model.rows):
        raise InputError(
            f"the plan has {len(plan.rows)} placement rows, the model {len(model.rows)}: pass the model it was made for"
        )


def stage_seconds(plan: Plan, costs: CostModel, bucket: BucketPlan, stage: int) -> dict[Kind, Seconds]:
    """How long each kind of task of a stage takes."""
    device, indices, rows = plan.devices[stage], plan.stages[stage], bucket.rows_per_microbatch
    padded, overhead = bucket.chunk * bucket.chunks, costs.overhead(device)
    again = [row for row, runs in zip(indices, run_again(costs, plan.remat, indices), strict=True) if runs]

    def of_rows(kind: Kind, time: int, which: Sequence[int] = indices) -> list[Seconds]:
        return [costs.seconds(kind, row, rows, time, device) for row in which]

    def task(parts: Sequence[Seconds]) -> Seconds:
        return Seconds(sum(part.alone for part in parts) + overhead, sum(part.shared for part in parts) + overhead)

    return {
        "F": task(of_rows("F", bucket.chunk)),
        "B": task(of_rows("B", bucket.chunk) + of_rows("F", bucket.chunk, again)),
        "W": task(of_rows("W", padded)),
        "U": task(of_rows("U", padded)),
    }


def run_again(costs: CostModel, remat: str, rows: Sequence[int]) -> list[bool]:
    """Whether B of each row begins with its F, in the same program. A lean row's does in a whole stage alone."""
    lean = costs.lean_rows if remat == "layer" else frozenset()
    return [remat in ("layer", "stage") and row not in lean for row in rows]


def stage_memory(costs: CostModel, indices: Sequence[int], bucket: BucketPlan, remat: str) -> StageMemory:
    """What a stage of the given rows holds.

    F, B and W run their rows one after another, so their temporaries are those of the largest row. W joins a row's
    chunks, each array copied, but for its x: that has the place of another that W is done with. What B made for it may
    lie where the largest gradient of another row will, if that is new. Where W adds to a gradient it makes the row's
    own first (but an embedding's, which it adds to in place). W of a lean row has other temporaries too, which are
    there whether it adds or not.

    With remat "layer" F keeps the input of every row and with "stage" that of the stage. Where B runs F again it makes
    what W reads, and what it reads itself is among its temporaries.
    """
    rows, padded = bucket.rows_per_microbatch, bucket.chunk * bucket.chunks
    held = [costs.memory(row, rows, bucket.chunk) for row in indices]
    again, lean = run_again(costs, remat, indices), costs.lean_rows if remat != "none" else frozenset()
    joined = _joined(held, bucket.chunks, new=bucket.microbatches == 1) if bucket.chunks > 1 else [0] * len(held)
    scratch = [costs.memory(row, rows, padded).scratch_weight for row in indices]
    adding = [size + extra for size, extra in zip(joined, scratch, strict=True)]
    own = [
        extra - part.parameters if row in lean else 0 for row, part, extra in zip(indices, held, scratch, strict=True)
    ]
    first = [size + extra for size, extra in zip(joined, own, strict=True)]
    unit = [between_tasks(part, runs) for part, runs in zip(held, again, strict=True)]
    saved, kept, tape = map(sum, zip(*unit, strict=True))
    inputs = sum(part.input for part in held[1:]) if remat == "layer" else 0
    return StageMemory(
        fixed=sum(part.parameters + part.state for part in held),
        saved=saved,
        kept=kept + inputs,
        tape=tape,
        input=held[0].input,
        output=held[-1].output,
        scratch_forward=max(part.scratch_forward for part in held),
        scratch_backward=_scratch_backward(held, again, remat),
        scratch_weight=max(first),
        gradient=sum(part.parameters for part in held),
        scratch_add=max(adding) - max(first) if bucket.microbatches > 1 else 0,
    )


def between_tasks(row: RowMemory, again: bool) -> tuple[int, int, int]:
    """What a row saves, keeps and has on its tape; where B runs F again it makes on its tape what F would have kept."""
    return (0, 0, row.tape + row.kept) if again else (row.saved, row.kept, row.tape)


def _joined(held: Sequence[RowMemory], chunks: int, *, new: bool) -> list[int]:
    """What W joins of each row and needs memory for; x is not counted, also where no row below keeps it."""
    below = [0, *(part.output for part in held[:-1])]
    own = [0 if part.input else x for part, x in zip(held, below, strict=True)]
    rooms = [max((part.largest for part in held if part is not row), default=0) if new else 0 for row in held]
    tapes = [chunks * row.tape if chunks * row.tape > room else 0 for row, room in zip(held, rooms, strict=True)]
    return [tape + chunks * max(0, part.kept - x) for tape, part, x in zip(tapes, held, own, strict=True)]


def _scratch_backward(held: Sequence[RowMemory], again: Sequence[bool], remat: str) -> int:
    """Temporaries of a stage's B.

    Between two rows there is the gradient that one hands the other. F run again has its own temporaries where what B
    makes for W will lie, as far as these reach. Rows alike begin their scans with the same zeros, which are there from
    the first row to the last.
    """
    if remat == "layer" and any(again):
        zeros = sorted(part.tape for part in held)[-2] if len(held) > 1 else 0
        return zeros + max(
            part.scratch_backward + (part.saved + _beyond(part) if runs else 0)
            for part, runs in zip(held, again, strict=True)
        )
    if not any(again):
        handed = max((part.output for part in held[:-1]), default=0)
        return handed + max(part.scratch_backward for part in held)
    return sum(part.saved for part in held) + max(part.scratch_backward + _beyond(part) for part in held)


def _beyond(part: RowMemory) -> int:
    """F's temporaries that do not fit where B's results will lie."""
    return max(0, part.scratch_forward - part.tape - part.kept)


def shared_hosts(plan: Plan, costs: CostModel) -> tuple[Any, ...] | None:
    """The host of each device index; None where no two devices of the plan share one."""
    indices = plan.device_indices
    hosts = tuple(costs.host(plan.devices[indices.index(i)]) for i in range(max(indices) + 1))
    return hosts if any(host in hosts[:i] for i, host in enumerate(hosts)) else None
