"""Schedules compiled for many partitions: against `simulate`, task by task, and the bounds that leave schedules out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_lstm.planning import SCHEDULES, StageMemory, peak_bytes, simulate
from mp_lstm.planning.flow import KINDS, Flow, StageArrays, bound

PARTITIONS = 3


@st.composite
def problems(draw):
    stages, chunks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shared = draw(st.booleans())
    devices = tuple(draw(st.integers(0, 1)) for _ in range(stages)) if shared else tuple(range(stages))
    generator = SCHEDULES[draw(st.sampled_from(list(SCHEDULES)[1:]))]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    apart = np.not_equal.outer(devices, devices)
    times = StageArrays(
        random.integers(0, 9, (4, stages, PARTITIONS)).astype(float),
        random.integers(0, 5, (2, stages - 1, PARTITIONS)).astype(float),
        np.where(apart, 0.5, 0.0),
    )
    return generator(devices, (chunks,) * microbatches), times


@settings(deadline=None)
@given(problems())
def test_one_pass_gives_what_simulation_gives(problem):
    schedule, times = problem

    def transfer(k):
        def seconds(task, source, target):
            if task.kind == "W":
                return times.norms[source, target]
            return times.links["FB".index(task.kind), min(source, target), k]

        return seconds

    made = Flow(schedule).makespans(times)
    for k in range(PARTITIONS):
        timeline = simulate(
            schedule, lambda task, k=k: times.tasks[KINDS.index(task.kind), task.stage, k], transfer=transfer(k)
        )
        assert made[k] == pytest.approx(timeline.makespan)


@settings(deadline=None)
@given(problems())
def test_no_schedule_beats_the_bound(problem):
    schedule, times = problem
    if len(set(schedule.devices)) == schedule.stages:
        least = bound(times, schedule.chunks[0], len(schedule.chunks))
        assert (Flow(schedule).makespans(times) >= least - 1e-9).all()


@settings(deadline=None)
@given(problems())
def test_what_is_held_between_tasks_is_no_more_than_the_peak(problem):
    """With nothing sent and no temporaries, it is the very peak where B adds nothing while `saved` is still there."""
    schedule, _ = problem
    if len(set(schedule.devices)) < schedule.stages:
        return
    for saved, kept, tape in ((5, 3, 0), (5, 3, 2)):
        memory = StageMemory(0, saved, kept, tape, 0, 0, 0, 0, 0)
        peaks = peak_bytes(schedule, [[memory] * len(schedule.chunks)] * schedule.stages)
        for stage, moments in enumerate(Flow(schedule).pressure):
            peak = peaks[schedule.devices[stage]]
            most = max(np.array(moments) @ (saved, kept, tape))
            assert most == peak if not tape else most <= peak
