"""The LSTM against four oracles: a textbook loop, finite differences, flax, and the original example's numbers.

Accuracy is stated where it is used: float64 to 1e-10 of each array's norm, float32 to 2e-5.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import mp_lstm
import original
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, join_time
from reference import assert_close, lstm_states

TIME, ROWS, INPUTS, HIDDEN = 7, 4, 3, 5
LENGTHS = np.array([7, 0, 3, 1])


def example(dtype: Any = np.float64, seed: int = 0) -> tuple[mp_lstm.LSTMParams, jax.Array, mp_lstm.LSTMState]:
    """Parameters, inputs and a state, all random."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.5, dtype)

    params = mp_lstm.LSTMParams(draw(INPUTS, 4 * HIDDEN), draw(HIDDEN, 4 * HIDDEN), draw(4 * HIDDEN))
    return params, draw(TIME, ROWS, INPUTS), mp_lstm.LSTMState(draw(ROWS, HIDDEN), draw(ROWS, HIDDEN))


def lstm(*args: Any, lengths: np.ndarray | None = None, **options: Any) -> Any:
    """`mp_lstm.lstm` with lengths from numpy."""
    return mp_lstm.lstm(*args, lengths=None if lengths is None else jnp.asarray(lengths), **options)


def textbook(params: Any, x: Any, state: Any, lengths: Any = None) -> tuple[mp_lstm.LSTMState, Any]:
    """The cell written out, step by step."""

    def sigmoid(z: Any) -> Any:
        return 1 / (1 + jnp.exp(-z))

    h, c = state
    lengths = np.full(x.shape[1], x.shape[0]) if lengths is None else np.asarray(lengths)
    outputs = []
    for t in range(x.shape[0]):
        z = x[t] @ params.kernel + h @ params.recurrent_kernel + params.bias[None, :]
        i, f, g, o = jnp.split(z, 4, axis=1)
        new_c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        new_h = sigmoid(o) * jnp.tanh(new_c)
        real = (t < lengths)[:, None]
        h, c = jnp.where(real, new_h, h), jnp.where(real, new_c, c)
        outputs.append(jnp.where(real, new_h, 0.0))
    return mp_lstm.LSTMState(h, c), jnp.stack(outputs)


def outputs_and_gradients(run: Any, *args: Any) -> Any:
    """What `run` returns, and the gradients of a random projection of all of it, in one program that compiles fast."""

    def both(args: Any) -> Any:
        outputs, pull = jax.vjp(run, *args)
        leaves, structure = jax.tree.flatten(outputs)
        rng = np.random.default_rng(1)
        weights = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
        return outputs, pull(jax.tree.unflatten(structure, weights))

    return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(args)


class TestTextbook:
    @pytest.mark.parametrize("lengths", [None, LENGTHS, np.zeros(ROWS, int)])
    @pytest.mark.parametrize("unroll", [1, 3])
    def test_outputs_and_gradients(self, x64: None, lengths: np.ndarray | None, unroll: int) -> None:
        args = example()
        actual = outputs_and_gradients(partial(lstm, lengths=lengths, unroll=unroll), *args)
        expected = outputs_and_gradients(partial(textbook, lengths=lengths), *args)
        assert_close(actual, expected, 1e-10)

    def test_float32(self) -> None:
        args = example(np.float32)
        actual = outputs_and_gradients(partial(lstm, lengths=LENGTHS), *args)
        expected = outputs_and_gradients(partial(textbook, lengths=LENGTHS), *args)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(actual)} == {"float32"}
        assert_close(actual, expected, 2e-5)

    def test_numbers_worked_out_by_hand(self, x64: None) -> None:
        """Each gate alone decides where its sign says: f keeps the cell, i and g write it, o shows it."""
        open_, shut = 40.0, -40.0
        state = mp_lstm.LSTMState(jnp.zeros((1, 1)), jnp.full((1, 1), 0.5))
        for (i, f, g, o), cell, shown in [
            ((shut, open_, open_, open_), 0.5, np.tanh(0.5)),
            ((open_, shut, open_, open_), 1.0, np.tanh(1.0)),
            ((open_, open_, open_, shut), 1.5, 0.0),
            ((open_, open_, -open_, open_), -0.5, np.tanh(-0.5)),
        ]:
            params = mp_lstm.LSTMParams(jnp.zeros((1, 4)), jnp.zeros((1, 4)), jnp.array([i, f, g, o]))
            after, y = mp_lstm.lstm(params, jnp.zeros((1, 1, 1)), state)
            np.testing.assert_allclose([after.c[0, 0], after.h[0, 0], y[0, 0, 0]], [cell, shown, shown], atol=1e-15)

    def test_state_is_zero_by_default(self) -> None:
        params, x, state = example(np.float32)
        zeros = jax.tree.map(jnp.zeros_like, state)
        assert_close(mp_lstm.lstm(params, x), mp_lstm.lstm(params, x, zeros), 0.0)

    def test_under_jit_and_vmap(self, x64: None) -> None:
        params, x, state = example()
        many = jnp.stack([x, 2 * x])
        _, y = jax.jit(jax.vmap(mp_lstm.lstm, (None, 0, None)))(params, many, state)
        assert_close(y, jnp.stack([mp_lstm.lstm(params, one, state)[1] for one in many]), 1e-10)


