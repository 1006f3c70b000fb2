"""Planning: costs, partition, schedules, simulation and the plan, in plain Python over numbers; never imports jax."""

from mp_lstm.planning.costs import Cost, Rates
from mp_lstm.planning.partition import balanced, check_partition
from mp_lstm.planning.plan import BucketPlan, Plan, Row, make_plan, predict, row_splits
from mp_lstm.planning.schedule import (
    SCHEDULES,
    Schedule,
    Task,
    Unit,
    arrange,
    dependencies,
    serial,
    validate,
    wavefront,
)
from mp_lstm.planning.simulate import Timeline, simulate, timetable

__all__ = [
    "SCHEDULES",
    "BucketPlan",
    "Cost",
    "Plan",
    "Rates",
    "Row",
    "Schedule",
    "Task",
    "Timeline",
    "Unit",
    "arrange",
    "balanced",
    "check_partition",
    "dependencies",
    "make_plan",
    "predict",
    "row_splits",
    "serial",
    "simulate",
    "timetable",
    "validate",
    "wavefront",
]
