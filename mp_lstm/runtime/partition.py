"""How a stage's programs run on a mesh of several devices.

F, B, W and evaluation run as they are on every device, on its rows of the micro-batch (a slice of rows is what they
are for anyway) and its part of the vocabulary. So what a device computes is what it would alone, and all that crosses
between devices is written down: sums of the loss and of weight gradients over data (`stages`), and a few numbers a step
over model (`layers.vocabulary`). Left to the compiler, [T, B] flattened to rows for a product would be gathered.

Everything else (norms, U, carried state, inference) is written for whole arrays, and the compiler divides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mp_lstm.runtime.placement import DATA, MODEL, Tree, over_rows, over_steps, own_part, parameters

ON_PARTS = ("forward", "evaluate", "backward", "backward_add", "weight_gradient", "weight_gradient_add")

# Where the parts of a phase's result lie; results of phases that are not here lie as parameters do.
_RESULTS: dict[str, tuple[Any, ...]] = {
    "forward": (over_rows, over_steps, own_part),
    "evaluate": (over_rows, over_steps),
    "backward": (over_steps, over_rows, own_part, own_part),
    "backward_add": (over_steps, over_rows, own_part, own_part),
    "split": (over_rows,),
}


def result_shardings(phase: str, result: Tree, stage: NamedSharding) -> list[NamedSharding]:
    """The sharding of each leaf of a program's result.

    Args:
      phase: of the program.
      result: arrays or structs, of a part where the phase runs on parts.
      stage: what the stage has whole.
    """
    if stage.num_devices == 1:
        return [stage] * len(jax.tree.leaves(result))
    if phase not in _RESULTS:
        return jax.tree.leaves(parameters(result, stage, whole=phase not in ON_PARTS))
    kinds = _RESULTS[phase]
    parts = result if len(kinds) > 1 else (result,)
    return [
        stage if leaf.ndim == 0 and kind is not own_part else kind(stage)
        for part, kind in zip(parts, kinds, strict=True)
        for leaf in jax.tree.leaves(part)
    ]


def part_of(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and type of what one device has of an array. Its sharding is left out: it is no array of the mesh."""
    sharding = struct.sharding
    assert isinstance(sharding, NamedSharding), "a stage's arrays have named shardings"
    shape = sharding.shard_shape(struct.shape)
    shape = shape[1:] if _is_own(sharding) else shape
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def over_parts(
    function: Callable[..., list[Any]], given: list[NamedSharding], made: list[NamedSharding]
) -> Callable[..., list[Any]]:
    """Turns a function of parts into one of whole arrays.

    Args:
      function: of each device's parts; axes data and model have names in it.
      given, made: shardings of arguments and results.
    """

    def of_parts(*leaves: Any) -> list[Any]:
        parts = [leaf[0] if _is_own(sharding) else leaf for leaf, sharding in zip(leaves, given, strict=True)]
        found = function(*parts)
        return [leaf[None] if _is_own(sharding) else leaf for leaf, sharding in zip(found, made, strict=True)]

    # What is whole is equal on all devices: JAX need not prove it.
    return jax.shard_map(
        of_parts,
        mesh=given[0].mesh,
        in_specs=tuple(sharding.spec for sharding in given),
        out_specs=[sharding.spec for sharding in made],
        check_vma=False,
    )


def _is_own(sharding: NamedSharding) -> bool:
    return sharding.spec == own_part(sharding).spec


def axis_sizes(stage: NamedSharding) -> list[tuple[str, int]]:
    """The named axes of a stage's mesh, for tracing a function of parts."""
    return [(axis, stage.mesh.shape[axis]) for axis in (DATA, MODEL)]


def stage_of(struct: jax.ShapeDtypeStruct) -> NamedSharding:
    """What a stage has whole, from the sharding of any of its arrays."""
    sharding: Any = struct.sharding
    return sharding if sharding.num_devices == 1 else NamedSharding(sharding.mesh, PartitionSpec())
