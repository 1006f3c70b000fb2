"""The language model written a second time, as a textbook would: what every pipeline has to equal.

One scan over the LSTM cell for each layer, optax's cross-entropy, and `jax.grad` over the lot. No phases, chunks,
devices or hand-written gradients. It shares nothing with the package but the layout of parameters and the dropout
masks, which are a function of (key, batch counter, place of the layer, time step, row) alone:

    root = dropout_key(key);  key of row r = fold_in(root, r);  each chain inside a row folds in the place of its child

    row                                                               into   weights   out
    lstm                                                                     none
    chain([dropout, lstm])                                            0      1
    chain([dropout, lstm, dropout])                     (last row)    0      1         2
    chain([dropout, lstm, temporal, dropout, activation])             0      1         3
    residual(chain([dropout, lstm]))                                  0      1
    chain([residual(chain([dropout, lstm])), dropout])  (last row)    0, 0   0, 1      1

Layers of rate zero are not there; `_places` counts. Regularised activations add to what is differentiated, not to the
loss.

It is slow and meant to be obvious. Gradients are those of the summed loss; `Result.mean` divides.

    spec = Spec(layers=2, dropout=0.5)
    result = run(spec, params, [batch], key=key)
    assert_close(gradients, result.mean()[1], 1e-10)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mp_lstm.layers.base import dropout_key
from mp_lstm.layers.dropout import keep_mask, keep_probability

TOLERANCE = {"float32": 2e-5, "float64": 1e-10}
"""Largest relative error of the loss and of each leaf of the gradient, by dtype."""


class Spec(NamedTuple):
    """What the parameters' shapes do not tell of a language model; names as in `mp_lstm.language_model`.

    Args:
      layers: number of LSTM layers.
      dropout: rate; 0: the model has no dropout layers.
      tie: the decoder uses the embedding's table.
      residual_from: LSTM layers from this one on (counted from 1) add their input where sizes agree.
      dropout_input, dropout_output: rates into the first layer and out of the last; None: as `dropout`.
      dropout_words, weight_drop: rates of words and of recurrent weights that are zero for a batch.
      dropout_locked: masks are those of the first step.
      activation_reg, temporal_reg: factors of what is added for each real step.
    """

    layers: int
    dropout: float = 0.0
    tie: bool = False
    residual_from: int | None = None
    dropout_input: float | None = None
    dropout_output: float | None = None
    dropout_words: float = 0.0
    dropout_locked: bool = False
    weight_drop: float = 0.0
    activation_reg: float = 0.0
    temporal_reg: float = 0.0

    @property
    def into(self) -> float:
        return self.dropout if self.dropout_input is None else self.dropout_input

    @property
    def out(self) -> float:
        return self.dropout if self.dropout_output is None else self.dropout_output


class Result(NamedTuple):
    """Sums over a window of batches.

    Args:
      loss_sum: sum over real steps of weight times negative log-likelihood.
      weight_sum: sum of the weights of real steps.
      gradients: of `loss_sum`, laid out as the parameters.
      states: for each batch, the (h, c) of each LSTM layer after it.
    """

    loss_sum: Any
    weight_sum: Any
    gradients: Any
    states: tuple[tuple[tuple[Any, Any], ...], ...]

    def mean(self) -> tuple[Any, Any]:
        """Loss and gradients per unit of weight; zeros where there is no weight."""
        weight = self.weight_sum if self.weight_sum else 1
        return self.loss_sum / weight, jax.tree.map(lambda leaf: leaf / weight, self.gradients)


def run(
    spec: Spec, params: Any, batches: Sequence[Any], *, key: Any = None, counter: int = 0, carry: Any = None
) -> Result:
    """Loss and gradients of a window of batches.

    Args:
      spec: the model.
      params: a tuple, one entry a row, on the host or on any devices.
      batches: records with inputs, targets, weights, lengths and resets, of any lengths [T, B].
      key: training's key; None: no dropout, and nothing added for activations.
      counter: number of the first batch; each batch counts one.
      carry: (h, c) of each LSTM layer before the window, read by batches with `resets`; None: zeros.

    Returns:
      Sums over the window, as numpy arrays.
    """
    params = jax.tree.map(np.array, params)  # copies: a view of a device's array would keep it from being donated
    batches = [tuple(batch[:5]) for batch in batches]
    differentiated = jax.value_and_grad(functools.partial(_window, spec, counter), has_aux=True)
    value_and_grad = jax.jit(differentiated, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    (loss_sum, (weight_sum, states)), gradients = value_and_grad(params, batches, key, carry)
    return jax.tree.map(np.asarray, Result(loss_sum, weight_sum, gradients, states))


def logits(spec: Spec, params: Any, inputs: Any) -> Any:
    """Predictions [T, B, V] for tokens [T, B], every step real and no dropout."""
    params = jax.tree.map(np.array, params)
    lstms = list(named_tuples_with(params, "recurrent_kernel"))
    mask = jnp.ones(inputs.shape, bool)
    y, _, _ = _layers(spec, params, lstms, jnp.asarray(inputs), mask, _zeros(lstms, inputs.shape[1]), None, 0)
    return np.asarray(_decode(spec, params, y))


def _window(spec: Spec, counter: int, params: Any, batches: Any, key: Any, carry: Any) -> Any:
    """Sums over the batches; no gradient flows from a batch into the one before."""
    lstms = list(named_tuples_with(params, "recurrent_kernel"))
    assert len(lstms) == spec.layers, f"{len(lstms)} LSTM layers in the parameters, {spec.layers} in the spec"
    loss_sum, weight_sum, states = 0.0, 0.0, []
    for k, (inputs, targets, weights, lengths, resets) in enumerate(batches):
        time, rows = inputs.shape
        zeros = _zeros(lstms, rows)
        mask = jnp.ones((time, rows), bool) if lengths is None else jnp.arange(time)[:, None] < lengths[None, :]
        weights = jnp.where(mask, 1.0 if weights is None else weights, 0.0).astype(lstms[0].kernel.dtype)
        before = zeros if resets is None or carry is None else _reset(resets, zeros, carry)
        y, after, added = _layers(spec, params, lstms, inputs, mask, before, key, counter + k)
        targets = jnp.where(weights == 0, 0, targets)  # what stands on padding need not be a token
        losses = optax.softmax_cross_entropy_with_integer_labels(_decode(spec, params, y), targets)
        loss_sum += (weights * losses).sum() + (added - jax.lax.stop_gradient(added))
        weight_sum += weights.sum()
        states.append(after)
        carry = carry if resets is None else jax.lax.stop_gradient(after)
    return loss_sum, (weight_sum, tuple(states))


def _zeros(lstms: Sequence[Any], rows: int) -> tuple[tuple[Any, Any], ...]:
    shapes = [(rows, lstm.recurrent_kernel.shape[0]) for lstm in lstms]
    return tuple((jnp.zeros(shape, lstms[0].kernel.dtype), jnp.zeros(shape, lstms[0].kernel.dtype)) for shape in shapes)


def _reset(resets: Any, zeros: Any, carry: Any) -> Any:
    return jax.tree.map(lambda zero, old: jnp.where(jnp.asarray(resets, bool)[:, None], zero, old), zeros, carry)


def _layers(
    spec: Spec, params: Any, lstms: Sequence[Any], inputs: Any, mask: Any, before: Any, key: Any, counter: int
) -> tuple[Any, tuple[tuple[Any, Any], ...], Any]:
    """Embedding and LSTM layers: outputs [T, B, H], each layer's (h, c) after every row's last real step, and terms."""

    def draw(row: int, place: tuple[int, ...], rate: float, shape: tuple[int, ...]) -> Any:
        """What is multiplied: 0 where dropped, else one by the share that is kept."""
        if key is None or rate == 0:
            return jnp.ones(shape)
        folded = functools.reduce(jax.random.fold_in, place, jax.random.fold_in(dropout_key(key), row))
        return keep_mask(folded, counter, 0, 0, shape, rate) / keep_probability(rate)

    def dropped(x: Any, row: int, place: tuple[int, ...], rate: float) -> Any:
        steps = 1 if spec.dropout_locked else len(x)
        return x * draw(row, place, rate, (steps, *x.shape[1:])).astype(x.dtype)

    table = jnp.asarray(params[0].table)
    words = draw(0, (), spec.dropout_words, (1, 1, len(table)))[0, 0, :, None].astype(table.dtype)
    x, y, after = (table * words)[inputs], None, []
    for index, (lstm, state) in enumerate(zip(lstms, before, strict=True)):
        number, last = index + 1, index + 1 == len(lstms)  # the number is the row too: row 0 is the embedding
        skip = spec.residual_from is not None and number >= spec.residual_from and x.shape[-1] == state[0].shape[-1]
        into = spec.dropout if index else spec.into
        places = _places(spec, into, skip=skip, last=last)
        kernel = lstm.recurrent_kernel
        factor = draw(number, places["weights"], spec.weight_drop, (1, *kernel.shape))[0].astype(kernel.dtype)
        weights = lstm._replace(recurrent_kernel=kernel * factor)
        y, state = _scan(weights, dropped(x, number, places.get("into", ()), into), state, mask)
        x = x + y if skip else y
        x = dropped(x, number, places.get("out", ()), spec.out) if last else x
        after.append(state)
    return x, tuple(after), 0.0 if key is None else _terms(spec, x, y, mask)


def _terms(spec: Spec, x: Any, y: Any, mask: Any) -> Any:
    """Sums over real steps, and over real steps with one before, of means over features."""
    size = jnp.square(x).mean(axis=-1)
    moved = jnp.square(y[1:] - y[:-1]).mean(axis=-1)
    return (spec.activation_reg * jnp.where(mask, size, 0).sum()) + (
        spec.temporal_reg * jnp.where(mask[1:], moved, 0).sum()
    )


def _places(spec: Spec, into: float, *, skip: bool, last: bool) -> dict[str, tuple[int, ...]]:
    """Where the layers of a row stand: what their keys are folded with, in order."""
    within = {"into": into, "weights": True, "temporal": last and spec.temporal_reg}
    after = {"out": last and spec.out, "activation": last and spec.activation_reg}
    inner, outer = ([name for name, there in names.items() if there] for names in (within, after))
    return _paths([inner, *outer] if skip else inner + outer)


def _paths(parts: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The path to each name in nested chains; one layer alone is no chain."""
    found = {}
    for i, part in enumerate(parts):
        here = (i,) if len(parts) > 1 else ()
        below = {part: ()} if isinstance(part, str) else _paths(part)
        found |= {name: here + path for name, path in below.items()}
    return found


