"""Costs read from a table of measured points: between points, straight lines.

A table holds, for each distinct placement row and each kind of device, the seconds of F, B and W at a few numbers of
batch rows and of time steps, and the bytes that the row holds there. In between, and beyond, values are linear in time,
then in rows. F, B and W of a recurrent row are such lines with an offset, for the weights that every unit reads again.

The table is plain data and knows no device by itself: it can be saved, loaded and planned with on another machine.
`PointCache` keeps single points on disk as they are measured, so that an interruption loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import Kind, RowMemory, Seconds

Values = tuple[float, ...]
Points = Mapping[tuple[int, int], Values]  # (rows, time) -> what was found there


class Place(NamedTuple):
    """A device: its kind, its host (devices of equal host share its processor), and bytes of its memory if known."""

    kind: str
    host: str
    capacity: int | None


class RowUse(NamedTuple):
    """A placement row: which row of the table it is like, and whether the row below it keeps what is its x."""

    like: str
    given: bool


class TaskPoint(NamedTuple):
    """Seconds of one task of a row; for U, which depends on neither, `rows` and `time` are 1."""

    like: str
    device_kind: str
    kind: Kind
    rows: int
    time: int
    alone: float
    shared: float


class MemoryPoint(NamedTuple):
    """Bytes of a row, for units of so many rows and time steps."""

    like: str
    rows: int
    time: int
    bytes: RowMemory


class Link(NamedTuple):
    """Transfers from a device of one kind to another of the other."""

    source: str
    target: str
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class MeasuredCosts:
    """What every task of a model costs, by measurement: a `CostModel`.

    Args:
      label: where the numbers come from.
      rows: for each placement row of the model, which row of the table it is like.
      devices: by name, that is `str(device)`.
      tasks, memories: the points.
      overheads: seconds a task costs beside its rows, by kind of device.
      links: between devices.
      leaner: as `rows`, of each row's lean variant where it has one; None: these were not measured.
      is_lean: whether these are the costs of `leaner`.

    Example:
      >>> points = [TaskPoint("lstm", "cpu", "F", 20, time, 1e-3 * time, 2e-3 * time) for time in (8, 16)]
      >>> costs = MeasuredCosts(
      ...     label="measured on 1 x cpu",
      ...     rows=(RowUse("lstm", given=False),),
      ...     devices={"cpu:0": Place("cpu", "here", None)},
      ...     tasks=tuple(points),
      ...     memories=(),
      ...     overheads={"cpu": 1e-5},
      ...     links=(),
      ... )
      >>> costs.seconds("F", 0, 20, 12, "cpu:0")
      Seconds(alone=0.012, shared=0.024)
    """

    label: str
    rows: tuple[RowUse, ...]
    devices: Mapping[str, Place]
    tasks: tuple[TaskPoint, ...]
    memories: tuple[MemoryPoint, ...]
    overheads: Mapping[str, float]
    links: tuple[Link, ...]
    leaner: tuple[RowUse, ...] | None = None
    is_lean: bool = False
    _tables: dict[Any, dict[tuple[int, int], Values]] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for point in self.tasks:
            table = self._tables.setdefault((point.like, point.device_kind, point.kind), {})
            table[point.rows, point.time] = (point.alone, point.shared)
        for point in self.memories:
            self._tables.setdefault(point.like, {})[point.rows, point.time] = tuple(map(float, point.bytes[OWNED:]))

    def seconds(self, kind: Kind, row: int, rows: int, time: int, device: Any) -> Seconds:
        """Time of a row's task: F and B of one unit, W of a micro-batch's joined chunks, U of a step.

        Raises:
          InputError: the device, or this row on devices of its kind, was not measured.
        """
        if kind == "U":
            rows = time = 1
        return Seconds(*self._value((self._row(row).like, self._place(device).kind, kind), rows, time))

    def memory(self, row: int, rows: int, time: int) -> RowMemory:
        """Bytes of a placement row, for units of `rows` batch rows and `time` steps.

        Raises:
          InputError: the row was not measured.
        """
        use = self._row(row)
        scaled = map(round, self._value(use.like, rows, time))
        owned = next(point.bytes[:OWNED] for point in self.memories if point.like == use.like)
        held = RowMemory(*owned, *scaled)
        # An x that the row below does not keep is this row's wherever the stage begins.
        return held if use.given else held._replace(kept=held.kept + held.input, input=0)

    def overhead(self, device: Any) -> float:
        """Seconds that a task costs beside its rows."""
        return self.overheads[self._place(device).kind]

    def transfer(self, nbytes: int, source: Any, target: Any) -> float:
        """Seconds until `nbytes` have reached another device; none to the same one.

        Raises:
          InputError: a device, or a transfer between devices of these kinds, was not measured.
        """
        if str(source) == str(target):
            return 0.0
        kinds = self._place(source).kind, self._place(target).kind
        for link in self.links:
            if (link.source, link.target) == kinds:
                return link.latency_seconds + nbytes / link.bytes_per_second
        raise InputError(f"no transfer from {kinds[0]} to {kinds[1]} was measured: measure with two such devices")

    def capacity(self, device: Any) -> int | None:
        """Bytes of a device's memory; None: unknown."""
        return self._place(device).capacity

    def host(self, device: Any) -> str:
        """The host of a device."""
        return self._place(device).host

    @property
    def lean_rows(self) -> frozenset[int]:
        """Rows whose costs are those of their lean variants."""
        if not self.is_lean or self.leaner is None:
            return frozenset()
        pairs = zip(self.rows, self.leaner, strict=True)
        return frozenset(i for i, (plain, lean) in enumerate(pairs) if plain.like != lean.like)

    def lean(self) -> MeasuredCosts:
        """The same of each row's lean variant, where it has one.

        Raises:
          InputError: they were not measured.
        """
        if self.leaner is None:
            raise InputError(
                "the head as every remat but 'none' runs it was not measured: measure with the remat of the plan, or "
                "with None for any"
            )
        return self if self.is_lean or self.leaner == self.rows else replace(self, is_lean=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON."""
        write_json(Path(path), {name: getattr(self, name) for name in _FIELDS} | {"devices": dict(self.devices)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredCosts:
        """Reads a table that `save` wrote.

        Raises:
          InputError: the file cannot be read, or holds something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(
                label=content["label"],
                rows=tuple(RowUse(*row) for row in content["rows"]),
                devices={name: Place(*place) for name, place in content["devices"].items()},
                tasks=tuple(TaskPoint(*point) for point in content["tasks"]),
                memories=tuple(
                    MemoryPoint(like, rows, time, RowMemory(*held)) for like, rows, time, held in content["memories"]
                ),
                overheads=content["overheads"],
                links=tuple(Link(*link) for link in content["links"]),
                leaner=tuple(RowUse(*row) for row in content["leaner"]) if content.get("leaner") else None,
            )
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}: pass a file that MeasuredCosts.save wrote") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not a table of measured costs ({error}): measure again") from None

    def _row(self, row: int) -> RowUse:
        if not 0 <= row < len(self.rows):
            raise InputError(f"row {row} is wanted, {len(self.rows)} rows were measured: measure the model at hand")
        return self.leaner[row] if self.is_lean and self.leaner else self.rows[row]

    def _place(self, device: Any) -> Place:
        if str(device) not in self.devices:
            known = ", ".join(self.devices)
            raise InputError(f"device {device} was not measured, these were: {known}: measure with it, or pass those")
        return self.devices[str(device)]

    def _value(self, table: Any, rows: int, time: int) -> Values:
        """A search asks for the same few values over and over, so each is worked out once."""
        key = table, rows, time
        if key not in self._known:
            if table not in self._tables:
                what = table if isinstance(table, str) else "{2} of row '{0}' on {1}".format(*table)
                raise InputError(f"no point of {what} was measured: measure the model on the plan's devices")
            self._known[key] = interpolate(self._tables[table], rows, time)
        return self._known[key]


