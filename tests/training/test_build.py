"""From a configuration to a pipeline: what is made of each section, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from mp_lstm.data import ContiguousBatches, Corpus, SentenceBatches, iterate, read_directory
from mp_lstm.errors import InputError
from mp_lstm.training import build, optimizers
from mp_lstm.training.build import bill_of, limit_vocabulary, make_sources, read_corpus
from mp_lstm.training.config import Config, ModelConfig, load
from mp_lstm.training.optimizers import make_optimizer, make_schedule
from mp_lstm.training.planned import make_planned
from mp_lstm.training.setup import Setup, make_setup, resolved, updates_per_epoch

SMALL = "--model.embed 4 --model.hidden 4 --model.layers 2 --model.dropout 0 --data.batch_size 4"
TRAIN = [n for n in (2, 3, 3, 5, 5, 5, 8, 12) for _ in range(3)]  # words of each sentence
VALID, TEST = [2, 6, 15], [4, 4, 4]


def text(lengths: list[int]) -> str:
    return "".join(" ".join("abcdefg"[i % 7] for i in range(length)) + "\n" for length in lengths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    for split, lengths in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (path / f"{split}.txt").write_text(text(lengths))
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return read_directory(folder)


@pytest.fixture
def setup_of(corpus: Corpus, devices: list[jax.Device]) -> Callable[..., Setup]:
    def make(words: str = "", count: int = 2) -> Setup:
        return make_setup(config_of(words), corpus, devices[:count])

    return make


def config_of(words: str = "") -> Config:
    return load(overrides=f"{SMALL} {words}".split())


# --- text ---


def test_a_directory_is_read(folder: Path):
    corpus = read_corpus(config_of(f"--data.source {folder}"))
    assert len(corpus.vocabulary) == 8  # seven letters and <eos>


@pytest.mark.parametrize("source", ["austen", "folder"])
def test_the_vocabulary_is_limited_whatever_the_source(folder: Path, source: str):
    source = str(folder) if source == "folder" else source
    corpus = read_corpus(config_of(f"--data.source {source} --data.vocab_limit 5"))
    assert corpus.vocabulary.words[:2] == ("<eos>", "<unk>")
    assert len(corpus.vocabulary) == 5
    assert corpus.train.tokens.max() == 4


def test_a_limited_corpus_is_the_one_that_reading_with_a_limit_gives(folder: Path, corpus: Corpus):
    limited, read = limit_vocabulary(corpus, 4), read_directory(folder, vocab_limit=4)
    assert limited.vocabulary == read.vocabulary
    for split in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(limited, split).tokens, getattr(read, split).tokens)


def test_a_missing_corpus_is_explained(tmp_path: Path):
    with pytest.raises(InputError, match=r"^\[data\.source\] .*none is no directory: pass one with train"):
        read_corpus(config_of(f"--data.source {tmp_path / 'none'}"))


# --- batches ---


def test_all_splits_share_their_buckets(corpus: Corpus):
    sources = make_sources(config_of("--data.buckets 4 8"), corpus)
    assert all(isinstance(source, SentenceBatches) for source in sources)
    # Sentences of 9 and 13 steps in train and of 16 in valid are longer: two more buckets for all of them together.
    assert sources.train.buckets == (4, 8, 9, 16)
    assert sources.valid.buckets == (4, 8, 16)
    assert sources.test.buckets == (8,)


def test_auto_buckets_hold_every_sentence(corpus: Corpus):
    sources = make_sources(config_of(), corpus)
    assert sources.valid.buckets[-1] == 16
    assert all(source.dropped.sentences == 0 for source in sources)


def test_what_is_dropped_is_counted(corpus: Corpus):
    sources = make_sources(config_of("--data.buckets 8 --data.long_sentences drop"), corpus)
    assert [source.dropped.sentences for source in sources] == [6, 1, 0]


def test_only_training_is_shuffled_and_by_the_seed(corpus: Corpus):
    def order(words: str, split: int) -> list[int]:
        source = make_sources(config_of(f"--data.buckets 16 {words}"), corpus)[split]
        return [length for _, batch in iterate(source, epochs=1) for length in batch.lengths.tolist()]

    assert order("--train.seed 0", 0) == order("--train.seed 0", 0) != order("--train.seed 1", 0)
    assert order("", 1) == [3, 7, 16, 0]


def test_contiguous_text(corpus: Corpus):
    sources = make_sources(config_of("--data.mode contiguous --data.length 6"), corpus)
    assert all(isinstance(source, ContiguousBatches) and source.buckets == (6,) for source in sources)


def test_the_last_update_of_an_epoch_may_have_fewer_batches(corpus: Corpus):
    config = config_of("--data.buckets 16 --optimizer.every_k 4")
    source = make_sources(config, corpus).train
    assert (source.num_batches(), updates_per_epoch(config, source)) == (6, 2)


# --- model, plan, pipeline ---


def test_every_field_of_the_model_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(build, "language_model", lambda **options: given.update(options))
    model = ModelConfig(residual=3, dropout_words=0.1, weight_drop=0.2, activation_reg=2.0, products="bfloat16")
    build.make_model(replace(Config(), model=model), 100)
    fields = vars(model) | {"residual_from": 3}
    del fields["residual"]
    assert {name: given[name] for name in fields} == fields


def test_the_setup_is_what_the_sections_say(setup_of: Callable[..., Setup]):
    setup = setup_of("--model.hidden 6 4 --pipeline.partition 3 1 --pipeline.chunk 4 --optimizer.every_k 2")
    assert [row.name for row in setup.model.rows] == ["embed", "lstm 1", "lstm 2", "head"]
    assert setup.plan.partition == (3, 1)
    assert {bucket.chunk for bucket in setup.plan.buckets.values()} == {4}
    assert set(setup.plan.buckets) == {length for source in setup.sources for length in source.buckets}
    assert setup.pipe.every_k == 2
    assert setup.plan.rows[0].parameters == 8 * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline.partition 2 1", "[pipeline] partition gives 3 layers (2+1), the model has 4"),
        ("--pipeline.stages 5", "[pipeline] 5 stages for a model of 4 placement rows: pass at most"),
        ("--pipeline.stages 3", "[pipeline] 3 stages for 2 devices: use fewer stages, or emulate more devices with"),
        ("--pipeline.partition 2 1 1", "[pipeline] 3 stages for 2 devices: use fewer stages, or emulate more"),
        ("--pipeline.microbatches 5", "[pipeline] microbatches is 5, the batch has 4 rows"),
        ("--pipeline.chunk 17", "[pipeline] chunk is 17 time steps, the longest bucket has 16"),
        ("--pipeline.schedule wavefrnt", "[pipeline] schedule 'wavefrnt' is unknown: did you mean 'wavefront'?"),
        ("--pipeline.schedule serial --pipeline.chunk 2", "[pipeline] schedule 'serial' runs a batch uncut"),
        ("--model.hidden 4 4 4", "[model] hidden gives 3 sizes, the model has 2 layers"),
        ("--model.hidden 4 6", "[model] tie: the last hidden size is 6 and embed is 4"),
        ("--data.buckets 2 --data.long_sentences drop", "[data] all 30 sentences are longer than the last bucket, 2"),
        ("--optimizer.name rmsprob", "optimizer.name 'rmsprob' is unknown to optax: did you mean rmsprop?"),
        (
            "--optimizer.name lbfgs",
            "optimizer.name is 'lbfgs', whose update needs value, grad, value_fn too; a stage has",
        ),
        (
            "--optimizer.name noisy_sgd",
            "optimizer.name is 'noisy_sgd', whose update depends on all other parameters; a",
        ),
        ("--optimizer.name rprop", "optimizer.rate_schedule is cosine_decay_schedule, but rprop takes one rate alone"),
        ("--optimizer.options epsi 1", "optimizer.options has 'epsi', adam does not: did you mean eps?"),
        ("--optimizer.options b1 high", "optimizer.options: b1 is 'high', wanted a number"),
        ("--optimizer.options nesterov 1", "optimizer.options: nesterov is 1, wanted true or false"),
        ("--optimizer.options learning_rate 1", "optimizer.options has learning_rate: set optimizer.learning_rate"),
        ("--optimizer.rate_schedule plato", "optimizer.rate_schedule 'plato' is unknown: did you mean plateau?"),
        ("--optimizer.rate_options alpa 0", "optimizer.rate_options has 'alpa', cosine_decay_schedule does not: did"),
        (
            "--optimizer.rate_schedule linear_schedule",
            "optimizer.rate_options lacks end_value of linear_schedule: write e.g. rate_options = { end_value = 0.0 }",
        ),
    ],
)
def test_what_does_not_fit_is_explained(setup_of: Callable[..., Setup], words: str, message: str):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        setup_of(words)


def test_chosen_buckets_stay_when_a_run_goes_on_longer_or_elsewhere(setup_of: Callable[..., Setup]):
    setup = setup_of()
    kept = resolved(setup)
    assert kept.data.buckets == tuple(setup.plan.buckets)
    longer = replace(kept, train=replace(kept.train, epochs=100), pipeline=replace(kept.pipeline, stages=1))
    assert make_sources(longer, setup.corpus).train.buckets == setup.sources.train.buckets
    given = setup_of("--data.buckets 9 16")
    assert resolved(given) == given.config


def _bill(setup: Setup):
    return bill_of(setup.config, setup.corpus, setup.sources)


def test_the_bucket_bill(setup_of: Callable[..., Setup]):
    bill = _bill(setup_of("--data.buckets 4 8 16"))
    assert bill is not None
    assert (bill.sentences, bill.epochs) == ((9, 9, 6), 3)
    assert _bill(setup_of("--data.mode contiguous")) is None
    assert _bill(setup_of("--data.buckets 8 --data.long_sentences drop")) is None


# --- optimizers and learning rates ---


@pytest.mark.parametrize("name", sorted(set(optimizers.optimizers()) - set(optimizers.UNFIT)))
def test_every_optimizer_of_optax_is_made_by_its_name(name: str):
    config = config_of(f"--optimizer.name {name} --optimizer.rate_schedule constant")
    made = make_optimizer(config)
    assert isinstance(made, optax.GradientTransformation)


def test_options_reach_the_optimizer():
    config = config_of("--optimizer.name sgd --optimizer.options momentum 0.5 nesterov True")
    ours, theirs = make_optimizer(config, 0.1), optax.sgd(0.1, momentum=0.5, nesterov=True)
    params = {"w": np.ones(3, np.float32)}
    got, wanted = (maker.update(params, maker.init(params))[0]["w"] for maker in (ours, theirs))
    np.testing.assert_array_equal(got, wanted)


def rates(words: str, updates: int, at: list[int]) -> list[float]:
    schedule = make_schedule(config_of(f"--optimizer.learning_rate 1 {words}"), updates)
    return [round(float(schedule(update)) if callable(schedule) else schedule, 6) for update in at]


@pytest.mark.parametrize("name", ["constant", "plateau"])
def test_a_rate_that_does_not_depend_on_the_update(name: str):
    assert rates(f"--optimizer.rate_schedule {name}", 10, [0, 10**6]) == [1.0, 1.0]


def test_a_rate_by_epochs_as_zaremba_has_it():
    words = "--optimizer.rate_schedule epochs --optimizer.rate_epochs 4 --optimizer.rate_divisor 2"
    assert rates(words, 10, [0, 39, 40, 49, 50]) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert rates(words.replace("epochs 4", "epochs 1"), 10, [0, 9, 10]) == [1.0, 1.0, 0.5]


def test_an_optax_schedule_is_as_long_as_the_run_unless_it_says_otherwise():
    cosine = "--train.epochs 2 --optimizer.rate_schedule cosine_decay_schedule"
    assert rates(cosine, 10, [0, 10, 20]) == [1.0, 0.5, 0.0]
    assert rates(f"{cosine} --train.max_steps 5", 10, [0, 10, 20]) == [1.0, 0.5, 0.0]
    assert rates(f"{cosine} --optimizer.rate_options decay_steps 10 alpha 0.2", 10, [10]) == [0.2]


def test_a_schedule_with_a_peak_has_the_learning_rate_there():
    words = "--optimizer.rate_schedule warmup_cosine_decay_schedule --optimizer.rate_options warmup_steps 4"
    assert rates(words, 10, [0, 2, 4, 40]) == [0.0, 0.5, 1.0, 0.0]


def test_rates_are_looked_up_without_a_device(setup_of: Callable[..., Setup]):
    setup = setup_of()
    schedule = make_schedule(setup.config, updates_per_epoch(setup.config, setup.sources.train))
    assert callable(schedule)
    with jax.transfer_guard("disallow"):
        found = [setup.learning_rate(update) for update in (0, 5, 23)]
    assert all(isinstance(rate, float) for rate in found)
    np.testing.assert_allclose(found, [schedule(update) for update in (0, 5, 23)], rtol=1e-6, atol=1e-9)


# --- what plans are chosen by ---

MACHINE = """
devices = { big = 1, small = 1 }
[device.big]
flops_per_second = 1e13
bytes_per_second = 1e12
[device.small]
flops_per_second = 1e11
bytes_per_second = 1e10
"""


def test_a_described_machine_is_planned_for_and_not_trained_on(tmp_path: Path, setup_of: Callable[..., Setup]):
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    here = setup_of()
    pipeline = replace(here.config.pipeline, costs=str(machine))
    config = replace(here.config, pipeline=pipeline)
    planned = make_planned(config, here.corpus, [])
    assert planned.plan.devices[0] == "big:0"
    assert planned.costs.label == "predicted for 1 x big + 1 x small (machine.toml)"
    with pytest.raises(InputError, match=r"\[pipeline\] costs is .*machine.toml.*mp-lstm plan"):
        make_setup(config, here.corpus, jax.devices()[:2])


@pytest.mark.slow
def test_measured_costs_are_kept(tmp_path: Path, setup_of: Callable[..., Setup]):
    here = setup_of("--data.buckets 16")
    config = replace(here.config, pipeline=replace(here.config.pipeline, costs="measured", microbatches=1))
    first = make_planned(config, here.corpus, jax.devices()[:2], cache=tmp_path)
    kept = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file())
    again = make_planned(config, here.corpus, jax.devices()[:2], cache=tmp_path)
    assert first.costs.label.startswith("measured on 2 x cpu")
    assert kept == sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()) != []
    assert again.plan == first.plan


def test_buckets_count_by_how_often_they_occur(setup_of: Callable[..., Setup]):
    source = setup_of("--data.buckets 4 8 16").sources.train
    lengths = [source.batch(0, index).inputs.shape[0] for index in range(source.num_batches())]
    assert source.counts() == {length: lengths.count(length) for length in sorted(set(lengths))}
