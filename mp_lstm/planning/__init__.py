"""Planning: costs, partition, schedules, simulation and the plan, in plain Python over numbers; never imports jax."""

from mp_lstm.planning.calibration import (
    CalibratedCosts,
    Calibration,
    DeviceRates,
    LinkRates,
    default_calibration,
)
from mp_lstm.planning.costs import Cost, CostModel, RowMemory, Seconds
from mp_lstm.planning.group import Group
from mp_lstm.planning.make import make_plan
from mp_lstm.planning.measured import MeasuredCosts
from mp_lstm.planning.memory import StageMemory, peak_bytes
from mp_lstm.planning.partition import balanced, check_partition
from mp_lstm.planning.plan import BucketPlan, Plan, Row, row_splits
from mp_lstm.planning.prediction import predict, predicted_memory
from mp_lstm.planning.schedule import Schedule, Task, Unit, dependencies, timetable, validate, weight_task, work
from mp_lstm.planning.schedules import (
    SCHEDULES,
    Generator,
    arrange,
    gpipe,
    one_f_one_b,
    serial,
    wavefront,
    zero_bubble,
)
from mp_lstm.planning.simulate import Timeline, simulate

__all__ = [
    "SCHEDULES",
    "BucketPlan",
    "CalibratedCosts",
    "Calibration",
    "Cost",
    "CostModel",
    "DeviceRates",
    "Generator",
    "Group",
    "LinkRates",
    "MeasuredCosts",
    "Plan",
    "Row",
    "RowMemory",
    "Schedule",
    "Seconds",
    "StageMemory",
    "Task",
    "Timeline",
    "Unit",
    "arrange",
    "balanced",
    "check_partition",
    "default_calibration",
    "dependencies",
    "gpipe",
    "make_plan",
    "one_f_one_b",
    "peak_bytes",
    "predict",
    "predicted_memory",
    "row_splits",
    "serial",
    "simulate",
    "timetable",
    "validate",
    "wavefront",
    "weight_task",
    "work",
    "zero_bubble",
]
