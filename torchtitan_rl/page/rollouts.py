"""Finds the rollouts of a run: `RolloutTable`.

Only what is needed to find a rollout is kept, in a private temporary SQLite file: the place of its
row, what is sorted and filtered by, and a text index. The row itself is read again from its file.

What rows contain may be anything, see `values.py`.
"""

from __future__ import annotations

import math
import re
import sqlite3
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_rl.bounds import is_line
from torchtitan_rl.observability.explain import finite, median_by_step
from torchtitan_rl.page.values import Json, Row, clean, dicts, integer, integers, items, name_of

MAX_LIMIT = 1_000
_MAX_EXCERPT = 240
_MAX_SIBLINGS = 256
_MAX_SEARCHED = 10_000  # characters of a rollout in the text index
_MAX_TURN_TIMES = 2_000  # of a replica
_MAX_REPLICAS = 1_000
_CACHE_KIB = 8_192
_SOURCE_LINES = 10_000_000  # the numbers of an evaluation's files begin at multiples of this

_COLUMNS = {
    "step": "INTEGER",
    "version": "INTEGER",
    "split": "TEXT",
    "source": "TEXT",
    "group_id": "TEXT",
    "rollout_id": "TEXT",
    "problem_id": "TEXT",
    "status": "TEXT",
    "reward": "REAL",
    "advantage": "REAL",
    "turns": "INTEGER",
    "tokens": "INTEGER",
    "age_max": "INTEGER",
    "chosen": "TEXT",
}
_DETAILS = {"excerpt": "TEXT", "file": "INTEGER", "start": "INTEGER", "size": "INTEGER"}
_NAMES = ("n", *_COLUMNS, "excerpt")
_INDEXED = ("step", "group_id", "problem_id", "reward", "tokens", "age_max", "advantage")
_SORTS = {
    "step": "step",
    "reward": "reward",
    "tokens": "tokens",
    "age": "age_max",
    "advantage": "advantage",
}
_OTHERS = ("q", "sort", "offset", "limit")


class ParameterError(ValueError):
    """A parameter of a request is wrong. The message names it."""


def _columns(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items())


def _marks(number: int) -> str:
    return ", ".join("?" * number)


def _text(name: str, text: str) -> str:
    return text


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"-?\d{1,15}", text, re.ASCII):
        raise ParameterError(f"{name}: give an integer")
    return int(text)


