"""The bugs this project exists to be rid of, and some that others have reported of systems like it.

Each test is a `check` of one behaviour, applied twice: to the library, which passes, and to a few lines that do what
was once done wrong, which do not. A check that its fault passes would guard nothing.

Faults 1 to 23 are those of the example that this project succeeds. Pitfalls, in the second half, come from the issue
trackers of pipeline, recurrent-network and data libraries. Those of reading text are tested in tests/data.

One file, though a long one: it is the list of faults, in their order.
"""

from __future__ import annotations

import io
import json
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
from examples import SIZES, VOCAB, Plug, by_row, dispatch, padded, random_batch, random_carry, random_params
from mp_lstm import cli
from mp_lstm.data import (
    Corpus,
    SentenceBatches,
    Split,
    Vocabulary,
    build_vocabulary,
    fit_buckets,
    iterate,
    length_histogram,
    read_text,
)
from mp_lstm.errors import InputError
from mp_lstm.layers import decoder
from mp_lstm.planning import partition as partitions
from mp_lstm.planning.schedule import Schedule
from mp_lstm.planning.schedules import serial, wavefront
from mp_lstm.planning.simulate import simulate
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.placement import put, stage_sharding
from mp_lstm.runtime.programs import Program
from mp_lstm.training.checkpoint import steps as checkpoints
from mp_lstm.training.config import from_table
from mp_lstm.training.evaluate import SplitResult
from mp_lstm.training.fit import fit
from mp_lstm.training.generate import generate
from mp_lstm.training.setup import make_setup
from reference import assert_close, lstm_states

Check = Callable[[Any], None]


def guards(check: Check, *, right: Any, wrong: Any) -> None:
    """Asserts that a check passes what is right and does not pass what is wrong."""
    check(right)
    with pytest.raises(AssertionError):
        check(wrong)


# What most tests share: buckets 3 and 6 in chunks of 3, four rows in micro-batches of 2, 1 and 1, a tied decoder on
# another stage than the embedding. `ONE` is the same model on one device, without a pipeline.


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    model = mp_lstm.language_model(**SIZES | {"embed": 4}, tie=True)
    options = {"donate": False, "every_k": 2}
    plan = {"lengths": (3, 6), "chunk": 3, "microbatches": 3, "partition": (2, 2)}
    return examples.pipeline(model, devices=jax.devices()[1:3], options=options, **plan)


@pytest.fixture(scope="module")
def params(pipe: mp_lstm.Pipeline) -> Any:
    return random_params(pipe.model)


@pytest.fixture(scope="module")
def state(pipe: mp_lstm.Pipeline, params: Any) -> mp_lstm.State:
    return pipe.load(params)


@pytest.fixture(scope="module")
def one(pipe: mp_lstm.Pipeline) -> Callable[..., Any]:
    """(params, batch, carry) -> ((mean loss, aux), gradient) on one device."""

    def loss(params: Any, batch: Any, carry: Any = None) -> Any:
        return pipe.model.loss(params, batch, carry=carry)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def batch_of(time: int, rows: int = 4, seed: int = 0, **fields: Any) -> mp_lstm.Batch:
    return random_batch(np.random.default_rng([seed, time]), time, rows, **fields)


SHORT, LONG = batch_of(3, lengths=[3, 1, 2, 3]), batch_of(6, lengths=[6, 4, 0, 5])


# Training


def test_fault_01_every_bucket_had_weights_of_its_own(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    class Trained:
        """A state, or one for each bucket."""

        def __init__(self, bucket: Callable[[mp_lstm.Batch], int]):
            self.bucket = bucket
            self.states = {}

        def state_of(self, batch: mp_lstm.Batch) -> mp_lstm.State:
            return self.states.get(self.bucket(batch), state)

        def step(self, batch: mp_lstm.Batch) -> None:
            self.states[self.bucket(batch)] = pipe.step(self.state_of(batch), [batch])[0]

        def loss(self, batch: mp_lstm.Batch) -> float:
            return float(pipe.evaluate(self.state_of(batch), batch).loss)

    def check(trained: Trained) -> None:
        before = trained.loss(LONG)
        trained.step(SHORT)
        assert trained.loss(LONG) != before, "a step on a short batch teaches long ones nothing"

    guards(check, right=Trained(lambda batch: 0), wrong=Trained(lambda batch: batch.inputs.shape[0]))


def test_fault_02_every_bucket_was_unrolled_to_the_longest(pipe: mp_lstm.Pipeline) -> None:
    def check(place: Callable[[mp_lstm.Batch], Any]) -> None:
        for batch in (SHORT, LONG):
            (placed,) = place(batch).batches
            assert sum(chunk.shape[0] for chunk in placed.inputs[0]) == batch.inputs.shape[0]

    guards(check, right=pipe.place, wrong=lambda batch: pipe.place(padded(batch, 6, 4)))


EOS = 0


def text(sentences: Sequence[Sequence[int]]) -> Split:
    tokens = [token for sentence in sentences for token in (*sentence, EOS)]
    return Split(np.array(tokens, np.int32), np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)]))


