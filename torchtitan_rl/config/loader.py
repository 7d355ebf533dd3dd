"""Reads a configuration: a Python file with a `RunConfig` named ``config``, and command-line
options, which tyro parses. A ready configuration of the package is found by its name:
``alphabet_sort_tiny``.

This module also lists the versions that are installed on a machine, and compares them with those
of another machine. All machines need the same code, because processes on other hosts unpickle
objects that the controller sends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import platform
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import tyro

from torchtitan_rl.bounds import field_errors, import_file
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError, one_line

_READY_DIR = Path(__file__).parents[1] / "configs"
_SUPERVISED = ("sft", "dpo")  # the first words of the names of their ready configurations
_C = TypeVar("_C")


def load_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration in the file ``path`` (or the ready configuration of this name), and
    apply the command-line options ``overrides``.

    Raises:
        ConfigError: the file does not exist, fails, or has no `RunConfig`; or an option is wrong.
        SystemExit: ``--help`` is among the options.
    """
    config = _config_in(path, RunConfig)
    if not any(name.startswith("task") for name in field_errors(config)):
        config = replace(config, task=config.task.with_all_options())
    return parse_options(RunConfig, overrides, prog=f"torchtitan-rl train {path}", default=config)


def load_supervised(path: Path, overrides: Sequence[str], *, kind: type[_C], command: str) -> _C:
    """Load the configuration of another kind, like `load_config`."""
    config = _config_in(path, kind, command=command)
    return parse_options(kind, overrides, prog=f"torchtitan-rl {command} {path}", default=config)


def _config_in(path: Path, kind: type[_C], *, command: str = "train") -> _C:
    file = _config_file(path, command)
    if file.suffix != ".py":
        raise ConfigError(f"CONFIG is {path}: give a Python file")
    try:
        module = import_file(file, f"config_file_{path.stem}", path.parent)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:  # the file's message, or a signal
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        cause = f"line {lines[-1]}, {one_line(error)}" if lines else one_line(error)
        raise ConfigError(f"CONFIG is {path}: {cause}; correct the file") from error
    config = getattr(module, "config", None)
    if not isinstance(config, kind):
        raise ConfigError(
            f"CONFIG is {path}: it has no {kind.__name__} named 'config'; write config = "
            f"{kind.__name__}(...)"
        )
    return config


def split_config(
    words: Sequence[str], *, prog: str, command: str = "train"
) -> tuple[Path, list[str]]:
    """Split a command's words into CONFIG, which is the first word, and the others. ``command`` is
    the one whose ready configurations an error lists.

    Raises:
        ConfigError: the first word is an option, or there is no word.
    """
    if not words or words[0].startswith("-"):
        place = f"it comes first, {prog} CONFIG [options]; " if len(words) > 1 else ""
        raise ConfigError(
            f"CONFIG is missing: {place}give a Python file or one of "
            f"{', '.join(ready_configs(command))}"
        )
    return Path(words[0]), list(words[1:])


def ready_configs(command: str = "train") -> tuple[str, ...]:
    """Names of the configurations that come with the package for ``train``, ``sft`` or ``dpo``."""
    names = sorted(file.stem for file in _READY_DIR.glob("[!_]*.py"))
    firsts = {name: name.partition("_")[0] for name in names}
    return tuple(
        name
        for name in names
        if firsts[name] == command or (command == "train" and firsts[name] not in _SUPERVISED)
    )


def _config_file(given: Path, command: str) -> Path:
    if given.is_file():
        return given
    if str(given) in ready_configs(command):
        return _READY_DIR / f"{given}.py"
    what = "there is no such file, and no ready configuration of that name"
    for other in ("train", *_SUPERVISED):
        if str(given) in ready_configs(other):
            what = f"it is for torchtitan-rl {other}"
    raise ConfigError(
        f"CONFIG is {given}: {what}; give a Python file or one of "
        f"{', '.join(ready_configs(command))}"
    )


_PACKAGE = Path(__file__).parents[1]
_USERS_OF_THE_PACKAGE = ("experiments", "configs")  # imported only by the controller
_LIBRARIES = ("torch", "vllm", "torchtitan", "torchmonarch", "transformers")
_CODE = "code of torchtitan-rl"


@functools.cache
def installed() -> dict[str, str]:
    """The versions of the libraries, and a digest of this package's code, by name."""
    versions = {"torchtitan-rl": _version("torchtitan-rl"), "Python": platform.python_version()}
    versions |= {name: _version(name) for name in _LIBRARIES}
    return versions | {_CODE: code_digest(_PACKAGE)}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One message for each name that differs: ``torch 2.12.0, and the controller has 2.13.0``."""
    found = [
        f"{name} {there.get(name, 'of an unknown version')}, and the controller has {version}"
        for name, version in here.items()
        if there.get(name) != version
    ]
    # If a version differs, the code digest of this package adds nothing.
    return found[:-1] if len(found) > 1 and found[-1].startswith(_CODE) else found


def code_digest(package: Path) -> str:
    """A digest of the names and contents of all Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if inner.parts[0] not in _USERS_OF_THE_PACKAGE:
            digest.update(f"{inner}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    """The version of a package, without the suffix for its accelerator (``2.13.0+cpu``)."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"


# Of a field with several types: the option, what it takes, and the given words.
_NO_TYPE = r"Error parsing (\S+): no type matching (\S+) .* from \[(.*?)\]\."
_KINDS = {"INT": "a whole number", "FLOAT": "a number"}
_BORDER, _RULES = " │|╰╯+", "─-"  # characters of tyro's boxes, which depend on the encoding


def parse_options(
    kind: type[_C], words: Sequence[str], *, prog: str, default: _C | None = None
) -> _C:
    """Parse options into a ``kind``, starting from ``default``.

    Raises:
        ConfigError: an option is unknown, lacks its value, or has a value of the wrong type.
        SystemExit: ``--help`` is among the options.
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
    """Split words into a command's own options and those of a run's configuration, whose names have
    a dot.

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


def take_options(words: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split words into the values of the options ``names``, and the other words.

    >>> take_options(["--count", "4", "--task.digits=2"], ["--count", "--split"])
    ({'--count': '4'}, ['--task.digits=2'])

    Raises:
        ConfigError: an option has no value.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        if name not in names:
            rest.append(word)
            continue
        given[name] = value if has_value else next(left, "")
        if not given[name] or (given[name].startswith("--") and not has_value):
            raise ConfigError(f"{name} is given without a value; see --help")
    return given, rest


def _first_section(box: str) -> str:
    """The message in tyro's box, in one line. If an option is unknown, the message is about this
    option (with the similar options that tyro suggests), even if another option is missing."""
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
    if wrong := re.match(_NO_TYPE, message):
        kinds = re.sub(r"[{}]", "", wrong[2]).replace(",", "|").split("|")
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
        return f"{wrong[1]} is {wrong[3]}: give {' or '.join(kinds)}"
    words = (line.split()[0].strip(",") for line in begins.get("Perhaps", ()))
    similar = [word for word in words if word.startswith("--")]
    return f"{message} (similar: {', '.join(similar)})" if similar else message


def _missing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
