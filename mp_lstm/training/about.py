"""What a checkpoint tells of itself, in its part `about`, by which a damaged one is known before it is read.

    rows, step, batches, rate, key, key_impl, carries, notes    what `checkpoint.restore` goes by
    files, digests                                              bytes and CRC-32 of each file that holds arrays
    digest                                                      CRC-32 of all this, as JSON

Earlier versions wrote no digests; what they wrote is read without.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mp_lstm.training.files import replace_text
from mp_lstm.training.notes import notes_from_json

FORMAT = 1
ABOUT = "about/metadata"  # where orbax keeps the part `about`
# What reading a damaged checkpoint raises: files that are missing, cut or garbled, names that are not there. An
# `OSError` that tells of the system and not of the files is sorted out where it is explained.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
# The fields of `about` that a checkpoint is restored from.
FIELDS = {
    "rows": (list,),
    "step": (int,),
    "batches": (int,),
    "rate": (float, int),
    "key": (list,),
    "key_impl": (str,),
    "carries": (bool,),
    "notes": (dict,),
}
_CHUNK = 1 << 20  # bytes of a file that are digested at a time


def found_files(path: Path) -> dict[str, dict[str, int]]:
    """Bytes and digest of each file that holds arrays of a checkpoint, as `about` keeps them."""
    files = sorted(file for part in path.glob("state*") for file in part.rglob("*") if file.is_file())
    return {
        "files": {str(file.relative_to(path)): file.stat().st_size for file in files},
        "digests": {str(file.relative_to(path)): _digest(file) for file in files},
    }


def noted_files(path: Path) -> dict[str, dict[str, int]] | None:
    """The same, as a checkpoint that was saved before has it: files that came to harm since must not pass for whole."""
    with contextlib.suppress(*DAMAGE):
        about = json.loads((path / ABOUT).read_bytes())
        if about["digest"] == _digest_of(about):
            return {name: about[name] for name in ("files", "digests")}
    return None


def write_about(path: Path, about: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Writes the part `about` of a checkpoint, with the digest of all that it tells."""
    about = {**about, **files}
    replace_text(path / ABOUT, json.dumps({**about, "digest": _digest_of(about)}))


def read_whole(path: Path, *, contents: bool) -> dict[str, Any]:
    """The part `about` of a checkpoint; fails where it or a file of the arrays is damaged.

    Args:
      path: of the checkpoint; nothing more is asked of one of another format.
      contents: read the files of the arrays too, and not only ask for their sizes.
    """
    about = json.loads((path / ABOUT).read_bytes())
    if about["format"] != FORMAT:
        return about
    if about.get("digest", _digest_of(about)) != _digest_of(about):
        raise ValueError(f"{ABOUT} is not as it was written")
    for name, kinds in FIELDS.items():
        if type(about[name]) not in kinds:
            raise ValueError(f"{name} of {ABOUT} is {about[name]!r}")
    for row in about["rows"]:
        if not (
            isinstance(row["name"], str) and isinstance(row["params"], dict) and isinstance(row["optimizer"], dict)
        ):
            raise ValueError(f"a row of {ABOUT} is {row!r}")
    key_of(about)
    notes_from_json(about["notes"])
    digests = about.get("digests", {})
    for name, size in about.get("files", {}).items():  # none: the run was killed before it could note them
        with (path / name).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ValueError(f"{name} has {found:,} of {size:,} bytes")
        if contents and name in digests and _digest(path / name) != digests[name]:
            raise ValueError(f"{name} is not as it was written")
    return about


def key_of(about: Mapping[str, Any]) -> jax.Array:
    """The key of the run's state."""
    key = jax.random.wrap_key_data(jax.device_put(np.asarray(about["key"], np.uint32)), impl=about["key_impl"])
    if key.shape:
        raise ValueError(f"key of {ABOUT} is {about['key']!r}")
    return key


def _digest(file: Path) -> int:
    digest = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest = zlib.crc32(chunk, digest)
    return digest


def _digest_of(about: Mapping[str, Any]) -> int:
    """Of its text but for the digest itself; JSON that is read and written again is the same text."""
    return zlib.crc32(json.dumps({name: value for name, value in about.items() if name != "digest"}).encode())