class TestFiniteDifferences:
    @staticmethod
    def scalar(params: Any, x: Any, state: Any, lengths: np.ndarray | None = None) -> jax.Array:
        """One number in which every output counts, differently at every step."""
        after, y = lstm(params, x, state, lengths=lengths)
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return (weights * y).sum() + (weights[0] * after.h).sum() - (weights[1] * after.c).sum()

    @pytest.mark.parametrize("lengths", [None, LENGTHS])
    def test_random_direction(self, x64: None, lengths: np.ndarray | None) -> None:
        @jax.jit
        def scalar(*args: Any) -> jax.Array:
            return self.scalar(*args, lengths=lengths)

        check_grads(scalar, example(), order=1, modes=["rev"], atol=1e-8, rtol=1e-8, eps=1e-5)

    def test_each_gate(self, x64: None) -> None:
        """Directions that a random one could hide: one gate's bias at a time."""
        params, x, state = example()
        scalar = jax.jit(self.scalar)
        gradient = jax.grad(scalar)(params, x, state).bias
        for gate in range(4):
            step = jnp.zeros(4 * HIDDEN).at[gate * HIDDEN : (gate + 1) * HIDDEN].set(1e-5)
            ahead, behind = (scalar(params._replace(bias=params.bias + s), x, state) for s in (step, -step))
            assert_close(gradient @ step, (ahead - behind) / 2, 1e-8)


class TestFlax:
    """flax's OptimizedLSTMCell under nn.RNN: one kernel a gate, the bias beside the recurrent kernel, carry (c, h)."""

    @pytest.fixture
    def model(self) -> nn.RNN:
        return nn.RNN(nn.OptimizedLSTMCell(HIDDEN, param_dtype=jnp.float64), time_major=True, return_carry=True)

    @staticmethod
    def to_flax(params: mp_lstm.LSTMParams) -> Any:
        kernels, recurrent, biases = (jnp.split(array, 4, axis=-1) for array in params)
        cell = {}
        for gate, k, r, b in zip("ifgo", kernels, recurrent, biases, strict=True):
            cell[f"i{gate}"] = {"kernel": k}
            cell[f"h{gate}"] = {"kernel": r, "bias": b}
        return {"params": {"cell": cell}}

    def test_layout(self, x64: None, model: nn.RNN) -> None:
        params, x, _ = example()
        own = jax.eval_shape(model.init, jax.random.key(0), x)
        assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, self.to_flax(params))

    # flax gives a row of length 0 the state of its last padded step, so there is none here.
    @pytest.mark.parametrize("lengths", [None, np.array([7, 2, 3, 1])])
    def test_outputs_and_gradients(self, x64: None, model: nn.RNN, lengths: np.ndarray | None) -> None:
        def flax_lstm(params: Any, x: Any, state: Any) -> Any:
            options = {} if lengths is None else {"seq_lengths": jnp.asarray(lengths)}
            (c, h), y = model.apply(self.to_flax(params), x, initial_carry=(state.c, state.h), **options)
            if lengths is not None:  # flax goes on past the end of a row
                y = jnp.where((np.arange(TIME)[:, None] < lengths[None, :])[..., None], y, 0)
            return mp_lstm.LSTMState(h, c), y

        args = example()
        actual = outputs_and_gradients(partial(lstm, lengths=lengths), *args)
        assert_close(actual, outputs_and_gradients(flax_lstm, *args), 1e-10)