def rows_of(batch: mp_lstm.Batch) -> list[tuple[list[int], list[int]]]:
    assert batch.lengths is not None
    return [
        (batch.inputs[:length, row].tolist(), batch.targets[:length, row].tolist())
        for row, length in enumerate(batch.lengths.tolist())
    ]


def batched(sentence: list[int]) -> tuple[list[int], list[int]]:
    """Inputs and targets of the library."""
    (row,) = rows_of(SentenceBatches(text([sentence]), (8,), 1).batch(0, 0))
    return row


def test_fault_03_the_last_target_was_the_first_word() -> None:
    def check(batch: Callable[[list[int]], tuple[list[int], list[int]]]) -> None:
        _, targets = batch([5, 6, 7])
        assert targets[-1] == EOS

    guards(check, right=batched, wrong=lambda words: (words, [*words[1:], words[0]]))


def test_fault_04_padding_was_trained_on_and_counted(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    def check(prepare: Callable[[mp_lstm.Batch], mp_lstm.Batch]) -> None:
        """Two batches that differ in their padding alone, in how much there is and what stands on it."""
        few = batch_of(6, 3, lengths=[5, 2, 4], resets=[True] * 3)
        steps = []
        for batch in (few, padded(few, 6, 4, fill=7)):
            after, metrics = pipe.step(state, [prepare(batch)])
            assert after.carry is not None
            steps.append((metrics.tokens, float(metrics.loss), pipe.params(after), lstm_states(after.carry)))
        assert steps[0][:2] == steps[1][:2]
        assert steps[0][0] == 11
        assert_close(steps[1][2:], steps[0][2:], 0.0)

    def every_step_is_real(batch: mp_lstm.Batch) -> mp_lstm.Batch:
        return batch._replace(lengths=None)

    guards(check, right=lambda batch: batch, wrong=every_step_is_real)


def test_fault_05_eos_was_neither_read_nor_predicted() -> None:
    def check(batch: Callable[[list[int]], tuple[list[int], list[int]]]) -> None:
        inputs, targets = batch([5, 6, 7])
        assert EOS in inputs
        assert EOS in targets
        assert len(targets) == 4, "every word is predicted, the first one too"

    guards(check, right=batched, wrong=lambda words: (words[:-1], words[1:]))


def test_fault_06_different_weights_shared_one_optimiser_state() -> None:
    """Several weights had one index of the optimiser: momentum of one went into the others."""
    optimizer = optax.sgd(1.0, momentum=0.5)

    def right(params: Any, gradients: Sequence[Any]) -> Any:
        state, scalars = optimizers.init(optimizer, params), [jnp.float32(1)] * 3
        for gradient in gradients:
            params, state = optimizers.update(optimizer, params, state, gradient, *scalars, max_norm=None)
        return params

    def wrong(params: Any, gradients: Sequence[Any]) -> Any:
        state = optimizer.init(params[0])  # of the shape of all rows
        for gradient in gradients:
            moved = []
            for row, slope in zip(params, gradient, strict=True):
                updates, state = optimizer.update(slope, state)
                moved.append(row + updates)
            params = tuple(moved)
        return params

    def check(train: Callable[[Any, Sequence[Any]], Any]) -> None:
        start, slopes = (jnp.zeros(2), jnp.zeros(2)), (jnp.ones(2), jnp.array([0.0, 4.0]))
        ends = train(start, [slopes] * 2)
        # two steps of momentum: g, then g + g / 2
        assert_close(ends, tuple(-2.5 * slope for slope in slopes), 1e-6)

    guards(check, right=right, wrong=wrong)


def joined(batches: Sequence[mp_lstm.Batch]) -> mp_lstm.Batch:
    """All rows of some batches as one."""
    time = max(batch.inputs.shape[0] for batch in batches)
    wide = [padded(batch, time, batch.inputs.shape[1]) for batch in batches]
    inputs, targets = (np.concatenate(parts, axis=1) for parts in zip(*[batch[:2] for batch in wide], strict=True))
    lengths = [batch.lengths for batch in wide if batch.lengths is not None]
    return mp_lstm.Batch(inputs, targets, lengths=np.concatenate(lengths))


def test_fault_07_accumulation_over_buckets_was_not_one_large_batch(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any, one: Callable[..., Any]
) -> None:
    def gradient(batch: mp_lstm.Batch) -> Any:
        return one(params, batch)[1]

    def check(of_window: Callable[[list[mp_lstm.Batch]], Any]) -> None:
        assert_close(of_window([SHORT, LONG]), gradient(joined([SHORT, LONG])), 2e-5)

    def means_added(window: list[mp_lstm.Batch]) -> Any:
        return jax.tree.map(jnp.add, *map(gradient, window))

    guards(check, right=lambda window: pipe.value_and_grad(state, window)[1], wrong=lambda window: gradient(window[-1]))
    guards(check, right=lambda window: pipe.value_and_grad(state, window)[1], wrong=means_added)


def test_fault_07_the_remainder_of_an_epoch_was_lost(pipe: mp_lstm.Pipeline) -> None:
    """Pitfall 11 too."""

    def check(windows: Callable[[list[mp_lstm.Batch]], Any]) -> None:
        assert sum(len(window) for window in windows([SHORT, LONG, SHORT])) == 3

    def whole_windows_only(batches: list[mp_lstm.Batch]) -> list[list[mp_lstm.Batch]]:
        return [batches[i : i + 2] for i in range(0, len(batches) - 1, 2)]

    guards(check, right=lambda batches: [window.batches for window in pipe.prefetch(batches)], wrong=whole_windows_only)


# Metrics


def test_fault_08_a_uniform_model_over_50_words_printed_2500() -> None:
    """The loss was divided by the number of rows twice and by the number of tokens never."""
    model = mp_lstm.language_model(vocab=50, embed=2, hidden=2, layers=1)
    pipe = examples.pipeline(model, batch_size=3, lengths=(6,), chunk=2)
    state = pipe.load(jax.tree.map(np.zeros_like, random_params(model)))
    time, rows = 6, 3
    batch = batch_of(time, rows)

    def check(perplexity: Callable[[], float]) -> None:
        assert f"{perplexity():.1f}" == "50.0"

    def divided_twice() -> float:
        total = float(pipe.evaluate(state, batch).loss) * time * rows
        return math.exp(total / rows / rows)

    assert f"{divided_twice():.0f}" == "2500"
    guards(check, right=lambda: pipe.evaluate(state, batch).perplexity, wrong=divided_twice)
    short = batch._replace(lengths=np.array([1, 0, 4]))
    check(lambda: pipe.evaluate(state, short).perplexity)
    check(lambda: pipe.step(state, short)[1].perplexity)


def test_fault_09_only_the_first_time_step_was_scored(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    def check(score: Callable[[mp_lstm.Batch], float]) -> None:
        for time in range(6):
            targets = LONG.targets.copy()
            targets[time, 0] = (targets[time, 0] + 1) % VOCAB
            assert score(LONG._replace(targets=targets)) != score(LONG)

    def of_first_step(batch: mp_lstm.Batch) -> float:
        return score(batch._replace(weights=(np.arange(6) == 0)[:, None] * np.ones((6, 4))))

    def score(batch: mp_lstm.Batch) -> float:
        return float(pipe.evaluate(state, batch).loss)

    guards(check, right=score, wrong=of_first_step)


def test_fault_10_the_logarithm_of_zero() -> None:
    logits, target = jnp.array([[1000.0, 0.0]]), jnp.array([1])

    def check(negative_log_likelihood: Callable[[], Any]) -> None:
        assert float(negative_log_likelihood()) == 1000.0

    def of_softmax() -> Any:
        return -jnp.log(jax.nn.softmax(logits)[0, 1])

    guards(check, right=lambda: decoder.cross_entropy(logits, target, jnp.ones(1))[0], wrong=of_softmax)
    check(lambda: mp_lstm.softmax_cross_entropy(logits[:, None], target[:, None], jnp.ones((1, 1))))


# A whole run, whose validation losses are made up: in the last epochs they do not improve.
LOSSES = [2.0, 1.5, 1.4999, 1.6, 1.2]
WORDS = Vocabulary(("<eos>", "<unk>", "a", "b", "c"))
TABLE: dict[str, dict[str, Any]] = {
    "data": {"batch_size": 4, "buckets": [4]},
    "model": {"embed": 3, "hidden": 3, "layers": 1, "dropout": 0.0, "tie": False, "residual": "none"},
    "optimizer": {"name": "sgd", "learning_rate": 0.1, "rate_schedule": "plateau"},
    "train": {"epochs": len(LOSSES), "log_every": 1},
}


class Run:
    """A run that is over: what is left of it."""

    def __init__(self, run_dir: Path):
        corpus = Corpus(*[text([[2, 3], [4], [2, 2, 3], [3, 4]])] * 3, WORDS, "tiny")
        self.run_dir = run_dir
        self.setup = make_setup(from_table(TABLE), corpus, jax.devices()[:2])
        losses = iter(LOSSES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "mp_lstm.training.loop.evaluate", lambda *_: SplitResult(next(losses), 1.0, corpus.valid.tokens.size)
            )
            self.result = fit(self.setup, run_dir)
        self.lines = (run_dir / "metrics.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "run")


def test_fault_11_the_rate_was_halved_against_an_absolute_number_and_the_best_forgotten(run: Run) -> None:
    """What counted was whether a wrong number had fallen by 1.0 since the last epoch, and the last model was kept."""

    def right() -> tuple[list[float], float | None]:
        found = [json.loads(line) for line in run.lines]
        rates = {line["epoch"]: line["learning_rate"] for line in found if line["event"] == "train"}
        assert run.result.best is not None
        return list(rates.values()), run.result.best.loss

    def wrong() -> tuple[list[float], float | None]:
        rates, rate, last = [], 0.1, math.inf
        for loss in LOSSES:
            rates.append(rate)
            rate *= 0.5 if last - loss < 1.0 else 1.0
            last = loss
        return rates, last

    def check(trained: Callable[[], tuple[list[float], float | None]]) -> None:
        rates, best = trained()
        # 1.5 is better than 2, the next two are no better than 1.5: each halves the rate of what comes after.
        assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.025])
        assert best == 1.2

    guards(check, right=right, wrong=wrong)


def test_fault_12_lines_of_steps_and_of_epochs_had_one_format(run: Run) -> None:
    fields = {
        "start": {"placement", "parameters", "vocab", "buckets", "schedule", "chunk", "dropped"},
        "train": {"step", "epoch", "loss", "perplexity", "tokens", "tokens_per_second", "grad_norm", "learning_rate"},
        "valid": {"step", "epoch", "loss", "perplexity", "tokens"},
        "test": {"step", "epoch", "loss", "perplexity", "tokens"},
        "done": {"steps", "seconds", "programs", "compiled_after_warmup"},
    }

    def check(lines: list[str]) -> None:
        events = [json.loads(line) for line in lines]
        assert [event.get("event") for event in (events[0], events[-1])] == ["start", "done"]
        for event in events:
            assert fields[event.pop("event")] <= set(event)

    def nameless(lines: list[str]) -> list[str]:
        return [json.dumps({key: value for key, value in json.loads(line).items() if key != "event"}) for line in lines]

    guards(check, right=run.lines, wrong=nameless(run.lines))


# The iterator

SENTENCES = [[1 + index % 9] * (1 + index % 11) for index in range(100)]


def read_by(source: Any, epoch: int = 0) -> list[tuple[int, ...]]:
    """Targets of all rows of an epoch, in order, without `<eos>`."""
    batches = (source.batch(epoch, index) for index in range(source.num_batches(epoch)))
    return [tuple(targets[:-1]) for batch in batches for _, targets in rows_of(batch) if targets]


def test_fault_13_epochs_were_shuffled_once_and_without_a_seed() -> None:
    def check(make: Callable[[int], Callable[[int], list[Any]]]) -> None:
        first, again, other = make(3), make(3), make(4)
        assert first(0) != first(1)
        assert first(0) != other(0)
        assert [first(epoch) for epoch in (2, 0)] == [again(epoch) for epoch in (2, 0)]

    def right(seed: int) -> Callable[[int], list[Any]]:
        source = SentenceBatches(text(SENTENCES), (4, 8, 12), 4, seed=seed)
        return lambda epoch: read_by(source, epoch)

    def wrong(seed: int) -> Callable[[int], list[Any]]:
        order = random.sample(SENTENCES, len(SENTENCES))
        return lambda epoch: order

    guards(check, right=right, wrong=wrong)


def test_fault_14_tails_of_buckets_and_long_sentences_were_dropped() -> None:
    def check(read: Callable[[Sequence[int], int], list[tuple[int, ...]]]) -> None:
        assert Counter(read((4, 8), 7)) == Counter(map(tuple, SENTENCES))

    def whole_batches_that_fit(buckets: Sequence[int], batch_size: int) -> list[tuple[int, ...]]:
        read: list[tuple[int, ...]] = []
        for low, high in zip([0, *buckets], buckets, strict=False):
            fit = [tuple(sentence) for sentence in SENTENCES if low < len(sentence) + 1 <= high]
            read += fit[: len(fit) // batch_size * batch_size]
        return read

    def right(buckets: Sequence[int], batch_size: int) -> list[tuple[int, ...]]:
        return read_by(SentenceBatches(text(SENTENCES), buckets, batch_size))

    guards(check, right=right, wrong=whole_batches_that_fit)


def test_fault_15_an_abbreviation_ended_the_sentence() -> None:
    content = "mr. smith went home . he slept\nthe end\n"
    vocabulary = build_vocabulary(content.splitlines())

    def check(count: Callable[[], int]) -> None:
        assert count() == 2

    guards(
        check,
        right=lambda: len(read_text(io.StringIO(content), vocabulary).offsets) - 1,
        wrong=lambda: len(content.replace("\n", " ").split(". ")),
    )


def test_fault_16_an_unknown_word_was_a_key_error() -> None:
    def check(encode: Callable[[tuple[str, ...], str], Any]) -> None:
        try:
            assert encode(("<eos>", "<unk>", "it"), "it rains") == [2, 1, 0]
            with pytest.raises(InputError, match="rains"):
                encode(("<eos>", "it"), "it rains")
        except KeyError as error:
            raise AssertionError("a bare KeyError") from error

    def right(words: tuple[str, ...], line: str) -> Any:
        return read_text(io.StringIO(line), Vocabulary(words)).tokens.tolist()

    def wrong(words: tuple[str, ...], line: str) -> Any:
        ids = {word: i for i, word in enumerate(words)}
        return [*(ids[word] for word in line.split()), 0]

    guards(check, right=right, wrong=wrong)


def test_fault_17_generated_buckets_missed_the_longest_sentence() -> None:
    lengths = [5] * 40 + [9] * 30 + [31]

    def check(buckets: Callable[[list[int]], Sequence[int]]) -> None:
        assert max(buckets(lengths)) >= 31

    def where_there_are_enough(lengths: list[int], enough: int = 20) -> list[int]:
        return [length for length, count in sorted(Counter(lengths).items()) if count >= enough]

    def right(lengths: list[int]) -> Sequence[int]:
        return mp_lstm.data.best_buckets(length_histogram(lengths), 2)

    guards(check, right=right, wrong=where_there_are_enough)
    check(lambda lengths: fit_buckets(length_histogram(lengths), [5, 9]))


def test_fault_18_the_callers_lists_were_sorted_and_reversed_in_place() -> None:
    def check(use: Callable[[list[int], list[list[int]]], Any]) -> None:
        buckets, sentences = [12, 4, 8], [[1, 2, 3], [4]]
        use(buckets, sentences)
        assert buckets == [12, 4, 8]
        assert sentences == [[1, 2, 3], [4]]

    def wrong(buckets: list[int], sentences: list[list[int]]) -> None:
        buckets.sort()
        for sentence in sentences:
            sentence.reverse()

    guards(
        check, right=lambda buckets, sentences: SentenceBatches(text(sentences), buckets, 2).batch(0, 0), wrong=wrong
    )


def test_fault_19_a_second_pass_was_empty_and_an_empty_iterator_divided_by_zero() -> None:
    class Once:
        """What the original was: batches that are used up."""

        def __init__(self, sentences: list[list[int]]):
            self.left: Iterator[Any] = iter(sentences)

        def batches(self) -> int:
            return sum(1 for _ in self.left)

    class Source:
        def __init__(self, sentences: list[list[int]]):
            self.source = SentenceBatches(text(sentences), (12,), 4)

        def batches(self) -> int:
            return sum(1 for _ in iterate(self.source, epochs=1))

    def check(make: Callable[[list[list[int]]], Any]) -> None:
        some = make(SENTENCES)
        assert some.batches() == some.batches() > 0
        with pytest.raises(InputError, match="there are no sentences to batch"):
            make([])

    guards(check, right=Source, wrong=Once)


# Design


@pytest.fixture(scope="module")
def plug(pipe: mp_lstm.Pipeline) -> Plug:
    return Plug(pipe.plan.devices[-1])


def test_fault_20_one_blocking_scalar_a_parameter(pipe: mp_lstm.Pipeline, state: mp_lstm.State, plug: Plug) -> None:
    """For the norm of the gradient; and one for each time step, for the loss. tests/test_overlap.py has more."""
    window = pipe.place([LONG])
    jax.block_until_ready(pipe.step(state, window))

    class Reads:
        """A pipeline, each of whose steps reads the norm of each parameter."""

        def step(self, state: mp_lstm.State, window: Any) -> Any:
            after, metrics = pipe.step(state, window)
            for leaf in jax.tree.leaves(after.stages):
                float(np.linalg.norm(leaf))
            return after, metrics

    jax.block_until_ready(Reads().step(state, window))

    def check(trained: Any) -> None:
        assert dispatch(trained, state, window, plug).returned

    guards(check, right=pipe, wrong=Reads())


def test_fault_21_layers_were_placed_by_their_number_alone() -> None:
    """The decoder, which costs the most, came on top of as many layers as everybody else had."""
    model = mp_lstm.language_model(vocab=2000, embed=8, hidden=8, layers=6)
    costs = [row.cost(4, 8).flops for row in model.rows]

    def check(partition_of: Callable[[int], tuple[int, ...]]) -> None:
        sizes = partition_of(2)
        ends = np.cumsum(sizes)
        busiest = max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        possible = min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
        assert busiest == pytest.approx(possible)

    def right(stages: int) -> tuple[int, ...]:
        return mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=["a", "b"], stages=stages).partition

    guards(check, right=right, wrong=lambda stages: partitions.even(len(costs), stages))


def test_fault_22_devices_overlapped_by_accident_only() -> None:
    """Inside one batch's graph; here chunks and micro-batches overlap, and W fills what would be idle."""

    def check(make: Callable[[], Schedule]) -> None:
        schedule = make()
        timeline = simulate(schedule, lambda task: 1.0 / len(schedule.chunks) / schedule.chunks[0])
        work = sum(timeline.busy.values())
        assert timeline.makespan < 0.75 * work, "two devices ought to be nearly twice as fast as one"

    guards(check, right=lambda: wavefront((0, 1), (4, 4)), wrong=lambda: serial((0, 1), (1, 1)))


def test_fault_23_no_command_line_seed_checkpoint_test_set_or_sampling(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing:
        """A script that trains and prints."""

        commands = ""
        checkpoints: tuple[int, ...] = ()
        test = None
        seed = None

        def write(self, seed: int) -> str:
            return str(random.random())

    class Library:
        checkpoints = tuple(checkpoints(run.run_dir))
        test = run.result.test
        seed = run.setup.config.train.seed

        @property
        def commands(self) -> str:
            with pytest.raises(SystemExit) as status:
                cli.main(["--help"])
            assert status.value.code == 0
            return capsys.readouterr().out

        def write(self, seed: int) -> str:
            pipe = run.setup.pipe
            return generate(pipe, pipe.load(random_params(pipe.model)), WORDS, "a b", tokens=8, seed=seed)[0]

    def check(project: Any) -> None:
        assert all(command in project.commands for command in ("train", "evaluate", "generate", "plan", "timeline"))
        assert project.checkpoints
        assert project.test is not None
        assert project.seed is not None
        assert project.write(1) == project.write(1) != project.write(2)

    guards(check, right=Library(), wrong=Nothing())


# Pitfalls


def test_pitfall_06_accumulating_gradients_costs_no_copy(devices: list[jax.Device]) -> None:
    """The accumulator is donated to the program that adds to it."""
    x = put(np.ones(1000, np.float32), stage_sharding(devices[0]))

    def check(program: Program) -> None:
        assert program.memory().alias_size_in_bytes >= x.nbytes

    def adding(donate: tuple[int, ...]) -> Program:
        return Program("add", lambda so_far, new: so_far + new, (x, x), donate=donate)

    guards(check, right=adding((0,)), wrong=adding(()))


def test_pitfall_06_the_pipeline_donates_its_accumulators(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    pipe.step(state, [SHORT, LONG])
    adding = [program for key, program in pipe.programs[6].items() if key.phase == "weight_gradient_add"]
    assert len(adding) == 2
    for program, stage in zip(adding, state.stages, strict=True):
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(stage.own))
        assert program.memory().alias_size_in_bytes >= own


def test_pitfall_07_a_donation_that_cannot_be_used_is_an_error(devices: list[jax.Device]) -> None:
    """It is only a warning of jax's; the settings of the tests turn it into an error (pyproject.toml)."""
    x = put(np.ones(10, np.float32), stage_sharding(devices[0]))

    def check(function: Callable[[Any], Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                Program("f", function, (x,), donate=(0,))(jnp.copy(x))
        except UserWarning as warning:
            raise AssertionError(warning) from warning

    guards(check, right=lambda x: x + 1, wrong=lambda x: x[:3])


Layers = Callable[..., tuple[Any, Any]]


def one_lstm() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    params = mp_lstm.LSTMParams(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 16), (4, 16), (16,))))
    state = mp_lstm.LSTMState(*(jnp.asarray(rng.normal(size=(2, 4)), jnp.float32) for _ in range(2)))
    return params, jnp.asarray(rng.normal(size=(5, 2, 3)), jnp.float32), state


def test_pitfall_16_a_row_of_length_0_returned_the_state_of_its_padding() -> None:
    params, x, before = one_lstm()
    lengths = jnp.array([5, 0])

    def check(lstm: Layers) -> None:
        after, y = lstm(params, x, before, lengths=lengths)
        assert_close((after.h[1], after.c[1]), (before.h[1], before.c[1]), 0.0)
        assert (y[:, 1] == 0).all()

    def last_step_of_a_run_over_everything(params: Any, x: Any, state: Any, *, lengths: Any) -> Any:
        h = [mp_lstm.lstm(params, x[: t + 1], state)[0] for t in range(x.shape[0])]
        ends = np.asarray(lengths) - 1  # -1 for a row of length 0: the last step
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *h)
        return jax.tree.map(lambda leaf: leaf[ends, np.arange(2)], stacked), mp_lstm.lstm(params, x, state)[1]

    guards(check, right=mp_lstm.lstm, wrong=last_step_of_a_run_over_everything)


