"""Ahead-of-time compilation, and the cache of compiled programs by bucket.

A compiled program is pinned to its stage's device and to its shapes: anything else raises, so that no transfer and no
recompilation can slip in. It does not return what it was given, nor the same value twice: saved activations that are
inputs, or outputs too, are put back by the host, which saves their copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from mp_lstm.runtime.compiler import compiler_options
from mp_lstm.runtime.placement import Tree, elsewhere, structs


class ProgramKey(NamedTuple):
    """What tells programs apart: the stage, the phase, and the shapes it is for."""

    stage: int
    phase: str
    shape: Hashable


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
        args = structs(args)
        leaves, in_tree = jax.tree.flatten(args)
        donated = _leaf_positions(args, donate)
        began = time.perf_counter()
        trees: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            results, tree = jax.tree.flatten(function(*jax.tree.unflatten(in_tree, leaves)))
            trees.append(tree)
            return results

        closed = jax.make_jaxpr(flat)(*leaves)
        self._out_tree = trees[-1]
        self._sources, computed = _sources(closed.jaxpr, donated)
        evaluate = jaxpr_as_fun(closed)

        def fresh(*leaves: Any) -> list[Any]:
            results = evaluate(*leaves)
            return [results[i] for i in computed]

        fresh.__name__ = fresh.__qualname__ = name
        sharding = leaves[0].sharding
        (device, *_) = sharding.device_set
        options = compiler_options(phase, device, closed.jaxpr)
        jitted = jax.jit(fresh, donate_argnums=sorted(donated), out_shardings=sharding)
        self._compiled = jitted.lower(*leaves).compile(compiler_options=options)
        self._results = [
            leaves[i] if given else jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for (given, i), aval in zip(self._sources, closed.out_avals, strict=True)
        ]
        self.name = name
        self.seconds = time.perf_counter() - began

    def __call__(self, *args: Tree) -> Tree:
        """Enqueues the program."""
        leaves = jax.tree.leaves(args)
        computed = self._compiled(*leaves)
        return jax.tree.unflatten(self._out_tree, [leaves[i] if given else computed[i] for given, i in self._sources])

    def results(self) -> Tree:
        """Structs of what a call returns."""
        return jax.tree.unflatten(self._out_tree, self._results)

    def memory(self) -> Any:
        """XLA's account of the program's memory: bytes of arguments, outputs, temporaries."""
        return self._compiled.memory_analysis()


def _leaf_positions(args: tuple[Tree, ...], positions: tuple[int, ...]) -> set[int]:
    """Positions among all leaves of the leaves of some arguments."""
    found, at = set(), 0
    for i, arg in enumerate(args):
        count = len(jax.tree.leaves(arg))
        if i in positions:
            found.update(range(at, at + count))
        at += count
    return found


def _sources(jaxpr: Any, donated: set[int]) -> tuple[list[tuple[bool, int]], list[int]]:
    """Where each result comes from: (True, input) or (False, place among the computed); and which are computed.

    A donated input is never handed back: its memory is gone.
    """
    inputs = {id(var): i for i, var in enumerate(jaxpr.invars) if i not in donated}
    places: dict[int, int] = {}
    computed: list[int] = []
    sources = []
    for i, var in enumerate(jaxpr.outvars):
        if id(var) in inputs:
            sources.append((True, inputs[id(var)]))
            continue
        if id(var) not in places:
            places[id(var)] = len(computed)
            computed.append(i)
        sources.append((False, places[id(var)]))
    return sources, computed


class Report(NamedTuple):
    """Programs compiled, the seconds that took, and the stated bound on their number."""

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
        sharding: NamedSharding,
        *,
        compile_only: bool,
    ) -> Tree:
        """What stands for the results of another process's program, which is traced once for it and not compiled."""
        if key not in self._elsewhere:
            results = jax.eval_shape(function, *structs(args))
            self._elsewhere[key] = structs(results, sharding), elsewhere(results, sharding)
        abstract, standing = self._elsewhere[key]
        return abstract if compile_only else standing

    def report(self) -> Report:
        """Counts and seconds."""
        seconds = sum(program.seconds for program in self._programs.values())
        by_length = {length: len(keys) for length, keys in sorted(self._by_length.items())}
        return Report(len(self), seconds, self.bound, by_length)

    def clear(self) -> None:
        """Drops every program; they are compiled again when next needed."""
        self._programs.clear()
        self._by_length.clear()
        self._elsewhere.clear()
