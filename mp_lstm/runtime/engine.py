"""The engine of a pipeline: its stages with their programs and constants, and the one call that runs a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mp_lstm.layers.model import Model
from mp_lstm.runtime.constants import Constants
from mp_lstm.runtime.placement import Tree, is_here
from mp_lstm.runtime.programs import ProgramKey, Programs
from mp_lstm.runtime.stages import Stage


class Engine(NamedTuple):
    """What every walk of a pipeline shares."""

    model: Model
    stages: tuple[Stage, ...]
    programs: Programs
    constants: Constants

    def run(
        self,
        stage: Stage,
        phase: str,
        shape: Any,
        function: Callable[..., Tree],
        args: tuple[Tree, ...],
        *,
        donate: tuple[int, ...] = (),
        lengths: Sequence[int] = (),
        compile_only: bool = False,
    ) -> Tree:
        """Enqueues a program of a stage, compiled if need be; or only compiles it and gives its results' structs.

        A stage of another process runs there: here it gives what stands for its results.
        """
        key = ProgramKey(stage.number, phase, shape)
        if not is_here(stage.sharding):
            return self.programs.results_elsewhere(key, function, args, compile_only=compile_only)
        program = self.programs.get(key, function, args, donate=donate, lengths=lengths)
        return program.results() if compile_only else program(*args)