def test_pitfall_17_the_masked_kernel_differed_from_the_plain_one() -> None:
    """A row in a padded batch is that row alone, cut to its length."""
    params, x, before = one_lstm()

    def check(lstm: Layers) -> None:
        after, y = lstm(params, x, before, lengths=jnp.array([5, 3]))
        row = mp_lstm.LSTMState(before.h[1:], before.c[1:])
        alone, wanted = mp_lstm.lstm(params, x[:3, 1:], row)
        assert_close((y[:3, 1:], after.h[1:], after.c[1:]), (wanted, alone.h, alone.c), 1e-6)

    def masking_its_output_alone(params: Any, x: Any, state: Any, *, lengths: Any) -> Any:
        after, y = mp_lstm.lstm(params, x, state)
        return after, y * (jnp.arange(5)[:, None] < lengths[None, :])[:, :, None]

    guards(check, right=mp_lstm.lstm, wrong=masking_its_output_alone)


def test_pitfall_18_micro_batches_took_the_state_of_other_rows(
    pipe: mp_lstm.Pipeline, params: Any, one: Callable[..., Any]
) -> None:
    """The state was cut along another axis than the rows, or all micro-batches got its first rows."""
    carry = random_carry(pipe.model, 4)
    batch = LONG._replace(resets=np.array([False, False, True, False]))
    (loss, aux), _ = one(params, batch, carry)

    def step(carry: Any) -> tuple[Any, Any]:
        optimizer = optax.sgd(0.1)
        state = pipe.restore(params, [optimizer.init(row) for row in params], key=jax.random.key(0), carry=carry)
        after, metrics = pipe.step(state, [batch])
        return metrics.loss, lstm_states(after.carry)

    def check(step: Callable[[Any], tuple[Any, Any]]) -> None:
        assert_close(step(carry), (loss, lstm_states(aux.carry)), 2e-5)

    def first_rows_for_all(carry: Any) -> tuple[Any, Any]:
        return step(jax.tree.map(lambda leaf: leaf[[0, 1, 0, 0]], carry))

    guards(check, right=step, wrong=first_rows_for_all)


