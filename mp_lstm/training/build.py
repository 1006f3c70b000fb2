"""From a configuration to everything a run needs: corpus, batches, model, plan, optimizer, pipeline.

    Config --read_corpus--> Corpus --make_sources--> Sources
                               |                        |
                               +-- make_model --> Plan <+-- its bucket lengths
                                                    |
                                   make_optimizer --> Pipeline

Each step is a function of values. Nothing is trained and no parameter is drawn here: a pipeline is made of programs
that are compiled when first used. What the library's checks find wrong is told with the section it was set in.

Longer than most files: the steps above are read together, each a function of the ones before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mp_lstm.data import (
    BatchSource,
    BucketBill,
    ContiguousBatches,
    Corpus,
    Histogram,
    SentenceBatches,
    Split,
    auto_buckets,
    bucket_bill,
    build_vocabulary,
    fit_buckets,
    length_histogram,
    load_austen,
    read_directory,
)
from mp_lstm.errors import InputError
from mp_lstm.layers.language_model import language_model
from mp_lstm.layers.model import Model
from mp_lstm.planning import Calibration, CostModel, Plan, default_calibration, make_plan, predict
from mp_lstm.runtime.costs import measure_costs
from mp_lstm.runtime.make import make_pipeline
from mp_lstm.runtime.pipeline import Pipeline
from mp_lstm.training.config import Config
from mp_lstm.training.optimizers import Schedule, make_optimizer, make_schedule

# One program takes about 0.3 s to compile, and a stage has about five for each bucket: F, B twice, W, evaluation.
COMPILE_SECONDS = 1.5


class Sources(NamedTuple):
    """Batches of the three splits: training's shuffled anew each epoch, the others in the order of the text."""

    train: BatchSource
    valid: BatchSource
    test: BatchSource


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


class Planned(NamedTuple):
    """What a plan is made for and by: a `Setup` without its pipeline, so that its devices need not be there."""

    sources: Sources
    model: Model
    plan: Plan
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
    return Planned(sources, model, plan, costs or default_calibration().costs(model))


def is_description(config: Config) -> bool:
    """Whether `pipeline.costs` names a file."""
    return config.pipeline.costs.endswith(".toml")


def _measured(
    config: Config, model: Model, lengths: Sequence[int], devices: Sequence[Any], cache: Path | None
) -> CostModel:
    """Times the model's layers on the devices, where this has not been done before."""
    optimizer = make_optimizer(config, config.optimizer.learning_rate)
    slices = config.pipeline.microbatches
    rows = config.data.batch_size
    counts = tuple(m for m in (1, 2) if m <= rows) if slices == "auto" else (slices,)
    return measure_costs(model, rows, lengths, devices, microbatches=counts, optimizer=optimizer, cache_dir=cache)


def _shares(source: BatchSource, lengths: Sequence[int]) -> dict[int, float]:
    """How often each bucket occurs in training; those that only validation or testing needs do not count."""
    counts = source.counts()
    return {length: float(counts.get(length, 0)) for length in lengths}


def resolved(setup: Setup) -> Config:
    """The configuration with the buckets that were chosen, as a run keeps it.

    What "auto" buckets are depends on the length of the run and on its stages. A resumed run may change these, but its
    batches must stay as they were.

    Example:
      >>> from mp_lstm.training.config import load
      >>> config = load(overrides=["--model.embed", "8", "--model.hidden", "8"])
      >>> resolved(make_setup(config, read_corpus(config), jax.devices()[:2])).data.buckets[-1]
      300
    """
    data = setup.config.data
    if data.mode == "contiguous" or data.buckets != "auto":
        return setup.config
    return replace(setup.config, data=replace(data, buckets=tuple(setup.plan.buckets)))


def read_corpus(config: Config) -> Corpus:
    """Reads the text, the package's own or a directory's.

    Raises:
      InputError: it is missing, empty or badly encoded; see `read_directory`.

    Example:
      >>> from mp_lstm.training.config import load
      >>> len(read_corpus(load(overrides=["--data.vocab_limit", "500"])).vocabulary)
      500
    """
    data = config.data
    if data.source == "austen":
        corpus = load_austen()
        return corpus if data.vocab_limit is None else limit_vocabulary(corpus, data.vocab_limit)
    with named("data.source"):
        return read_directory(data.source, vocab_limit=data.vocab_limit)


def limit_vocabulary(corpus: Corpus, limit: int) -> Corpus:
    """The same text in its commonest words, all others being `<unk>`.

    Args:
      corpus: it is left as it is.
      limit: the most words, `<eos>` and `<unk>` included.

    Example:
      >>> corpus = limit_vocabulary(load_austen(), 50)
      >>> corpus.vocabulary.decode(corpus.test.tokens[:8])
      '" i <unk> <unk> <unk> , " <unk>'
    """
    words = corpus.vocabulary.words
    counts = np.bincount(corpus.train.tokens, minlength=len(words)).tolist()
    vocabulary = build_vocabulary(dict(zip(words, counts, strict=True)), limit)
    ids = vocabulary.encode(words)
    train, valid, test = (
        Split(ids[split.tokens], split.offsets) for split in (corpus.train, corpus.valid, corpus.test)
    )
    return Corpus(train, valid, test, vocabulary, corpus.name)


