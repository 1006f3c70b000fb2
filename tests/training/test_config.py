"""The configuration: defaults, files, overrides, and every way to get them wrong.

Over 400 lines: the tables of wrong values are as long as the configuration.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.layers.dropout import MOST_RATE
from mp_lstm.training.config import (
    RANGES,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
    from_table,
    load,
    load_saved,
    save,
    validate,
)
from mp_lstm.training.fields import field_types, to_toml
from mp_lstm.training.overrides import (
    field_comments,
    flag_types,
    overridden,
    override,
    overrides_help,
    split_overrides,
)

CONFIGS = Path(__file__).parents[2] / "configs"
FLAGS = flag_types(Config)


# --- defaults and the files that come with the project ---


def test_the_defaults_are_the_demo():
    demo = load(CONFIGS / "austen.toml")
    assert demo.pipeline.partition == (4, 2)
    assert demo.train.emulate_devices == 2  # by default a run takes the devices of the machine
    pipeline, train = replace(demo.pipeline, partition="auto"), replace(demo.train, emulate_devices=None)
    assert replace(demo, pipeline=pipeline, train=train) == Config()


def test_the_original_has_its_own_values():
    config = load(CONFIGS / "mxnet_8x400.toml")
    assert config.data.buckets == (8, 16, 24, 32, 60)
    assert config.data.batch_size == 20
    assert config.model == ModelConfig(
        200, 400, 8, 0.5, tie=False, residual=None, init_scale=0.1, forget_bias=0.0, products="bfloat16"
    )
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.options, optimizer.learning_rate, optimizer.max_norm) == ("sgd", {}, 0.1, 5.0)
    assert (optimizer.normalize, optimizer.rate_schedule, optimizer.rate_factor) == ("rows", "plateau", 0.5)
    assert config.train.epochs == 25


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_config_file_opens_with_command_time_and_perplexity(path: Path):
    load(path)
    header = path.read_text().split("\n\n")[0]
    assert f"mp-lstm train configs/{path.relative_to(CONFIGS)}" in header
    assert re.search(r"Expected: [\d.]+ (minutes|hours) on two CPU cores; validation perplexity", header)


@pytest.mark.parametrize("section", [DataConfig, ModelConfig, PipelineConfig, OptimizerConfig, TrainConfig])
def test_every_field_has_a_comment(section: type):
    assert [name for name in field_types(section) if not field_comments(section)[name].endswith(".")] == []


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.epochs = 3


# --- files ---

WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
SIZES = st.integers(1, 10**6)
POSITIVE = st.floats(2.0**-126, 3e38)
SHARES = st.floats(0, 1, exclude_max=True)
DROPOUTS = st.floats(0, 1 - 2**-16)
TUPLES = st.lists(SIZES, min_size=1, max_size=4).map(tuple)
OPTIONS = st.dictionaries(WORDS, st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | WORDS, max_size=3)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any valid configuration."""

    def section(cls: type, **special: st.SearchStrategy[Any]) -> Any:
        values = {}
        for name, hint in field_types(cls).items():
            strategies = [special[name]] if name in special else [_values(hint)]
            if type(None) in typing.get_args(hint):
                strategies.append(st.none())
            values[name] = draw(st.one_of(strategies))
        return cls(**values)

    layers = draw(st.integers(1, 9))
    model = section(
        ModelConfig,
        layers=st.just(layers),
        **dict.fromkeys(("dropout", "dropout_input", "dropout_output", "dropout_words", "weight_drop"), DROPOUTS),
        **dict.fromkeys(("activation_reg", "temporal_reg"), st.just(0.0) | POSITIVE),
        residual=st.integers(1, layers),
        init_scale=POSITIVE | st.lists(POSITIVE, min_size=1, max_size=4).map(tuple),
        forget_bias=st.floats(-3e38, 3e38),
        biases=st.integers(1, 2),
    )
    optimizer = section(
        OptimizerConfig,
        learning_rate=POSITIVE,
        max_norm=POSITIVE,
        rate_factor=st.floats(0.1, 0.9),
        plateau_threshold=SHARES,
        rate_divisor=st.floats(1, 3e38),
        weight_decay=st.floats(0, 3e38),
    )
    data = section(DataConfig, vocab_limit=st.integers(2, 10**6), batch_size=st.integers(1, 2**16))
    train = section(TrainConfig, emulate_devices=st.integers(1, 1024), step_timeout=POSITIVE)
    pipeline = section(PipelineConfig, costs=st.sampled_from(("nominal", "measured", "machine.toml")))
    return Config(data, model, pipeline, optimizer, train)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(parts)
    if parts and origin not in (tuple, dict):
        return st.one_of([_values(part) for part in parts if part is not type(None)])
    return {tuple: TUPLES, dict: OPTIONS, int: SIZES, str: WORDS, bool: st.booleans()}[origin or hint]