def test_pitfall_19_the_mean_of_means_is_not_the_mean(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any, one: Callable[..., Any]
) -> None:
    """Micro-batches have different numbers of real tokens: 6 + 4, 0 and 5 here."""
    (whole, _), _ = one(params, LONG)

    def check(loss: Callable[[], Any]) -> None:
        assert_close(loss(), whole, 2e-5)

    def mean_of_means() -> Any:
        parts = [jax.tree.map(lambda leaf, rows=rows: leaf[..., rows], LONG) for rows in ([0, 1], [2], [3])]
        return np.mean([float(pipe.model.loss(params, part)[0]) for part in parts])

    guards(check, right=lambda: pipe.value_and_grad(state, [LONG])[0], wrong=mean_of_means)


def test_pitfall_21_rows_that_do_not_divide_were_cut_off(pipe: mp_lstm.Pipeline) -> None:
    """Uneven micro-batches are padded, and the padding is masked."""

    def check(rows: Callable[[mp_lstm.Batch], list[np.ndarray]]) -> None:
        pieces = rows(batch_of(3))
        assert len({piece.shape for piece in pieces}) == 1, "stages expect one shape"
        assert Counter(np.concatenate(pieces, axis=1).T[:, 0].tolist()) >= Counter(batch_of(3).inputs[0].tolist())

    def right(batch: mp_lstm.Batch) -> list[np.ndarray]:
        return [np.asarray(chunks[0]) for chunks in pipe.place(batch).batches[0].inputs]

    def equal_parts(batch: mp_lstm.Batch) -> list[np.ndarray]:
        each = batch.inputs.shape[1] // 3
        return [batch.inputs[:, i * each : (i + 1) * each] for i in range(3)]

    guards(check, right=right, wrong=equal_parts)