class TestLengths:
    def test_a_finished_row_keeps_its_state_and_outputs_zero(self) -> None:
        params, x, state = example(np.float32)
        after, y = lstm(params, x, state, lengths=LENGTHS)
        for row, length in enumerate(LENGTHS):
            assert (y[length:, row] == 0).all()
            assert length == 0 or (after.h[row] == y[length - 1, row]).all()

    def test_a_row_of_length_0(self) -> None:
        """State in is state out, gradient out is gradient in, and nothing else hears of the row."""
        params, x, state = example(np.float32)
        (after, y), pull = jax.vjp(partial(lstm, lengths=LENGTHS), params, x, state)
        assert (after.h[1] == state.h[1]).all()
        assert (after.c[1] == state.c[1]).all()
        assert (y[:, 1] == 0).all()

        only_this_row = jnp.zeros((ROWS, HIDDEN)).at[1].set(1.0)
        dparams, dx, dstate = pull((mp_lstm.LSTMState(2 * only_this_row, 3 * only_this_row), jnp.zeros_like(y)))
        assert (dstate.h == 2 * only_this_row).all()
        assert (dstate.c == 3 * only_this_row).all()
        assert all((leaf == 0).all() for leaf in jax.tree.leaves((dparams, dx)))

        dparams, dx, dstate = pull((jax.tree.map(jnp.zeros_like, after), jnp.zeros_like(y).at[:, 1].set(1.0)))
        assert all((leaf == 0).all() for leaf in jax.tree.leaves((dparams, dx, dstate)))

    @pytest.mark.parametrize("value", [1e30, np.nan, np.inf])
    def test_what_stands_on_padding_changes_no_output(self, value: float) -> None:
        params, x, state = example(np.float32)
        padded = jnp.where((np.arange(TIME)[:, None] < LENGTHS[None, :])[..., None], x, value)
        run = jax.jit(lambda x: lstm(params, x, state, lengths=LENGTHS))
        assert_close(run(padded), run(x), 0.0)

    def test_what_stands_on_padding_changes_no_gradient(self) -> None:
        """As long as it is finite: the kernel's gradient is x^T dz, and 0 times NaN is NaN."""
        params, x, state = example(np.float32)
        padded = jnp.where((np.arange(TIME)[:, None] < LENGTHS[None, :])[..., None], x, 1e30)
        actual, expected = (
            outputs_and_gradients(partial(lstm, lengths=LENGTHS), params, inputs, state) for inputs in (padded, x)
        )
        assert_close(actual, expected, 0.0)

    def test_padding_costs_no_accuracy(self) -> None:
        """Each row alone, cut to its length, gives what it gives in the padded batch."""
        params, x, state = example(np.float32)
        after, y = lstm(params, x, state, lengths=LENGTHS)
        for row, length in enumerate(LENGTHS):
            this = slice(row, row + 1)
            alone = mp_lstm.LSTMState(state.h[this], state.c[this])
            if length:
                alone, output = mp_lstm.lstm(params, x[:length, this], alone)
                assert_close(y[:length, this], output, 1e-6)
            assert_close(mp_lstm.LSTMState(after.h[this], after.c[this]), alone, 1e-6)


