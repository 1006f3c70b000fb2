"""When each task of a schedule starts and ends, given how long tasks and transfers take.

A device does its tasks one after another in the schedule's order, each as soon as the device is free and what the task
needs has arrived; a transfer delays the receiver and occupies nobody. This is what a step's dispatch does too, so with
true times it predicts a step.

Devices may share a host's processor cores, as emulated ones do: then a task takes longer the more of the others are
busy. With hosts given, the simulation goes from event to event (a task begins or ends), and whenever the number of busy
devices changes, what is left of the running tasks is stretched or shrunk. On two devices of one host, tasks that take
2 s alone and 3 s beside one another, the second beginning 1 s after the first (a letter is a quarter of a second):

    device 0   AAAAAAAAAA        half of A in 1 s, the other half in 1.5 s
    device 1       BBBBBBBBBB    half of B in 1.5 s, the other half in 1 s
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import Seconds
from mp_lstm.planning.schedule import Schedule, Task

Times = Callable[[Task], float | Seconds] | Mapping[Task, float] | Mapping[Task, Seconds]
Transfer = Callable[[Task, int, int], float]


class Timeline(NamedTuple):
    """A simulated step, in seconds (or whatever the times were in).

    Args:
      start, end: of each task, from the step's beginning.
      makespan: the step's end.
      busy: time each device works, by device index.
      idle: share of the makespan that each device does not.
    """

    start: dict[Task, float]
    end: dict[Task, float]
    makespan: float
    busy: dict[int, float]
    idle: dict[int, float]


def no_transfer(task: Task, from_stage: int, to_stage: int) -> float:
    """Transfers that take no time."""
    return 0.0


def simulate(
    schedule: Schedule, times: Times, *, transfer: Transfer = no_transfer, hosts: Sequence[Any] | None = None
) -> Timeline:
    """Simulates a step.

    Args:
      schedule: a valid schedule.
      times: seconds of a task, as a function or a mapping; one number where it is the same however busy the host is.
      transfer: (task, from stage, to stage) -> seconds until what the task yields has reached the other stage. Stages
        that share a device send nothing; the norms that U waits for are sent by the last W of each stage.
      hosts: the host of each device index; None: every device has its own. Of n devices of a host (those that have no
        stage count too), k being busy, a task takes alone + (shared - alone) (k - 1) / (n - 1) seconds.

    Returns:
      The timeline.

    Raises:
      InputError: a task comes before one that it needs, or hosts lacks a device.

    Example:
      >>> from mp_lstm.planning.schedules import wavefront
      >>> schedule = wavefront((0, 1), (4,))
      >>> timeline = simulate(schedule, lambda task: {"F": 1.0, "B": 1.0, "W": 4.0, "U": 0.5}[task.kind])
      >>> timeline.makespan, timeline.busy[0], round(timeline.idle[0], 3)
      (14.5, 12.5, 0.138)

      Two devices of one host, where tasks take half as long again beside another one:

      >>> simulate(schedule, lambda task: Seconds(alone=1.0, shared=1.5), hosts=("here", "here")).makespan
      16.0
    """
    seconds = times if callable(times) else times.__getitem__
    durations = [_both(seconds(task)) for task in schedule.tasks]
    if hosts is None:
        start, end = _apart(schedule, durations, transfer)
    else:
        start, end = _Sharing(schedule, durations, transfer, hosts).run()
    busy = dict.fromkeys(sorted(set(schedule.devices)), 0.0)
    for task, begin, stop in zip(schedule.tasks, start, end, strict=True):
        busy[schedule.devices[task.stage]] += stop - begin
    makespan = max(end)
    idle = {device: max(0.0, 1.0 - worked / makespan) if makespan else 0.0 for device, worked in busy.items()}
    tasks = schedule.tasks
    return Timeline(dict(zip(tasks, start, strict=True)), dict(zip(tasks, end, strict=True)), makespan, busy, idle)


def _both(seconds: float | Seconds) -> Seconds:
    return seconds if isinstance(seconds, Seconds) else Seconds(seconds, seconds)


def _apart(schedule: Schedule, durations: Sequence[Seconds], transfer: Transfer) -> tuple[list[float], list[float]]:
    """Start and end of each task where devices have their own hosts: one pass, as a task's end is known at once."""
    tasks, devices = schedule.tasks, schedule.devices
    free = dict.fromkeys(devices, 0.0)
    start: list[float] = []
    end: list[float] = []
    for task, needs, duration in zip(tasks, schedule.needs, durations, strict=True):
        device = devices[task.stage]
        begin = free[device]
        for need in needs:
            arrival, source = end[need], tasks[need].stage
            if devices[source] != device:
                arrival += transfer(tasks[need], source, task.stage)
            begin = max(begin, arrival)
        start.append(begin)
        end.append(begin + duration.alone)
        free[device] = end[-1]
    return start, end


