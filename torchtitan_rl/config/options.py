"""Command-line options of a configuration class, by tyro; an error is one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from torchtitan_rl.errors import ConfigError

_C = TypeVar("_C")
_BORDER, _RULES = " │|╰╯+", "─-"  # of tyro's boxes; what they are made of goes by the encoding


def parse_options(
    kind: type[_C], words: Sequence[str], *, prog: str, default: _C | None = None
) -> _C:
    """A ``kind`` with these options, on top of ``default``.

    Raises:
        ConfigError: an option is not known, lacks its value, or has one of the wrong type.
        SystemExit: ``--help`` was asked for.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if default is None:
                return tyro.cli(kind, args=words, prog=prog)
            return tyro.cli(kind, args=words, prog=prog, default=default)
    except SystemExit as ended:
        if ended.code == 0:
            raise
    raise ConfigError(f"{_first_section(errors.getvalue())}; see {prog} --help")


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own options, and those of a run's configuration: these have a dot in their names.

    >>> split_options(["model", "--samples", "4", "--generator.replicas", "2"])
    (['model', '--samples', '4'], ['--generator.replicas', '2'])
    """
    own: list[str] = []
    others: list[str] = []
    part = own
    for word in words:
        if word.startswith("--"):
            part = others if "." in word.partition("=")[0] else own
        part.append(word)
    return own, others


def _first_section(box: str) -> str:
    """The message in tyro's box, in one line: what is unknown, with the options that it suggests,
    before what is missing."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # below the title
        text = line.strip(_BORDER)
        if not text:
            continue
        if set(text) - set(_RULES):
            sections[-1].append(line[2:].rstrip(_BORDER))
        elif sections[-1]:
            sections.append([])
    begins = {one[0].split()[0]: one for one in sections if one}
    section = begins.get("Unrecognized", sections[0])
    message = " ".join(" ".join(section).split()).rstrip(".")
    if message.startswith("Missing from"):
        return _missing([line.split()[0] for line in section[1:] if line[:5] != " " * 5])
    if positional := re.match(r"Missing value for argument '(\w+)'", message):
        return _missing([positional[1].upper()])
    words = (line.split()[0].strip(",") for line in begins.get("Perhaps", ()))
    similar = [word for word in words if word.startswith("--")]
    return f"{message} (similar: {', '.join(similar)})" if similar else message


def _missing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
