"""From a configuration to the parts of a run: corpus, batches, model.

    Config --read_corpus--> Corpus --make_sources--> Sources
                               |
                               +-- make_model --> Model

Each is a function of values; `planned` plans with them, `setup` puts them on devices. What the library's checks find
wrong is told with the section it was set in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mp_lstm.data import (
    BatchSource,
    BucketBill,
    ContiguousBatches,
    Corpus,
    Histogram,
    RandomLengthBatches,
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
from mp_lstm.planning import default_calibration, make_plan, predict
from mp_lstm.training.config import Config

# One program takes about 0.3 s to compile, and a stage has about five for each bucket: F, B twice, W, evaluation.
COMPILE_SECONDS = 1.5


class Sources(NamedTuple):
    """Batches of the three splits: training's shuffled anew each epoch, the others in the order of the text."""

    train: BatchSource
    valid: BatchSource
    test: BatchSource


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
        train, valid, test = (ContiguousBatches(split, data.length, data.batch_size) for split in splits)
        if data.random_length is not None:
            seed = config.train.seed
            with named("data.random_length"):
                train = RandomLengthBatches(corpus.train, data.length, data.batch_size, data.random_length, seed)
        return Sources(train, valid, test)
    if data.random_length is not None:
        raise InputError("[data] random_length is for consecutive text: leave it out, or pass --data.mode contiguous")
    with named("data"):
        # Fitted to the sentences of all splits at once: validation must not add buckets of its own.
        everything = length_histogram(np.concatenate([split.sentences.lengths for split in splits]))
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
    histogram = length_histogram(corpus.train.sentences.lengths)
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
            dropout_input=model.dropout_input,
            dropout_output=model.dropout_output,
            dropout_words=model.dropout_words,
            dropout_locked=model.dropout_locked,
            weight_drop=model.weight_drop,
            activation_reg=model.activation_reg,
            temporal_reg=model.temporal_reg,
            tie=model.tie,
            residual_from=model.residual,
            init_scale=model.init_scale,
            forget_bias=model.forget_bias,
            biases=model.biases,
            unroll=config.pipeline.unroll,
            products=None if model.products == "float32" else model.products,
        )


@contextlib.contextmanager
def named(part: str) -> Iterator[None]:
    """Puts the part of the configuration that is at fault before the library's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"[{part}] {error}") from error
