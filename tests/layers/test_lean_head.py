"""The head that computes its logits again, against the head that keeps their gradients and against optax."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
from mp_lstm.layers import lean_head
from mp_lstm.layers.base import Borrowed, Context, apply, join_time
from mp_lstm.layers.vocabulary import AXIS
from reference import assert_close

TIME, ROWS, HIDDEN, VOCAB = 5, 3, 4, 15


@pytest.fixture(params=[7, 160], ids=lambda rows: f"blocks of {rows}")
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Fifteen rows and columns: two blocks of eight, of which one is filled up or overlaps the other, or one block."""
    monkeypatch.setattr(lean_head, "BLOCK_ROWS", request.param)
    return request.param


def context() -> Context:
    """Weights of which some are zero."""
    rng = np.random.default_rng(1)
    weights = rng.uniform(size=(TIME, ROWS)) * (rng.random((TIME, ROWS)) < 0.7)
    return Context(targets=jnp.asarray(rng.integers(0, VOCAB, (TIME, ROWS))), weights=jnp.asarray(weights))


def params_of(table: Any, bias: Any, *, tied: bool) -> Any:
    if tied:
        return Borrowed(mp_lstm.TiedHeadParams(bias), mp_lstm.EmbeddingParams(table))
    return mp_lstm.HeadParams(table.T, bias)


def arrays(*, most: float = 1.0) -> tuple[Any, Any, Any]:
    """Table, bias and x; the largest bias is about `most`."""
    rng = np.random.default_rng(0)
    shapes = ((VOCAB, HIDDEN), (VOCAB,), (TIME, ROWS, HIDDEN))
    table, bias, x = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
    return table, bias + most, x


def lean_of(head: mp_lstm.Layer) -> mp_lstm.Layer:
    assert head.lean is not None
    return head.lean


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("most", [1.0, 1000.0])
def test_loss_and_gradients(x64: None, tied: bool, most: float) -> None:
    """Scaled by a number other than one; with biases whose exponentials would overflow."""
    head, ctx = mp_lstm.softmax_head(HIDDEN, VOCAB, tied=tied, dtype=jnp.float64), context()

    def of(layer: mp_lstm.Layer) -> Any:
        def run(table: Any, bias: Any, x: Any) -> Any:
            return 3.0 * apply(layer, params_of(table, bias, tied=tied), x, (), ctx)[1]

        return run

    def textbook(table: Any, bias: Any, x: Any) -> Any:
        logits = jnp.einsum("tbh,vh->tbv", x, table) + bias[None, None, :]
        return 3.0 * (ctx.weights * optax.softmax_cross_entropy_with_integer_labels(logits, ctx.targets)).sum()

    given = arrays(most=most)
    lean, kept, expected = (
        jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*given) for run in (of(lean_of(head)), of(head), textbook)
    )
    assert_close(lean, kept, 1e-12)
    assert_close(lean, expected, 1e-12 * most)


@pytest.mark.usefixtures("block_rows")
@pytest.mark.parametrize("tied", [False, True])
def test_rounded_products(x64: None, tied: bool) -> None:
    """The same operands are rounded, sooner or in each phase: only the order of sums in float64 differs."""
    head, ctx = mp_lstm.softmax_head(HIDDEN, VOCAB, tied=tied, products=jnp.bfloat16, dtype=jnp.float64), context()
    table, bias, x = arrays()
    params = params_of(table, bias, tied=tied)
    assert head.prepare is not None

    def phases(layer: mp_lstm.Layer, given: Any) -> Any:
        _, loss, saved = layer.forward(given, x, (), ctx)
        dx, _, tape = layer.backward(given, saved, jnp.asarray(2.0), (), ctx)
        return loss, dx, layer.weight_gradient(params, tape, ctx)

    kept, lean = phases(head, params), phases(lean_of(head), params)
    assert_close(lean, kept, 1e-12)
    jax.tree.map(np.testing.assert_array_equal, phases(lean_of(head), head.prepare(params)), lean)
    exact = phases(mp_lstm.softmax_head(HIDDEN, VOCAB, tied=tied, dtype=jnp.float64), params)
    assert_close(lean, exact, 2e-2)
    assert not np.allclose(lean[0], exact[0], rtol=1e-6)


@pytest.mark.usefixtures("block_rows")
def test_chunks_joined_over_time(x64: None) -> None:
    """W is given the context of a first chunk, whose targets are not those of the tape."""
    head, ctx = lean_of(mp_lstm.softmax_head(HIDDEN, VOCAB, dtype=jnp.float64)), context()
    table, bias, x = arrays()
    params = params_of(table, bias, tied=False)

    def tape(first: int, last: int) -> Any:
        part = Context(targets=ctx.targets[first:last], weights=ctx.weights[first:last])
        _, _, saved = head.forward(params, x[first:last], (), part)
        return head.backward(params, saved, jnp.ones(()), (), part)[2]

    joined = head.weight_gradient(params, join_time([tape(0, 2), tape(2, 5)]), Context(targets=ctx.targets[:2]))
    assert_close(joined, head.weight_gradient(params, tape(0, 5), ctx), 1e-12)