def make_sources(config: Config, corpus: Corpus) -> Sources:
    """Makes the batches of the three splits, which share their bucket lengths.

    Raises:
      InputError: buckets that no sentence fits.

    Example:
      >>> from mp_lstm.training.config import load
      >>> config = load(overrides=["--data.buckets", "16", "32", "--data.long_sentences", "split"])
      >>> make_sources(config, load_austen()).train.buckets
      (16, 32)
    """
    data = config.data
    splits = (corpus.train, corpus.valid, corpus.test)
    if data.mode == "contiguous":
        return Sources(*(ContiguousBatches(split, data.length, data.batch_size) for split in splits))
    with named("data"):
        # Fitted to the sentences of all splits at once: validation must not add buckets of its own.
        everything = length_histogram(np.concatenate([split.lengths for split in splits]))
        given = _auto_buckets(config, corpus) if data.buckets == "auto" else data.buckets
        buckets = fit_buckets(everything, given, data.long_sentences)
        make = functools.partial(
            SentenceBatches, buckets=buckets, batch_size=data.batch_size, policy=data.long_sentences
        )
        orders: list[dict[str, Any]] = [{"seed": config.train.seed}, {"shuffle": False}, {"shuffle": False}]
        sources = []
        for name, split, order in zip(Sources._fields, splits, orders, strict=True):
            with named(f"{name} text"):
                sources.append(make(split, **order))
        return Sources(*sources)


def _auto_buckets(config: Config, corpus: Corpus) -> tuple[int, ...]:
    histogram = length_histogram(corpus.train.lengths)
    return auto_buckets(histogram, **_bucket_prices(config, len(corpus.vocabulary), histogram))


def _bucket_prices(config: Config, vocab_size: int, histogram: Histogram) -> dict[str, Any]:
    """What a bucket's padding and its programs cost, predicted at nominal rates.

    The step is that of one device: how many there will be matters less than that the bill is the same on all machines.
    """
    rows, typical = config.data.batch_size, -(-histogram.tokens // histogram.sentences)
    model = make_model(config, vocab_size)
    plan = make_plan(model, batch_size=rows, lengths=(typical,), devices=("any",))
    seconds = predict(plan, model, default_calibration().costs(model), typical).makespan / (rows * typical)
    stages = config.pipeline.stages if isinstance(config.pipeline.stages, int) else config.train.emulate_devices or 1
    return {
        "batch_size": rows,
        "seconds_per_token": seconds,
        "compile_seconds": COMPILE_SECONDS * stages,
        "epochs": config.train.epochs,
    }


def bill_of(config: Config, corpus: Corpus, sources: Sources) -> BucketBill | None:
    """What the buckets of training cost and save, predicted; None where text is not cut into sentences."""
    source = sources.train
    if not isinstance(source, SentenceBatches) or source.dropped.sentences or source.policy == "split":
        return None
    histogram = source.histogram
    return bucket_bill(histogram, source.buckets, **_bucket_prices(config, len(corpus.vocabulary), histogram))


def make_model(config: Config, vocab_size: int) -> Model:
    """Makes the language model.

    Raises:
      InputError: sizes that do not fit.

    Example:
      >>> make_model(Config(), 100).rows[-1].name
      'head'
    """
    model = config.model
    with named("model"):
        return language_model(
            vocab=vocab_size,
            embed=model.embed,
            hidden=model.hidden,
            layers=model.layers,
            dropout=model.dropout,
            tie=model.tie,
            residual_from=model.residual,
            init_scale=model.init_scale,
            forget_bias=model.forget_bias,
            unroll=config.pipeline.unroll,
        )


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
        if len(devices) < wanted <= len(model.rows):
            raise InputError(
                f"{wanted} stages for {len(devices)} devices: use fewer stages, or emulate more devices with "
                f"--train.emulate_devices {wanted}"
            )
        return make_plan(
            model,
            batch_size=config.data.batch_size,
            lengths=lengths,
            devices=devices,
            stages=stages,
            partition=partition,
            schedule=_chosen(pipeline.schedule),
            chunk=_chosen(pipeline.chunk),
            microbatches=_chosen(pipeline.microbatches),
            remat=pipeline.remat,
            costs=costs,
            weights=weights,
        )


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


def _chosen(value: Any) -> Any:
    """What make_plan is to choose is None there."""
    return None if value == "auto" else value


@contextlib.contextmanager
def named(part: str) -> Iterator[None]:
    """Puts the part of the configuration that is at fault before the library's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"[{part}] {error}") from error
