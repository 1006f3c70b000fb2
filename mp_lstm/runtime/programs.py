"""Ahead-of-time compilation, and the cache of compiled programs by bucket.

A compiled program is pinned to its stage's devices and to its shapes: anything else raises, so that no transfer and no
recompilation can slip in. It does not return what it was given, nor the same value twice: saved activations that are
inputs, or outputs too, are put back by the host, which saves their copies.

Compiling takes one core a program, so threads do it: a program is in work once it is made, and the first call waits.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from mp_lstm.runtime.compiler import compiler_options
from mp_lstm.runtime.partition import ON_PARTS, axis_sizes, over_parts, part_of, result_shardings, stage_of
from mp_lstm.runtime.placement import Tree, standing_for, structs

CORES = os.cpu_count() or 1
_COMPILERS = ThreadPoolExecutor(CORES, thread_name_prefix="compiler")
_WAITING = threading.BoundedSemaphore(2 * CORES)
"""Few programs wait to be compiled, since an interrupted process compiles these before it ends."""


class ProgramKey(NamedTuple):
    """What tells programs apart: the stage, the phase, and the shapes it is for."""

    stage: int
    phase: str
    shape: Hashable


class Traced(NamedTuple):
    """A program that is not yet compiled.

    Args:
      function: leaves of the arguments -> what is computed.
      leaves: structs of the arguments' leaves; donated: positions of those whose memory the results may take.
      shardings: of what is computed.
      jaxpr: what a device runs.
      sources: of each result, as `_sources` has them.
      results: structs of what a call returns.
    """

    function: Callable[..., list[Any]]
    leaves: list[jax.ShapeDtypeStruct]
    donated: set[int]
    shardings: list[NamedSharding]
    jaxpr: Any
    sources: list[tuple[bool, int]]
    results: Tree


def traced(function: Callable[..., Tree], args: tuple[Tree, ...], donate: tuple[int, ...], phase: str) -> Traced:
    """Traces a function for a stage's devices; arguments as of `Program`."""
    args = structs(args)
    leaves, in_tree = jax.tree.flatten(args)
    donated = _leaf_positions(args, donate)
    stage = stage_of(leaves[0])
    on_parts = phase in ON_PARTS and stage.num_devices > 1
    trees: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        results, tree = jax.tree.flatten(function(*jax.tree.unflatten(in_tree, leaves)))
        trees.append(tree)
        return results

    trace = jax.make_jaxpr(flat, axis_env=axis_sizes(stage) if on_parts else None)
    closed = trace(*map(part_of, leaves) if on_parts else leaves)
    shardings = result_shardings(phase, jax.tree.unflatten(trees[-1], closed.out_avals), stage)
    sources, computed = _sources(closed.jaxpr, donated, leaves, None if on_parts else shardings)
    evaluate = jaxpr_as_fun(closed)

    def fresh(*leaves: Any) -> list[Any]:
        results = evaluate(*leaves)
        return [results[i] for i in computed]

    shardings, avals = [shardings[i] for i in computed], [closed.out_avals[i] for i in computed]
    if on_parts:
        fresh = over_parts(fresh, [leaf.sharding for leaf in leaves], shardings)
        avals = jax.eval_shape(fresh, *leaves)
    made = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(avals, shardings, strict=True)
    ]
    results = [leaves[i] if given else made[i] for given, i in sources]
    return Traced(fresh, leaves, donated, shardings, closed.jaxpr, sources, jax.tree.unflatten(trees[-1], results))


class Compiled(NamedTuple):
    """An executable, and when it was there."""

    executable: Any
    ended: float


def _compile(lowered: Any, options: dict[str, Any]) -> Compiled:
    try:
        executable = lowered.compile(compiler_options=options)
    finally:
        _WAITING.release()
    return Compiled(executable, time.perf_counter())


