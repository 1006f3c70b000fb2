"""One step of one small model, to the digit.

Unlike every other test this one knows the answers by heart. It fails where a change moves the numbers of a training run
in any way, right or wrong: the other tests tell which.
"""

from __future__ import annotations

import jax
import numpy as np
import optax

import examples
import mp_lstm

EXPECTED = {"loss": 2.2664482593536377, "norm": 0.31803959608078003, "parameters": 3.351990905212766}

ADVICE = """
One step of a fixed model gives other numbers than it did. Look at what else fails:
  - tests/test_transparency.py: the mathematics are wrong.
  - tests/layers/test_dropout.py alone, or nothing: dropout masks or their keys have changed. Runs cannot be continued
    across this change, which the changelog has to say.
  - after an upgrade of jax: it draws other random bits, or adds up in another order.
If the change is meant, put the new numbers into EXPECTED: {found}
"""


def test_one_step() -> None:
    model = mp_lstm.language_model(**examples.SIZES | {"embed": 4}, dropout=0.5, tie=True, residual_from=2)
    pipe = examples.pipeline(
        model,
        lengths=(6,),
        chunk=2,
        microbatches=3,
        partition=(2, 2),
        optimizer=optax.sgd(0.5),
        options={"max_norm": 0.2},
    )
    batch = examples.random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 3, 0, 5], weighted=True)
    state = pipe.load(examples.random_params(model), key=jax.random.key(1))
    state, metrics = pipe.step(state, batch)
    leaves = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(pipe.params(state))]
    weights = np.cos(np.arange(sum(leaf.size for leaf in leaves)))
    found = {
        "loss": float(metrics.loss),
        "norm": float(metrics.grad_norm),
        "parameters": float(weights @ np.concatenate(leaves)),
    }
    close = all(np.isclose(found[name], EXPECTED[name], rtol=2e-5, atol=0) for name in EXPECTED)
    assert close, ADVICE.format(found=found)
