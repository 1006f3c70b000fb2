"""Compiling a run bucket by bucket: the programs of a step before it, and of one more bucket before each of the first.

    step 1                    step 2               ...   step n + 1     step n + 2
    compile its bucket, run   compile one, run           evaluations    nothing is compiled any more

So the first step waits for the programs of one bucket, not for those of all. Compiling has the machine to itself: the
step before is read first, and no step's time counts it. Several processes compile all of it before the first step, for
one of them may take longer than the others would wait for it in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from mp_lstm.data import BatchSource
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.model import step_shape
from mp_lstm.planning.plan import Plan
from mp_lstm.runtime import processes
from mp_lstm.training.setup import Setup


class WarmUp:
    """What of a run is still to be compiled.

    Args:
      setup: of the run.
      compiled: tells how many programs the process has compiled.
    """

    def __init__(self, setup: Setup, compiled: Callable[[], int]):
        self._pipe, self._plan = setup.pipe, setup.plan
        self._compiled = compiled
        self._foreseen = 0
        self._steps = dict(_examples(self._plan, setup.sources.train))
        self._evaluations: list[Batch] | None = [
            batch for source in (setup.sources.valid, setup.sources.test) for _, batch in _examples(self._plan, source)
        ]

    @property
    def done(self) -> bool:
        """Whether all is compiled."""
        return not self._steps and self._evaluations is None

    @property
    def unforeseen(self) -> int:
        """Programs that were compiled elsewhere: in steps, validations, checkpoints."""
        return self._compiled() - self._foreseen

    def before_step(self, batches: Sequence[Batch]) -> None:
        """Compiles what a step of these batches needs; where that is there, the programs of one more bucket."""
        needed = {self._plan.bucket_for(step_shape(batch)[0]).length for batch in batches} & set(self._steps)
        if self._steps:
            for length in needed or list(self._steps)[:1]:
                self._compile([self._steps.pop(length)], evaluations=False)
        else:
            self.before_evaluation()

    def before_evaluation(self) -> None:
        """Compiles what validation and test need."""
        if self._evaluations is not None:
            examples, self._evaluations = self._evaluations, None
            self._compile(examples, steps=False)

    def complete(self) -> None:
        """Compiles all that is left."""
        while not self.done:
            self.before_step(())

    def _compile(self, examples: list[Batch], *, steps: bool = True, evaluations: bool = True) -> None:
        before = self._compiled()
        self._pipe.warm_up(examples, steps=steps, evaluations=evaluations)
        self._foreseen += self._compiled() - before


def complete_together(warm_up: WarmUp) -> None:
    """Compiles all programs of every process, and waits for the others."""
    warm_up.complete()
    processes.meet("the first step")
    int(processes.largest(0))


def _examples(plan: Plan, source: BatchSource) -> Iterator[tuple[int, Batch]]:
    """An empty batch of every bucket, by its length, of the structure that the source's batches have."""
    model = source.batch(0, 0)

    def empty(leaf: np.ndarray, length: int) -> np.ndarray:
        return np.zeros((length, *leaf.shape[1:]), leaf.dtype)

    for length in sorted({plan.bucket_for(length).length for length in source.buckets}):
        steps = {
            field: jax.tree.map(lambda leaf, length=length: empty(leaf, length), getattr(model, field))
            for field in ("inputs", "targets", "weights")
        }
        lengths = None if model.lengths is None else np.zeros_like(model.lengths)
        yield length, model._replace(**steps, lengths=lengths)
