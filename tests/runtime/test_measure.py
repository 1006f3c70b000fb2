"""Task intervals read back from the profiler; tests/test_overlap.py looks at their order."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.planning import Schedule, Task, Timeline, Unit, dependencies, serial, wavefront
from mp_lstm.runtime.measure import Interval, Measured, _union, intervals_of, measure_steps, timelines_of


def test_time_in_which_any_task_runs() -> None:
    tasks = [Interval(0, "forward", *ends) for ends in ((0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4))]
    assert _union(tasks[::-1]) == 4.0
    assert _union([]) == 0


def event(module: str | None, run: int, start: int, end: int) -> SimpleNamespace:
    stats = [("run_id", run)] + ([("hlo_module", module)] if module else [])
    return SimpleNamespace(stats=stats, start_ns=start * 1e9, end_ns=end * 1e9)


def test_an_interval_spans_the_operations_of_one_execution() -> None:
    events = [
        event("jit_stage0_forward", 1, 3, 4),
        event("jit_stage0_forward", 1, 1, 2),
        event("jit_stage0_forward", 2, 6, 7),
        event("jit_stage12_backward_add", 3, 4, 5),
        event("jit_somebody_elses", 4, 0, 9),
        event(None, 5, 0, 9),
    ]
    data = SimpleNamespace(planes=[SimpleNamespace(lines=[SimpleNamespace(events=events)])])
    assert intervals_of(data) == (
        Interval(0, "forward", 1, 4),
        Interval(12, "backward_add", 4, 5),
        Interval(0, "forward", 6, 7),
    )


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("forward", "F"), ("backward_add", "B"), ("weight_gradient", "W"), ("update", "U"), ("norm", None)],
)
def test_kinds(phase: str, kind: str | None) -> None:
    assert Interval(0, phase, 0, 1).kind == kind


PHASES = {"F": "forward", "B": "backward_add", "W": "weight_gradient", "U": "update"}


def run(schedule: Schedule, begin: float, gap: float = 0.0) -> list[Interval]:
    """What would be measured if every task took a second and began when the one before it in the order had ended."""
    tasks = enumerate(schedule.tasks)
    return [Interval(t.stage, PHASES[t.kind], begin + (1 + gap) * i, begin + (1 + gap) * i + 1) for i, t in tasks]


def test_intervals_are_paired_with_tasks_in_the_schedules_order() -> None:
    schedule = wavefront((0, 1), (2, 1))
    (step,) = timelines_of(run(schedule, 7.0), [schedule])
    assert step.start == {task: float(i) for i, task in enumerate(schedule.tasks)}
    assert step.end == {task: i + 1.0 for i, task in enumerate(schedule.tasks)}
    # the first B of a micro-batch is that of its last chunk
    backward = [step.start[Task("B", 1, (Unit(0, chunk),))] for chunk in (0, 1)]
    assert backward[0] > backward[1]


def test_steps_follow_one_another_and_may_differ() -> None:
    schedules = [wavefront((0, 1), (2,)), wavefront((0, 1), (3,)), wavefront((0, 1), (2,))]
    intervals = []
    for number, schedule in enumerate(schedules):
        intervals += run(schedule, 100.0 * number, gap=0.5 * number)
        intervals.append(Interval(1, "norm", 100.0 * number, 100.0 * number + 50))  # no task
    steps = timelines_of(intervals, schedules)
    assert [set(step.start) for step in steps] == [set(schedule.tasks) for schedule in schedules]
    tasks = [len(schedule.tasks) for schedule in schedules]
    assert [step.makespan for step in steps] == [tasks[0], tasks[1] * 1.5 - 0.5, tasks[2] * 2 - 1]


def test_busy_and_idle_are_a_devices() -> None:
    """Stages 0 and 2 share device 0, and two of its tasks overlap: the time of both counts once."""
    schedule = serial((0, 1, 0), (1,))
    intervals = run(schedule, 0.0)
    kinds = [(task.kind, task.stage) for task in schedule.tasks]
    forward, backward = (kinds.index((kind, 2)) for kind in "FB")
    assert backward == forward + 1
    intervals[backward] = intervals[backward]._replace(start=intervals[forward].start)
    (step,) = timelines_of(intervals, [schedule])
    assert step.makespan == 12
    assert step.busy == {0: 8, 1: 4}
    assert step.idle == {0: pytest.approx(1 / 3), 1: pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("steps", "message"), [(2, "the profile has 2 B of stage 0, the steps measured have 4: "), (0, "2 B .* have 0")]
)
def test_an_incomplete_profile_is_refused(steps: int, message: str) -> None:
    schedule = wavefront((0, 1), (2,))
    with pytest.raises(InputError, match=message):
        timelines_of(run(schedule, 0.0), [schedule] * steps)


def test_the_median_is_a_step_that_ran() -> None:
    def step(makespan: float) -> Timeline:
        return Timeline({}, {}, makespan, {}, {})

    for makespans, median in (((3.0, 9.0, 1.0), 3.0), ((4.0, 1.0), 1.0), ((2.0,), 2.0)):
        assert Measured((), 1.0, {}, tuple(map(step, makespans))).median == step(median)


def test_measured_steps() -> None:
    model = mp_lstm.language_model(**examples.SIZES)
    pipe = examples.pipeline(model, lengths=(4, 6), partition=(2, 2), chunk=2)
    rng = np.random.default_rng(0)
    batches = [examples.random_batch(rng, length, 4) for length in (4, 6, 4)]
    state = pipe.load(examples.random_params(model))
    for batch in batches[:2]:
        state, _ = pipe.step(state, batch)
    state, measured = measure_steps(pipe, state, batches)
    assert state.step == 5
    kinds = [interval.kind for interval in measured.intervals if interval.kind]
    assert sorted(kinds) == sorted(["F", "B"] * 2 * (2 + 3 + 2) + ["W", "U"] * 2 * 3)
    assert measured.seconds > 0
    assert all(0 < share <= 1 for share in measured.busy.values())
    assert set(measured.busy) == {0, 1}
    for step, length in zip(measured.steps, (4, 6, 4), strict=True):
        schedule = pipe.plan.schedule((length,))
        assert set(step.start) == set(schedule.tasks)
        assert min(step.start.values()) == 0
        assert max(step.end.values()) == step.makespan
        assert all(0 <= share < 1 for share in step.idle.values())
        # were an interval another task's, one would begin before what it needs has ended
        for task in schedule.tasks:
            assert all(step.start[task] >= step.end[need] for need in dependencies(schedule, task))


def test_tasks_that_compute_nothing_take_no_time() -> None:
    """B of a stage that has the embedding alone is in no profile: such plans could not be measured once."""
    pipe = examples.pipeline(mp_lstm.language_model(**examples.SIZES), lengths=(4,), partition=(1, 3), chunk=2)
    batch = examples.random_batch(np.random.default_rng(0), 4, 4)
    state, _ = pipe.step(pipe.init(jax.random.key(0)), batch)
    _, measured = measure_steps(pipe, state, [batch])
    (step,) = measured.steps
    nothing = [task for task in step.start if (task.kind, task.stage) == ("B", 0)]
    assert len(nothing) == 2
    for task in step.start:
        assert (step.end[task] == step.start[task]) == (task in nothing)
        assert 0 <= step.start[task] <= step.makespan
