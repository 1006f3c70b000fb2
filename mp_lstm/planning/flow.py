"""A schedule compiled for many partitions at once: one pass over its tasks gives the step time of every partition.

A schedule's order depends on its stages and units alone, so one order serves all partitions, and only times differ.
With the same rules as `simulate` (a device does its tasks in order, each when what it waits for has arrived), the pass
keeps for each task an array of end times, one a partition: a hundred partitions cost little more than one.

Devices that share a processor are beyond it: their times depend on who else is busy. There the search takes times in
between, and simulates the best few.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from mp_lstm.planning.schedule import Schedule, Task

KINDS = "FBWU"


class StageArrays(NamedTuple):
    """Seconds of K partitions.

    Args:
      tasks: [4, S, K] of a stage's F, B, W and U.
      links: [2, S-1, K] until what a stage sends up (0), or is sent down by the one above it (1), has arrived.
      norms: [S, S] until the norm of a stage has reached another one; 0 on one device.
    """

    tasks: np.ndarray
    links: np.ndarray
    norms: np.ndarray


class Flow:
    """A schedule, compiled.

    Args:
      schedule: a valid schedule.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        devices = schedule.devices
        places = {task: place for place, task in enumerate(schedule.tasks)}
        # What comes from the same device is done when the device is free: only arrivals from others are waited for.
        self._steps: list[tuple[int, int, int, int, int]] = []  # kind, stage, device, place awaited or -1, link
        for kind, stage, units in schedule.tasks:
            other = stage - 1 if kind == "F" else stage + 1
            awaited, link = -1, min(stage, other)
            if kind in "FB" and 0 <= other < schedule.stages and devices[other] != devices[stage]:
                awaited = places[Task(kind, other, units)]
            self._steps.append((KINDS.index(kind), stage, devices[stage], awaited, link))

    def makespans(self, times: StageArrays) -> np.ndarray:
        """Simulates a step for each partition.

        Args:
          times: of K partitions.

        Returns:
          [K] seconds.
        """
        free: list[np.ndarray] = [np.zeros(times.tasks.shape[2])] * (max(self.schedule.devices) + 1)
        ends: list[np.ndarray] = []
        weights = [free[0]] * self.schedule.stages  # end of each stage's last W
        norm = np.empty(0)
        for kind, stage, device, awaited, link in self._steps:
            begin = free[device]
            if awaited >= 0:
                begin = np.maximum(begin, ends[awaited] + times.links[kind, link])
            elif kind == 3:
                if not norm.size:  # every W precedes every U
                    norm = (np.stack(weights)[:, None, :] + times.norms[:, :, None]).max(axis=0)
                begin = np.maximum(begin, norm[stage])
            end = begin + times.tasks[kind, stage]
            if kind == 2:
                weights[stage] = end
            free[device] = end
            ends.append(end)
        return np.maximum.reduce(free)

    @cached_property
    def pressure(self) -> list[np.ndarray]:
        """For each stage [E, 3]: units of saved, of kept and of tape that it holds after its tasks.

        Only the moments that may be the fullest are listed.
        """
        chunks = self.schedule.chunks
        held = np.zeros((self.schedule.stages, 3), np.int64)
        events: list[set[tuple[int, ...]]] = [set() for _ in held]
        for kind, stage, units in self.schedule.tasks:
            if kind == "U":
                continue
            joined = chunks[units[0].microbatch]
            held[stage] += {"F": (1, 1, 0), "B": (-1, 0, 1), "W": (0, -joined, -joined)}[kind]
            events[stage].add(tuple(held[stage].tolist()))
        return [_largest(np.array(sorted(seen))) for seen in events]


def bound(times: StageArrays, chunks: int, microbatches: int) -> np.ndarray:
    """A time that no schedule of these tasks can beat, for each partition.

    A stage cannot begin before its first input has come up, does all its work, and what it does last must go down and
    be weighed; or one micro-batch goes up to it chunk by chunk, to the top, back, and down chunk by chunk.

    Args:
      times: of K partitions whose stages have devices of their own.
      chunks: chunks of a micro-batch.
      microbatches: number of micro-batches.

    Returns:
      [K] seconds.
    """
    forward, backward, weight, update = times.tasks
    up, down = np.concatenate([np.zeros_like(times.tasks[:2, :1]), times.links], axis=1)  # of the link below a stage
    before = np.cumsum(forward + up, axis=0) - forward  # until the first input of a stage has come
    after = np.cumsum(backward + down, axis=0) - backward  # from a stage's last B until the first stage's is done
    round_trip = forward + backward
    through = round_trip + up + down
    above = through[::-1].cumsum(axis=0)[::-1] - through  # from a stage's F to the top, and back
    busy = before + chunks * microbatches * round_trip
    last = np.where(np.arange(len(forward))[:, None] > 0, after + weight[0], 0.0)
    works = busy + np.maximum(microbatches * weight, last)
    path = before + chunks * round_trip + above + after + weight[0]
    return np.maximum(works, path).max(axis=0) + update.max(axis=0)


def _largest(events: np.ndarray) -> np.ndarray:
    covered = (events[None] >= events[:, None]).all(axis=2)  # [E, E] by itself alone, if it is to stay
    return events[covered.sum(axis=1) == 1]
