"""Memory as it is: the arrays a row's programs make, and the bytes a step really holds on each device.

`row_arrays` reads from a row's programs of F and B which arrays they make and who reads them last; an array that is an
input, or that comes out twice, is there once. `live_bytes` runs a step and asks JAX, after every task that is enqueued,
for the arrays alive on each device: with the temporaries of that task's program this is what its device needs then.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax

from mp_lstm.planning.group import members
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.pipeline import Pipeline, Window
from mp_lstm.runtime.placement import Tree
from mp_lstm.runtime.programs import Program, ProgramKey
from mp_lstm.runtime.stages import Stage
from mp_lstm.runtime.state import State


def nbytes(tree: Tree) -> int:
    """Bytes of a tree of arrays or structs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class RowArrays(NamedTuple):
    """Bytes of the arrays that F and B of a row make, as `RowMemory` names them.

    Args:
      saved, kept, tape, input, output: as there.
      summed: of the tape that is added up instead of joined, one a micro-batch.
      keeps_y: whether y is among what F saves.
    """

    saved: int
    kept: int
    tape: int
    input: int
    output: int
    summed: int
    keeps_y: bool


class _Slot(NamedTuple):
    """A leaf of a program's result: where it comes from (see `Program`), and its bytes."""

    source: tuple[bool, int]
    bytes: int


def row_arrays(forward: Program, backward: Program, forward_args: Tree, backward_args: Tree) -> RowArrays:
    """Tells the arrays of a row apart.

    Args:
      forward, backward: its programs.
      forward_args, backward_args: structs of their arguments.
    """
    _, y, saved = _slots(forward)
    _, _, timed, summed = _slots(backward)
    x = _positions(forward_args, 2)
    parameters = {*_positions(forward_args, 0), *_positions(forward_args, 1), *_positions(forward_args, 4)}
    # Saved arrays are arguments of B: those that B hands back are in the tape, and so read by W.
    taped = {slot.source[1] for slot in (*timed, *summed) if slot.source[0]}
    made: dict[Any, int] = {}
    inputs: dict[Any, int] = {}
    last_read_by_w: set[Any] = set()
    for position, slot in zip(_positions(backward_args, 2), saved, strict=True):
        given, place = slot.source
        if given and place in parameters:
            continue
        (inputs if given and place in x else made)[slot.source] = slot.bytes
        if position in taped:
            last_read_by_w.add(slot.source)
    kept = sum(size for source, size in made.items() if source in last_read_by_w)
    return RowArrays(
        saved=sum(made.values()) - kept,
        kept=kept,
        tape=_new(timed, besides=_positions(backward_args, 3)),
        input=sum(inputs.values()),
        output=sum(slot.bytes for slot in y),
        summed=_new(summed),
        keeps_y=all(slot.source in made or slot.source in inputs for slot in y),
    )


def _slots(program: Program) -> list[list[_Slot]]:
    """The leaves of each part of a program's result."""
    sources, parts = iter(program._sources), program.results()
    return [[_Slot(next(sources), nbytes(leaf)) for leaf in jax.tree.leaves(part)] for part in parts]


def _positions(args: Tree, which: int) -> range:
    """Positions among all leaves of the leaves of one argument."""
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    first = sum(counts[:which])
    return range(first, first + counts[which])


def _new(slots: list[_Slot], besides: Container[int] = ()) -> int:
    """Bytes of what is made, each array once, and of those inputs that only this holds on to: dy, if W reads it."""
    return sum({source: size for source, size in slots if not source[0] or source[1] in besides}.values())


class _Watched(Engine):
    """An engine that shows every program that it has just enqueued."""

    see: Callable[[ProgramKey, Program], None]

    @classmethod
    def of(cls, engine: Engine, see: Callable[[ProgramKey, Program], None]) -> _Watched:
        watched = cls(*engine)
        watched.see = see
        return watched

    def run(self, stage: Stage, phase: str, shape: Any, *args: Any, **options: Any) -> Tree:
        result = super().run(stage, phase, shape, *args, **options)
        key = ProgramKey(stage.number, phase, shape)
        self.see(key, self.programs._programs[key])
        return result


def live_bytes(pipe: Pipeline, state: State, window: Window) -> tuple[State, dict[int, int]]:
    """Runs a step and finds the most bytes that each device needs at once.

    After each task that is enqueued these are the arrays alive on its device, its arguments and results among them, and
    the temporaries of its program. Arrays that are neither in the state nor in the window, nor made by the step, do not
    count.

    Args:
      pipe: a pipeline.
      state: consumed, unless the pipeline keeps its states.
      window: as `Pipeline.step` takes it.

    Returns:
      The state after the step, and bytes by device index (`plan.device_indices`), of a group's fullest device.

    Example:
      >>> import jax, mp_lstm, numpy as np, optax
      >>> from mp_lstm.runtime.memory import live_bytes, nbytes
      >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2)
      >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
      >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
      >>> batch = mp_lstm.Batch(np.zeros((8, 4), int), np.ones((8, 4), int))
      >>> state, peaks = live_bytes(pipe, pipe.init(jax.random.key(0)), batch)
      >>> peaks[0] > 2 * nbytes([stage.own for stage in state.stages])  # parameters, gradients, and more
      True
    """
    placed = pipe.place(window)
    mine = {id(leaf) for leaf in jax.tree.leaves((state, placed)) if isinstance(leaf, jax.Array)}
    # Held until the end, so that no array of the step gets the identity of one of them.
    strangers = [array for array in jax.live_arrays() if id(array) not in mine]
    excluded = set(map(id, strangers))
    indices = {
        str(device): index
        for place, index in zip(pipe.plan.devices, pipe.plan.device_indices, strict=True)
        for device in members(place)
    }
    temporaries: dict[ProgramKey, int] = {}
    peaks = dict.fromkeys(sorted(set(indices.values())), 0)

    def see(key: ProgramKey, program: Program) -> None:
        if key not in temporaries:
            temporaries[key] = program.memory().temp_size_in_bytes
        working = pipe.plan.device_indices[key.stage]
        for name, held in _held(excluded).items():
            if name in indices:
                index = indices[name]
                peaks[index] = max(peaks[index], held + (temporaries[key] if index == working else 0))

    options = {"normalize": pipe._normalize, "every_k": pipe.every_k, "donate": pipe._donate}
    watched = Pipeline(_Watched.of(pipe._engine, see), pipe.plan, pipe._optimizer, **options)
    after, _ = watched.step(state, placed)
    return after, peaks


def _held(excluded: set[int]) -> dict[str, int]:
    """Bytes alive on each device, by its name; two arrays in one place of memory are there once."""
    held: dict[str, dict[int, int]] = {}
    for array in [array for array in jax.live_arrays() if id(array) not in excluded]:
        parts = [array] if len(array.devices()) == 1 else [shard.data for shard in array.addressable_shards]
        for part in parts:
            (device,) = part.devices()
            held.setdefault(str(device), {})[part.unsafe_buffer_pointer()] = part.nbytes
    return {name: sum(places.values()) for name, places in held.items()}
