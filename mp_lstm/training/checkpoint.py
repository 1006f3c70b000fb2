"""Checkpoints: what a run needs to go on as if it had never stopped, on any partition. Orbax is imported here alone.

    run_dir/checkpoints/<step>/
      state   arrays of parameters, optimiser states and carried state, named by placement row
      state-I of several processes, the arrays of process I in its place (`parts`)
      about   JSON: the rows and their shapes; step, batches, rate, key; the run's own notes (`Notes`); sizes and
              digests, by which a damaged checkpoint is known before it is read (`training.about`)

Arrays belong to rows, not to stages, so a checkpoint moves to any partition and any devices: each array goes straight
from its stage's device to the file, and from the file to the device of the stage that owns its row now. What stages
lend each other is not kept, it is copied anew.

A checkpoint is written beside the others under another name and renamed when it is whole, so a run killed at any moment
leaves those before it as they were. The last two are kept, and the one with the best validation.

Which one that is stands in the notes of the last checkpoint, and nowhere else. A run may validate a step that it has
saved before; saving it again replaces its notes, so they always tell of the best validation: `Notes.tested`.

Over 400 lines: what is said where saving or restoring fails stands beside either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from mp_lstm.errors import InputError
from mp_lstm.runtime import Pipeline, State, processes
from mp_lstm.runtime.placement import Tree, elsewhere, is_here, structs
from mp_lstm.training import parts
from mp_lstm.training.about import (
    ABOUT,
    DAMAGE,
    FORMAT,
    found_files,
    key_of,
    noted_files,
    read_whole,
    write_about,
)
from mp_lstm.training.files import writing
from mp_lstm.training.notes import Notes, notes_from_json
from mp_lstm.training.rows import rows_of, tree_of, unflattened

FOLDER = "checkpoints"
KEPT = 2
UNFINISHED = ".orbax-checkpoint-tmp"  # as orbax marks what it has not finished
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

RunDir = str | os.PathLike[str]


class Restored(NamedTuple):
    """A state, and the notes that were saved with it."""

    state: State
    notes: Notes


def steps(run_dir: RunDir) -> list[int]:
    """The steps of the checkpoints of a run, in order; unfinished ones do not count.

    Raises:
      InputError: something that is no directory stands in their place, or it cannot be read.

    Example:
      >>> steps("no such directory")
      []
    """
    folder = _folder(run_dir)
    try:
        if not folder.exists():
            return []
        if not folder.is_dir():
            raise InputError(f"{folder} is a file, wanted the directory of the checkpoints: move it away")
        return sorted(ocp.utils.checkpoint_steps(folder))
    except OSError as error:
        raise _unreadable(folder, error) from error


def latest(run_dir: RunDir) -> int | None:
    """The step of a run's last checkpoint, None where there is none.

    Example:
      >>> latest("no such directory") is None
      True
    """
    found = steps(run_dir)
    return found[-1] if found else None


def best(run_dir: RunDir) -> int | None:
    """The step of the checkpoint with the best validation; the last one's where there is none.

    Raises:
      InputError: the last checkpoint, which tells, is damaged.

    Example:
      >>> best("no such directory") is None
      True
    """
    found = steps(run_dir)
    if not found:
        return None
    notes = _notes(_about(run_dir, found[-1]), found)
    return notes.tested.step if notes.tested else found[-1]


def save(run_dir: RunDir, pipe: Pipeline, state: State, notes: Notes) -> None:
    """Saves a state; waits for the devices. A step that has been saved before keeps its arrays and gets the new notes.

    Args:
      run_dir: of the run.
      pipe: of the state.
      state: left as it is.
      notes: the loop's.

    Raises:
      InputError: the directory cannot be written to.
    """
    about = {
        "format": FORMAT,
        "rows": _description(pipe),
        "step": state.step,
        "batches": state.batches,
        "rate": state.rate,
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
        "key_impl": str(jax.random.key_impl(state.key)),
        "carries": state.carry is not None,
        "notes": notes._asdict(),
    }
    if processes.are_several():
        _write_parts(run_dir, state)
        processes.by_the_first(lambda: _finish_parts(run_dir, about, notes))
        return
    with _writing(run_dir), _manager(run_dir, write=True) as manager:
        path, files = _path(run_dir, state.step), None
        if state.step in manager.all_steps():
            files = noted_files(path)
        else:
            args = ocp.args.Composite(state=ocp.args.StandardSave(tree_of(state)), about=ocp.args.JsonSave(about))
            manager.save(state.step, args=args, force=True)
        write_about(path, about, files or found_files(path))
        for step in _superfluous(manager.all_steps(), notes):
            manager.delete(step)


def _write_parts(run_dir: RunDir, state: State) -> None:
    """Each of several processes writes its arrays, beside the checkpoints and under a name that none has."""
    folder = _folder(run_dir)
    own = {
        part: {name: leaf for name, leaf in named.items() if is_here(leaf.sharding)}
        for part, named in tree_of(state).items()
    }

    def begin() -> str:
        with _writing(run_dir):
            folder.mkdir(exist_ok=True)
            for left in folder.glob(f"*{UNFINISHED}*"):  # by a process that was killed
                shutil.rmtree(left)
            if state.step in steps(run_dir):
                return ""
            _unfinished(run_dir, state.step).mkdir()
        return "begun"

    def write() -> None:
        with _writing(run_dir):
            parts.write(_unfinished(run_dir, state.step) / f"state-{jax.process_index()}", own)

    if processes.by_the_first(begin):
        processes.together("the checkpoint", write if jax.tree.leaves(own) else lambda: None)


def _finish_parts(run_dir: RunDir, about: dict[str, Any], notes: Notes) -> str:
    """Makes a checkpoint of the parts that all processes have written, by giving it its name."""
    step = about["step"]
    with _writing(run_dir):
        path, files = _unfinished(run_dir, step), None
        if not path.exists():  # it has been saved before
            path = _path(run_dir, step)
            files = noted_files(path)
        (path / ABOUT).parent.mkdir(exist_ok=True)
        write_about(path, about, files or found_files(path))
        path.rename(_path(run_dir, step))
        for old in _superfluous(steps(run_dir), notes):
            shutil.rmtree(_path(run_dir, old))
    return ""


def _unfinished(run_dir: RunDir, step: int) -> Path:
    return _folder(run_dir) / f"{step}{UNFINISHED}"


def restore(pipe: Pipeline, run_dir: RunDir, step: int | None = None) -> Restored:
    """Reads a checkpoint onto a pipeline's devices.

    Args:
      pipe: of the same model and optimizer; partition, devices, buckets and schedule may differ.
      run_dir: of the run.
      step: of the checkpoint; None: the last one.

    Returns:
      The state and the notes.

    Raises:
      InputError: there is no such checkpoint, it is damaged, or of another model or optimizer.
    """
    found = steps(run_dir)
    if not found or step not in (None, *found):
        what = f"no checkpoint of step {step}, only of {found}" if found else "no checkpoint"
        raise InputError(f"{_folder(run_dir)} has {what}: train first, or pass the directory of another run")
    step = found[-1] if step is None else step
    processes.by_the_first(lambda: str(_about(run_dir, step, contents=True)["step"]))  # it reads all the files
    about = _about(run_dir, step)
    _check(pipe, about, _path(run_dir, step))
    wanted = _abstract_state(pipe, carries=about["carries"])
    try:
        arrays = _arrays(run_dir, step, tree_of(wanted))
    except Exception as error:  # so wide, as orbax raises a plain `Exception` for damaged arrays; others go on
        if not isinstance(error, DAMAGE) and type(error) is not Exception:
            raise
        raise _explained(run_dir, step, error) from error
    rows = rows_of(wanted)
    state = pipe.restore(
        unflattened(rows["params"], arrays["params"]),
        unflattened(rows["optimizer"], arrays["optimizer"]),
        carry=unflattened(rows["carry"], arrays["carry"]) if about["carries"] else None,
        key=key_of(about),
        step=about["step"],
        batches=about["batches"],
        rate=about["rate"],
    )
    return Restored(state, _notes(about, found))


def _arrays(run_dir: RunDir, step: int, wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The wanted arrays of this process's stages, from whichever part has them, and what stands for the others."""
    found = sorted(_path(run_dir, step).glob("state*"))
    if not processes.are_several() and [part.name for part in found] == ["state"]:
        with _manager(run_dir) as manager:
            return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
    arrays = {
        part: {name: elsewhere(leaf, leaf.sharding) for name, leaf in named.items() if not is_here(leaf.sharding)}
        for part, named in wanted.items()
    }
    here = {
        part: {name: leaf for name, leaf in named.items() if name not in arrays[part]} for part, named in wanted.items()
    }
    for path in found:
        for part, named in parts.read(path, here).items():
            arrays[part].update(named)
    return arrays


