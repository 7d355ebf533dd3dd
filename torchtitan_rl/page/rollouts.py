"""The rollouts of a run: `RolloutTable` finds them, `rollout_details` shows one.

Only what is needed to find a rollout is kept, in a private temporary SQLite file: the place of its
row, what is sorted and filtered by, and a text index. The row itself is read again from its file.

What rows contain is hostile: values of any type, of any size. A value of an unexpected type counts
as missing, and texts are cut.
"""

from __future__ import annotations

import math
import re
import shutil
import sqlite3
import tempfile
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.bounds import is_line
from torchtitan_rl.observability.explain import finite, median_by_step

MAX_TEXT = 20_000  # characters of one text in an answer
MAX_TOKEN_TEXT = 200
MAX_TOKENS = 20_000  # of one rollout in an answer
MAX_LIMIT = 1_000
_MAX_NAME = 500
_MAX_EXCERPT = 240
_MAX_ITEMS = 2_000  # entries of a list or an object in an answer
_MAX_DEPTH = 8
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

Row = Mapping[str, Any]
Json = dict[str, Any]


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


def _float(name: str, text: str) -> float:
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
    "reward_min": ("reward >= ?", _float),
    "reward_max": ("reward <= ?", _float),
    "age_min": ("age_max >= ?", _integer),
}