@given(configs())
def test_what_is_saved_loads_equal(tmp_path_factory: pytest.TempPathFactory, config: Config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    save(config, path)
    assert load(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\nlayers = 2", "section [modle] is unknown: did you mean model?"),
        ("[model]\nlayer = 2", "field model.layer is unknown: did you mean layers?"),
        ("[train]\nxyzzy = 2", "field train.xyzzy is unknown: one of epochs, max_steps,"),
        ("model = 2", "model is 2, wanted a table: write [model] above its fields"),
        ("[model]\nlayers = '2'", "model.layers is '2', wanted a whole number"),
        ("[model]\nlayers = true", "model.layers is True, wanted a whole number"),
        ("[model]\nlayers = 2.0", "model.layers is 2.0, wanted a whole number"),
        ("[model]\ntie = 1", "model.tie is 1, wanted true or false"),
        ("[model]\nhidden = [64, 'a']", "model.hidden is [64, 'a'], wanted a whole number or a list of whole numbers"),
        ("[model]\nresidual = 'no'", "model.residual is 'no', wanted a whole number or none"),
        ("[model]\ninit_scale = 'x'", "model.init_scale is 'x', wanted a number or a list of numbers or none"),
        ("[model]\nproducts = 'float16'", "model.products is 'float16', wanted float32 or bfloat16"),
        ("[data]\nmode = 'words'", "data.mode is 'words', wanted sentences or contiguous"),
        ("[data]\nbuckets = 32", "data.buckets is 32, wanted auto or a list of whole numbers"),
        ("[optimizer]\nname = 1", "optimizer.name is 1, wanted a text"),
        ("[optimizer]\nlearning_rate = 'x'", "optimizer.learning_rate is 'x', wanted a number"),
        ("[optimizer]\noptions = { b1 = [1] }", "optimizer.options is {'b1': [1]}, wanted names with their values"),
        ("[model\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.toml cannot be read \(No such file or directory\): pass a TOML file"):
        load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"[data]\nsource = '\xe9'")
    with pytest.raises(InputError, match=r"latin\.toml is not TOML: 'utf-8' codec can't decode byte 0xe9"):
        load(tmp_path / "latin.toml")


def test_a_number_that_no_float_holds_is_explained():
    with pytest.raises(InputError, match=r"optimizer\.learning_rate is 10{400}, wanted a number$"):
        from_table({"optimizer": {"learning_rate": 10**400}})


def test_a_byte_order_mark_is_skipped(tmp_path: Path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nepochs = 7\r\n")
    assert load(tmp_path / "a.toml").train.epochs == 7


def test_a_saved_file_that_lost_a_section_is_not_filled_up(tmp_path: Path):
    """An emptied config.toml made any run one on the demo's text."""
    path = tmp_path / "config.toml"
    save(Config(), path)
    path.write_text(path.read_text().partition("[optimizer]")[0])
    with pytest.raises(
        InputError, match=r"config.toml has lost its section \[optimizer\]: put the file of the run back"
    ):
        load_saved(path)


@pytest.mark.parametrize("cut", ["epochs", "step_timeout"])
def test_a_saved_file_that_lost_its_end_is_not_filled_up(tmp_path: Path, cut: str):
    """A config.toml that ended with "[train]" was resumed with the demo's epochs and seed, and written anew."""
    path = tmp_path / "config.toml"
    save(Config(), path)
    text = path.read_text()
    path.write_text(text[: text.index(f"\n{cut} =") + 1])
    message = r"config.toml has \d+ of the \d+ fields that it was saved with: put the file of the run back"
    with pytest.raises(InputError, match=message):
        load_saved(path)


def test_a_file_saved_before_a_field_was_added_has_its_default(tmp_path: Path):
    """Such a file does not say how many fields it has, or says the number there were then."""
    path = tmp_path / "config.toml"
    save(Config(), path)
    first, *lines = path.read_text().splitlines(keepends=True)
    older = "".join(line for line in lines if not line.startswith("step_timeout"))
    for header in ("", re.sub(r"\d+", lambda count: str(int(count[0]) - 1), first)):
        path.write_text(header + older)
        assert load_saved(path) == Config()
    path.write_text(older[: older.index("\nepochs =") + 1])
    with pytest.raises(InputError, match=r"config.toml has lost the fields of \[train\]: put the file of the run back"):
        load_saved(path)


def test_a_whole_number_is_a_number():
    assert from_table({"optimizer": {"learning_rate": 1}}).optimizer.learning_rate == 1.0
    assert isinstance(from_table({"optimizer": {"learning_rate": 1}}).optimizer.learning_rate, float)


# --- overrides ---


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--model.tie False", "tie", False),
        ("--model.tie True", "tie", True),
        ("--model.tie false", "tie", False),
        ("--model.tie=true", "tie", True),
        ("--model.hidden 64", "hidden", 64),
        ("--model.hidden 64 32", "hidden", (64, 32)),
        ("--model.residual none", "residual", None),
        ("--model.residual None", "residual", None),
        ("--model.layers=3", "layers", 3),
        ("--model.init-scale 0.1", "init_scale", 0.1),
        ("--model.init_scale 0.1 0.2", "init_scale", (0.1, 0.2)),
        ("--model.dropout_input 0.4", "dropout_input", 0.4),
        ("--model.products bfloat16", "products", "bfloat16"),
        ("--model.layers 3 --model.layers 2", "layers", 2),
        ("--model.forget_bias -1", "forget_bias", -1.0),
    ],
)
def test_overrides(words: str, field: str, value: Any):
    assert getattr(override(Config(), words.split()).model, field) == value


