"""The trace of a step, held against the rules of Chrome's trace-event format."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest

from mp_lstm.planning import Task, Timeline, Unit, serial, simulate, wavefront
from mp_lstm.runtime.perfetto import trace_events

METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def check_format(trace: Any) -> None:
    """Asserts what viewers want of a trace in JSON object format."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[tuple[int, int], list[Any]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        lane = event["pid"], event["tid"]
        assert all(isinstance(number, int) and number > 0 for number in lane)
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind)
            named.add((event["name"], event["pid"] if event["name"].startswith("process") else lane))
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            lanes[lane].append(event)
    # every lane has its names, no thread's number is another's too, and no event overlaps the next of its thread
    assert named == {
        (name, key) for pid, tid in lanes for name in METADATA for key in [pid if name.startswith("p") else (pid, tid)]
    }
    assert len({tid for _, tid in lanes}) == len(lanes)
    for events in lanes.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(events))


def processes(trace: Any) -> dict[str, list[Any]]:
    """The complete events of each process, by its name, in the order in which processes are shown."""
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    order = {event["pid"]: event["args"]["sort_index"] for event in metadata if event["name"] == "process_sort_index"}
    names = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return {names[pid]: [event for event in tasks if event["pid"] == pid] for pid in sorted(order, key=order.get)}


def late(timeline: Timeline, seconds: float) -> Timeline:
    moved = ({task: at + seconds for task, at in times.items()} for times in (timeline.start, timeline.end))
    return timeline._replace(**dict(zip(("start", "end"), moved, strict=True)))


def test_devices_are_processes_measured_above_predicted() -> None:
    schedule = wavefront((0, 1), (2,))
    predicted = simulate(schedule, lambda task: 0.001)
    timelines = {"measured": late(predicted, 0.5), "predicted": predicted}
    trace = trace_events(timelines, schedule, ["cpu:0", "cpu:3"])
    check_format(trace)
    shown = processes(trace)
    assert list(shown) == ["cpu:0 measured", "cpu:0 predicted", "cpu:3 measured", "cpu:3 predicted"]
    stage_0 = ["F0 stage 0", "F1 stage 0", "B1 stage 0", "B0 stage 0", "W stage 0", "U stage 0"]
    assert [event["name"] for event in shown["cpu:0 measured"]] == stage_0
    microseconds = [round(event["ts"]) for event in shown["cpu:0 predicted"]]
    assert microseconds == [0, 1000, 4000, 5000, 6000, 7000]
    assert [round(event["ts"]) for event in shown["cpu:0 measured"]] == [500_000 + at for at in microseconds]
    assert {round(event["dur"]) for event in shown["cpu:3 measured"]} == {1000}


def test_an_event_tells_its_task() -> None:
    schedule = wavefront((0,), (2, 1))
    trace = trace_events({"predicted": simulate(schedule, lambda task: 1.0)}, schedule, ["cpu:0"])
    check_format(trace)
    told = {event["name"]: (event["cat"], event["args"]) for event in processes(trace)["cpu:0 predicted"]}
    units = ["micro-batch 0, chunk 0", "micro-batch 0, chunk 1"]
    assert told["F0.1 stage 0"] == ("F", {"stage": 0, "kind": "F", "units": units[1:]})
    assert told["W0 stage 0"] == ("W", {"stage": 0, "kind": "W", "units": units})
    assert told["U stage 0"] == ("U", {"stage": 0, "kind": "U", "units": []})


def test_stages_that_share_a_device_are_its_threads() -> None:
    schedule = serial((0, 1, 0), (1,))
    trace = trace_events({"predicted": simulate(schedule, lambda task: 1.0)}, schedule, ["gpu:0", "gpu:1"])
    check_format(trace)
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    shown = processes(trace)
    assert {names[event["tid"]] for event in shown["gpu:0 predicted"]} == {"stage 0", "stage 2"}
    for event in itertools.chain(*shown.values()):
        assert names[event["tid"]] == f"stage {event['args']['stage']}"


@pytest.mark.parametrize("field", ["pid", "tid", "ts", "dur", "name", "args"])
def test_the_check_finds_what_is_missing(field: str) -> None:
    schedule = serial((0,), (1,))
    trace = trace_events({"predicted": simulate(schedule, lambda task: 1.0)}, schedule, ["cpu:0"])
    del trace["traceEvents"][-1][field]
    with pytest.raises(KeyError):
        check_format(trace)


def test_the_check_finds_an_overlap() -> None:
    schedule = serial((0,), (1,))
    timeline = simulate(schedule, lambda task: 1.0)
    timeline.end[Task("F", 0, (Unit(0, 0),))] += 0.5
    with pytest.raises(AssertionError):
        check_format(trace_events({"predicted": timeline}, schedule, ["cpu:0"]))