class RolloutTable:
    """Rollouts by number, in the order of their files."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="page-"))
        self._db = sqlite3.connect(self._folder / "index.sqlite", isolation_level=None)
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
        number: int = self._db.execute("SELECT count(*) FROM rollouts").fetchone()[0]
        return number

    def put(self, source: str, file: int, start: int, size: int, step: int, row: Row) -> None:
        """Add the rollout of a row. If an evaluation repeats a rollout, the later one counts."""
        self._begin()
        first = len(self._numbers) * _SOURCE_LINES
        n = self._numbers[source] = self._numbers.get(source, first) + 1
        brief = _brief(row, step) | {"source": source}
        if source:
            self._remove_repeated(source, brief["rollout_id"])
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
        """The briefs of the rollouts that match.

        Raises:
            ParameterError: a parameter is unknown or has a wrong value.
        """
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> None:
        self._summary = self._found = None
        if not self._is_writing:
            self._db.execute("BEGIN")
            self._is_writing = True

    def _remove_repeated(self, source: str, rollout_id: str) -> None:
        self._db.execute("CREATE INDEX IF NOT EXISTS by_rollout ON rollouts (rollout_id)")
        where = "source = ? AND rollout_id = ?"
        self._db.execute(f"DELETE FROM rollouts WHERE {where}", (source, rollout_id))

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
        for turn in _dicts(row.get("turns")):
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
    turns = _dicts(row.get("turns"))
    version = _int(row.get("version"))
    split = _name(row.get("split"))
    versions = [one for turn in turns for one in _ints(turn.get("versions"))]
    age = None
    if split == "train" and version is not None and versions:
        age = version - 1 - min(versions)  # a step trains the version before its own
    advantages = [a for turn in turns if (a := finite(turn.get("advantage"))) is not None]
    return {
        "step": step,
        "version": version,
        "split": split,
        "group_id": _name(row.get("group_id")),
        "rollout_id": _name(row.get("rollout_id")),
        "problem_id": _name(row.get("problem_id")),
        "status": _name(row.get("status")),
        "reward": finite(row.get("reward")),
        "advantage": advantages[0] if advantages else None,
        "turns": len(turns),
        "tokens": sum(len(_list(turn.get("token_ids"))) for turn in turns),
        "age_max": age,
        "chosen": _name(row.get("chosen")),
        "excerpt": _excerpt(row, turns),
    }


def _excerpt(row: Row, turns: Sequence[Row]) -> str:
    """The beginning of the last answer."""
    texts = [turn.get("text") for turn in turns[-1:]]
    texts += [one.get("content") for one in _dicts(row.get("messages"))[-1:]]
    text = next((one for one in texts if isinstance(one, str)), "")
    return " ".join(clean(text[:_MAX_EXCERPT]).split())


def _searched(row: Row) -> str:
    texts = [one.get("content") for one in _dicts(row.get("messages"))]
    texts = texts or [turn.get("text") for turn in _dicts(row.get("turns"))]
    parts = [row.get("problem_id"), row.get("cause"), *texts]
    return clean("\n".join(one for one in parts if isinstance(one, str))[:_MAX_SEARCHED])


def rollout_details(row: Row, decode: Callable[[Sequence[int]], list[str]] | None) -> Json:
    """What the page shows of one rollout's row.

    Args:
        decode: the text of each token; None if there is no tokenizer.
    """
    turns = _dicts(row.get("turns"))
    left = MAX_TOKENS
    shown = []
    for turn in turns:
        shown.append(_turn(row, turn, decode, left))
        left -= len(shown[-1]["tokens"])
    for parent, turn in zip(_parents(turns), shown, strict=True):
        turn["parent"] = parent
    return {
        "cause": plain(row.get("cause")),
        "problem": plain(row.get("problem")),
        "metrics": plain(row.get("metrics")),
        "phase_s": plain(row.get("phase_s")),
        "messages": plain(_dicts(row.get("messages"))),
        "turns": shown,
    }


def _turn(
    row: Row, turn: Row, decode: Callable[[Sequence[int]], list[str]] | None, most_tokens: int
) -> Json:
    ids = _list(turn.get("token_ids"))
    names = ("reward", "branch_reward", "is_seen", "finish_reason", "stop_reason", "replica")
    return {
        "text": plain(turn.get("text")),
        **{name: plain(turn.get(name)) for name in (*names, "metrics", "advantage")},
        "prompt_tokens": len(_list(turn.get("prompt_token_ids"))),
        "num_tokens": len(ids),
        "tokens": list(_tokens(row, turn, ids[: max(0, most_tokens)], decode)),
    }


def _tokens(
    row: Row, turn: Row, ids: Sequence[Any], decode: Callable[[Sequence[int]], list[str]] | None
) -> Iterator[Json]:
    texts: Sequence[str | None] = [None] * len(ids)
    if decode is not None and all(_int(one) is not None for one in ids):
        texts = decode(ids)
    names = ("logprobs", "trainer_logprobs", "versions", "loss_mask", "num_kept")
    logprobs, trainer_logprobs, versions, mask, kept = (_list(turn.get(name)) for name in names)
    advantages = turn.get("advantage")
    newest = _int(row.get("version"))
    trained = newest - 1 if newest is not None and row.get("split") == "train" else None
    for at, (token, text) in enumerate(zip(ids, texts, strict=True)):
        logprob, of_trainer = (finite(_at(values, at)) for values in (logprobs, trainer_logprobs))
        version = _int(_at(versions, at))
        has_loss = _at(mask, at) == 1
        yield {
            "text": None if text is None else cut(text, MAX_TOKEN_TEXT),
            "id": _int(token),
            "logprob": logprob,
            "trainer_logprob": of_trainer,
            "ratio": _ratio(of_trainer, logprob),
            "version": version,
            "age": None if trained is None or version is None else trained - version,
            "mask": int(has_loss),
            "advantage": finite(advantages) if has_loss else None,
            "kept": _int(_at(kept, at)),
        }


def _ratio(of_trainer: float | None, logprob: float | None) -> float | None:
    if of_trainer is None or logprob is None:
        return None
    return math.exp(max(-50.0, min(50.0, of_trainer - logprob)))


def _parents(turns: Sequence[Row]) -> list[int | None]:
    """For each turn, the earlier turn whose prompt and completion its prompt extends; the longest
    of several."""
    wholes = [_list(turn.get("prompt_token_ids")) + _list(turn.get("token_ids")) for turn in turns]
    parents: list[int | None] = []
    for index, turn in enumerate(turns[:_MAX_ITEMS]):
        prompt = _list(turn.get("prompt_token_ids"))
        extended = [
            earlier
            for earlier in range(index)
            if wholes[earlier] and prompt[: len(wholes[earlier])] == wholes[earlier]
        ]
        parents.append(max(extended, key=lambda one: len(wholes[one]), default=None))
    return parents + [None] * (len(turns) - len(parents))


# Values of any kind, made harmless.


def clean(text: str) -> str:
    """Without lone surrogates, which neither SQLite nor UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def cut(text: str, most: int) -> str:
    """Cut a text, and say its length if it was longer."""
    if len(text) <= most:
        return clean(text)
    return f"{clean(text[:most])}… [cut: {len(text):,} characters]"


def plain(value: Any, depth: int = 0) -> Any:
    """A value for an answer: JSON types, finite numbers, bounded in size and depth."""
    if isinstance(value, str):
        return cut(value, MAX_TEXT)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if finite(value) is not None and abs(value) < 1 << 53 else finite(value)
    if depth == _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return {cut(str(key), _MAX_NAME): plain(one, depth + 1) for key, one in items}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in value[:_MAX_ITEMS]]
    return cut(str(value), _MAX_NAME)


def _name(value: Any) -> str:
    return cut(value, _MAX_NAME) if isinstance(value, str) else ""


def _int(value: Any) -> int | None:
    is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53
    return value if is_int else None


def _ints(value: Any) -> list[int]:
    return [one for one in _list(value) if _int(one) is not None]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Json]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None