def test_overrides_come_after_the_file(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text("[train]\nepochs = 7\nseed = 7")
    train = load(path, ["--train.epochs", "9"]).train
    assert (train.epochs, train.seed) == (9, 7)


def test_fields_that_are_overridden_are_told_once_and_by_their_names():
    words = ["--train.epochs", "9", "--data.batch-size=8", "--data.buckets", "8", "16", "--train.epochs=7"]
    assert overridden(words) == ["train.epochs", "data.batch_size", "data.buckets"]


def test_options_keep_their_types():
    options = override(
        Config(), ["--optimizer.options", "b1", "0.5", "nesterov", "True", "count", "3"]
    ).optimizer.options
    assert options == {"b1": 0.5, "nesterov": True, "count": 3}


@pytest.mark.parametrize("flag", [flag for flag, hint in FLAGS.items() if hint is bool])
@pytest.mark.parametrize("value", [True, False])
def test_switches_are_written_as_in_a_file(flag: str, value: bool):
    """The help and the message said true, and only True was taken."""
    section, field = flag.removeprefix("--").split(".")
    for word in (str(value), to_toml(value)):
        assert getattr(getattr(override(Config(), [flag, word]), section), field) is value


@pytest.mark.parametrize("words", [["nesterov", "true", "b1", "0.5"], ["{ nesterov = true, b1 = 0.5 }"]])
def test_options_may_be_switches(words: list[str]):
    """The word "true" was a text, which the optimizer refused."""
    assert override(Config(), ["--optimizer.options", *words]).optimizer.options == {"nesterov": True, "b1": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.layer 3", "--model.layer is unknown: did you mean --model.layers?"),
        ("--layers 3", "--layers is unknown: did you mean --model.layers?"),
        ("--data.layers 3", "--data.layers is unknown: did you mean --model.layers?"),
        ("--xyzzy 3", "--xyzzy is unknown: --help lists all flags"),
        ("--model.layers x", "--model.layers is 'x', wanted a whole number"),
        ("--model.layers 2 3", "--model.layers is '2 3', wanted a whole number"),
        ("--model.layers", "--model.layers is missing, wanted a whole number"),
        ("--model.tie", "--model.tie is missing, wanted true or false"),
        ("--model.tie yes", "--model.tie is 'yes', wanted true or false"),
        ("--data.buckets 8,16", "--data.buckets is '8,16', wanted auto or a list of whole numbers"),
        ("3 --model.layers 3", "'3' follows no flag: write --section.field before its value"),
    ],
)
def test_a_wrong_override_is_one_line(capfd: pytest.CaptureFixture[str], words: str, message: str):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        override(Config(), words.split())
    assert capfd.readouterr() == ("", "")


