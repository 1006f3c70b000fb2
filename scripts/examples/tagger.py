"""Tags words by their kind, but only inside quotation marks: what decides may stand far before.

    python scripts/examples/tagger.py

Tagging is a softmax head with a target for every step; sentences of any length go into buckets, over two devices.
"""

from __future__ import annotations

import argparse
import sys

import jax
import numpy as np
import optax

import mp_lstm

WORDS, TAGS, ROWS, SIZE = 12, 3, 32, 32


def sentences(
    rng: np.random.Generator, count: int, buckets: tuple[int, ...], rows: int
) -> mp_lstm.data.SentenceBatches:
    """Random words, 0 the quotation mark; tag 0 outside and for the marks themselves, 1 or 2, the kind, inside."""
    words = [rng.integers(1, WORDS, length) * (rng.random(length) > 0.15) for length in rng.integers(5, 41, count)]
    tags = [np.where((np.cumsum(line == 0) % 2 == 1) & (line > 0), 1 + line % 2, 0) for line in words]
    return mp_lstm.data.sequence_batches(words, tags, buckets, rows)


def main() -> int:
    """Trains, compares, and says by its status whether the model is better."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12, help="passes over 1,000 sentences")
    args = parser.parse_args()

    mp_lstm.emulate_devices(2)
    train = sentences(np.random.default_rng(0), 1000, (20, 40), ROWS)
    lstms = [mp_lstm.lstm_layer(SIZE, SIZE, name=name) for name in ("lstm 1", "lstm 2")]
    model = mp_lstm.sequential([mp_lstm.embedding(WORDS, SIZE), *lstms, mp_lstm.softmax_head(SIZE, TAGS)])
    plan = mp_lstm.make_plan(model, batch_size=ROWS, lengths=train.buckets, devices=jax.devices(), partition=(2, 2))
    pipe = mp_lstm.make_pipeline(model, plan, optax.adam(1e-2), max_norm=1.0)
    state = pipe.init(jax.random.key(0))
    for window in pipe.prefetch(batch for _, batch in mp_lstm.data.iterate(train, epochs=args.epochs)):
        state, _ = pipe.step(state, window)

    counts = np.zeros((WORDS, TAGS))
    np.add.at(counts, (train.split.inputs, train.split.targets), 1)
    unseen = sentences(np.random.default_rng(1), 200, (40,), 200).batch(0, 0)
    real = np.arange(40)[:, None] < np.asarray(unseen.lengths)
    tags = np.asarray(pipe.infer(state, unseen.inputs)[0]).argmax(axis=-1)
    right, naive = ((guess == unseen.targets)[real].mean() for guess in (tags, counts.argmax(axis=1)[unseen.inputs]))
    print(f"tags that are right: model {right:.1%}, each word's commonest {naive:.1%}")
    return 0 if right > naive else 1


if __name__ == "__main__":
    sys.exit(main())
