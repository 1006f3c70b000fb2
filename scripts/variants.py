"""Training steps of one model placed in several ways, in turn in one process: A B C A B C ...

Presets mxnet, medium and large (configs/bench) are full batches of random tokens: forward, backward, clip, SGD. austen
is the original example's model with its buckets on the corpus of the package: the same batches for every variant.
partitions compares two ways to place eight layers on three devices. The table has best and median of the rounds, the
ratio of medians to the first variant, and the same steps as simulated for separate devices of nominal speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

import mp_lstm
from mp_lstm.training.build import make_model
from mp_lstm.training.config import load
from presets import CONFIGS, NAMES, VOCAB, Preset, load_preset, random_batch, seconds_of_round

PRESETS = (*NAMES, "austen", "partitions")


class Variant(NamedTuple):
    """One way to place and schedule a model."""

    name: str
    devices: int
    options: dict[str, Any]


class Result(NamedTuple):
    """Seconds of every round of a variant, real tokens of a round, and the seconds simulated for separate devices."""

    name: str
    seconds: list[float]
    tokens: int
    predicted: float
    partition: tuple[int, ...]


PLAIN = (
    Variant("one device", 1, {}),
    Variant("two devices, serial", 2, {"schedule": "serial"}),
    Variant("two devices, wavefront", 2, {"schedule": "wavefront"}),
)
SPLIT = {"partition": (6, 4)}
VARIANTS = {
    "mxnet": (
        *PLAIN,
        Variant("two devices, serial", 2, {"schedule": "serial", **SPLIT}),
        Variant("two devices, 2 chunks", 2, {"schedule": "wavefront", "chunk": 16, **SPLIT}),
        Variant("two devices, 4 chunks", 2, {"schedule": "wavefront", "chunk": 8, **SPLIT}),
    ),
    "partitions": (
        Variant("even: embed+4 | 4 | head", 3, {"partition": (5, 4, 1)}),
        Variant("uneven: embed | 8 | head", 3, {"partition": (1, 8, 1)}),
    ),
}


def preset_of(name: str) -> Preset:
    """The model and batch shapes of a preset."""
    if name != "austen":
        return load_preset("mxnet" if name == "partitions" else name)
    config = load(CONFIGS / "mxnet_8x400.toml")
    assert isinstance(config.data.buckets, tuple), "the original's buckets are given"
    return Preset(make_model(config, VOCAB), config.data.batch_size, config.data.buckets)


def make_batches(name: str, preset: Preset, plan: mp_lstm.Plan) -> list[mp_lstm.Batch]:
    """The batches of one round."""
    if name == "austen":
        batches = mp_lstm.data.austen(plan)
        return [next(batches) for _ in range(20)]
    return [random_batch(preset)]


def prepare(name: str, preset: Preset, variant: Variant) -> tuple[mp_lstm.Pipeline, list[Any], float]:
    """A warmed-up pipeline, its placed windows, and the seconds simulated for a round on separate devices."""
    devices = jax.devices()[: variant.devices]
    options: dict[str, Any] = {"batch_size": preset.batch_size, "lengths": preset.lengths, "devices": devices}
    plan = mp_lstm.make_plan(preset.model, **options, **variant.options)
    pipe = mp_lstm.make_pipeline(preset.model, plan, optax.sgd(0.1), max_norm=5.0)
    batches = make_batches(name, preset, plan)
    pipe.warm_up(batches)
    costs = mp_lstm.default_calibration().costs(preset.model)
    predicted = sum(mp_lstm.predict(plan, preset.model, costs, len(batch.inputs)).makespan for batch in batches)
    return pipe, [pipe.place(batch) for batch in batches], predicted


def run(name: str, rounds: int) -> list[Result]:
    """Times the variants of a preset in turn."""
    preset, variants = preset_of(name), VARIANTS.get(name, PLAIN)
    prepared = [prepare(name, preset, variant) for variant in variants]
    states = [pipe.init(jax.random.key(0)) for pipe, _, _ in prepared]
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds + 2):
        for i, (pipe, windows, _) in enumerate(prepared):
            states[i], taken = seconds_of_round(pipe, states[i], windows)
            seconds[i].append(taken)
    return [
        Result(variant.name, times[2:], sum(window.tokens for window in windows), predicted, pipe.plan.partition)
        for variant, times, (pipe, windows, predicted) in zip(variants, seconds, prepared, strict=True)
    ]


def table(name: str, results: Sequence[Result]) -> str:
    """Milliseconds a round, real tokens a second, ratios."""
    lines = [f"{name:26}  partition   best ms  median ms  tokens/s  ratio  simulated apart, ms"]
    first = statistics.median(results[0].seconds)
    for result in results:
        best, median = min(result.seconds), statistics.median(result.seconds)
        partition = "+".join(map(str, result.partition))
        lines.append(
            f"{result.name:26}  {partition:9}  {best * 1e3:8.1f}  {median * 1e3:9.1f}  {result.tokens / median:8.0f}  "
            f"{median / first:5.2f}  {result.predicted * 1e3:8.1f}"
        )
    return "\n".join(lines)
