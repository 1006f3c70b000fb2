"""The pipeline: training as pure steps on a state that is a value.

    place     a window of batches is cut and sent to its devices
    walk      F, B and W of all stages are enqueued in the schedule's order
    norms     one scalar a stage goes to the last stage, their sum comes back
    U         every stage updates its own rows

A step returns as soon as all of this is enqueued: its metrics are device scalars, best read after the next step's call.

It is over 400 lines because half of them document the public methods, and those belong on one page.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Params
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.checks import checked
from mp_lstm.layers.model import reset_rows
from mp_lstm.planning.plan import Plan
from mp_lstm.runtime import average as averages
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.batches import PlacedWindow, pad_batch, place_window
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.finish import averages_of, finish, lend_parameters, start_averages
from mp_lstm.runtime.placement import Tree, computed, everywhere, put, structs, transfer
from mp_lstm.runtime.stages import Stage, Unit
from mp_lstm.runtime.state import Metrics, StageState, State, check_key, check_state, checked_carry
from mp_lstm.runtime.verify import Certificate, certify
from mp_lstm.runtime.walk import Walk

Window = Batch | Sequence[Batch] | PlacedWindow


class Pipeline:
    """A model on its devices. Made by `make_pipeline`; its methods are functions of a `State`.

    Args:
      engine: stages, programs and constants.
      plan, optimizer, normalize, every_k, donate: as given to `make_pipeline`.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        optimizer: optax.GradientTransformation,
        *,
        normalize: str,
        every_k: int,
        donate: bool,
    ):
        self.plan = plan
        self.model = engine.model
        self.stages = engine.stages
        self.programs = engine.programs
        self.every_k = every_k
        self._engine = engine
        self._optimizer = optimizer
        self._normalize = normalize
        self._donate = donate

    def init(self, key: Key[Array, ""]) -> State:
        """Draws parameters, each stage's on its own devices: the same as `model.init(key)`.

        Raises:
          InputError: the key is none that `jax.random.key` made.
        """
        check_key(key)
        own = tuple(computed(stage.init, stage.sharding, put(key, stage.sharding)) for stage in self.stages)
        return self._state(own, key)

    def load(self, params: Params, *, key: Key[Array, ""] | None = None) -> State:
        """A fresh state with the given parameters, in the model's types.

        Args:
          params: of the whole model, one entry a row, as `params` and `model.init` return them.
          key: training's key; `jax.random.key(0)` by default.

        Raises:
          InputError: the parameters are those of another model; the key is none that `jax.random.key` made.
        """
        wanted, key = self._shapes, jax.random.key(0) if key is None else key
        check_key(key)
        if jax.tree.structure(wanted) != jax.tree.structure(params):
            got = jax.tree.structure(params)
            raise InputError(f"the parameters' structure is {got}, the model's is {jax.tree.structure(wanted)}")
        for (path, want), got in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(params), strict=True):
            if want.shape != np.shape(got):
                name = self.model.rows[path[0].idx].name
                raise InputError(
                    f"{name}: {jax.tree_util.keystr(path[1:])} has shape {np.shape(got)}, {want.shape} is wanted"
                )
        copies = jax.tree.map(lambda want, got: np.array(got, want.dtype), wanted, params)
        own = tuple(put(copies[stage.rows.start : stage.rows.stop], stage.sharding) for stage in self.stages)
        return self._state(own, key)

    def params(self, state: State, which: str = "last") -> Params:
        """Parameters of the whole model as host arrays, one entry a row; waits for the devices.

        Args:
          state: left as it is.
          which: the "last" ones, or their "average", which `average_parameters` keeps.
        """
        state = self._chosen(state, which)
        rows = tuple(row for stage in state.stages for row in everywhere(stage.own, "the parameters"))
        return jax.tree.map(lambda leaf: np.array(leaf), rows)

    def place(self, window: Window) -> PlacedWindow:
        """Cuts a batch, or the batches of one update, and sends each part to the devices that need it.

        Raises:
          InputError: shapes or types that do not agree, or that the plan has no room for; lengths, weights or ids that
            are out of range.
        """
        if isinstance(window, PlacedWindow):
            return window
        options = {"normalize": self._normalize, "dtype": self._engine.constants.dtype}
        return place_window(self.model, self.plan, self.stages, _batches(window), **options)

    def prefetch(self, batches: Iterable[Batch]) -> Iterator[PlacedWindow]:
        """Windows of `every_k` batches, each placed while the devices still work on the one before.

        The batches that remain at the end make a shorter last window, so none is lost.
        """
        batches = iter(batches)
        while window := list(itertools.islice(batches, self.every_k)):
            yield self.place(window)

    def step(self, state: State, window: Window) -> tuple[State, Metrics]:
        """One update from one window of batches; enqueues everything and waits for nothing.

        Args:
          state: consumed, unless the pipeline was made with donate=False.
          window: a batch, several batches, or what `place` or `prefetch` gave.

        Returns:
          The new state and the window's metrics.

        Raises:
          InputError: a bare batch where `every_k` batches make a window; a state that is used up or another pipeline's;
            what `place` refuses.
        """
        self._check(state)
        if isinstance(window, Batch) and self.every_k > 1:
            raise InputError(
                f"every_k is {self.every_k} and step got a bare batch: iterate over pipe.prefetch(batches), or pass "
                f"a list of 1 to {self.every_k} batches"
            )
        window = self.place(window)
        walk = self._walk(state.stages, window, state.key, state.batches, state.carry)
        stages, metrics = finish(walk, state.stages, state.rate, donate=self._donate)
        carry = tuple(walk.carry) if any(batch.resets is not None for batch in window.batches) else state.carry
        seen = state.batches + len(window.batches)
        return State(state.key, stages, carry, state.step + 1, seen, state.rate), metrics

    def value_and_grad(self, state: State, window: Window) -> tuple[Float[Array, ""], Params]:
        """The loss of a window and its gradient, normalised as in a step: one entry a row, on its stage's device."""
        self._check(state)
        window = self.place(window)
        walk = self._walk(state.stages, window, state.key, state.batches, state.carry)
        rows: list[Params] = []
        for stage in self.stages:
            args = (walk.gradients_of(stage).own, window.denominators[stage.number])
            rows += self._engine.run(stage, "normalize", None, optimizers.normalized, args)
        last = self.stages[-1]
        loss = self._engine.run(last, "mean", None, jnp.divide, (walk.total, window.weight_scalar))
        return everywhere(loss, "the loss"), tuple(rows)

    def evaluate(
        self,
        state: State,
        window: Window,
        *,
        carry: tuple[Tree, ...] | None = None,
        params: str = "last",
        compile_only: bool = False,
    ) -> Metrics:
        """The loss of a window without dropout.

        Args:
          state: left as it is.
          window: a batch, several batches, or what `place` gave.
          carry: what the metrics of the batch before held, where state is carried.
          params: the "last" ones, or their "average"; for many batches take `averaged` once.
          compile_only: compile the programs and return no metrics' values.

        Raises:
          InputError: what `step` refuses of a state or a batch; a carry of another number of stages or rows, or of
            other arrays.
        """
        if not compile_only:
            state = self._chosen(state, params)
        window = self.place(window)
        if carry is not None and any(batch.resets is not None for batch in window.batches):
            carry = self._checked_carry(carry, self.plan.batch_size)
        walk = self._begin(state.stages, window, state.key, state.batches, carry, compile_only)
        walk.run_forward(self.plan.schedule(window.lengths))
        last, args = self.stages[-1], (walk.total, window.weight_scalar)
        loss = self._engine.run(last, "mean", None, jnp.divide, args, compile_only=compile_only)
        carried = tuple(walk.carry) if any(batch.resets is not None for batch in window.batches) else None
        return Metrics(everywhere(loss, "the loss"), window.weight, window.tokens, carry=carried)

    @functools.cached_property
    def keeps_average(self) -> bool:
        """Whether the optimizer keeps an average of parameters."""
        return averages.find([held.optimizer for held in self.abstract_state().stages]) is not None

    def start_average(self, state: State) -> State:
        """Switches the average of parameters on: of those after the updates to come. The given state lives on in it.

        Raises:
          InputError: the optimizer keeps none.
        """
        self._check_average(state)
        return dataclasses.replace(state, stages=start_averages(self._engine, state.stages))

    def averaged(self, state: State) -> State:
        """The state with the average as its parameters, to be evaluated; the last ones before it is switched on.

        Raises:
          InputError: the optimizer keeps none.
        """
        self._check_average(state)
        return dataclasses.replace(state, stages=averages_of(self._engine, state.stages))

    def infer(
        self, state: State, inputs: Tree, carry: Sequence[Tree] | None = None, *, resets: Any = None
    ) -> tuple[Tree, tuple[Tree, ...]]:
        """Predictions for a few steps, through the placed stages.

        Args:
          state: left as it is.
          inputs: [T, B, ...] host arrays; every shape is compiled once.
          carry: what the call before returned; None: the initial state.
          resets: [B] rows whose carry is the initial state even so; None: no row.

        Returns:
          The model's predictions (logits [T, B, V]) on the last stage's device, and the carry.

        Raises:
          InputError: what `step` refuses of a state, or of a batch's inputs; a carry of another number of stages or
            rows, or of other arrays.
        """
        self._check(state)
        inputs, _, _, _, resets = checked(self.model.rows, Batch(inputs, resets=resets), targets=False)
        rows = jax.tree.leaves(inputs)[0].shape[1]
        shape = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(inputs))
        after = []
        if carry is None:
            carry = self._initial_carry(rows)
        else:
            carry = self._checked_carry(carry, rows)
            if resets is not None and np.any(resets):
                carry = [self._reset(stage, before, resets) for stage, before in zip(self.stages, carry, strict=True)]
        x = put(inputs, self.stages[0].sharding)
        for stage, held, before in zip(self.stages, state.stages, carry, strict=True):
            x = transfer(x, stage.sharding, f"what stage {stage.number} predicts from")
            args = (held.own, held.lent, x, before, Unit())
            carried, x = self._engine.run(stage, "infer", shape, stage.infer, args)
            after.append(carried)
        return everywhere(x, "the predictions"), tuple(after)

    def _initial_carry(self, rows: int) -> list[Tree]:
        """The state of each stage before the first step, of so many rows."""
        return [self._engine.constants.initial_state(stage, rows, whole=True) for stage in self.stages]

    def _checked_carry(self, carry: Any, rows: int) -> tuple[Tree, ...]:
        """A carry that was given for so many rows."""
        return checked_carry(carry, self.stages, self._initial_carry(rows), [row.name for row in self.model.rows])

    def _reset(self, stage: Stage, carried: Tree, resets: Any) -> Tree:
        """A stage's carry with the initial state in some rows."""
        if not jax.tree.leaves(carried):
            return carried
        initial = self._engine.constants.initial_state(stage, len(resets), whole=True)
        args = (put(np.asarray(resets, bool), stage.sharding), initial, carried)
        return self._engine.run(stage, "reset", len(resets), reset_rows, args)

    def verify(self, state: State, window: Batch | Sequence[Batch]) -> Certificate:
        """Compares the pipeline's gradient, and every row's own backward, with JAX's derivative on one device.

        All parameters are brought to the default device for it: use a small version of a model that fits none.

        Args:
          state: left as it is.
          window: a batch, or several.

        Returns:
          The certificate: print it, or ask whether it `passed`.

        Example:
          >>> import jax, mp_lstm, numpy as np, optax
          >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2, dropout=0.5)
          >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
          >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
          >>> batch = mp_lstm.Batch(np.zeros((8, 4), int), np.ones((8, 4), int))
          >>> pipe.verify(pipe.init(jax.random.key(0)), batch).passed
          True
        """
        params, batches = self.params(state), [checked(self.model.rows, batch) for batch in _batches(window)]
        dtype = self._engine.constants.dtype
        return certify(
            self.model,
            params,
            [pad_batch(self.plan, batch, dtype)[1] for batch in batches],  # the state that is carried has all rows
            lambda: self._gathered(*self.value_and_grad(state, batches)),
            stages=[stage.number for stage in self.stages for _ in stage.rows],
            key=state.key,
            counter=state.batches,
            carry=self._host_carry(state),
            remat=self.plan.remat,
        )

    @functools.cached_property
    def _shapes(self) -> Params:
        """Structs of the model's parameters, one entry a row."""
        return jax.eval_shape(self.model.init, jax.random.key(0))

    def _check(self, state: State) -> None:
        check_state(state, self.stages, self._shapes)

    def _check_average(self, state: State) -> None:
        self._check(state)
        if not self.keeps_average:
            raise InputError(
                "the optimizer keeps no average of parameters: pass optax.chain(optimizer, average_parameters()) to "
                "make_pipeline"
            )

    def _chosen(self, state: State, which: str) -> State:
        """The state whose parameters are the last ones, or their average."""
        if which not in ("last", "average"):
            raise InputError(f"params is {which!r}, one of last, average is wanted")
        if which == "average":
            return self.averaged(state)
        self._check(state)
        return state

    def _host_carry(self, state: State) -> Tree:
        """The carried state of all rows, as host arrays."""
        if state.carry is None:
            return None
        return jax.tree.map(np.array, tuple(row for part in state.carry for row in everywhere(part, "the state")))

    def _gathered(self, loss: Array, rows: Params) -> tuple[Array, Params]:
        """A loss, and gradients by row, as every process has them."""
        return loss, tuple(everywhere(row, "the gradient") for row in rows)

    def warm_up(self, batches: Iterable[Window] | None = None, *, steps: bool = True, evaluations: bool = True) -> None:
        """Compiles, without running them, all programs that steps and evaluations of these batches use.

        Args:
          batches: examples, one of each shape that will come; by default one padded batch of tokens a bucket, alone and
            (where `every_k` allows) two in a window.
          steps, evaluations: whether those of steps are compiled, and those of evaluations.

        Raises:
          InputError: the model takes no tokens, so no batch can be made up for it.

        Example:
          >>> import jax, mp_lstm, optax
          >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2)
          >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
          >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
          >>> pipe.warm_up()
          >>> len(pipe.programs) > 0
          True
        """
        if batches is None:
            try:
                return self.warm_up(self._examples(), steps=steps, evaluations=evaluations)
            except InputError as error:
                raise InputError(f"warm_up() makes up tokens: pass it a batch of each bucket ({error})") from error
        state = self.abstract_state()
        for example in batches:
            for window in _windows(example, self.every_k):
                placed = self.place(window)
                if steps:
                    walk = self._walk(state.stages, placed, state.key, 0, None, compile_only=True)
                    finish(walk, state.stages, 1.0, donate=self._donate, compile_only=True)
                if evaluations:
                    self.evaluate(state, placed, compile_only=True)
        if self.keeps_average and evaluations:
            averages_of(self._engine, state.stages, compile_only=True)
            start_averages(self._engine, state.stages, compile_only=True)
        return self.programs.wait()

    def abstract_state(self) -> State:
        """Shapes, types and shardings of a state."""
        key = jax.random.key(0)
        own = tuple(structs(jax.eval_shape(stage.init, key), stage.sharding) for stage in self.stages)
        optimizer = [jax.eval_shape(functools.partial(optimizers.init, self._optimizer), part) for part in own]
        states = [structs(tree, stage.sharding) for tree, stage in zip(optimizer, self.stages, strict=True)]
        return State(key, tuple(map(StageState, own, states, lend_parameters(self._engine, own))))

    def _examples(self) -> list[Batch]:
        """One batch of tokens for each bucket."""
        rows = self.plan.batch_size
        lengths = np.ones(rows, np.int32)
        return [Batch(z := np.zeros((length, rows), np.int32), z, lengths=lengths) for length in self.plan.buckets]

    def _state(self, own: tuple[Params, ...], key: Key[Array, ""]) -> State:
        init = functools.partial(optimizers.init, self._optimizer)
        states = [computed(init, stage.sharding, part) for part, stage in zip(own, self.stages, strict=True)]
        return State(key, tuple(map(StageState, own, states, lend_parameters(self._engine, own))))

    def _walk(
        self,
        states: Sequence[StageState],
        window: PlacedWindow,
        key: Key[Array, ""],
        seen: int,
        carry: Sequence[Tree] | None,
        *,
        compile_only: bool = False,
    ) -> Walk:
        """A finished walk: F, B and W enqueued, lent gradients sent home."""
        walk = self._begin(states, window, key, seen, carry, compile_only)
        walk.run(self.plan.schedule(window.lengths))
        walk.send_lent_gradients()
        return walk

    def _begin(
        self,
        states: Sequence[StageState],
        window: PlacedWindow,
        key: Key[Array, ""],
        seen: int,
        carry: Sequence[Tree] | None,
        compile_only: bool,
    ) -> Walk:
        counters = [
            [put(np.asarray(seen + k, np.uint32), stage.sharding) for stage in self.stages]
            for k in range(len(window.batches))
        ]
        keys = [self._engine.constants.key(stage, key) for stage in self.stages]
        return Walk(self._engine, states, window, keys=keys, counters=counters, carry=carry, compile_only=compile_only)

    def restore(
        self,
        params: Params,
        optimizer: Sequence[Any],
        *,
        key: Key[Array, ""],
        carry: Sequence[Tree] | None = None,
        step: int = 0,
        batches: int = 0,
        rate: float = 1.0,
    ) -> State:
        """The state made of what a checkpoint keeps: parts by row, so that they fit any partition.

        Args:
          params, optimizer, carry: one entry a row, on the devices of the row's stage or to be sent there; consumed.
          key, step, batches, rate: as in `State`.
        """

        def by_stage(rows: Sequence[Tree]) -> tuple[Tree, ...]:
            parts = [tuple(rows[stage.rows.start : stage.rows.stop]) for stage in self.stages]
            return tuple(transfer(part, stage.sharding) for part, stage in zip(parts, self.stages, strict=True))

        own = by_stage(params)
        stages = tuple(map(StageState, own, by_stage(optimizer), lend_parameters(self._engine, own)))
        return State(key, stages, None if carry is None else by_stage(carry), step, batches, rate)


def _batches(window: Any) -> list[Batch]:
    """The batches of a window, at least one, or whatever was given instead."""
    batches = list(window) if isinstance(window, Sequence | Iterator) and not isinstance(window, Batch) else [window]
    if not batches:
        raise InputError("the window has no batch, at least one is wanted")
    return batches


def _windows(example: Window, every_k: int) -> list[Window]:
    """The example, and where windows have several batches also twice in one: adding up takes programs of its own."""
    if isinstance(example, PlacedWindow) or every_k == 1:
        return [example]
    batches = [example] if isinstance(example, Batch) else list(example)
    return [batches, batches * 2]