class TestChunks:
    """A layer run chunk by chunk, state handed on, gives what it gives on the whole, in all three phases."""

    @pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 2, 6, 7)])
    @pytest.mark.parametrize("lengths", [None, LENGTHS])
    def test_phases(self, x64: None, cuts: tuple[int, ...], lengths: np.ndarray | None) -> None:
        layer = mp_lstm.lstm_layer(INPUTS, HIDDEN, dtype=jnp.float64)
        mask = None if lengths is None else jnp.asarray(np.arange(TIME)[:, None] < lengths[None, :])
        chunks = [slice(start, end) for start, end in itertools.pairwise(cuts)]
        contexts = [Context(start=c.start, mask=None if mask is None else mask[c], train=True) for c in chunks]
        units = list(zip(chunks, contexts, strict=True))

        @jax.custom_vjp
        def chunked(params: Any, x: Any, state: Any) -> Any:
            return forward(params, x, state)[0]

        def forward(params: Any, x: Any, state: Any) -> Any:
            outputs, saved = [], []
            for chunk, ctx in units:
                state, y, kept = layer.forward(params, x[chunk], state, ctx)
                outputs.append(y)
                saved.append(kept)
            return (state, jnp.concatenate(outputs)), (params, saved)

        def backward(kept: Any, cotangent: Any) -> Any:
            (params, saved), (dstate, dy) = kept, cotangent
            dx, tapes = [], []
            for (chunk, ctx), saved_chunk in reversed(list(zip(units, saved, strict=True))):
                below, dstate, tape = layer.backward(params, saved_chunk, dy[chunk], dstate, ctx)
                dx.insert(0, below)
                tapes.insert(0, tape)
            gradients = layer.weight_gradient(params, join_time(tapes), Context(mask=mask, train=True))
            return gradients, jnp.concatenate(dx), dstate

        chunked.defvjp(forward, backward)
        args = example()
        expected = outputs_and_gradients(partial(textbook, lengths=lengths), *args)
        assert_close(outputs_and_gradients(chunked, *args), expected, 1e-10)

    def test_calls_chain(self, x64: None) -> None:
        """What a user does with carried state: two calls of `lstm` are one, gradients included."""

        def halves(params: Any, x: Any, state: Any) -> Any:
            middle, first = mp_lstm.lstm(params, x[:4], state)
            after, second = mp_lstm.lstm(params, x[4:], middle)
            return after, jnp.concatenate([first, second])

        args = example()
        actual, expected = (outputs_and_gradients(run, *args) for run in (halves, mp_lstm.lstm))
        assert_close(actual, expected, 1e-10)


class TestBfloat16Products:
    """Operands of products are rounded to 8 bits of mantissa; sums, state, parameters and gradients stay float32."""

    def test_types_and_accuracy(self) -> None:
        args = example(np.float32)
        rounded, exact = (
            outputs_and_gradients(partial(lstm, lengths=LENGTHS, products=products), *args)
            for products in (jnp.bfloat16, None)
        )
        assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded)} == {"float32"}
        assert_close(rounded, exact, 2e-2)

    def test_operands_are_rounded_and_nothing_else(self) -> None:
        """One step from a zero state with weights that need no rounding: only the input's rounding shows."""
        params, x, _ = example(np.float32)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
        nearest = x.astype(jnp.bfloat16).astype(jnp.float32)
        _, rounded = mp_lstm.lstm(params, x[:1], products=jnp.bfloat16)
        assert_close(rounded, mp_lstm.lstm(params, nearest[:1])[1], 1e-6)
        assert (rounded != mp_lstm.lstm(params, x[:1])[1]).any()