def test_pitfall_22_later_shapes_were_cut_to_the_first_ones(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any, one: Callable[..., Any]
) -> None:
    def check(losses: Callable[[list[mp_lstm.Batch]], list[float]]) -> None:
        batches = [SHORT, LONG, batch_of(4, 3), SHORT]
        assert_close(losses(batches), [one(params, batch)[0][0] for batch in batches], 2e-5)

    def cut(batches: list[mp_lstm.Batch]) -> list[float]:
        time = batches[0].inputs.shape[0]
        return right(
            [
                mp_lstm.Batch(
                    batch.inputs[:time],
                    batch.targets[:time],
                    lengths=None if batch.lengths is None else np.minimum(batch.lengths, time),
                )
                for batch in batches
            ]
        )

    def right(batches: list[mp_lstm.Batch]) -> list[float]:
        return [float(pipe.evaluate(state, batch).loss) for batch in batches]

    guards(check, right=right, wrong=cut)


def test_pitfall_23_outputs_met_the_targets_of_another_unit(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any, one: Callable[..., Any]
) -> None:
    (whole, _), _ = one(params, batch_of(6))

    def check(targets: Callable[[Any], Any]) -> None:
        window = pipe.place([batch_of(6)])
        (placed,) = window.batches
        window = window._replace(batches=(placed._replace(targets=targets(placed.targets)),))
        assert_close(pipe.value_and_grad(state, window)[0], whole, 2e-5)

    def of_the_next_chunk(targets: Any) -> Any:
        return [chunks[::-1] for chunks in targets]

    def of_the_next_microbatch(targets: Any) -> Any:
        return [*targets[1:], targets[0]]

    guards(check, right=lambda targets: targets, wrong=of_the_next_chunk)
    guards(check, right=lambda targets: targets, wrong=of_the_next_microbatch)