class _Sharing:
    """A simulation from event to event. Tasks are positions in the total order, devices their indices."""

    def __init__(self, schedule: Schedule, durations: Sequence[Seconds], transfer: Transfer, hosts: Sequence[Any]):
        if len(hosts) <= max(schedule.devices):
            raise InputError(
                f"hosts gives the host of {len(hosts)} devices, the schedule uses device {max(schedule.devices)}: "
                "pass one host for each device index"
            )
        self.schedule, self.durations, self.transfer, self.hosts = schedule, durations, transfer, hosts
        self.size, self.busy = Counter(hosts), Counter()
        self.device = [schedule.devices[task.stage] for task in schedule.tasks]
        self.waiting = [len(needs) for needs in schedule.needs]
        self.arrival = [0.0] * len(schedule.tasks)  # when the last of what it needs is there
        self.followers: list[list[int]] = [[] for _ in schedule.tasks]
        for follower, needs in enumerate(schedule.needs):
            for need in needs:
                self.followers[need].append(follower)
        self.queues: dict[int, deque[int]] = {device: deque() for device in sorted(set(schedule.devices))}
        for position, device in enumerate(self.device):
            self.queues[device].append(position)
        self.running: dict[int, int] = {}  # device -> its task
        self.event = dict.fromkeys(self.queues, inf)  # when the device's task ends, or its next one begins
        self.start = [0.0] * len(schedule.tasks)
        self.end = [0.0] * len(schedule.tasks)

    def run(self) -> tuple[list[float], list[float]]:
        """Start and end of each task."""
        for device in self.queues:
            self.look(device, 0.0)
        while (now := self.event[device := min(self.event, key=self.event.__getitem__)]) < inf:
            if device in self.running:
                self.finish(device, now)
            else:
                self.begin(device, now)
        return self.start, self.end

    def look(self, device: int, now: float) -> None:
        """Sets when an idle device begins its next task, if all that it needs is on its way."""
        queue = self.queues[device]
        if queue and device not in self.running and not self.waiting[queue[0]]:
            self.event[device] = max(now, self.arrival[queue[0]])

    def begin(self, device: int, now: float) -> None:
        """Begins the device's next task, which slows down the others of its host."""
        self.change_busy(self.hosts[device], 1, now)
        position = self.running[device] = self.queues[device].popleft()
        self.start[position] = now
        self.event[device] = now + self.seconds(position, self.busy[self.hosts[device]])

    def finish(self, device: int, now: float) -> None:
        """Ends the device's task, which speeds up the others of its host and may let tasks begin anywhere."""
        position = self.running.pop(device)
        self.end[position] = now
        self.event[device] = inf
        self.change_busy(self.hosts[device], -1, now)
        tasks = self.schedule.tasks
        for follower in self.followers[position]:
            other, sent = self.device[follower], now
            if other != device:
                sent += self.transfer(tasks[position], tasks[position].stage, tasks[follower].stage)
            self.arrival[follower] = max(self.arrival[follower], sent)
            self.waiting[follower] -= 1
            self.look(other, now)
        self.look(device, now)

    def change_busy(self, host: Any, more: int, now: float) -> None:
        """Counts one busy device more or less, and stretches what is left of the tasks that run on its host."""
        before = self.busy[host]
        self.busy[host] += more
        for device, position in self.running.items():
            alone, shared = self.durations[position]
            if alone != shared and self.hosts[device] == host:
                old, new = self.seconds(position, before), self.seconds(position, before + more)
                if old:  # else it ends now
                    self.event[device] = now + (self.event[device] - now) * new / old

    def seconds(self, position: int, busy: int) -> float:
        """How long a task takes while so many devices of its host are busy."""
        alone, shared = self.durations[position]
        others = self.size[self.hosts[self.device[position]]] - 1
        return alone + (shared - alone) * (busy - 1) / others if others else alone
