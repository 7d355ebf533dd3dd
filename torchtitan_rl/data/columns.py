"""Fills templates with the columns of a row, and evaluates conditions; errors name the row's place.

A template is a text with columns in braces, in the syntax of `str.format`: ``{question}``; an item
of a nested column is ``{reward_model[ground_truth]}``. A condition is ``COLUMN OPERATOR VALUE``:
``level <= 3``, ``subject == algebra``, ``answer != null``. A value is JSON, ``True``, ``False``,
``None``, or a text in single, double or no quotes. Its type must be the column's type, or null.

The functions ``*_errors`` check fields of tasks: each message names field, value and fix.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from numbers import Number
from string import Formatter
from typing import Any

import regex

from torchtitan_rl.data.rows import DataError, Row
from torchtitan_rl.errors import one_line

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONSTANTS = {"True": True, "False": False, "None": None}
# Types of columns, each with its Python type and how its values are written in a condition.
_KINDS: Mapping[str, tuple[type, str]] = {
    "a boolean": (bool, "true or false"),
    "a number": (Number, "a number without quotes"),
    "a text": (str, "a text in double quotes"),
    "a list": (list, "a list in JSON"),
    "an object": (dict, "an object in JSON"),
    "null": (type(None), "null"),
}
_ANSWER_TIMEOUT_S = 10.0
_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|<|>)\s*(.*?)\s*")


def template_error(template: str) -> str | None:
    """The error in a template, or None."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"{error}; write {{{{ and }}}} for braces"
    if any(not re.match(r"\w", name) for name in names):
        return "empty braces; write the name of a column in them"
    return None


def fill(template: str, row: Row, place: str) -> str:
    """Fill a template with a row's columns; raises as `column` does."""
    for _, name, _, _ in Formatter().parse(template):
        if name:
            column(re.split(r"[.\[]", name, maxsplit=1)[0], row, place)
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        cause = one_line(error)
        raise DataError(f"{place}: {template!r} cannot be filled ({cause})") from error


def column(name: str, row: Row, place: str) -> Any:
    """The value of a column. DataError: the column is missing or null."""
    if name not in row:
        raise DataError(f"{place}: no column {name!r}; it has {', '.join(row)}")
    if row[name] is None:
        raise DataError(f"{place}: column {name!r} is null; leave such rows out: {name} != null")
    return row[name]


class Condition:
    """A condition that rows must meet; ValueError if the text is not one.

    >>> Condition("level <= 3").holds({"level": 2}, "line 1")
    True
    """

    def __init__(self, text: str) -> None:
        found = _CONDITION.fullmatch(text)
        if found is None:
            signs = " ".join(_OPERATORS)
            raise ValueError(f"{text!r} is not a condition; write COLUMN OPERATOR VALUE ({signs})")
        self._text = text
        self._column, sign, value = found.groups()
        self._compare = _OPERATORS[sign]
        self._value = _parse(value)

    def holds(self, row: Row, place: str) -> bool:
        """Whether the row meets the condition. DataError: the column is missing, or its value has
        another type than the condition's."""
        if self._column not in row:
            raise DataError(f"{place}: no column {self._column!r}; it has {', '.join(row)}")
        found = row[self._column]
        kind, other = _kind(found), _kind(self._value)
        if kind != other and "null" not in (kind, other):
            example = _KINDS[kind][1] if kind in _KINDS else "null, the only one for such a column"
            raise DataError(
                f"{place}: column {self._column!r} is {kind}, and the value of {self._text!r} is "
                f"{other}; write the value as {example}"
            )
        try:
            return bool(self._compare(found, self._value))
        except TypeError as error:
            raise DataError(f"{place}: {self._text!r} cannot be checked ({error})") from error


def _parse(value: str) -> Any:
    if value in _CONSTANTS:
        return _CONSTANTS[value]
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1]
    try:
        return json.loads(value)
    except ValueError:
        return value


def _kind(value: object) -> str:
    for kind, (of, _) in _KINDS.items():
        if isinstance(value, of):
            return kind
    return f"of type {type(value).__name__}"


def template_errors(owner: object, section: str, *names: str) -> list[str]:
    """One message for each text of ``owner`` that is not a template."""
    values = {name: getattr(owner, name) for name in names}
    wrong = {name: template_error(value) for name, value in values.items()}
    return [f"{section}.{name}={values[name]!r}: {why}" for name, why in wrong.items() if why]


def pattern_errors(owner: object, section: str, *names: str) -> list[str]:
    """One message for each text of ``owner`` that is not a regular expression."""
    found = []
    for name in names:
        try:
            regex.compile(getattr(owner, name))
        except regex.error as error:
            value = getattr(owner, name)
            found.append(f"{section}.{name}={value!r}: not a regular expression ({error})")
    return found


def url_errors(owner: object, section: str, name: str) -> list[str]:
    """A message if the text is not an HTTP or HTTPS address."""
    if (value := getattr(owner, name)).startswith(("http://", "https://")):
        return []
    return [f"{section}.{name}={value!r}: must begin with http:// or https://"]


def server_errors(owner: object, section: str, name: str) -> list[str]:
    """`url_errors`, or a message if no HTTP server answers at the address."""
    if found := url_errors(owner, section, name):
        return found
    import httpx

    url = getattr(owner, name)
    try:
        with httpx.stream("HEAD", url, timeout=_ANSWER_TIMEOUT_S):
            return []  # any answer shows that the server is there
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = one_line(error)
    return [f"{section}.{name}={url!r}: no server answers ({cause}); start it before the run"]