def test_pitfall_24_only_the_last_units_gradient_was_kept(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, params: Any, one: Callable[..., Any]
) -> None:
    """A stage that holds one result for what goes back, and not one for each unit."""
    whole = one(params, LONG)[1]

    def check(gradient: Callable[[], Any]) -> None:
        assert_close(gradient(), whole, 2e-5)

    def of_last_rows() -> Any:
        return one(params, LONG._replace(weights=np.ones((6, 4)) * (np.arange(4) == 3)))[1]

    guards(check, right=lambda: pipe.value_and_grad(state, [LONG])[1], wrong=of_last_rows)


def test_pitfall_25_tied_weights_on_two_stages_diverged(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """After any number of steps the borrower's copy is the owner's table."""

    def check(step: Callable[[mp_lstm.State], mp_lstm.State]) -> None:
        after = state
        for _ in range(2):
            after = step(after)
        owner, borrower = after.stages
        assert borrower.lent[0].table.devices() != owner.own[0].table.devices()
        np.testing.assert_array_equal(borrower.lent[0].table, owner.own[0].table)

    def right(state: mp_lstm.State) -> mp_lstm.State:
        return pipe.step(state, [LONG])[0]

    def copied_once(state: mp_lstm.State) -> mp_lstm.State:
        after = right(state)
        return mp_lstm.State(
            after.key, (after.stages[0], after.stages[1]._replace(lent=state.stages[1].lent)), None, after.step
        )

    guards(check, right=right, wrong=copied_once)


def clipped(gradients: Any, norm: Any, limit: float) -> Any:
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, limit / norm), gradients)


