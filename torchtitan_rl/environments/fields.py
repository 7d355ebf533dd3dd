"""Checks that several tasks make of their fields; each message names field, value and fix."""

from __future__ import annotations

import operator
import re

import regex

from torchtitan_rl.data.columns import template_error

_COMPARE = {
    "above": operator.gt,
    "below": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
}
_BOUND = re.compile(rf"({'|'.join(_COMPARE)}) (\S+?)(?:,|$)")


def range_errors(owner: object, section: str, **rules: str) -> list[str]:
    """One message for each number of ``owner`` that breaks its rule.

    >>> from torchtitan_rl import RestConfig
    >>> range_errors(RestConfig(epochs=-1), "task.rest", epochs="at least 0, below 9")
    ['task.rest.epochs=-1: must be at least 0, below 9']
    """
    found = []
    for name, rule in rules.items():
        value = getattr(owner, name)
        if not all(_COMPARE[word](value, float(end)) for word, end in _BOUND.findall(rule)):
            found.append(f"{section}.{name}={value}: must be {rule}")
    return found


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
    """A message if the text is not an address of HTTP."""
    if (value := getattr(owner, name)).startswith(("http://", "https://")):
        return []
    return [f"{section}.{name}={value!r}: must begin with http:// or https://"]
