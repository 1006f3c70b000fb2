"""Task intervals read back from the profiler; tests/test_overlap.py looks at their order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.runtime.measure import Interval, _union, intervals_of, measure_steps


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


def test_measured_steps() -> None:
    model = mp_lstm.language_model(**examples.SIZES)
    pipe = examples.pipeline(model, lengths=(4,), chunk=2)
    batch = examples.random_batch(np.random.default_rng(0), 4, 4)
    state, _ = pipe.step(pipe.load(examples.random_params(model)), batch)
    state, measured = measure_steps(pipe, state, [batch] * 3)
    assert state.step == 4
    kinds = [interval.kind for interval in measured.intervals if interval.kind]
    assert sorted(kinds) == sorted(["F", "F", "B", "B", "W", "U"] * 2 * 3)
    assert measured.seconds > 0
    assert all(0 < share <= 1 for share in measured.busy.values())
    assert set(measured.busy) == {0, 1}
