"""The most bytes each device holds during a step of a schedule: a walk through its order, adding and freeing arrays.

What is alive between the tasks of a stage, beside what it always holds (parameters, optimiser state):

    F of a unit   takes x from below, which stays as `input`; makes `saved`, `kept`, and y, which goes up
    B of a unit   takes y's gradient from above and `saved`, frees both; makes `tape`, and x's gradient, which goes down
    W             takes `tape`, `kept` and `input` of a micro-batch's units, and frees them; the first makes `gradient`,
                  those after it make their own and add it

An array that was sent is held by the device it was sent to until the task that waits for it is done. The temporaries of
a program count while it runs.

The order between devices is that of the schedule's total order, which is the one in which a step is dispatched. Small
arrays are left out: carried states, masks, the batch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mp_lstm.planning.schedule import Schedule, Task


class StageMemory(NamedTuple):
    """Bytes of one stage; all but `fixed` and the last three for one unit of a micro-batch.

    Args:
      fixed: parameters and the optimiser's state; the same for all micro-batches.
      saved: arrays F makes that B reads last.
      kept: arrays F makes that W reads last.
      tape: arrays B makes that W reads.
      input: of x, if F saves it.
      output: of y, and so of its gradient.
      scratch_forward, scratch_backward: temporaries of the programs of a unit.
      scratch_weight: temporaries of W, which joins the units of a micro-batch.
      gradient: of the parameters, there from the first W to U; the same for all micro-batches.
      scratch_add: temporaries of a W that adds to a gradient, beside `scratch_weight`.
    """

    fixed: int
    saved: int
    kept: int
    tape: int
    input: int
    output: int
    scratch_forward: int
    scratch_backward: int
    scratch_weight: int
    gradient: int = 0
    scratch_add: int = 0


def peak_bytes(schedule: Schedule, memories: Sequence[Sequence[StageMemory]]) -> dict[int, int]:
    """Finds the most bytes each device holds at once.

    Args:
      schedule: a valid schedule.
      memories: of each stage, and in it of each micro-batch.

    Returns:
      Bytes by device index.

    Example:
      Four micro-batches of which F saves 100 bytes; B needs no more:

      >>> from mp_lstm.planning.schedules import gpipe, one_f_one_b
      >>> memories = [[StageMemory(1000, 100, 0, 0, 0, 0, 0, 0, 0)] * 4] * 2
      >>> peak_bytes(gpipe((0, 1), (1,) * 4), memories), peak_bytes(one_f_one_b((0, 1), (1,) * 4), memories)
      ({0: 1400, 1: 1400}, {0: 1200, 1: 1100})
    """
    held = dict.fromkeys(sorted(set(schedule.devices)), 0)
    for device, stage in zip(schedule.devices, memories, strict=True):
        held[device] += stage[0].fixed
    peak = dict(held)

    def hold(stage: int, change: int) -> None:
        device = schedule.devices[stage]
        held[device] += change
        peak[device] = max(peak[device], held[device])

    begun: set[int] = set()  # stages that have a gradient
    for task in schedule.tasks:
        adds = task.stage in begun
        if task.kind == "W" and not adds:
            begun.add(task.stage)
            hold(task.stage, memories[task.stage][task.microbatch].gradient)
        if task.kind != "U":  # it works in place
            made, left, sent = _bytes(task, memories, adds)
            hold(task.stage, made)  # while the task runs
            hold(task.stage, left - made)
            receiver = task.stage + (1 if task.kind == "F" else -1)
            if sent and 0 <= receiver < schedule.stages:
                hold(receiver, sent)
    return peak


def _bytes(task: Task, memories: Sequence[Sequence[StageMemory]], adds: bool) -> tuple[int, int, int]:
    """What an F, B or W adds while it runs, what of it is left behind less what it frees, and what it sends.

    `adds`: whether a W of the stage has made its gradient.
    """
    stage, microbatch = task.stage, task.microbatch
    own = memories[stage][microbatch]
    if task.kind == "W":
        scratch = own.scratch_weight + (own.scratch_add if adds else 0)
        return scratch, -len(task.units) * (own.kept + own.tape + own.input), 0
    x = memories[stage - 1][microbatch].output if stage else 0  # sent by the stage below, and its gradient sent there
    if task.kind == "F":
        kept = own.saved + own.kept
        first = 0 if stage else own.input  # of the first stage, x is no other stage's output
        return kept + first + own.output + own.scratch_forward, kept + own.input - x, own.output
    dy = own.output if stage < len(memories) - 1 else 0
    return own.tape + x + own.scratch_backward, own.tape - own.saved - dy, x
