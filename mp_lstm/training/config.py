"""The configuration of a run: frozen dataclasses, read from TOML and overridden from the command line.

    defaults  <-  CONFIG.toml  <-  --section.field value

Each step is strict: an unknown name, a wrong type or a value out of range is an `InputError` that names the field. The
defaults are those of configs/austen.toml, the demo. TOML has no null, so a file says "none" where a field is None.

What only shows with the corpus or the devices at hand (a partition that does not add up, say) is left to `build`.

It is over 400 lines so that every field and its range are on one page.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import LEAST, MOST
from mp_lstm.training.fields import WRONG, field_types, from_toml, in_words, suggestion, to_toml
from mp_lstm.training.files import replace_text
from mp_lstm.training.overrides import overridden, override
from mp_lstm.training.unused import refuse_unused, unused

Auto = Literal["auto"]
Options = dict[str, int | float | bool | str]


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it becomes batches."""

    # "austen", the corpus in the package, or a directory with train, valid and test text.
    source: str = "austen"
    # A sentence a row, or rows of consecutive text whose state is carried from batch to batch.
    mode: Literal["sentences", "contiguous"] = "sentences"
    # Sentences: the padded lengths; auto: those that pay most, compilation counted.
    buckets: Auto | tuple[int, ...] = "auto"
    # Sentences longer than the last bucket: up to two more buckets, pieces, or left out (and counted).
    long_sentences: Literal["extend", "split", "drop"] = "extend"
    # Rows of a batch.
    batch_size: int = 32
    # Contiguous: time steps of a batch.
    length: int = 35
    # Contiguous: lengths of training drawn around `length` at random, multiples of this; none: all the same. The rate
    # of an update is scaled by its length.
    random_length: int | None = None
    # The most words of the vocabulary, the rest are <unk>; none: all.
    vocab_limit: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The language model."""

    # Size of the token vectors.
    embed: int = 200
    # Size of the LSTM layers: one for all, or one for each.
    hidden: int | tuple[int, ...] = 200
    # LSTM layers.
    layers: int = 4
    # Rate on the connections into every LSTM layer and out of the last.
    dropout: float = 0.1
    # Rate on the connections into the first LSTM layer; none: as dropout.
    dropout_input: float | None = None
    # Rate on the connections out of the last LSTM layer; none: as dropout.
    dropout_output: float | None = None
    # Rate of words whose vector is zero for a whole batch.
    dropout_words: float = 0.0
    # One mask for all steps of a sequence, instead of one for each step.
    dropout_locked: bool = False
    # Rate of recurrent weights that are zero for a whole batch.
    weight_drop: float = 0.0
    # Activation regularisation: training's gradient is that of the loss and, each token, of this times the mean square
    # of the last LSTM layer's output, dropout applied.
    activation_reg: float = 0.0
    # Temporal activation regularisation: likewise, times the mean square of what that layer's output moved in a step.
    temporal_reg: float = 0.0
    # The decoder's kernel is the embedding's table.
    tie: bool = True
    # LSTM layers from this one on (counted from 1) add their input to their output; none: no layer does.
    residual: int | None = 2
    # All weights from uniform(-init_scale, init_scale), or a number for each of embedding, LSTM layers and head (a tied
    # head has none); none: Glorot and orthogonal ones.
    init_scale: float | tuple[float, ...] | None = None
    # Initial bias of the forget gates.
    forget_bias: float = 1.0
    # Biases of an LSTM layer; 2, as in the papers' code and in PyTorch, learn as one does at twice the rate.
    biases: int = 1
    # What the operands of matrix products are rounded to; parameters, state and sums stay float32.
    products: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class PipelineConfig:
    """Which layers live on which device, and how a batch flows through them."""

    # Number of stages; auto: those of the partition, else one for each device, or group of them.
    stages: Auto | int = "auto"
    # Devices that work on a stage together; auto: as many as the next two multiply to.
    devices_per_stage: Auto | int = "auto"
    # Parts into which these divide the rows of a micro-batch; auto: as many as there are devices for.
    data_parallel: Auto | int = "auto"
    # Parts into which these divide the vocabulary, of embedding and head; it must be a multiple (see vocab_limit).
    model_parallel: int = 1
    # Placement rows (embedding, LSTM layers, head) of each stage; auto: those of the least predicted step time.
    partition: Auto | tuple[int, ...] = "auto"
    # "serial" (no overlap, the baseline), "wavefront", "gpipe", "one_f_one_b", "zero_bubble"; auto: the fastest.
    schedule: str = "auto"
    # Time steps of a chunk; auto: for each bucket the number with the least predicted step time.
    chunk: Auto | int = "auto"
    # Slices of a batch's rows; auto: chosen with the plan.
    microbatches: Auto | int = "auto"
    # Less memory for more work: the "head" computes its logits again, also each "layer" its activations, or the "stage"
    # all of them; auto: as much as it takes to fit the memory.
    remat: Literal["none", "head", "layer", "stage", "auto"] = "none"
    # What "auto" goes by: "nominal" rates, "measured" layers (minutes, once a machine), or, to plan, a machine's file
    # (*.toml).
    costs: str = "nominal"
    # Time steps of each scan that are written out at once.
    unroll: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    """The update."""

    # Any leaf-wise optax optimizer with a learning rate: adam, adamw, nadam, sgd, rmsprop, lion, lamb and many more.
    name: str = "adam"
    # Largest, or first, learning rate.
    learning_rate: float = 3e-3
    # Further arguments of the optimizer, e.g. { b2 = 0.99 }.
    options: Options = field(default_factory=dict)
    # Most that the gradient's norm over all stages may be; none: no clipping.
    max_norm: float | None = 1.0
    # What gradient sums are divided by: real tokens or real rows of the update.
    normalize: Literal["tokens", "rows"] = "tokens"
    # Batches of an update; the last update of an epoch may have fewer.
    every_k: int = 1
    # "constant", "plateau", "epochs", or an optax schedule that counts updates: linear_schedule, polynomial_schedule,
    # exponential_decay, cosine_decay_schedule, cosine_onecycle_schedule, linear_onecycle_schedule,
    # warmup_constant_schedule, warmup_cosine_decay_schedule or warmup_exponential_decay_schedule.
    rate_schedule: str = "cosine_decay_schedule"
    # Arguments of the optax schedule, e.g. { alpha = 0.1 }; a length that is not given is the whole run.
    rate_options: Options = field(default_factory=dict)
    # Plateau: factor on the rate after a validation that is no better than the best one so far.
    rate_factor: float = 0.5
    # Plateau: relative improvement of the validation loss that counts as better.
    plateau_threshold: float = 0.001
    # Epochs: epochs at the first rate.
    rate_epochs: int = 4
    # Epochs: what the rate is divided by in each epoch after these.
    rate_divisor: float = 2.0
    # Times the parameters, added to the gradient after clipping.
    weight_decay: float = 0.0
    # Average the parameters, once a validation is worse than the best of all but the last `average_after` before it,
    # and validate and test the average.
    average: bool = False
    # Average: validations, each at the end of an epoch, that may be no better before it begins.
    average_after: int = 5


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    # Passes over the training text.
    epochs: int = 3
    # Updates after which the run ends even so; none: no limit. Learning rates are as without it.
    max_steps: int | None = None
    # Seed of parameters, dropout and the order of batches.
    seed: int = 0
    # Updates between two lines of metrics.
    log_every: int = 10
    # Updates between two validations; none: one at the end of each epoch.
    eval_every: int | None = None
    # Updates between two checkpoints; none: one at the end of each epoch.
    checkpoint_every: int | None = None
    # Validations in a row without a new best one after which the run ends; none: it does not.
    patience: int | None = None
    # Train on this many emulated CPU devices, those of all processes; none: on the devices of the machine.
    emulate_devices: int | None = None
    # Several processes: seconds that one waits for what another sends before it ends; none: as long as that one lives.
    step_timeout: float | None = 300.0


@dataclass(frozen=True)
class Config:
    """A run's configuration; equal ones make equal runs.

    Example:
      >>> Config().data.source, Config(train=TrainConfig(epochs=2)).train.epochs
      ('austen', 2)
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()


