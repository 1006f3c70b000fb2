"""A step as a trace that timeline viewers open: ui.perfetto.dev, and Chrome's chrome://tracing.

The format is the JSON of Chrome's trace events: a viewer shows one group of lanes a "process" and one lane a "thread".
A device is a process, once as measured and once as predicted, one below the other; its stages are the threads.

References:
  Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mp_lstm.planning.schedule import Schedule, Task, label
from mp_lstm.planning.simulate import Timeline

MICROSECONDS = 1e6  # the unit of the format, in a second


def trace_events(timelines: Mapping[str, Timeline], schedule: Schedule, device_names: Sequence[str]) -> dict[str, Any]:
    """Writes timelines of one schedule as a trace: save it with `json.dump`.

    Args:
      timelines: by what they are, e.g. "measured" and "predicted", in the order in which they are shown.
      schedule: what all of them ran.
      device_names: by device index.

    Returns:
      The trace, of plain dicts, lists, numbers and strings.

    Example:
      >>> from mp_lstm.planning import serial, simulate
      >>> schedule = serial((0,), (1,))
      >>> trace = trace_events({"predicted": simulate(schedule, lambda task: 0.5)}, schedule, ["cpu:0"])
      >>> [(event["name"], event["ts"]) for event in trace["traceEvents"] if event["ph"] == "X"]
      [('F0 stage 0', 0.0), ('B0 stage 0', 500000.0), ('W stage 0', 1000000.0), ('U stage 0', 1500000.0)]
    """
    events: list[dict[str, Any]] = []
    groups = [(device, what) for device in sorted(set(schedule.devices)) for what in timelines]
    for process, (device, what) in enumerate(groups, start=1):
        stages = [stage for stage, its in enumerate(schedule.devices) if its == device]
        # Numbers from 1, and none twice: viewers give 0 a meaning of their own.
        threads = {stage: process * schedule.stages + stage for stage in stages}
        events += _names(process, f"{device_names[device]} {what}", threads)
        events += _tasks(process, threads, timelines[what], schedule)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(process: int, name: str, threads: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    first = min(threads.values())
    yield _metadata("process_name", process, first, name=name)
    yield _metadata("process_sort_index", process, first, sort_index=process)
    for stage, thread in threads.items():
        yield _metadata("thread_name", process, thread, name=f"stage {stage}")
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _tasks(
    process: int, threads: Mapping[int, int], timeline: Timeline, schedule: Schedule
) -> Iterator[dict[str, Any]]:
    """Complete events, one a task, in order of their start."""
    for task in sorted((task for task in schedule.tasks if task.stage in threads), key=timeline.start.__getitem__):
        start = timeline.start[task]
        yield {
            "ph": "X",
            "name": f"{label(task, microbatches=len(schedule.chunks))} stage {task.stage}",
            "cat": task.kind,
            "pid": process,
            "tid": threads[task.stage],
            "ts": start * MICROSECONDS,
            "dur": (timeline.end[task] - start) * MICROSECONDS,
            "args": _described(task),
        }


def _described(task: Task) -> dict[str, Any]:
    units = [f"micro-batch {unit.microbatch}, chunk {unit.chunk}" for unit in task.units]
    return {"stage": task.stage, "kind": task.kind, "units": units}
