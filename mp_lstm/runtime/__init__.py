"""Runtime: devices live here and only here."""

from mp_lstm.runtime.average import average_parameters
from mp_lstm.runtime.costs import measure_costs
from mp_lstm.runtime.edges import stage_devices
from mp_lstm.runtime.make import make_pipeline
from mp_lstm.runtime.pipeline import Pipeline
from mp_lstm.runtime.state import Metrics, State

__all__ = ["Metrics", "Pipeline", "State", "average_parameters", "make_pipeline", "measure_costs", "stage_devices"]
