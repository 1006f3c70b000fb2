"""Real tokens a second on the corpus of the package: one bucket, several, those chosen, and text without padding."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax

import mp_lstm
from mp_lstm.data import BatchSource, Corpus, SentenceBatches, best_buckets, length_histogram
from mp_lstm.training.build import make_model, make_sources, read_corpus
from mp_lstm.training.config import Config, load
from presets import CONFIGS
from tables.kit import Runner, draw, in_turn, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TINY = ["--data.vocab_limit", "50", "--model.embed", "4", "--model.hidden", "4", "--model.layers", "2"]
TINY += ["--pipeline.partition", "2", "2"]


class Speed(NamedTuple):
    """How fast a source trains.

    Args:
      name: of the source.
      buckets: their number.
      real: share of real tokens in what runs.
      tokens_per_second: real ones.
    """

    name: str
    buckets: int
    real: float
    tokens_per_second: float


def sources(config: Config, contiguous: Config, corpus: Corpus, counts: Sequence[int]) -> dict[str, BatchSource]:
    """Training text in batches, in several ways."""
    histogram = length_histogram(corpus.train.lengths)
    batch_size, seed = config.data.batch_size, config.train.seed
    found: dict[str, BatchSource] = {}
    for count in counts:
        name = f"{count} bucket{'s' if count > 1 else ''}"
        lengths = best_buckets(histogram, count)
        found[name] = SentenceBatches(corpus.train, buckets=lengths, batch_size=batch_size, seed=seed)
    found["auto"] = make_sources(config, corpus).train
    found["contiguous"] = make_sources(contiguous, corpus).train
    return found


def examples(source: BatchSource, each: int) -> dict[int, list[mp_lstm.Batch]]:
    """Up to `each` batches of every length, from all over an epoch."""
    counts = source.counts()
    found: dict[int, list[mp_lstm.Batch]] = {length: [] for length in counts}
    wanted = sum(min(each, count) for count in counts.values())
    for index in np.random.default_rng(0).permutation(source.num_batches()).tolist():
        batch = source.batch(0, index)
        part = found[len(batch.inputs)]
        if len(part) < each:
            part.append(batch)
            wanted -= 1
        if not wanted:
            break
    return found


def epoch_seconds(counts: Mapping[int, int], step_seconds: Mapping[int, float]) -> float:
    """Seconds of an epoch from those of a step of each length."""
    return sum(count * step_seconds[length] for length, count in counts.items())


def make_runner(config: Config, model: mp_lstm.Model, source: BatchSource, batches: Sequence[Any]) -> Runner:
    """A pipeline for a source, placed as configured."""
    plan = mp_lstm.make_plan(
        model,
        batch_size=config.data.batch_size,
        lengths=source.buckets,
        devices=jax.devices()[:2],
        partition=config.pipeline.partition,
        weights=source.counts(),
    )
    return Runner(mp_lstm.make_pipeline(model, plan, optax.adam(1e-3), max_norm=1.0), batches)


def measure(config: Config, contiguous: Config, counts: Sequence[int], each: int, rounds: int) -> list[Speed]:
    """Times steps of every length of every source, all of them in turn."""
    corpus = read_corpus(config)
    model = make_model(config, len(corpus.vocabulary))
    runs, places = [], []
    found = sources(config, contiguous, corpus, counts)
    for name, source in found.items():
        batches = examples(source, each)
        runner = make_runner(config, model, source, [part[0] for part in batches.values()])
        for length, part in batches.items():
            runs.append(lambda runner=runner, part=part: runner.seconds(part) / len(part))
            places.append((name, length))
    steps = dict(zip(places, map(statistics.median, in_turn(runs, rounds)), strict=True))
    speeds = []
    for name, source in found.items():
        lengths = source.counts()
        seconds = epoch_seconds(lengths, {length: steps[name, length] for length in lengths})
        padded = sum(count * length for length, count in lengths.items()) * config.data.batch_size
        speeds.append(Speed(name, len(lengths), source.tokens / padded, source.tokens / seconds))
    return speeds


def table(picture: Path, *, quick: bool) -> str:
    """Measures, draws, and says what it shows."""
    path, tiny = CONFIGS / "austen.toml", TINY if quick else []
    config = load(path, overrides=tiny)
    contiguous = load(path, overrides=["--data.mode", "contiguous", *tiny])
    counts, each, rounds = ((1, 2), 1, 2) if quick else ((1, 3, 5, 8), 2, 5)
    speeds = measure(config, contiguous, counts, each, rounds)
    rate = {speed.name: speed.tokens_per_second for speed in speeds}
    rows = [
        (speed.name, speed.buckets, f"{speed.real:.0%}", f"{rate[speed.name]:,.0f}", f"{relative:.2f}")
        for speed in speeds
        for relative in (rate[speed.name] / rate["contiguous"],)
    ]

    def panel(axes: Axes) -> None:
        axes.bar([speed.name for speed in speeds], [speed.tokens_per_second for speed in speeds])
        axes.set_ylabel("real tokens a second")
        axes.tick_params(axis="x", rotation=20)

    model = config.model
    head = ["batches", "lengths", "real tokens of what runs", "real tokens/s", "to contiguous"]
    return together(
        prose(
            f"Training the model of configs/austen.toml ({model.layers} layers of {model.hidden}) on two devices:",
            f"up to {each} batches of every length, drawn from all over an epoch, {rounds} rounds in turn after",
            "warm-up, with placing them. The median step of a length counts as often as an epoch has batches of",
            "it. The buckets of a given number are those that waste least.",
        ),
        markdown(head, rows),
        prose(
            f"auto reaches {rate['auto'] / rate['contiguous']:.0%} of contiguous mode's real tokens/s (at least 80% is",
            f"wanted) and {rate['auto'] / rate['1 bucket']:.1f} times one bucket's (at least 2).",
        ),
        draw(picture, [panel]),
    )