def restore_best(pipe: Pipeline, run_dir: Path) -> Restored:
    """Reads the best parameters of a run, averaged where the run averages."""
    restored = restore(pipe, run_dir, best(run_dir))
    return restored._replace(state=pipe.averaged(restored.state)) if pipe.keeps_average else restored


def _folder(run_dir: RunDir) -> Path:
    return Path(run_dir).absolute() / FOLDER


@contextlib.contextmanager
def _manager(run_dir: RunDir, *, write: bool = False) -> Iterator[ocp.CheckpointManager]:
    """Orbax's manager of a run's checkpoints, which also sweeps up after a killed write before it writes."""
    options = ocp.CheckpointManagerOptions(
        create=write, cleanup_tmp_directories=write, enable_async_checkpointing=False
    )
    manager = ocp.CheckpointManager(_folder(run_dir), options=options)
    try:
        yield manager
    finally:
        manager.close()


@contextlib.contextmanager
def _writing(run_dir: RunDir) -> Iterator[None]:
    """As `writing`, for arrays too: orbax has them written by a library whose errors are no `OSError`s."""
    for name in ("absl", "asyncio"):  # for good: what was being written besides fails later, up to the process's end
        logging.getLogger(name).addFilter(_is_news)
    with writing(_folder(run_dir)):
        try:
            yield
        except ValueError as error:
            if not _is_refusal(error):
                raise
            raise _of_the_system(error) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record tells of anything but refusals: the user gets one line of them, orbax would log hundreds."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, OSError) or _is_refusal(error))


