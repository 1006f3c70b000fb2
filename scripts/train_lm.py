"""The whole story in the public API: plan, pipeline, training, evaluation and a few words of text.

    python scripts/train_lm.py --steps 400

`mp-lstm train` does the same with checkpoints, validation and a configuration file.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import numpy as np
import optax

import mp_lstm
import mp_lstm.launch


def train(pipe: mp_lstm.Pipeline, steps: int, *, every: int = 50) -> mp_lstm.State:
    """Trains for some steps; each step's metrics are read when the next one is under way, so no device waits."""
    state = pipe.init(jax.random.key(0))
    batches = itertools.islice(mp_lstm.data.austen(pipe.plan, epochs=100), steps)
    unread: list[tuple[int, mp_lstm.Metrics]] = []
    for step, batch in enumerate(pipe.prefetch(batches), 1):
        state, metrics = pipe.step(state, batch)
        report(unread)
        unread = [(step, metrics)] if step % every == 0 else []
    report(unread)
    return state


def report(unread: list[tuple[int, mp_lstm.Metrics]]) -> None:
    """Prints the metrics of steps; this waits for their devices."""
    for step, metrics in unread:
        print(f"step {step}: perplexity {metrics.perplexity:.1f}", flush=True)


def perplexity(pipe: mp_lstm.Pipeline, state: mp_lstm.State, split: str) -> float:
    """The perplexity of a split: every token counts the same, whatever its batch."""
    found = [pipe.evaluate(state, batch) for batch in mp_lstm.data.austen(pipe.plan, split=split)]
    total = sum(float(metrics.loss) * metrics.weight for metrics in found)
    return float(np.exp(total / sum(metrics.weight for metrics in found)))


def write(pipe: mp_lstm.Pipeline, state: mp_lstm.State, vocabulary: mp_lstm.data.Vocabulary, words: int) -> str:
    """Draws some words, one at a time, through the placed stages."""
    generator = np.random.default_rng(0)
    word, carry, text = vocabulary.eos, None, []
    for _ in range(words):
        logits, carry = pipe.infer(state, np.full((1, 1), word, np.int32), carry)
        noise = generator.gumbel(size=len(vocabulary))  # the largest sum is a draw from the softmax
        word = int(np.argmax(np.asarray(logits)[0, 0] + noise))
        text.append(word)
    return vocabulary.decode(text)


def main() -> None:
    """Runs the story."""
    parser = argparse.ArgumentParser(description="Trains a small LSTM language model on two emulated devices.")
    parser.add_argument("--steps", type=int, default=400, help="updates of training")
    parser.add_argument("--words", type=int, default=30, help="words to write afterwards")
    args = parser.parse_args()

    mp_lstm.launch.set_allocator()
    mp_lstm.emulate_devices(2)
    vocabulary = mp_lstm.data.load_austen().vocabulary
    model = mp_lstm.language_model(vocab=len(vocabulary), embed=128, hidden=128, layers=2, tie=True, residual_from=2)
    plan = mp_lstm.make_plan(model, batch_size=20, lengths=(16, 32, 64), devices=jax.devices(), partition=(2, 2))
    print(plan, end="\n\n")
    pipe = mp_lstm.make_pipeline(model, plan, optax.adam(5e-3), max_norm=1.0)
    pipe.warm_up()
    print(pipe.programs.report(), end="\n\n")
    state = train(pipe, args.steps)
    print(f"validation perplexity {perplexity(pipe, state, 'valid'):.1f}", end="\n\n")
    print(write(pipe, state, vocabulary, args.words))


if __name__ == "__main__":
    main()