OWNED = 3  # fields of `RowMemory` that do not grow with a unit
_FIELDS = ("label", "rows", "tasks", "memories", "overheads", "links", "leaner")


def interpolate(points: Points, rows: int, time: int) -> Values:
    """The values between points, on straight lines in time and then in rows; beyond the points the lines go on.

    Args:
      points: (rows, time) -> values; for each number of rows at least one time.
      rows, time: where.

    Returns:
      The values, none below zero. Where there is but one point along an axis they are proportional.

    Example:
      >>> interpolate({(10, 4): (3.0,), (10, 8): (5.0,), (20, 4): (4.0,)}, rows=15, time=6)
      (5.0,)
    """
    by_rows: dict[int, dict[int, Values]] = {}
    for (at_rows, at_time), values in points.items():
        by_rows.setdefault(at_rows, {})[at_time] = values
    return _line({at_rows: _line(by_time, time) for at_rows, by_time in by_rows.items()}, rows)


def _line(points: Mapping[int, Values], at: int) -> Values:
    """Values on the line through the two points next to `at`."""
    if at in points:
        return points[at]
    places = sorted(points)
    if len(places) == 1:
        return tuple(value * at / places[0] for value in points[places[0]])
    upper = min(max(bisect_right(places, at), 1), len(places) - 1)
    left, right = places[upper - 1], places[upper]
    share = (at - left) / (right - left)
    return tuple(max(0.0, a + (b - a) * share) for a, b in zip(points[left], points[right], strict=True))


class PointCache:
    """Measured points on disk, one small file each, written as soon as it is known.

    Args:
      folder: where; made if need be. None: nothing is kept.

    Example:
      >>> cache = PointCache(None)
      >>> cache.get({"phase": "F", "rows": 20}, lambda: [0.25])
      [0.25]
    """

    def __init__(self, folder: str | os.PathLike[str] | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder}: {error.strerror}: pass a folder that can be written to, or None") from None

    def get(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The point of a key, measured if it is not there.

        Args:
          key: all that the point depends on.
          measure: gives it, as what JSON can hold.
        """
        if self._folder is None:
            return measure()
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = self._folder / f"{name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return kept["value"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not one of ours: measured anew and written over
        value = measure()
        write_json(path, {"key": key, "value": value})
        return value


def write_json(path: Path, content: Any) -> None:
    """Writes a file as a whole: whoever reads it finds the old one or the new one.

    Raises:
      InputError: the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: pass a path that can be written to") from None


def time_grid(longest: int, points: int) -> tuple[int, ...]:
    """Numbers of time steps at which to measure: multiples of 4, in geometric steps up to the longest.

    Args:
      longest: most time steps that will be planned for.
      points: how many, at least two.

    Example:
      >>> time_grid(60, 5), time_grid(60, 3), time_grid(3, 5)
      ((4, 8, 16, 32, 60), (4, 16, 60), (4, 8))
    """
    last = max(8, -(-longest // 4) * 4)
    ratio = (last / 4) ** (1 / (points - 1))
    return tuple(sorted({4 * round(ratio**i) for i in range(points - 1)} | {last}))


def label_of(kinds: Iterable[str], what: str) -> str:
    """Says where a table comes from.

    Example:
      >>> label_of(["cpu", "cpu"], "jax 0.10.2")
      'measured on 2 x cpu, jax 0.10.2'
    """
    counted: dict[str, int] = {}
    for kind in kinds:
        counted[kind] = counted.get(kind, 0) + 1
    return f"measured on {' + '.join(f'{count} x {kind}' for kind, count in counted.items())}, {what}"