def float_in(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ParameterError(f"{name}: give a number")
    return number


_FILTERS: dict[str, tuple[str, Callable[[str, str], str | float]]] = {
    "split": ("split = ?", _text),
    "source": ("source = ?", _text),
    "group": ("group_id = ?", _text),
    "problem": ("problem_id = ?", _text),
    "status": ("status = ?", _text),
    "chosen": ("chosen = ?", _text),
    "step": ("step = ?", _integer),
    "step_min": ("step >= ?", _integer),
    "step_max": ("step <= ?", _integer),
    "reward_min": ("reward >= ?", float_in),
    "reward_max": ("reward <= ?", float_in),
    "age_min": ("age_max >= ?", _integer),
}


class RolloutTable:
    """Rollouts by number, in the order of their files."""

    def __init__(self) -> None:
        # Without a name, SQLite's file has none either, so it is gone even after a kill -9.
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB};"
            f"CREATE TABLE rollouts (n INTEGER PRIMARY KEY, {_columns(_COLUMNS)});"
            f"CREATE TABLE details (n INTEGER PRIMARY KEY, {_columns(_DETAILS)});"
            "CREATE VIRTUAL TABLE texts USING fts5(text, content='');"
            + "".join(f"CREATE INDEX by_{one} ON rollouts ({one});" for one in _INDEXED)
        )
        self._summary: Json | None = None
        self._found: tuple[Any, array[int]] | None = None  # of the last search
        self._is_writing = False
        self._numbers: dict[str, int] = {}  # of the last rollout of a source
        self._turn_times: defaultdict[str, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_MAX_TURN_TIMES)
        )

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    def put(self, source: str, file: int, start: int, size: int, step: int, row: Row) -> None:
        """Add the rollout of a row. If an evaluation repeats a rollout, the later one counts."""
        self._begin()
        first = len(self._numbers) * _SOURCE_LINES
        n = self._numbers[source] = self._numbers.get(source, first) + 1
        brief = _brief(row, step) | {"source": source}
        if source:
            self._db.execute("CREATE INDEX IF NOT EXISTS by_rollout ON rollouts (rollout_id)")
            repeated = (source, brief["rollout_id"])
            self._db.execute("DELETE FROM rollouts WHERE source = ? AND rollout_id = ?", repeated)
        values = [brief[name] for name in _COLUMNS]
        self._db.execute(f"INSERT INTO rollouts VALUES ({_marks(1 + len(values))})", (n, *values))
        details = (n, brief["excerpt"], file, start, size)
        self._db.execute(f"INSERT INTO details VALUES ({_marks(len(details))})", details)
        self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (n, _searched(row)))
        if brief["split"] == "train":
            self._note_turn_times(step, row)

    def cut(self, step: int) -> None:
        """Drop the rollouts of later steps: a resumed run takes these steps again."""
        self._begin()
        self._db.execute("DELETE FROM rollouts WHERE step > ?", (step,))

    def commit(self) -> None:
        if self._is_writing:
            self._db.execute("COMMIT")
            self._is_writing = False

    def token_s(self, *, after_step: int) -> dict[str, dict[int, float]]:
        """The seconds per token of turns after a step, by replica and step."""
        return {
            name: median_by_step(one for one in times if one[0] > after_step)
            for name, times in self._turn_times.items()
        }

    def query(self, parameters: Mapping[str, str]) -> Json:
        """The briefs of the rollouts that match. Raises ParameterError for a wrong parameter."""
        where, values = _conditions(parameters)
        order = _order(parameters.get("sort", "step"))
        limit = min(_integer("limit", parameters.get("limit", "100")), MAX_LIMIT)
        offset = _integer("offset", parameters.get("offset", "0"))
        if limit < 0 or offset < 0:
            raise ParameterError("limit, offset: give 0 or more")
        if "q" in parameters:  # the text index is asked once for all pages
            found = self._found_by_text(f"WHERE {where} ORDER BY {order}", values)
            total, chosen = len(found), found[offset : offset + limit].tolist()
        else:
            counted = self._db.execute(f"SELECT count(*) FROM rollouts WHERE {where}", values)
            total = counted.fetchone()[0]
            chosen = self._chosen(
                f"WHERE {where} ORDER BY {order} LIMIT {limit} OFFSET {offset}", values
            )
        return {"total": total, "rows": self._briefs(chosen)} | self._summarized()

    def place(self, n: int) -> tuple[str, int, int, int] | None:
        """Source, file, first byte and size of the row of a rollout."""
        found = self._db.execute(
            "SELECT source, file, start, size FROM rollouts JOIN details USING (n) WHERE n = ?",
            (n,),
        )
        place: tuple[str, int, int, int] | None = found.fetchone()
        return place

    def related(self, n: int) -> Json | None:
        """A rollout's brief, its siblings in the group, and others of the same problem."""
        if not self._chosen("WHERE n = ?", (n,)):
            return None
        (brief,) = self._briefs([n])
        group = brief["source"], brief["step"], brief["group_id"]
        of_group = "source = ? AND step = ? AND group_id = ?"
        limit = f"ORDER BY step, n LIMIT {_MAX_SIBLINGS}"
        return {
            "brief": brief,
            "siblings": self._briefs(
                self._chosen(f"WHERE {of_group} AND n != ? {limit}", (*group, n))
            ),
            "same_problem": self._briefs(
                self._chosen(
                    f"WHERE problem_id = ? AND NOT ({of_group}) {limit}",
                    (brief["problem_id"], *group),
                )
            ),
        }

    def close(self) -> None:
        self._db.close()

    def _begin(self) -> None:
        self._summary = self._found = None
        if not self._is_writing:
            self._db.execute("BEGIN")
            self._is_writing = True

    def _summarized(self) -> Json:
        """The statuses and the range of steps, computed again after a change."""
        if self._summary is None:
            statuses = self._db.execute("SELECT DISTINCT status FROM rollouts ORDER BY status")
            steps = self._db.execute("SELECT min(step), max(step) FROM rollouts")
            self._summary = {"statuses": [one for (one,) in statuses], "steps": steps.fetchone()}
        return self._summary

    def _found_by_text(self, rest: str, values: Sequence[Any]) -> array[int]:
        key = rest, tuple(values)
        if self._found is None or self._found[0] != key:
            self._found = key, array("q", self._chosen(rest, values))
        return self._found[1]

    def _chosen(self, rest: str, values: Sequence[Any]) -> list[int]:
        return [n for (n,) in self._db.execute(f"SELECT n FROM rollouts {rest}", values)]

    def _briefs(self, chosen: Sequence[int]) -> list[Json]:
        found = self._db.execute(
            f"SELECT {', '.join(_NAMES)} FROM rollouts JOIN details USING (n) "
            f"WHERE n IN ({_marks(len(chosen))})",
            chosen,
        )
        by_number = {row[0]: dict(zip(_NAMES, row, strict=True)) for row in found}
        return [by_number[n] for n in chosen]

    def _note_turn_times(self, step: int, row: Row) -> None:
        for turn in dicts(row.get("turns")):
            name, metrics = turn.get("replica"), turn.get("metrics")
            latency = metrics.get("inter_token_latency_s") if isinstance(metrics, dict) else None
            seconds = finite(latency)
            if not (isinstance(name, str) and is_line(name) and seconds and seconds > 0):
                continue
            if name in self._turn_times or len(self._turn_times) < _MAX_REPLICAS:
                self._turn_times[name].append((step, seconds))


