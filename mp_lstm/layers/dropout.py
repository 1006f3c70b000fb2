"""Dropout whose masks cannot depend on how a batch is cut.

A mask is a function of (key, batch counter, time step, row, column) alone. It is drawn by running the Threefry block
cipher on counters (time step, row << 16 | column group): a chunk that begins at step t and row r draws exactly the part
of the whole batch's mask that it covers, at the cost of its own size. One call of the cipher gives four 16-bit
numbers, so the keep probability is rounded to a multiple of 2^-16, and the scale is its exact inverse.

Where a mask does not depend on a step, a row or a column, that counter is zero: locked dropout, the dropout of words
(`embedding`) and of recurrent weights (`weight_drop`) draw theirs here too.

References:
  Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html
  On the non-recurrent connections of an LSTM: Zaremba et al. 2014, https://arxiv.org/abs/1409.2329
  Counter-based random numbers: Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer
from mp_lstm.planning.checks import number, shown
from mp_lstm.planning.costs import Cost

LEVELS = 1 << 16
MOST_RATE = 1 - 1 / LEVELS  # more would keep nothing
# Of Threefry-2x32: the rotations of its rounds, and what makes the third word of its key.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def keep_probability(rate: float) -> float:
    """Probability with which a value is kept: 1 - rate, rounded to a multiple of 2^-16."""
    return round((1.0 - rate) * LEVELS) / LEVELS


def keep_mask(
    key: Key[Array, ""],
    counter: Integer[Array, ""] | int,
    start: Integer[Array, ""] | int,
    row: Integer[Array, ""] | int,
    shape: tuple[int, int, int],
    rate: float,
) -> Bool[Array, "T B D"]:
    """Draws the part of a batch's mask that a unit covers.

    Args:
      key: the layer's dropout key.
      counter: number of the batch.
      start: first time step of the unit.
      row: first batch row of the unit, below 65,536.
      shape: (T, B, D) of the unit.
      rate: probability of dropping a value.

    Returns:
      [T, B, D], True where a value is kept.

    Example:
      >>> import jax
      >>> from mp_lstm.layers.dropout import keep_mask
      >>> whole = keep_mask(jax.random.key(0), 3, 0, 0, (6, 4, 5), 0.5)
      >>> part = keep_mask(jax.random.key(0), 3, 2, 1, (2, 3, 5), 0.5)
      >>> bool((whole[2:4, 1:] == part).all())
      True
    """
    time, rows, size = shape
    seed = jax.random.bits(jax.random.fold_in(key, counter), (2,), jnp.uint32)
    steps = jnp.asarray(start, jnp.uint32) + jnp.arange(time, dtype=jnp.uint32)
    places = (jnp.asarray(row, jnp.uint32) + jnp.arange(rows, dtype=jnp.uint32)) << 16
    columns = jnp.arange(size, dtype=jnp.uint32)
    # Four neighbours share a cipher of 64 bits. Each works it out for itself, so that a mask is one elementwise loop.
    a, b = threefry(seed[0], seed[1], steps[:, None, None], places[None, :, None] | (columns >> 2)[None, None, :])
    word = jnp.where((columns & 2)[None, None, :] == 0, a, b)
    number = jnp.where((columns & 1)[None, None, :] == 0, word & 0xFFFF, word >> 16)
    return number < round((1.0 - rate) * LEVELS)


def threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds, JAX's default generator, written out: JAX's own is a loop that fuses with nothing.

    Args:
      key0, key1: the key.
      x0, x1: the counter; all four of uint32, broadcast against each other.

    Returns:
      Two numbers of 32 random bits.

    References:
      Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405

    Example:
      >>> import jax.numpy as jnp
      >>> zero = jnp.zeros((), jnp.uint32)
      >>> [hex(int(number)) for number in threefry(zero, zero, zero, zero)]
      ['0x6b200159', '0x99ba4efe']
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(PARITY))
    x0, x1 = jnp.broadcast_arrays(x0 + keys[0], x1 + keys[1])
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << bits) | (x1 >> (32 - bits)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def dropout(rate: float, *, name: str = "dropout") -> Layer:
    """Drops values of [T, B, D] with probability `rate` while training, and scales the rest.

    Args:
      rate: probability of dropping a value, in [0, 1), at most `MOST_RATE`.
      name: for tables and messages.

    Returns:
      The layer, without parameters or state.

    Raises:
      InputError: the rate is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> ctx = Context(key=jax.random.key(0), train=True)
      >>> _, y, _ = mp_lstm.dropout(0.5).forward((), jnp.ones((2, 3, 4)), (), ctx)
      >>> sorted(set(y.ravel().tolist()))
      [0.0, 2.0]
    """
    rate = checked_rate(name, rate)

    def draw(ctx: Context, shape: tuple[int, int, int]) -> Array:
        return keep_mask(training_key(name, ctx), ctx.counter, ctx.start, ctx.row, shape, rate)

    return _dropping(rate, draw, name)


def locked_dropout(rate: float, *, name: str = "dropout") -> Layer:
    """Drops features of [T, B, D] for all steps of a row in a batch, with probability `rate` while training.

    The mask is a function of (key, batch counter, row, column): every chunk of a batch has the same, the next batch
    another, also where state is carried.

    Args:
      rate: probability of dropping a feature of a row, in [0, 1), at most `MOST_RATE`.
      name: for tables and messages.

    Returns:
      The layer, without parameters or state.

    Raises:
      InputError: the rate is out of range.

    References:
      Variational dropout: Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287; on the connections between LSTM
      layers, as here: Merity, Keskar and Socher 2017, https://arxiv.org/abs/1708.02182

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> ctx = Context(key=jax.random.key(0), train=True)
      >>> _, y, _ = mp_lstm.locked_dropout(0.5).forward((), jnp.ones((5, 3, 4)), (), ctx)
      >>> bool((y == y[:1]).all())
      True
    """
    rate = checked_rate(name, rate)

    def draw(ctx: Context, shape: tuple[int, int, int]) -> Array:
        return keep_mask(training_key(name, ctx), ctx.counter, 0, ctx.row, (1, *shape[1:]), rate)

    return _dropping(rate, draw, name)


def _dropping(rate: float, draw: Callable[[Context, tuple[int, int, int]], Array], name: str) -> Layer:
    """The layer that drops where a mask says; `draw` makes the mask of a unit, [T or 1, B, D]."""

    # F keeps the mask, a byte a value, so that B need not draw it again.
    def forward(params: tuple[()], x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array, Array | None]:
        if not ctx.train or rate == 0.0:
            return state, x, None
        time, rows, size = x.shape
        mask = draw(ctx, (time, rows, size))
        return state, kept_and_scaled(x, mask, rate), mask

    def backward(
        params: tuple[()], saved: Array | None, dy: Array, dstate: tuple[()], ctx: Context
    ) -> tuple[Array, tuple[()], tuple[()]]:
        return dy if saved is None else kept_and_scaled(dy, saved, rate), dstate, ()

    return Layer(
        name=name,
        kind="dropout",
        init=lambda key: (),
        init_state=lambda batch_size: (),
        forward=forward,
        backward=backward,
        weight_gradient=lambda params, tape, ctx: (),
        infer=lambda params, x, state, ctx: (state, x),
        cost=lambda batch_size, time: Cost(0, 0, 0, 0, 0, 0, 0),
    )


def kept_and_scaled(x: Array, mask: Array, rate: float) -> Array:
    """x where the mask is True, divided by the probability of that, and zero elsewhere."""
    return jnp.where(mask, x * (1.0 / keep_probability(rate)), jnp.zeros((), x.dtype))


def checked_rate(name: str, rate: Any) -> float:
    """A rate as Python's number; raises InputError for none, and for one so near to 1 that nothing would be kept."""
    found = number(rate)
    if found is None or not 0.0 <= found <= MOST_RATE:
        wanted = f"a number in [0, 1) is wanted, at most {MOST_RATE}"
        raise InputError(f"{name}: the rate is {shown(rate)}, {wanted}: pass a smaller one, or 0")
    return found


def training_key(name: str, ctx: Context) -> Key[Array, ""]:
    """The key of a layer's masks; raises InputError where training was given none."""
    if ctx.key is None:
        raise InputError(f"{name}: training with dropout needs a key: pass key=jax.random.key(...)")
    return ctx.key