def _scan(lstm: Any, x: Any, state: tuple[Any, Any], mask: Any) -> tuple[Any, tuple[Any, Any]]:
    """The textbook cell over time; a padded step keeps the state and outputs zero."""

    def step(state: tuple[Any, Any], inputs: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
        (h, c), (x_t, real) = state, inputs
        z = x_t @ lstm.kernel + h @ lstm.recurrent_kernel + lstm.bias[None, :]
        i, f, g, o = jnp.split(z, 4, axis=-1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        real = real[:, None]
        return (jnp.where(real, new_h, h), jnp.where(real, new_c, c)), jnp.where(real, new_h, 0)

    state, y = jax.lax.scan(step, state, (x, mask))
    return y, state


def _decode(spec: Spec, params: Any, y: Any) -> Any:
    kernel = params[0].table.T if spec.tie else params[-1].kernel
    return y @ kernel + params[-1].bias[None, None, :]


def named_tuples_with(tree: Any, field: str) -> Iterator[Any]:
    """The NamedTuples in nested tuples that have a field of this name, in order."""
    if hasattr(tree, "_fields") and field in tree._fields:
        yield tree
    elif isinstance(tree, tuple | list):
        for child in tree:
            yield from named_tuples_with(child, field)


def lstm_states(carry: Any) -> tuple[tuple[Any, Any], ...]:
    """The (h, c) of each LSTM layer in the carry of a model or a pipeline, as `run` takes and gives them."""
    return tuple((np.array(state.h), np.array(state.c)) for state in named_tuples_with(carry, "h"))


def relative_errors(actual: Any, expected: Any) -> dict[str, float]:
    """||a - b|| / ||b|| of each leaf, by its path; ||a|| where b is zero."""
    structure, wanted = jax.tree.structure(actual), jax.tree.structure(expected)
    assert structure == wanted, f"got the tree {structure}, wanted {wanted}"
    errors = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, f"{name}: got the shape {a.shape}, wanted {b.shape}"
        errors[name] = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    return errors


def assert_close(actual: Any, expected: Any, tolerance: float | None = None) -> None:
    """Asserts that each leaf's relative error is within the tolerance.

    Args:
      actual: what was got.
      expected: what was wanted, a tree of the same structure.
      tolerance: by default `TOLERANCE` of the expected leaves' least precise dtype.
    """
    if tolerance is None:
        tolerance = max(TOLERANCE[str(np.asarray(leaf).dtype)] for leaf in jax.tree.leaves(expected))
    errors = relative_errors(actual, expected)
    # Written so that NaN fails too.
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors beyond {tolerance}: {wrong}"