def _conditions(parameters: Mapping[str, str]) -> tuple[str, list[str | float]]:
    conditions: list[str] = ["1"]
    values: list[str | float] = []
    for name, text in parameters.items():
        if name in _FILTERS:
            condition, parse = _FILTERS[name]
            conditions.append(condition)
            values.append(parse(name, clean(text)))
        elif name == "q":
            if words := re.findall(r"\w+", clean(text)):
                conditions.append("n IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
                values.append(" ".join(f'"{word}"' for word in words) + "*")
        elif name not in _OTHERS:
            raise ParameterError(f"{name}: no such parameter")
    return " AND ".join(conditions), values


def _order(sort: str) -> str:
    column = _SORTS.get(sort.removeprefix("-"))
    if column is None:
        raise ParameterError(f"sort: give one of {', '.join(_SORTS)}, with - for descending")
    if sort.startswith("-"):
        return f"{column} DESC, n DESC"
    return f"{column} ASC NULLS LAST, n"


def _brief(row: Row, step: int) -> Json:
    turns = dicts(row.get("turns"))
    version = integer(row.get("version"))
    split = name_of(row.get("split"))
    versions = [one for turn in turns for one in integers(turn.get("versions"))]
    age = None
    if split == "train" and version is not None and versions:
        age = version - 1 - min(versions)  # a step trains the version before its own
    advantages = [a for turn in turns if (a := finite(turn.get("advantage"))) is not None]
    return {
        "step": step,
        "version": version,
        "split": split,
        "group_id": name_of(row.get("group_id")),
        "rollout_id": name_of(row.get("rollout_id")),
        "problem_id": name_of(row.get("problem_id")),
        "status": name_of(row.get("status")),
        "reward": finite(row.get("reward")),
        "advantage": advantages[0] if advantages else None,
        "turns": len(turns),
        "tokens": sum(len(items(turn.get("token_ids"))) for turn in turns),
        "age_max": age,
        "chosen": name_of(row.get("chosen")),
        "excerpt": _excerpt(row, turns),
    }


def _excerpt(row: Row, turns: Sequence[Row]) -> str:
    """The beginning of the last answer."""
    texts = [turn.get("text") for turn in turns[-1:]]
    texts += [one.get("content") for one in dicts(row.get("messages"))[-1:]]
    text = next((one for one in texts if isinstance(one, str)), "")
    return " ".join(clean(text[:_MAX_EXCERPT]).split())


def _searched(row: Row) -> str:
    texts = [one.get("content") for one in dicts(row.get("messages"))]
    texts = texts or [turn.get("text") for turn in dicts(row.get("turns"))]
    parts = [row.get("problem_id"), row.get("cause"), *texts]
    return clean("\n".join(one for one in parts if isinstance(one, str))[:_MAX_SEARCHED])