class TestInit:
    def test_shapes_and_types(self, x64: None) -> None:
        for dtype in (jnp.float32, jnp.float64):
            params = mp_lstm.lstm_init(jax.random.key(0), INPUTS, HIDDEN, dtype=dtype)
            assert isinstance(params, mp_lstm.LSTMParams)
            assert [leaf.shape for leaf in params] == [(INPUTS, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,)]
            assert {leaf.dtype for leaf in params} == {jnp.dtype(dtype)}

    def test_defaults(self) -> None:
        params = mp_lstm.lstm_init(jax.random.key(0), 300, 64)
        limit = np.sqrt(6 / (300 + 4 * 64))
        assert 0.99 * limit < abs(params.kernel).max() <= limit
        assert_close(params.recurrent_kernel @ params.recurrent_kernel.T, jnp.eye(64), 1e-5)
        assert (params.bias == 0).all()

    def test_initialisers_are_used(self) -> None:
        constant = jax.nn.initializers.constant
        kinds = {"kernel_init": constant(1), "recurrent_init": constant(2), "bias_init": constant(3)}
        params = mp_lstm.lstm_init(jax.random.key(0), INPUTS, HIDDEN, **kinds)
        assert [set(leaf.ravel().tolist()) for leaf in params] == [{1.0}, {2.0}, {3.0}]

    def test_the_key_decides_and_parameters_differ(self) -> None:
        normal = jax.nn.initializers.normal()
        kinds = {"kernel_init": normal, "recurrent_init": normal, "bias_init": normal}
        first, same, other = (mp_lstm.lstm_init(jax.random.key(k), HIDDEN, HIDDEN, **kinds) for k in (0, 0, 1))
        assert_close(first, same, 0.0)
        assert (first.kernel != other.kernel).any()
        assert (first.kernel != first.recurrent_kernel).any()


class TestErrors:
    @pytest.mark.parametrize("unroll", [0, -1, 17])
    def test_unroll(self, unroll: int) -> None:
        params, x, state = example(np.float32)
        with pytest.raises(InputError, match=f"unroll is {unroll}, 1 to 16 is wanted"):
            mp_lstm.lstm(params, x, state, unroll=unroll)

    @pytest.mark.parametrize(("sizes", "message"), [((0, 5), "inputs is 0"), ((3, -1), "hidden is -1")])
    def test_sizes(self, sizes: tuple[int, int], message: str) -> None:
        with pytest.raises(InputError, match=f"top: {message}, wanted at least 1: pass a positive number"):
            mp_lstm.lstm_layer(*sizes, name="top")


class TestOriginal:
    """The original example's recorded run, on one device. tests/original.py tells how it is translated."""

    def test_states_loss_gradients_and_norm(self) -> None:
        run = original.load()
        steps, rows = run.batch.inputs.shape
        value_and_grad = jax.jit(jax.value_and_grad(run.model.loss, has_aux=True))
        (mean, aux), gradients = value_and_grad(jax.tree.map(jnp.asarray, run.initial), run.batch)
        assert_close(aux.loss_sum, run.losses[0].sum(), 2e-6)
        assert_close(mean, run.losses[0].sum() / (steps * rows), 2e-6)
        gradients = jax.tree.map(lambda leaf: leaf * (steps * rows), gradients)  # of the sum, not the mean
        assert_close(gradients, run.gradients, 2e-5)
        assert_close(optax.tree.norm(gradients) / rows, run.norms[0], 2e-6)
        assert_close(lstm_states(aux.carry), run.states, 2e-6)

    def test_losses_norms_and_weights_of_five_steps(self) -> None:
        run = original.load()
        rows = run.batch.inputs.shape[1]
        optimizer = optax.chain(optax.clip_by_global_norm(run.max_norm), optax.sgd(run.learning_rate))

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            def summed(params: Any) -> jax.Array:
                return run.model.loss(params, run.batch)[1].loss_sum

            loss, gradients = jax.value_and_grad(summed)(params)
            gradients = jax.tree.map(lambda leaf: leaf / rows, gradients)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradients)

        params, state = jax.tree.map(jnp.asarray, run.initial), optimizer.init(run.initial)
        for k in range(original.STEPS):
            params, state, loss, norm = step(params, state)
            assert_close(loss, run.losses[k].sum(), 2e-6)
            assert_close(norm, run.norms[k], 1e-5)
        assert_close(params, run.final, 2e-5)

    @pytest.mark.parametrize("lengths", [jnp.array([2.5, 1.0]), jnp.array([True, False])])
    def test_lengths_that_are_no_whole_numbers(self, lengths: jax.Array) -> None:
        """2.5 steps were three."""
        params = mp_lstm.lstm_init(jax.random.key(0), 3, 5)
        with pytest.raises(InputError, match=r"lstm: lengths are (float32|bool) \[2\], whole numbers of steps \[2\]"):
            mp_lstm.lstm(params, jnp.ones((4, 2, 3)), lengths=lengths)