def test_overrides_are_told_from_other_words():
    words = ["train", "--model.layers", "2", "a.toml", "--run-dir", "x.y", "--data.buckets=8", "b", "--modle.x", "1"]
    others, overrides = split_overrides(words, FLAGS)
    assert others == ["train", "a.toml", "--run-dir", "x.y", "b"]
    assert overrides == ["--model.layers", "2", "--data.buckets=8", "--modle.x", "1"]
    assert split_overrides(["--prompt", "-- so . he"], FLAGS) == (["--prompt", "-- so . he"], [])


def test_help_lists_every_field():
    text = overrides_help(Config())
    assert [flag for flag in FLAGS if f"{flag} " not in text] == []
    assert "Rows of a batch. (a whole number; default: 32)" in text
    assert max(map(len, text.splitlines())) <= 100


# --- ranges ---


@pytest.mark.parametrize("name", RANGES)
def test_every_range_is_held(name: str):
    section, field = name.split(".")
    hint = field_types(field_types(Config)[section])[field]
    integral = int in (hint, *typing.get_args(hint)) or typing.get_origin(hint) is tuple or "list" in str(hint)
    wrong = -1 if integral else (float("nan") if name == "model.forget_bias" else -0.5)
    wrong = (wrong,) if name in ("data.buckets", "pipeline.partition") else wrong
    config = Config()
    bad = replace(config, **{section: replace(getattr(config, section), **{field: wrong})})
    shown = list(wrong) if isinstance(wrong, tuple) else wrong
    with pytest.raises(InputError, match=f"^{re.escape(f'{name} is {shown!r}, wanted ')}"):
        validate(bad)


def test_every_number_has_a_range():
    numbers = {
        flag.removeprefix("--")
        for flag, hint in FLAGS.items()
        if {int, float} & {hint, *typing.get_args(hint)} or tuple in map(typing.get_origin, typing.get_args(hint))
    }
    assert numbers == set(RANGES)


@pytest.mark.parametrize("value", ["8 1000000000", "1000000000"])
@pytest.mark.parametrize("name", ["data.buckets", "data.batch_size", "model.layers", "train.emulate_devices"])
def test_numbers_far_beyond_use_are_refused(name: str, value: str):
    """A million emulated devices hung, and such a batch ended in numpy's memory error."""
    if " " in value and name != "data.buckets":
        return
    with pytest.raises(
        InputError, match=rf"{name} is .*1000000000.*, wanted at least 1 and at most [\d,]+: its default"
    ):
        load(overrides=[f"--{name}", *value.split()])


