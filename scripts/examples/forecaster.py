"""Forecasts the next value of a noisy sum of two sinusoids, better than by repeating the last one.

    python scripts/examples/forecaster.py

Dense features need no embedding: a model is any layers in order, here LSTM layers on two devices and a squared error.
"""

from __future__ import annotations

import argparse
import sys

import jax
import numpy as np
import optax

import mp_lstm

STEPS, ROWS, HIDDEN = 64, 32, 32


def series(rng: np.random.Generator) -> mp_lstm.Batch:
    """Series [T, B, 1], each with frequencies and phases of its own; the target is the value of the next step."""
    time = np.arange(STEPS + 1)[:, None]
    waves = [np.sin(time * rng.uniform(0.2, 1.0, ROWS) + rng.uniform(0, 2 * np.pi, ROWS)) for _ in range(2)]
    values = (sum(waves) + 0.1 * rng.normal(size=(STEPS + 1, ROWS)))[:, :, None].astype(np.float32)
    return mp_lstm.Batch(values[:-1], values[1:])


def main() -> int:
    """Trains, compares, and says by its status whether the model is better."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="updates of training")
    args = parser.parse_args()

    mp_lstm.emulate_devices(2)
    lower, upper = mp_lstm.lstm_layer(1, HIDDEN, name="lstm 1"), mp_lstm.lstm_layer(HIDDEN, HIDDEN, name="lstm 2")
    model = mp_lstm.sequential([lower, upper, mp_lstm.dense(HIDDEN, 1)], loss=mp_lstm.squared_error)
    plan = mp_lstm.make_plan(
        model, batch_size=ROWS, lengths=(STEPS,), devices=jax.devices(), partition=(1, 2), chunk=STEPS // 4
    )
    pipe = mp_lstm.make_pipeline(model, plan, optax.adam(5e-3), max_norm=1.0)
    state = pipe.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    for window in pipe.prefetch(series(rng) for _ in range(args.steps)):
        state, _ = pipe.step(state, window)

    unseen = series(np.random.default_rng(1))
    error, naive = float(pipe.evaluate(state, unseen).loss), float(np.square(unseen.targets - unseen.inputs).mean())
    print(f"squared error: model {error:.4f}, the last value repeated {naive:.4f}")
    return 0 if error < naive else 1


if __name__ == "__main__":
    sys.exit(main())