def load(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration.

    Args:
      path: a TOML file; what it leaves out has its default. None: the defaults.
      overrides: command-line words, such as ["--model.layers", "2"].

    Returns:
      The configuration, validated.

    Raises:
      InputError: the file cannot be read; a name is unknown, a type wrong, a value out of range; a field is given that
        does nothing (`unused`). What a file gives may come to that by overrides of other fields, and what `save` wrote
        is a run's, whatever it is.

    Example:
      >>> load(overrides=["--model.hidden", "64", "32", "--model.layers", "2"]).model.hidden
      (64, 32)
    """
    source, table = ("", {}) if path is None else (f"{path}: ", _read(Path(path)))
    given = from_table(table, str(path))
    config = validate(override(given, overrides), source, given)
    words = overridden(overrides)
    if path is None or _saved_count(Path(path)) is None:
        names = [f"{section}.{name}" for section, content in table.items() for name in content]
        refuse_unused(config, [name for name in unused(given, names) if name not in words], source)
    refuse_unused(config, words)
    return config


def save(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes a configuration so that `load` reads it back equal.

    Args:
      config: it is written in full, defaults included.
      path: the file; it is replaced, at once.

    Raises:
      InputError: it cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(Config(), f"{folder}/config.toml")
      ...     load(f"{folder}/config.toml") == Config()
      True
    """
    lines = [f"# The {sum(len(vars(section)) for section in vars(config).values())} fields of a configuration."]
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        lines += [f"{name} = {to_toml(value)}" for name, value in vars(getattr(config, section.name)).items()]
        lines.append("")
    replace_text(path, "\n".join(lines))


def from_table(table: Mapping[str, Any], source: str = "the configuration") -> Config:
    """Makes a configuration of nested tables, as TOML gives them; ranges are left to `validate`.

    Args:
      table: section -> field -> value; what it leaves out has its default.
      source: where it comes from, for messages.

    Returns:
      The configuration.

    Raises:
      InputError: a section or field is unknown, or a value has the wrong type.

    Example:
      >>> from_table({"model": {"hidden": [64, 32], "residual": "none"}}).model.hidden
      (64, 32)
    """
    sections = {}
    for section, content in table.items():
        if section not in _SECTIONS:
            raise InputError(f"{source}: section [{section}] is unknown: {suggestion(section, _SECTIONS)}")
        if not isinstance(content, Mapping):
            raise InputError(f"{source}: {section} is {content!r}, wanted a table: write [{section}] above its fields")
        hints = field_types(_SECTIONS[section])
        for name, value in content.items():
            if name not in hints:
                raise InputError(f"{source}: field {section}.{name} is unknown: {suggestion(name, hints)}")
            if (converted := from_toml(hints[name], value)) is WRONG:
                raise InputError(f"{source}: {section}.{name} is {value!r}, wanted {in_words(hints[name])}")
            sections.setdefault(section, {})[name] = converted
    return Config(**{section: _SECTIONS[section](**values) for section, values in sections.items()})


def load_saved(path: str | os.PathLike[str]) -> Config:
    """Reads a configuration that `save` wrote: in full, so what is missing has been lost and has no default.

    Fields that the library has since got have theirs: the file says how many there were when it was written.

    Args:
      path: the file.

    Raises:
      InputError: as `load`, or a section is not there, or not all of its fields.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(Config(), f"{folder}/config.toml")
      ...     load_saved(f"{folder}/config.toml") == Config()
      True
    """
    name, table = os.fspath(path), _read(Path(path))
    if lost := [section for section in _SECTIONS if section not in table]:
        raise InputError(f"{name} has lost its section [{lost[0]}]: put the file of the run back")
    given = from_table(table, name)
    config = validate(given, f"{name}: ", given)
    found = sum(map(len, table.values()))
    if (count := _saved_count(Path(path))) is not None and found < count:
        raise InputError(
            f"{name} has {found} of the {count} fields that it was saved with: put the file of the run back"
        )
    if empty := [section for section in _SECTIONS if not table[section]]:  # of a file that does not say how many
        raise InputError(f"{name} has lost the fields of [{empty[0]}]: put the file of the run back")
    return config


def validate(config: Config, source: str = "", given: Config | None = None) -> Config:
    """Checks the ranges of all values.

    Args:
      config: of the right types.
      source: put before the message, where the value at fault is that of `given`.
      given: the configuration before it was overridden.

    Returns:
      The same configuration.

    Raises:
      InputError: a value is out of range, or two do not agree.

    Example:
      >>> validate(Config()) == Config()
      True
    """

    def told(name: str) -> str:
        """What is wrong: where, the field and its value."""
        value = _value(config, name)
        where = source if given is not None and repr(_value(given, name)) == repr(value) else ""  # nan is not nan
        return f"{where}{name} is {list(value) if isinstance(value, tuple) else value!r}"

    for name, (allowed, wanted) in RANGES.items():
        value = _value(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or any(not isinstance(v, str | None) and not allowed(v) for v in numbers):
            raise InputError(f"{told(name)}, wanted {wanted}: its default is {to_toml(_value(Config(), name))}")
    model, costs = config.model, config.pipeline.costs
    if model.residual is not None and model.residual > model.layers:
        raise InputError(
            f"{told('model.residual')}, the model has {model.layers} LSTM layers: pass one of them, or none"
        )
    if costs not in COSTS and not is_description(config):
        close = difflib.get_close_matches(costs.lower(), COSTS, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"its default is {to_toml(Config().pipeline.costs)}"
        raise InputError(f"{told('pipeline.costs')}, wanted {', '.join(COSTS)} or a machine's file (*.toml): {remedy}")
    return config


def is_description(config: Config) -> bool:
    """Whether `pipeline.costs` names a machine's file.

    Example:
      >>> is_description(Config()), is_description(Config(pipeline=PipelineConfig(costs="cluster.toml")))
      (False, True)
    """
    return config.pipeline.costs.endswith(".toml")


def _value(config: Config, name: str) -> Any:
    """Of a field by its full name, such as "train.epochs"."""
    section, _, field_name = name.partition(".")
    return getattr(getattr(config, section), field_name)


class _Range(NamedTuple):
    """Values that are allowed, and the words for them."""

    allowed: Callable[[Any], bool]
    wanted: str


def _at_least(least: int, most: int | None = None) -> _Range:
    """Whole numbers; `most` is far beyond use, where more would end in a process without answer or memory."""
    if most is None:
        return _Range(lambda value: value >= least, f"at least {least}")
    return _Range(lambda value: least <= value <= most, f"at least {least} and at most {most:,}")


MOST_DROPOUT = 1 - 2.0**-16  # masks are drawn of 16 bits: more would keep nothing

_POSITIVE = _Range(lambda value: LEAST <= value <= MOST, "a number above 0 that float32 holds (1.2e-38 to 3.4e38)")
_FACTOR = _Range(lambda value: 0 <= value <= MOST, "a finite number of at least 0 that float32 holds (to 3.4e38)")
_SHARE = _Range(lambda value: 0 <= value < 1, "a number from 0 to below 1")
_DROPOUT = _Range(lambda value: 0 <= value <= MOST_DROPOUT, f"{_SHARE.wanted}, at most {MOST_DROPOUT}")

# Of `pipeline.costs`, which may also be a file.
COSTS = ("nominal", "measured")

# Lists are checked element by element; they may not be empty.
RANGES = {
    "data.buckets": _at_least(1, 2**20),
    "data.batch_size": _at_least(1, 2**16),  # rows beyond would share dropout masks
    "data.length": _at_least(1, 2**20),
    "data.random_length": _at_least(1, 2**20),
    "data.vocab_limit": _at_least(2),
    "model.embed": _at_least(1, 2**20),
    "model.hidden": _at_least(1, 2**20),
    "model.layers": _at_least(1, 1024),
    "model.dropout": _DROPOUT,
    "model.dropout_input": _DROPOUT,
    "model.dropout_output": _DROPOUT,
    "model.dropout_words": _DROPOUT,
    "model.weight_drop": _DROPOUT,
    "model.biases": _at_least(1, 2),
    "model.activation_reg": _FACTOR,
    "model.temporal_reg": _FACTOR,
    "model.residual": _at_least(1),
    "model.init_scale": _POSITIVE,
    "model.forget_bias": _Range(lambda value: abs(value) <= MOST, "a finite number that float32 holds (to 3.4e38)"),
    "pipeline.stages": _at_least(1),
    "pipeline.devices_per_stage": _at_least(1),
    "pipeline.data_parallel": _at_least(1),
    "pipeline.model_parallel": _at_least(1),
    "pipeline.partition": _at_least(1),
    "pipeline.chunk": _at_least(1),
    "pipeline.microbatches": _at_least(1),
    "pipeline.unroll": _at_least(1),
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.max_norm": _POSITIVE,
    "optimizer.every_k": _at_least(1),
    "optimizer.rate_factor": _Range(lambda value: 0 < value < 1, "a number above 0 and below 1"),
    "optimizer.plateau_threshold": _SHARE,
    "optimizer.rate_epochs": _at_least(1, 2**31 - 1),
    "optimizer.rate_divisor": _Range(
        lambda value: 1 <= value <= MOST, "a number of at least 1 that float32 holds (to 3.4e38)"
    ),
    "optimizer.weight_decay": _FACTOR,
    "optimizer.average_after": _at_least(0),
    "train.epochs": _at_least(1),
    "train.max_steps": _at_least(1),
    "train.seed": _Range(lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295"),
    "train.log_every": _at_least(1),
    "train.eval_every": _at_least(1),
    "train.checkpoint_every": _at_least(1),
    "train.patience": _at_least(1),
    "train.emulate_devices": _at_least(1, 1024),
    "train.step_timeout": _Range(lambda value: 0 < value < math.inf, "a number above 0"),
}

_SECTIONS: dict[str, type[Any]] = typing.get_type_hints(Config)


_COUNT = re.compile(r"# The (\d+) fields of a configuration\.")  # what `save` writes first


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): pass a TOML file") from error
    except ValueError as error:  # TOML's own errors, and bytes that are not UTF-8
        raise InputError(f"{path} is not TOML: {error}") from error


def _saved_count(path: Path) -> int | None:
    """How many fields a file had when `save` wrote it; None of one that a user wrote."""
    count = _COUNT.match(_text(path))
    return None if count is None else int(count[1])


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8-sig")  # some editors write a byte-order mark