def _is_refusal(error: BaseException | None) -> bool:
    """Whether tensorstore says that the system does not let it write."""
    if not isinstance(error, ValueError) or isinstance(error, InputError):
        return False
    return re.search(r"os_error_code|RESOURCE_EXHAUSTED|(Error|Failed) writing", str(error)) is not None


def _of_the_system(error: Exception) -> Exception:
    """The `OSError` that tensorstore, by which orbax reads and writes arrays, tells of in words."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error)[:200])


def _superfluous(found: Iterable[int], notes: Notes) -> list[int]:
    """All checkpoints but the last ones and the best."""
    kept = {*sorted(found)[-KEPT:], notes.best.step if notes.best else None}
    return [step for step in found if step not in kept]


def _path(run_dir: RunDir, step: int) -> Path:
    return _folder(run_dir) / str(step)


def _about(run_dir: RunDir, step: int, *, contents: bool = False) -> dict[str, Any]:
    """What a checkpoint tells of itself, if it is whole, as far as `read_whole` looks."""
    path = _path(run_dir, step)
    try:
        about = read_whole(path, contents=contents)
    except DAMAGE as error:
        raise _explained(run_dir, step, error) from error
    if about["format"] != FORMAT:
        raise InputError(f"{path} has format {about['format']}, this version reads {FORMAT}: use the version it is of")
    return about


def _explained(run_dir: RunDir, step: int, error: Exception) -> InputError:
    """What is wrong with a checkpoint that could not be read: what the system refuses is no damage."""
    refusal = _of_the_system(error) if "os_error_code" in str(error) else error
    if isinstance(refusal, OSError) and not isinstance(refusal, _GONE):
        return _unreadable(_path(run_dir, step), refusal)
    return _damaged(run_dir, step, error)


def _unreadable(path: Path, error: OSError) -> InputError:
    remedy = "give this user the right to read it" if isinstance(error, PermissionError) else "mend that and try again"
    return InputError(f"{path} cannot be read ({error.strerror or error}): {remedy}")


def _damaged(run_dir: RunDir, step: int, error: Exception) -> InputError:
    """What is wrong with a checkpoint, and what there is beside it."""
    whole = []
    for other in steps(run_dir):
        with contextlib.suppress(*DAMAGE):
            if other != step and read_whole(_path(run_dir, other), contents=True)["format"] == FORMAT:
                whole.append(other)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    remedy = (
        f"delete or move it, to use step {whole[-1]} instead (whole: {', '.join(map(str, whole))})"
        if whole
        else "no other one is whole, so train anew, with another --run-dir"
    )
    return InputError(f"{_path(run_dir, step)} is damaged ({reason}): {remedy}")


def _notes(about: Mapping[str, Any], found: Sequence[int]) -> Notes:
    """The notes of a checkpoint among those that are there: a best one that is gone is none."""
    notes = notes_from_json(about["notes"])
    return notes if notes.best and notes.best.step in found else notes._replace(best=None)


def _abstract_state(pipe: Pipeline, *, carries: bool) -> State:
    """Shapes, types and shardings of a state, with the carried one where there is one."""
    state = pipe.abstract_state()
    if not carries:
        return state
    batch_size = pipe.plan.batch_size
    carry = tuple(
        structs(jax.eval_shape(functools.partial(stage.layer.init_state, batch_size)), stage.sharding)
        for stage in pipe.stages
    )
    return dataclasses.replace(state, carry=carry)


def _description(pipe: Pipeline) -> list[dict[str, Any]]:
    """What tells models and optimizers apart: name, parameters and optimiser state of each row, with their shapes."""
    state = pipe.abstract_state()
    names, rows = [row.name for row in pipe.model.rows], rows_of(state)

    def shapes(row: Tree) -> dict[str, str]:
        return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(row)}

    return [
        {"name": name, "params": shapes(params), "optimizer": shapes(optimizer)}
        for name, params, optimizer in zip(names, rows["params"], rows["optimizer"], strict=True)
    ]


def _check(pipe: Pipeline, about: Mapping[str, Any], path: Path) -> None:
    """Raises InputError where a checkpoint is not of this model and optimizer, and says how they differ."""
    saved, wanted = about["rows"], _description(pipe)
    remedy = "use the configuration it was trained with, or another run directory"
    names = [[row["name"] for row in rows] for rows in (saved, wanted)]
    if names[0] != names[1]:
        raise InputError(f"{path} is of another model: its rows are {names[0]}, this one's {names[1]}: {remedy}")
    for part, what in (("params", "model"), ("optimizer", "optimizer")):
        for old, new in zip(saved, wanted, strict=True):
            for place in {**old[part], **new[part]}:
                shapes = [row[part].get(place, "nothing") for row in (old, new)]
                if shapes[0] != shapes[1]:
                    raise InputError(
                        f"{path} is of another {what}: row {new['name']!r} has {shapes[0]} at {place}, this one's has "
                        f"{shapes[1]}: {remedy}"
                    )