def test_a_value_out_of_range_names_its_file_and_what_to_write(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text("[train]\nepochs = 0")
    message = "train.epochs is 0, wanted at least 1: its default is 3"
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {message}')}$"):
        load(path)
    with pytest.raises(InputError, match=r"^train\.epochs is -1, wanted at least 1: its default is 3$"):
        load(path, ["--train.epochs", "-1"])
    assert load(path, ["--train.epochs", "1"]).train.epochs == 1


def test_a_value_that_is_no_number_names_its_file(tmp_path: Path):
    """nan is not equal to itself, so it was not found in the file."""
    path = tmp_path / "a.toml"
    path.write_text("[optimizer]\nlearning_rate = nan")
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: optimizer.learning_rate is nan, wanted a number')}"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.forget_bias", "1e39"),
        ("model.forget_bias", "-1e39"),
        ("model.init_scale", "1e-50"),
        ("model.activation_reg", "1e39"),
        ("optimizer.learning_rate", "1e39"),
        ("optimizer.learning_rate", "1e-300"),
        ("optimizer.max_norm", "1e-300"),
        ("optimizer.max_norm", "1e39"),
        ("optimizer.weight_decay", "1e300"),
        ("optimizer.rate_divisor", "1e300"),
    ],
)
def test_numbers_are_those_of_float32(name: str, value: str):
    """A bias of 1e39 was infinite on the device, and a norm of 1e-300 zero: nothing was trained."""
    message = rf"^{re.escape(name)} is {re.escape(repr(float(value)))}, wanted a .*number .*float32.*: its default is "
    with pytest.raises(InputError, match=message):
        load(overrides=[f"--{name}", value])


@pytest.mark.parametrize("name", ["dropout", "dropout_input", "dropout_output", "dropout_words", "weight_drop"])
def test_dropout_keeps_at_least_what_its_masks_can_say(name: str):
    """A rate of 0.999999 kept nothing, and the scale was one divided by zero."""
    message = (
        rf"^model\.{name} is 0\.999999, wanted a number from 0 to below 1, at most 0\.9999847412109375: its default"
    )
    with pytest.raises(InputError, match=message):
        load(overrides=[f"--model.{name}", "0.999999"])
    assert getattr(load(overrides=[f"--model.{name}", repr(MOST_RATE)]).model, name) == MOST_RATE


@pytest.mark.parametrize(
    ("costs", "remedy"),
    [
        ("mesured", "did you mean measured?"),
        ("Nominal", "did you mean nominal?"),
        ("", 'its default is "nominal"'),
        ("cluster.TOML", 'its default is "nominal"'),
    ],
)
def test_costs_are_known_or_a_file(tmp_path: Path, costs: str, remedy: str):
    """Any other word was taken for nominal, and the plan was made without a measurement."""
    message = f"pipeline.costs is {costs!r}, wanted nominal, measured or a machine's file (*.toml): {remedy}"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load(overrides=[f"--pipeline.costs={costs}"])
    path = tmp_path / "a.toml"
    path.write_text(f"[pipeline]\ncosts = '{costs}'")
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {message}')}$"):
        load(path)


@pytest.mark.parametrize("costs", ["nominal", "measured", "cluster.toml"])
def test_costs_that_are_known(costs: str):
    assert load(overrides=["--pipeline.costs", costs]).pipeline.costs == costs


def test_lists_may_not_be_empty():
    with pytest.raises(InputError, match=r"data\.buckets is missing, wanted auto or a list of whole numbers"):
        load(overrides=["--data.buckets"])
    with pytest.raises(InputError, match=r"data\.buckets is \[\], wanted at least 1"):
        load(overrides=["--data.buckets", "[]"])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0"])
def test_rates_are_finite(value: str):
    with pytest.raises(InputError, match=r"optimizer\.learning_rate is .*, wanted a number above 0"):
        load(overrides=["--optimizer.learning_rate", value])


def test_the_residual_layer_is_one_of_the_layers():
    message = "model.residual is 5, the model has 4 LSTM layers: pass one of them, or none"
    with pytest.raises(InputError, match=re.escape(message)):
        load(overrides=["--model.residual", "5"])


@pytest.mark.parametrize("words", [["4", "2"], ["[4, 2]"], ["[4,", "2]"], ["(4, 2)"], ["[4,2]"]])
def test_a_list_may_be_written_as_in_a_file(words: list[str]):
    assert override(Config(), ["--pipeline.partition", *words]).pipeline.partition == (4, 2)


@pytest.mark.parametrize("words", [["b2", "0.99"], ["{ b2 = 0.99 }"], ["{b2=0.99}"]])
def test_a_table_may_be_written_as_in_a_file(words: list[str]):
    assert override(Config(), ["--optimizer.options", *words]).optimizer.options == {"b2": 0.99}
