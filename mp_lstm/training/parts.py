"""The part of a checkpoint that one process writes, and the reading of any rows from the parts of others.

A part is a checkpoint of orbax's own, of the arrays that live in one process. Orbax works in that process alone: which
parts make a checkpoint, and when it is whole, is `checkpoint`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from mp_lstm.runtime.edges import as_global

Arrays = Mapping[str, Mapping[str, Any]]


def alone() -> MultiprocessingOptions:
    """Has orbax work in this process without the others; where there are none, as it does by default."""
    if jax.process_count() == 1:
        return MultiprocessingOptions()
    index = jax.process_index()
    return MultiprocessingOptions(index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}")


def write(path: Path, arrays: Arrays) -> None:
    """Writes arrays of this process.

    Args:
      path: a directory that is not there yet.
      arrays: by part of the state and name.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(as_global, arrays)))


def read(path: Path, wanted: Arrays) -> Arrays:
    """Reads the wanted arrays that a part holds.

    Args:
      path: as it was written.
      wanted: structs with shardings, by part of the state and name; those that are not there are left out.
    """
    with _checkpointer() as checkpointer:
        held = checkpointer.metadata(path).item_metadata.tree
        here = {
            part: {name: struct for name, struct in named.items() if name in held.get(part, {})}
            for part, named in wanted.items()
        }
        if not jax.tree.leaves(here):
            return here
        how = ocp.checkpoint_utils.construct_restore_args(here)
        args = ocp.args.PyTreeRestore(here, restore_args=how, partial_restore=True)
        return checkpointer.restore(path, args=args)


def _checkpointer() -> ocp.Checkpointer:
    """Orbax's checkpointer for this process, without the account of arrays that it keeps of all processes."""
    options = alone()
    arrays = ocp.type_handlers.ArrayHandler(
        primary_host=options.primary_host, array_metadata_store=None, use_replica_parallel=False
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=options,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)
