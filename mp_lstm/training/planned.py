"""Planning a run: which layers live on which device, for the batches of a configuration.

Nothing here starts a device: what a plan is made for and by can be a machine that is only described.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mp_lstm.data import BatchSource, Corpus
from mp_lstm.errors import InputError
from mp_lstm.layers.model import Model
from mp_lstm.layers.sharding import check_parts
from mp_lstm.planning import Calibration, CostModel, Plan, default_calibration, make_plan, predict, predicted_memory
from mp_lstm.planning.group import group_shape
from mp_lstm.planning.grouped import costs_of
from mp_lstm.runtime.costs import measure_costs
from mp_lstm.training.build import Sources, make_model, make_sources, named
from mp_lstm.training.config import Config, is_description
from mp_lstm.training.optimizers import make_optimizer


class Planned(NamedTuple):
    """What a plan is made for and by: a `Setup` without its pipeline, so that its devices need not be there."""

    sources: Sources
    model: Model
    plan: Plan
    costs: CostModel


def make_planned(config: Config, corpus: Corpus, devices: Sequence[Any], *, cache: Path | None = None) -> Planned:
    """Plans a run on devices, or on those that `pipeline.costs` describes.

    Args:
      config: a validated configuration.
      corpus: as `read_corpus` gives it.
      devices: those that may be used, in order; not looked at where others are described.
      cache: folder of measured costs; None: none is kept.

    Returns:
      The plan with what it was made for and by.

    Raises:
      InputError: the configuration does not fit the corpus, the model or the devices, or a description is unusable.

    Example:
      >>> from mp_lstm.training.build import read_corpus
      >>> from mp_lstm.training.config import load
      >>> config = load(overrides=["--data.buckets", "300"])
      >>> make_planned(config, read_corpus(config), ["cpu:0", "cpu:1"]).costs.label
      'predicted for devices of one CPU core each'
    """
    model = make_model(config, len(corpus.vocabulary))
    sources = make_sources(config, corpus)
    lengths = sorted({length for source in sources for length in source.buckets})
    if is_description(config):
        calibration = Calibration.load(config.pipeline.costs)
        devices, costs = calibration.devices, calibration.costs(model)
    elif config.pipeline.costs == "measured":
        costs = _measured(config, model, lengths, devices, cache)
    else:
        costs = None
    plan = plan_for(config, model, lengths, devices, costs=costs, weights=_shares(sources.train, lengths))
    return Planned(sources, model, plan, costs_of(plan, costs or default_calibration().costs(model)))


def plan_for(
    config: Config,
    model: Model,
    lengths: Sequence[int],
    devices: Sequence[Any],
    *,
    costs: CostModel | None = None,
    weights: Mapping[int, float] | None = None,
) -> Plan:
    """Plans a model on devices, by costs (None: nominal ones) and by how often each length occurs.

    Raises:
      InputError: a partition, number of stages, chunk or number of micro-batches that cannot be.

    Example:
      >>> plan_for(Config(), make_model(Config(), 10_000), [16], ["cpu:0", "cpu:1"]).partition
      (5, 1)
    """
    pipeline = config.pipeline
    with named("pipeline"):
        partition = _chosen(pipeline.partition)
        stages = _chosen(pipeline.stages)
        wanted = stages or (len(partition) if partition else 1)
        meshes = {
            "devices_per_stage": _chosen(pipeline.devices_per_stage),
            "data_parallel": _chosen(pipeline.data_parallel),
            "model_parallel": pipeline.model_parallel,
        }
        size = math.prod(group_shape(**meshes))
        check_parts(model.rows, pipeline.model_parallel)
        if len(devices) < wanted * size and wanted <= len(model.rows):
            each = "" if size == 1 else f" of {size} devices"
            raise InputError(
                f"{wanted} stages{each} for {len(devices)} devices: use fewer stages, or emulate more devices with "
                f"--train.emulate_devices {wanted * size}"
            )
        return make_plan(
            model,
            batch_size=config.data.batch_size,
            lengths=lengths,
            devices=devices[: len(devices) // size * size],
            stages=stages,
            partition=partition,
            schedule=_chosen(pipeline.schedule),
            chunk=_chosen(pipeline.chunk),
            microbatches=_chosen(pipeline.microbatches),
            remat=_chosen(pipeline.remat),
            costs=costs,
            weights=weights,
            **meshes,
        )


def _measured(
    config: Config, model: Model, lengths: Sequence[int], devices: Sequence[Any], cache: Path | None
) -> CostModel:
    """Times the model's layers on the devices, where this has not been done before."""
    optimizer = make_optimizer(config, config.optimizer.learning_rate)
    slices = config.pipeline.microbatches
    rows = config.data.batch_size
    counts = tuple(m for m in (1, 2) if m <= rows) if slices == "auto" else (slices,)
    remat = _chosen(config.pipeline.remat)
    return measure_costs(
        model, rows, lengths, devices, microbatches=counts, optimizer=optimizer, remat=remat, cache_dir=cache
    )


def _shares(source: BatchSource, lengths: Sequence[int]) -> dict[int, float]:
    """How often each bucket occurs in training; those that only validation or testing needs do not count."""
    counts = source.counts()
    return {length: float(counts.get(length, 0)) for length in lengths}


def _chosen(value: Any) -> Any:
    """What make_plan is to choose is None there."""
    return None if value == "auto" else value


def prediction_lines(planned: Planned, counts: dict[int, int]) -> str:
    """Predicted time of a step, busy share and memory of each device, for each bucket and over all batches."""
    _, model, plan, costs = planned
    lines = [f"{costs.label}:"]
    seconds, busy = 0.0, [0.0] * len(set(plan.device_indices))
    for length, count in sorted(counts.items()):
        timeline = predict(plan, model, costs, length)
        shares = [timeline.busy[device] / timeline.makespan for device in sorted(timeline.busy)]
        lines.append(f"  bucket {length:>4}: {step_line(plan, timeline.makespan, shares)}")
        seconds += count * timeline.makespan
        busy = [total + count * timeline.busy[device] for device, total in enumerate(busy)]
    mean = step_line(plan, seconds / sum(counts.values()), [part / seconds for part in busy])
    devices = dict(zip(plan.device_indices, plan.devices, strict=True))
    peaks = predicted_memory(plan, model, costs)
    memory = ", ".join(f"{devices[index]} {peak / 1e6:,.1f} MB" for index, peak in peaks.items())
    return "\n".join([*lines, f"  all batches: {mean}", f"  most memory: {memory}"])


def step_line(plan: Plan, seconds: float, busy: Sequence[float]) -> str:
    """A step in words: its time, and the share of it that each device is busy."""
    devices = dict(zip(plan.device_indices, plan.devices, strict=True))
    shares = ", ".join(f"{devices[index]} busy {share:.0%}" for index, share in enumerate(busy))
    return f"{seconds * 1e3:,.1f} ms a step, {shares}"