@pytest.mark.usefixtures("block_rows")
def test_a_part_of_the_vocabulary(x64: None) -> None:
    """Three parts, that find one loss and one gradient of x; `jax.vmap` stands for their devices."""
    head, ctx, parts = lean_of(mp_lstm.softmax_head(HIDDEN, VOCAB, dtype=jnp.float64)), context(), 3
    table, bias, x = arrays()

    def run(params: mp_lstm.HeadParams) -> Any:
        _, loss, saved = head.forward(params, x, (), ctx)
        dx, _, tape = head.backward(params, saved, jnp.asarray(2.0), (), ctx)
        return loss, dx, head.weight_gradient(params, tape, ctx)

    loss, dx, gradient = run(mp_lstm.HeadParams(table.T, bias))
    kernels = table.T.reshape(HIDDEN, parts, -1).swapaxes(0, 1)
    losses, dxs, gradients = jax.vmap(run, axis_name=AXIS)(mp_lstm.HeadParams(kernels, bias.reshape(parts, -1)))
    for part in range(parts):
        assert_close((losses[part], dxs[part]), (loss, dx), 1e-12)
    assert_close(gradients.kernel.swapaxes(0, 1).reshape(HIDDEN, VOCAB), gradient.kernel, 1e-12)
    assert_close(gradients.bias.reshape(VOCAB), gradient.bias, 1e-12)


@pytest.mark.usefixtures("block_rows")
def test_without_weights_every_step_counts_once() -> None:
    head = lean_of(mp_lstm.softmax_head(HIDDEN, VOCAB, kernel_init=jax.nn.initializers.zeros))
    ctx = Context(targets=jnp.zeros((TIME, ROWS), int))
    _, loss, _ = head.forward(head.init(jax.random.key(0)), jnp.ones((TIME, ROWS, HIDDEN)), (), ctx)
    assert_close(loss, TIME * ROWS * np.log(VOCAB), 1e-6)


def test_blocks_have_as_many_rows_as_they_must(block_rows: int) -> None:
    for rows in range(1, 5 * block_rows):
        count, size = lean_head.blocks(rows)
        assert size >= min(rows, block_rows)
        assert (count - 1) * size < rows <= count * size < rows + count


def test_what_it_states_is_what_it_keeps() -> None:
    """Bytes of what F makes for B and W, and of what B makes for W."""
    head = lean_of(mp_lstm.softmax_head(HIDDEN, VOCAB))
    table, bias, x = (leaf.astype(jnp.float32) for leaf in arrays())
    params, ctx = params_of(table, bias, tied=False), context()
    _, _, saved = head.forward(params, x, (), ctx)
    _, _, tape = head.backward(params, saved, jnp.ones(()), (), ctx)
    cost = head.cost(ROWS, TIME)
    assert cost.saved_bytes == saved.dx.nbytes + saved.scale.nbytes
    assert cost.kept_bytes == tape.top.nbytes + tape.total.nbytes
    assert cost.tape_bytes == tape.scale.nbytes
    assert cost.input_bytes == x.nbytes
    assert tape.x is x
    assert tape.targets is ctx.targets


ARRAY = re.compile(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]")


@pytest.mark.parametrize("tie", [False, True])
def test_no_program_holds_the_logits_of_more_than_a_block(tie: bool) -> None:
    """And evaluation, which needs no gradient, has no product for one."""
    time, rows, vocab = 8, 60, 3 << 9
    model = mp_lstm.language_model(vocab=vocab, embed=4, hidden=4, layers=1, tie=tie)
    pipe = examples.pipeline(model, batch_size=rows, lengths=(time,), partition=(2, 1), chunk=8, remat="head")
    pipe.warm_up([examples.random_batch(np.random.default_rng(0), time, rows)])
    texts = {
        key.phase: program.executable.as_text()
        for key, program in pipe.programs._programs.items()
        if key.stage == 1 and key.phase in ("forward", "backward", "weight_gradient", "evaluate")
    }
    assert len(texts) == 4
    largest = {
        phase: max(math.prod(map(int, sizes.split(","))) for sizes in ARRAY.findall(text))
        for phase, text in texts.items()
    }
    assert largest["forward"] == max(largest.values()) == 160 * vocab
    products = {phase: len(re.findall(r" dot\(", text)) for phase, text in texts.items()}
    assert products == {"forward": 2, "evaluate": 1, "backward": 0, "weight_gradient": 3}
