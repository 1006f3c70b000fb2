"""Small models and batches for tests, and a program that keeps a device busy.

Everything is drawn by numpy from a seed, so that nothing is compiled for it.

    model = mp_lstm.language_model(**SIZES)
    pipe = pipeline(model, chunk=2, microbatches=3)
    batch = random_batch(np.random.default_rng(0), time=6, rows=5, lengths=[6, 0, 3, 1, 6])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.placement import stage_sharding

VOCAB = 11
SIZES: dict[str, Any] = {"vocab": VOCAB, "embed": 3, "hidden": 4, "layers": 2}


def random_params(model: mp_lstm.Model, seed: int = 0, *, scale: float = 0.5) -> Any:
    """Parameters of a model, normally distributed, as host arrays."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * scale).astype(leaf.dtype), shapes)


def random_carry(model: mp_lstm.Model, rows: int, seed: int = 0) -> Any:
    """State of every row of a model, normally distributed, as host arrays."""
    rng = np.random.default_rng([seed, rows])
    shapes = jax.eval_shape(lambda: tuple(row.init_state(rows) for row in model.rows))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


def random_batch(
    rng: np.random.Generator,
    time: int,
    rows: int,
    *,
    lengths: Sequence[int] | None = None,
    weighted: bool = False,
    resets: Sequence[bool] | None = None,
) -> mp_lstm.Batch:
    """Random tokens, on padding too; with `weighted` random weights, of which some are zero."""
    weights = rng.uniform(0.5, 2.0, size=(time, rows)) * (rng.random((time, rows)) < 0.8) if weighted else None
    return mp_lstm.Batch(
        inputs=rng.integers(0, VOCAB, (time, rows)),
        targets=rng.integers(0, VOCAB, (time, rows)),
        weights=weights,
        lengths=None if lengths is None else np.asarray(lengths, np.int32),
        resets=None if resets is None else np.asarray(resets, bool),
    )


def padded(batch: mp_lstm.Batch, time: int, rows: int, fill: int = 0) -> mp_lstm.Batch:
    """The same batch with steps and rows of padding added, `fill` standing on them."""
    more_time, more_rows = time - batch.inputs.shape[0], rows - batch.inputs.shape[1]
    lengths = np.full(batch.inputs.shape[1], batch.inputs.shape[0]) if batch.lengths is None else batch.lengths

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, more_time), (0, more_rows)], constant_values=fill)

    return batch._replace(
        inputs=pad(batch.inputs),
        targets=pad(batch.targets),
        weights=None if batch.weights is None else pad(batch.weights),
        lengths=np.pad(lengths, (0, more_rows)).astype(np.int32),
        resets=None if batch.resets is None else np.pad(batch.resets, (0, more_rows), constant_values=True),
    )


def pipeline(
    model: mp_lstm.Model,
    *,
    batch_size: int = 4,
    lengths: Sequence[int] = (8,),
    devices: Sequence[jax.Device] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    options: dict[str, Any] | None = None,
    **planned: Any,
) -> mp_lstm.Pipeline:
    """A pipeline over two devices (or those given); `planned` goes to `make_plan`, `options` to `make_pipeline`."""
    devices = jax.devices()[:2] if devices is None else devices
    plan = mp_lstm.make_plan(model, batch_size=batch_size, lengths=lengths, devices=devices, **planned)
    return mp_lstm.make_pipeline(model, plan, optimizer or optax.sgd(0.1), **(options or {}))


def by_row(trees: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """What stages hold, a tuple a stage with an entry a row, as one tuple with an entry a row."""
    return tuple(row for stage in trees for row in stage)


def recorder() -> optax.GradientTransformation:
    """An optimizer that changes no parameter and whose state is the gradient it was last given."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


TRIAL = 1 << 16


class Plug:
    """A program that does nothing for some seconds: what is sent to its device waits.

    Args:
      device: to be kept busy.
      seconds: at least, on an idle machine; a busy one takes longer.
    """

    def __init__(self, device: jax.Device, seconds: float = 1.0):
        self._sharding = stage_sharding(device)
        # Programs that XLA thinks are cheap are run at once, by whoever enqueues them: one turn must not be cheap.
        self._spin = jax.jit(lambda turns: jax.lax.fori_loop(0, turns, lambda _, x: 0.5 * x + 0.5, jnp.ones(4096)))
        self._turns = self._put(TRIAL)
        self._run(self._turns)  # compiles
        fastest = min(self._run(self._turns) for _ in range(3))
        self._turns = self._put(int(TRIAL * seconds / fastest))

    def _put(self, turns: int) -> jax.Array:
        return jax.device_put(np.int32(turns), self._sharding)

    def _run(self, turns: jax.Array) -> float:
        began = time.perf_counter()
        self._spin(turns).block_until_ready()
        return time.perf_counter() - began

    def insert(self) -> jax.Array:
        """Enqueues the program; its result is ready when the device is free again."""
        return self._spin(self._turns)


class Dispatched(NamedTuple):
    """What was seen of a step while the last stage's device was plugged.

    Args:
      returned: whether `step` returned before the plug was through.
      forwards: whether all forwards of stage 0 were computed before it was.
    """

    returned: bool
    forwards: bool


@contextmanager
def runs_seen(see: Callable[..., None]) -> Iterator[None]:
    """Calls `see(stage, phase, result)` after every program that a pipeline enqueues."""
    run = Engine.run

    def seen(self: Engine, stage: Any, phase: str, *args: Any, **options: Any) -> Any:
        result = run(self, stage, phase, *args, **options)
        see(stage, phase, result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", seen)
        yield


def dispatch(pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any, plug: Plug) -> Dispatched:
    """Steps while the last stage's device is plugged."""
    forwards: list[jax.Array] = []

    def see(stage: Any, phase: str, result: Any) -> None:
        if (stage.number, phase) == (0, "forward"):
            forwards.extend(jax.tree.leaves(result))

    with runs_seen(see):
        jax.block_until_ready((state, window))
        plugged = plug.insert()
        pipe.step(state, window)
        returned = not plugged.is_ready()
    assert forwards
    while not (computed := all(leaf.is_ready() for leaf in forwards)) and not plugged.is_ready():
        time.sleep(0.001)
    computed = computed and not plugged.is_ready()
    plugged.block_until_ready()
    return Dispatched(returned, computed)