def test_pitfall_26_each_device_clipped_by_its_own_norm(
    pipe: mp_lstm.Pipeline, params: Any, one: Callable[..., Any]
) -> None:
    """One norm over all stages, in which the tied table counts once, with the sum of its gradients."""
    gradients = one(params, LONG)[1]
    limit = 0.5 * float(optax.tree.norm(gradients))
    optimizer = examples.recorder()
    plan = mp_lstm.make_plan(pipe.model, batch_size=4, lengths=(6,), devices=jax.devices()[:2], partition=(2, 2))
    clipping = mp_lstm.make_pipeline(pipe.model, plan, optimizer, max_norm=limit)

    def right() -> Any:
        after, metrics = clipping.step(clipping.load(params), LONG)
        assert_close(metrics.grad_norm, optax.tree.norm(gradients), 2e-5)
        return by_row([stage.optimizer for stage in after.stages])

    def each_stage_alone() -> Any:
        halves = (gradients[:2], gradients[2:])
        return sum((clipped(half, optax.tree.norm(half), limit) for half in halves), ())

    def check(clip: Callable[[], Any]) -> None:
        assert_close(clip(), clipped(gradients, optax.tree.norm(gradients), limit), 2e-5)

    guards(check, right=right, wrong=each_stage_alone)


def test_pitfall_27_one_optimiser_over_all_devices_fails(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """jax has no program for arrays of several devices: there is one state a row, on its stage's device."""
    optimizer = optax.sgd(0.1)

    def right() -> Any:
        return pipe.step(state, [LONG])[0].stages

    def one_for_all() -> Any:
        own = by_row([stage.own for stage in state.stages])
        gradients = pipe.value_and_grad(state, [LONG])[1]
        return jax.jit(lambda g, p: optax.apply_updates(p, optimizer.update(g, optimizer.init(p))[0]))(gradients, own)

    def check(update: Callable[[], Any]) -> None:
        try:
            jax.block_until_ready(update())
        except ValueError as error:
            raise AssertionError(error) from error

    guards(check, right=right, wrong=one_for_all)


def test_pitfall_28_placement_inside_a_program_is_ignored(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> None:
    """`device_put` to a device says nothing there; ours is outside, and every stage's results are its device's."""
    first, last = pipe.plan.devices

    @jax.jit
    def inside(x: Any) -> tuple[Any, Any]:
        y = jax.device_put(x, first) + 1
        return y, jax.device_put(y, last) + 1

    def right() -> tuple[Any, Any]:
        gradients = pipe.value_and_grad(state, [LONG])[1]
        return gradients[0].table, gradients[-1].bias

    def check(results: Callable[[], tuple[Any, Any]]) -> None:
        assert [result.devices() for result in results()] == [{first}, {last}]

    guards(check, right=right, wrong=lambda: inside(put(np.ones(3), stage_sharding(first))))


def test_pitfall_29_a_device_count_set_too_late_was_ignored() -> None:
    """What tells the user so is `emulate_devices`; here devices are there already, four of them."""

    def check(emulate: Callable[[int], Any]) -> None:
        with pytest.raises(InputError, match="4"):
            emulate(len(jax.devices()) + 3)

    def set_and_forgotten(count: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={count}")

    def wrong(count: int) -> None:
        set_and_forgotten(count)
        assert len(jax.devices()) == count

    guards(check, right=mp_lstm.emulate_devices, wrong=wrong)