class Program:
    """One compiled executable of one stage.

    Args:
      name: of the executable, as profilers show it.
      function: a pure function of trees.
      args: arrays or structs with shardings, as the function will be called.
      donate: positions of arguments whose memory the results may take.
      phase: what it does, by which `compiler_options` chooses XLA's.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Tree],
        args: tuple[Tree, ...],
        donate: tuple[int, ...] = (),
        phase: str = "",
    ):
        self.began = time.perf_counter()
        trace = traced(function, args, donate, phase)
        trace.function.__name__ = trace.function.__qualname__ = name
        (device, *_) = trace.leaves[0].sharding.device_set
        options = compiler_options(phase, device, trace.jaxpr)
        jitted = jax.jit(trace.function, donate_argnums=sorted(trace.donated), out_shardings=trace.shardings)
        lowered = jitted.lower(*trace.leaves)
        _WAITING.acquire()
        self._future = _COMPILERS.submit(_compile, lowered, options)
        self._sources, self._results = trace.sources, trace.results
        self._out_tree = jax.tree.structure(trace.results)
        self.name = name

    @cached_property
    def executable(self) -> Any:
        """What was compiled; waits for it."""
        return self._future.result().executable

    @property
    def ended(self) -> float:
        """When its compilation ended; waits for it."""
        return self._future.result().ended

    def wait(self) -> None:
        """Waits until it is compiled."""
        self._future.result()

    def __call__(self, *args: Tree) -> Tree:
        """Enqueues the program."""
        leaves = jax.tree.leaves(args)
        computed = self.executable(*leaves)
        return jax.tree.unflatten(self._out_tree, [leaves[i] if given else computed[i] for given, i in self._sources])

    @property
    def computes(self) -> bool:
        """Whether it computes anything: B of an embedding only hands on what it was given."""
        return not all(given for given, _ in self._sources)

    def results(self) -> Tree:
        """Structs of what a call returns."""
        return self._results

    def memory(self) -> Any:
        """XLA's account of the program's memory: bytes of arguments, outputs, temporaries."""
        return self.executable.memory_analysis()


def _leaf_positions(args: tuple[Tree, ...], positions: tuple[int, ...]) -> set[int]:
    """Positions among all leaves of the leaves of some arguments."""
    found, at = set(), 0
    for i, arg in enumerate(args):
        count = len(jax.tree.leaves(arg))
        if i in positions:
            found.update(range(at, at + count))
        at += count
    return found


def _sources(
    jaxpr: Any, donated: set[int], leaves: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[NamedSharding] | None
) -> tuple[list[tuple[bool, int]], list[int]]:
    """Where each result comes from: (True, input) or (False, place among the computed); and which are computed.

    A donated input is never handed back: its memory is gone. Nor is one that lies otherwise than the result must: what
    one micro-batch carries is the whole batch's state as it stands, but divided over devices where that one is whole.

    Args:
      jaxpr: of the function.
      donated: positions of inputs.
      leaves: structs of the inputs.
      shardings: that the results must have; None: what is kept of an argument may stay as it lies.
    """
    inputs = {id(var): i for i, var in enumerate(jaxpr.invars) if i not in donated}
    places: dict[int, int] = {}
    computed: list[int] = []
    sources = []
    for i, var in enumerate(jaxpr.outvars):
        given = inputs.get(id(var))
        if given is not None and (shardings is None or leaves[given].sharding == shardings[i]):
            sources.append((True, given))
            continue
        if id(var) not in places:
            places[id(var)] = len(computed)
            computed.append(i)
        sources.append((False, places[id(var)]))
    return sources, computed


class Report(NamedTuple):
    """Programs compiled, the seconds in which some were, and the stated bound on their number."""

    programs: int
    seconds: float
    bound: int
    by_length: Mapping[int, int]

    def __str__(self) -> str:
        """One line a bucket."""
        lines = [f"{self.programs} programs (at most {self.bound}), compiled in {self.seconds:.1f} s"]
        lines += [f"  bucket {length}: uses {count}" for length, count in self.by_length.items()]
        return "\n".join(lines)


class Programs:
    """The bucket cache: compiled programs by (stage, phase, shape), shared where shapes agree.

    Args:
      bound: largest number of programs it will hold.
    """

    def __init__(self, bound: int):
        self.bound = bound
        self._programs: dict[ProgramKey, Program] = {}
        self._by_length: dict[int, set[ProgramKey]] = {}
        self._elsewhere: dict[ProgramKey, tuple[Tree, Tree]] = {}

    def __getitem__(self, length: int) -> Mapping[ProgramKey, Program]:
        """A bucket's entry: the programs its batches have used."""
        return {key: self._programs[key] for key in sorted(self._by_length[length], key=repr)}

    def __len__(self) -> int:
        return len(self._programs)

    def get(
        self,
        key: ProgramKey,
        function: Callable[..., Tree],
        args: tuple[Tree, ...],
        *,
        donate: tuple[int, ...] = (),
        lengths: Iterable[int] = (),
    ) -> Program:
        """The program of a key, compiled when first asked for.

        Args:
          key: what it is for.
          function, args, donate: as `Program` takes them.
          lengths: the buckets that use it.
        """
        program = self._programs.get(key)
        if program is None:
            name = f"stage{key.stage}_{key.phase}"
            program = self._programs[key] = Program(name, function, args, donate, key.phase)
        for length in lengths:
            self._by_length.setdefault(length, set()).add(key)
        return program

    def results_elsewhere(
        self,
        key: ProgramKey,
        function: Callable[..., Tree],
        args: tuple[Tree, ...],
        *,
        compile_only: bool,
    ) -> Tree:
        """What stands for the results of another process's program, which is traced once for it and not compiled."""
        if key not in self._elsewhere:
            results = traced(function, args, (), key.phase).results
            self._elsewhere[key] = results, standing_for(results)
        abstract, standing = self._elsewhere[key]
        return abstract if compile_only else standing

    def wait(self) -> None:
        """Waits until every program is compiled."""
        for program in self._programs.values():
            program.wait()

    def report(self) -> Report:
        """Counts and seconds; waits for what is being compiled."""
        seconds = covered([(program.began, program.ended) for program in self._programs.values()])
        by_length = {length: len(keys) for length, keys in sorted(self._by_length.items())}
        return Report(len(self), seconds, self.bound, by_length)

    def clear(self) -> None:
        """Drops every program; they are compiled again when next needed."""
        self._programs.clear()
        self._by_length.clear()
        self._elsewhere.clear()


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what some intervals cover together.

    Example:
      >>> covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
      4.0
    """
    length, reached = 0.0, -math.inf
    for began, ended in sorted(intervals):
        length += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return length
