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

    def summed(kind: Kind, time: int) -> Seconds:
        parts = [costs.seconds(kind, row, rows, time, device) for row in indices]
        extra = costs.overhead(device)
        return Seconds(sum(part.alone for part in parts) + extra, sum(part.shared for part in parts) + extra)

    padded = bucket.chunk * bucket.chunks
    forward, backward = summed("F", bucket.chunk), summed("B", bucket.chunk)
    if plan.remat != "none":  # B begins with F, in the same program
        extra = costs.overhead(device)
        backward = Seconds(backward.alone + forward.alone - extra, backward.shared + forward.shared - extra)
    return {"F": forward, "B": backward, "W": summed("W", padded), "U": summed("U", padded)}


def stage_memory(costs: CostModel, indices: Sequence[int], bucket: BucketPlan, remat: str) -> StageMemory:
    """What a stage of the given rows holds.

    F, B and W run their rows one after another, so their temporaries are those of the largest row. W joins a row's
    chunks, each array copied, but for its x: that has the place of another that W is done with. What B made for it may
    lie where the largest gradient of another row will, if that is new. Where W adds to a gradient it makes the row's
    own first (but an embedding's, which it adds to in place).

    With remat "layer" F keeps the input of every row and with "stage" that of the stage. B makes what W reads, and what
    it reads itself is among its temporaries.
    """
    rows, padded = bucket.rows_per_microbatch, bucket.chunk * bucket.chunks
    held = [costs.memory(row, rows, bucket.chunk) for row in indices]
    joined = _joined(held, bucket.chunks, new=bucket.microbatches == 1) if bucket.chunks > 1 else [0] * len(held)
    added = [costs.memory(row, rows, padded).scratch_weight if bucket.microbatches > 1 else 0 for row in indices]
    saved, kept, tape = (sum(getattr(part, name) for part in held) for name in ("saved", "kept", "tape"))
    if remat != "none":
        saved, kept, tape = 0, _inner_inputs(held) if remat == "layer" else 0, tape + kept
    return StageMemory(
        fixed=sum(part.parameters + part.state for part in held),
        saved=saved,
        kept=kept,
        tape=tape,
        input=held[0].input,
        output=held[-1].output,
        scratch_forward=max(part.scratch_forward for part in held),
        scratch_backward=_scratch_backward(held, remat),
        scratch_weight=max(joined),
        gradient=sum(part.parameters for part in held),
        scratch_add=max(map(sum, zip(joined, added, strict=True))) - max(joined),
    )


def _joined(held: Sequence[RowMemory], chunks: int, *, new: bool) -> list[int]:
    """What W joins of each row and needs memory for; x is not counted, also where no row below keeps it."""
    below = [0, *(part.output for part in held[:-1])]
    own = [0 if part.input else x for part, x in zip(held, below, strict=True)]
    rooms = [max((part.largest for part in held if part is not row), default=0) if new else 0 for row in held]
    tapes = [chunks * row.tape if chunks * row.tape > room else 0 for row, room in zip(held, rooms, strict=True)]
    return [tape + chunks * max(0, part.kept - x) for tape, part, x in zip(tapes, held, own, strict=True)]


def _scratch_backward(held: Sequence[RowMemory], remat: str) -> int:
    """Temporaries of a stage's B.

    Between two rows there is the gradient that one hands the other. F run again has its own temporaries where what B
    makes for W will lie, as far as these reach. Rows alike begin their scans with the same zeros, which are there from
    the first row to the last.
    """
    if remat == "none":
        handed = max((part.output for part in held[:-1]), default=0)
        return handed + max(part.scratch_backward for part in held)
    if remat == "layer":
        zeros = sorted(part.tape for part in held)[-2] if len(held) > 1 else 0
        return zeros + max(part.saved + part.scratch_backward + _beyond(part) for part in held)
    return sum(part.saved for part in held) + max(part.scratch_backward + _beyond(part) for part in held)


def _beyond(part: RowMemory) -> int:
    """F's temporaries that do not fit where B's results will lie."""
    return max(0, part.scratch_forward - part.tape - part.kept)


def _inner_inputs(held: Sequence[RowMemory]) -> int:
    return sum(part.input for part in held[1:])


def shared_hosts(plan: Plan, costs: CostModel) -> tuple[Any, ...] | None:
    """The host of each device index; None where no two devices of the plan share one."""
    indices = plan.device_indices
    hosts = tuple(costs.host(plan.devices[indices.index(i)]) for i in range(max(indices) + 1))
    return hosts if any(host in hosts[:i] for i, host in enumerate(hosts)) else None
