"""From a configuration and a corpus to everything a run needs: batches, model, plan, optimizer, pipeline.

    Config, Corpus --make_planned--> Sources, Model, Plan --make_optimizer--> Pipeline

Nothing is trained and no parameter is drawn here: a pipeline is made of programs that are compiled when first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mp_lstm.data import BatchSource, Corpus
from mp_lstm.errors import InputError
from mp_lstm.layers.model import Model
from mp_lstm.planning import CostModel, Plan
from mp_lstm.runtime.make import make_pipeline
from mp_lstm.runtime.pipeline import Pipeline
from mp_lstm.training.build import Sources, named
from mp_lstm.training.config import Config, is_description
from mp_lstm.training.optimizers import Schedule, make_optimizer, make_schedule
from mp_lstm.training.planned import make_planned


class Setup(NamedTuple):
    """What a run is made of.

    Args:
      config: the whole configuration.
      corpus: the text.
      sources: its batches.
      model: the model.
      plan: where and how it runs.
      pipe: the pipeline; no state yet.
      learning_rate: of the update with this number (from 0), before the state's rate factor. Plain numbers: looking
        one up touches no device.
      costs: what the plan was chosen by.
    """

    config: Config
    corpus: Corpus
    sources: Sources
    model: Model
    plan: Plan
    pipe: Pipeline
    learning_rate: Callable[[int], float]
    costs: CostModel


def make_setup(config: Config, corpus: Corpus, devices: Sequence[Any], *, cache: Path | None = None) -> Setup:
    """Assembles a run.

    Args:
      config: a validated configuration.
      corpus: as `read_corpus` gives it.
      devices: those that may be used, in order.
      cache: folder of measured costs; None: none is kept.

    Returns:
      The setup.

    Raises:
      InputError: the configuration does not fit the corpus, the model or the devices.

    Example:
      >>> from mp_lstm.training.build import read_corpus
      >>> from mp_lstm.training.config import load
      >>> words = ["--data.vocab_limit", "100", "--model.embed", "8", "--model.hidden", "8", "--data.buckets", "300"]
      >>> config = load(overrides=words)
      >>> make_setup(config, read_corpus(config), jax.devices()[:2]).plan.partition
      (4, 2)
    """
    if is_description(config):
        raise InputError(
            f"[pipeline] costs is {config.pipeline.costs!r}, which describes a machine that is not here: use it with "
            "`mp-lstm plan`, or pass 'nominal' or 'measured'"
        )
    sources, model, plan, costs = make_planned(config, corpus, devices, cache=cache)
    schedule = make_schedule(config, updates_per_epoch(config, sources.train))
    pipe = make_pipe(config, model, plan, schedule)
    return Setup(config, corpus, sources, model, plan, pipe, _looked_up(schedule), costs)


def resolved(setup: Setup) -> Config:
    """The configuration with the buckets that were chosen, as a run keeps it.

    What "auto" buckets are depends on the length of the run and on its stages. A resumed run may change these, but its
    batches must stay as they were.

    Example:
      >>> from mp_lstm.training.build import read_corpus
      >>> from mp_lstm.training.config import load
      >>> config = load(overrides=["--model.embed", "8", "--model.hidden", "8"])
      >>> resolved(make_setup(config, read_corpus(config), jax.devices()[:2])).data.buckets[-1]
      300
    """
    data = setup.config.data
    if data.mode == "contiguous" or data.buckets != "auto":
        return setup.config
    return replace(setup.config, data=replace(data, buckets=tuple(setup.plan.buckets)))


def make_pipe(config: Config, model: Model, plan: Plan, schedule: Schedule | float) -> Pipeline:
    """Puts a model on a plan's devices, with the configured update.

    Raises:
      InputError: the optimizer cannot be pipelined.
    """
    section, optimizer = config.optimizer, make_optimizer(config, schedule)
    with named("optimizer"):
        return make_pipeline(
            model,
            plan,
            optimizer,
            max_norm=section.max_norm,
            normalize=section.normalize,
            every_k=section.every_k,
        )


def updates_per_epoch(config: Config, source: BatchSource) -> int:
    """Updates in an epoch; the last may have fewer than `every_k` batches."""
    return -(-source.num_batches() // config.optimizer.every_k)


def _looked_up(schedule: Schedule | float) -> Callable[[int], float]:
    """A schedule as plain numbers.

    Optax computes rates on a device, behind whatever is queued there: they are worked out ahead, a table at a time.
    """
    if not callable(schedule):
        return lambda update: float(schedule)

    @functools.cache
    def table(number: int) -> np.ndarray:
        return np.asarray(jax.vmap(schedule)(np.arange(number * _TABLE, (number + 1) * _TABLE)))

    table(0)
    return lambda update: float(table(update // _TABLE)[update % _TABLE])


_TABLE = 1 << 18
