"""One walk through a schedule: enqueues F, B and W of every stage, and sends results between stages.

    for each task, in the schedule's total order:
      F  x (1) from the batch or the stage below, state (2) from the chunk before    -> y up, saved kept
      B  dy (3) from the stage above, dstate (4) from the chunk after, saved (5)     -> dx down, tape kept
      W  tapes (6) of a micro-batch's chunks                                         -> gradients, added up

A walk holds what is in flight, by stage and unit, and drops each value when its last reader has been enqueued. It never
looks at a value: nothing here waits for a device. Made with `compile_only` it compiles the very programs that a step
runs, on structs instead of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mp_lstm.layers.base import Params
from mp_lstm.layers.model import ties_from_below
from mp_lstm.planning.schedule import Schedule, Task
from mp_lstm.runtime import stages as stage_functions
from mp_lstm.runtime.batches import PlacedBatch, PlacedWindow
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.placement import Tree, over_steps, transfer
from mp_lstm.runtime.stages import Gradients, Stage, Unit
from mp_lstm.runtime.state import StageState


class Walk:
    """The values in flight during one pass over a window.

    Args:
      engine: stages and programs.
      states: what each stage holds.
      window: the placed batches.
      counters: by batch of the window and stage, the batch's number.
      keys: training's key, by stage.
      carry: state carried into the window, by stage; None where none is.
      compile_only: see above.
    """

    def __init__(
        self,
        engine: Engine,
        states: Sequence[StageState],
        window: PlacedWindow,
        *,
        keys: Sequence[Any],
        counters: Sequence[Sequence[Any]],
        carry: Sequence[Tree] | None,
        compile_only: bool = False,
    ):
        self.engine = engine
        self.states = states
        self.window = window
        self.carry = list(carry) if carry is not None else [None] * len(engine.stages)
        self.total: Any = engine.constants.zero_total(engine.stages[-1])
        self.gradients: list[Gradients | None] = [None] * len(engine.stages)
        self._keys = keys
        self._counters = counters
        self._compile_only = compile_only
        # Micro-batches of the whole window, in order: (number of the batch, micro-batch in it).
        self._places = [(k, m) for k, batch in enumerate(window.batches) for m in range(len(batch.splits))]
        self._prepared: dict[int, Params] = {}  # stage -> parameters as F and B take them
        self._arriving: dict[Any, Tree] = {}  # (kind, stage, unit) -> x or dy sent by a neighbour
        self._running: dict[Any, Tree] = {}  # (stage, micro-batch) -> state after the last chunk enqueued
        self._dstates: dict[Any, Tree] = {}  # (stage, micro-batch) -> gradient of that state
        self._saved: dict[Any, Tree] = {}  # (stage, unit) -> what F saved
        self._timed: dict[Any, list[Tree]] = {}  # (stage, micro-batch) -> tapes, last chunk first
        self._summed: dict[Any, Tree] = {}  # (stage, micro-batch) -> summed tape so far

    def run(self, schedule: Schedule) -> None:
        """Enqueues all of F, B and W."""
        enqueue = {"F": self._forward, "B": self._backward, "W": self._weight_gradient}
        for task in schedule.tasks:
            if task.kind != "U":
                enqueue[task.kind](task)

    def run_forward(self, schedule: Schedule) -> None:
        """Enqueues F alone, without saving anything: evaluation."""
        for task in schedule.tasks:
            if task.kind == "F":
                self._evaluate(task)

    def _forward(self, task: Task) -> None:
        stage, batch, args, done = self._enter(task)
        state, y, saved = self._call(stage, "forward", batch, stage.forward, args)
        self._saved[task.stage, task.units[0]] = saved
        done(state, y)

    def _evaluate(self, task: Task) -> None:
        stage, batch, args, done = self._enter(task)
        state, y = self._call(stage, "evaluate", batch, stage.evaluate, args)
        done(state, y)

    def _enter(self, task: Task) -> tuple[Stage, PlacedBatch, tuple[Tree, ...], Callable[[Tree, Tree], None]]:
        """Arguments of a forward task (1, 2), and what to do with its results."""
        s, (unit,) = task.stage, task.units
        stage, (k, m) = self.engine.stages[s], self._places[unit.microbatch]
        batch = self.window.batches[k]
        if unit.chunk == 0 and m == 0:
            self._begin(stage, k)
        x = batch.inputs[m][unit.chunk] if s == 0 else self._arriving.pop(("F", s, unit))
        total = self.total if stage.is_last else None
        state = self._running[s, unit.microbatch]
        args = (*self._parameters(stage), x, state, self._unit(stage, unit.microbatch, unit.chunk), total)

        def done(state: Tree, y: Tree) -> None:
            self._running[s, unit.microbatch] = state
            if stage.is_last:
                self.total = y
            else:
                self._arriving["F", s + 1, unit] = transfer(y, over_steps(self.engine.stages[s + 1].sharding), task)
            if unit.chunk == batch.bucket.chunks - 1 and m == len(batch.splits) - 1:
                self._end(stage, k)

        return stage, batch, args, done

    def _backward(self, task: Task) -> None:
        s, (unit,) = task.stage, task.units
        stage, (k, _) = self.engine.stages[s], self._places[unit.microbatch]
        batch, place = self.window.batches[k], (s, unit.microbatch)
        dy = self.engine.constants.one(stage) if stage.is_last else self._arriving.pop(("B", s, unit))
        dstate = self._dstates.pop(place, None)
        if dstate is None:  # nothing flows back from the next batch
            dstate = self.engine.constants.zero_dstate(stage, batch.shape.rows)
        summed = self._summed.pop(place, None)
        saved = self._saved.pop((s, unit))
        args = (*self._parameters(stage), saved, dy, dstate, self._unit(stage, unit.microbatch, unit.chunk), summed)
        first = summed is None
        dx, dstate, timed, summed = self._call(
            stage,
            "backward" if first else "backward_add",
            batch,
            functools.partial(stage.backward, time=batch.shape.chunk),
            args,
            donate=() if first else (6,),
        )
        self._timed.setdefault(place, []).append(timed)
        if jax.tree.leaves(summed):
            self._summed[place] = summed
        if unit.chunk > 0:
            self._dstates[place] = dstate
        if s > 0 and dx is not None:
            self._arriving["B", s - 1, unit] = transfer(dx, over_steps(self.engine.stages[s - 1].sharding), task)

    def _weight_gradient(self, task: Task) -> None:
        s, microbatch = task.stage, task.units[0].microbatch
        stage, (k, _) = self.engine.stages[s], self._places[microbatch]
        batch, held, so_far = self.window.batches[k], self.states[s], self.gradients[s]
        timed = tuple(reversed(self._timed.pop((s, microbatch))))
        summed = self._summed.pop((s, microbatch), _nothing(stage))
        args = (held.own, held.lent, timed, summed, self._unit(stage, microbatch, 0), so_far)
        self.gradients[s] = self._call(
            stage,
            "weight_gradient" if so_far is None else "weight_gradient_add",
            batch,
            functools.partial(stage.weight_gradient, time=batch.bucket.chunk * batch.bucket.chunks),
            args,
            joined=batch.bucket.chunks,
            donate=() if so_far is None else (5,),
        )

    def _call(
        self,
        stage: Stage,
        phase: str,
        batch: PlacedBatch,
        function: Callable[..., Tree],
        args: tuple[Tree, ...],
        *,
        joined: int | None = None,
        donate: tuple[int, ...] = (),
    ) -> Tree:
        return self.engine.run(
            stage,
            phase,
            (batch.shape, joined),
            function,
            args,
            donate=donate,
            lengths=(batch.bucket.length,),
            compile_only=self._compile_only,
        )

    def _parameters(self, stage: Stage) -> tuple[Params, Tree | None]:
        """A stage's parameters, and those it was lent, as F and B take them: prepared once in a walk."""
        held = self.states[stage.number]
        if stage.prepare is None:
            return held.own, held.lent
        if stage.number not in self._prepared:
            self._prepared[stage.number] = self.engine.run(
                stage,
                "prepare",
                None,
                stage.prepare,
                (held.own, held.lent),
                lengths=self.window.lengths,
                compile_only=self._compile_only,
            )
        return self._prepared[stage.number], None

    def _unit(self, stage: Stage, microbatch: int, chunk: int) -> Unit:
        k, m = self._places[microbatch]
        batch, constants = self.window.batches[k], self.engine.constants
        return Unit(
            key=self._keys[stage.number],
            counter=self._counters[k][stage.number],
            start=constants.number(stage, chunk * batch.bucket.chunk),
            row=constants.first_row(stage, batch.splits[m][0], batch.shape.rows),
            lengths=batch.lengths[stage.number][m],
            targets=batch.targets[m][chunk] if stage.is_last else None,
            weights=batch.weights[m][chunk] if stage.is_last else None,
        )

    def _begin(self, stage: Stage, k: int) -> None:
        """Sets the state of each micro-batch before batch k: the initial one, or the carried one."""
        batch, s = self.window.batches[k], stage.number
        first = self._places.index((k, 0))
        if batch.resets is None:
            pieces = [self.engine.constants.initial_state(stage, batch.shape.rows)] * len(batch.splits)
        else:
            rows = batch.splits[-1][1]
            initial = self.engine.constants.initial_state(stage, rows, whole=True)
            args = (initial if self.carry[s] is None else self.carry[s], batch.resets[s], initial)
            function = functools.partial(stage.split, splits=batch.splits)
            pieces = self._call_carry(stage, "split", batch, function, args)
        for m, piece in enumerate(pieces):
            self._running[s, first + m] = piece

    def _end(self, stage: Stage, k: int) -> None:
        """Takes the state after batch k, to be carried on."""
        batch, s = self.window.batches[k], stage.number
        first = self._places.index((k, 0))
        pieces = tuple(self._running.pop((s, first + m)) for m in range(len(batch.splits)))
        if batch.resets is not None:
            function = functools.partial(stage_functions.merge, splits=batch.splits)
            self.carry[s] = self._call_carry(stage, "merge", batch, function, (pieces,))

    def _call_carry(
        self, stage: Stage, phase: str, batch: PlacedBatch, function: Callable[..., Tree], args: tuple[Tree, ...]
    ) -> Tree:
        if not jax.tree.leaves(args[0]):  # a stage without state
            return function(*args)
        return self.engine.run(
            stage,
            phase,
            batch.splits,
            function,
            args,
            lengths=(batch.bucket.length,),
            compile_only=self._compile_only,
        )

    def gradients_of(self, stage: Stage) -> Gradients:
        """The sums of a stage's gradients, after its last W."""
        gradients = self.gradients[stage.number]
        assert gradients is not None, "a validated schedule has a W for every stage"
        return gradients

    def send_lent_gradients(self) -> None:
        """Adds the gradients of lent parameters to their owners', after the last W."""
        stages, model = self.engine.stages, self.engine.model
        for stage in stages:
            gradients = self.gradients_of(stage)
            for tie, debt in zip(ties_from_below(model, stage.rows), gradients.lent, strict=True):
                owner = next(other for other in stages if tie.owner in other.rows)
                what = f"the gradient that stage {stage.number} owes stage {owner.number}"
                self._add(owner, tie.owner - owner.rows.start, transfer(debt, owner.sharding, what))
            self.gradients[stage.number] = gradients._replace(lent=())

    def _add(self, stage: Stage, row: int, debt: Params) -> None:
        gradients = self.gradients_of(stage)
        own = list(gradients.own)
        own[row] = self.engine.run(
            stage,
            "add_lent",
            row,
            lambda own, debt: jax.tree.map(jax.numpy.add, own, debt),
            (own[row], debt),
            donate=(0,),
            lengths=self.window.lengths,
            compile_only=self._compile_only,
        )
        self.gradients[stage.number] = gradients._replace(own=tuple(own))


def _nothing(stage: Stage) -> Tree:
    """The summed tape of a stage none of whose layers sums: None at every layer."""

    def of(join: Any) -> Any:
        return tuple(map(of, join)) if isinstance(join, tuple) else None

    return of(stage.layer.join)
