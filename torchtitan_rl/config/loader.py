"""Reading a configuration: a Python file with a `RunConfig` named ``config``, then the options.

The ready configurations of the package are found by their names alone: ``alphabet_sort_tiny``.

What a machine has installed, and how it differs from what another one has.

A run's processes on other hosts unpickle what the controller sends: both sides need the same code.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from torchtitan_rl.config.checks.fields import field_errors
from torchtitan_rl.config.options import parse_options
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.functions import import_file

_READY_DIR = Path(__file__).parents[1] / "configs"


def load_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration in ``path``, which may be the name of a ready configuration instead of a
    file, with command-line ``overrides`` applied.

    Raises:
        ConfigError: no such file, one that does not run, no `RunConfig` in it, or a wrong option.
        SystemExit: ``--help``.
    """
    file = _config_file(path)
    if file.suffix != ".py":
        raise ConfigError(f"CONFIG is {path}: give a Python file")
    try:
        module = import_file(file, f"config_file_{path.stem}", path.parent)
    except (ConfigError, SystemExit):
        raise
    except Exception as error:
        raise ConfigError(f"CONFIG is {path}: {_cause(error, file)}; correct the file") from error
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"CONFIG is {path}: it has no RunConfig named 'config'; write config = RunConfig(...)"
        )
    if not any(name.startswith("task") for name in field_errors(config)):
        config = replace(config, task=config.task.with_all_options())
    return parse_options(RunConfig, overrides, prog=f"torchtitan-rl train {path}", default=config)


def split_config(words: Sequence[str], *, prog: str) -> tuple[Path, list[str]]:
    """CONFIG, which is the first of a command's words, and the others.

    Raises:
        ConfigError: the first one is an option, or there is none.
    """
    if not words or words[0].startswith("-"):
        place = f"it comes first, {prog} CONFIG [options]; " if len(words) > 1 else ""
        raise ConfigError(
            f"CONFIG is missing: {place}give a Python file or one of {', '.join(ready_configs())}"
        )
    return Path(words[0]), list(words[1:])


def ready_configs() -> tuple[str, ...]:
    """Names of the configurations that come with the package."""
    return tuple(sorted(file.stem for file in _READY_DIR.glob("[!_]*.py")))


def _config_file(given: Path) -> Path:
    if given.is_file():
        return given
    if str(given) in ready_configs():
        return _READY_DIR / f"{given}.py"
    raise ConfigError(
        f"CONFIG is {given}: there is no such file, and no ready configuration of that name; give "
        f"a Python file or one of {', '.join(ready_configs())}"
    )


def _cause(error: Exception, path: Path) -> str:
    """In one line, with the line of the file that it came from."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"line {frames[-1].lineno}, " if frames else ""
    return f"{where}{one_line(error)}"


_PACKAGE = Path(__file__).parents[1]
_USERS_OF_THE_PACKAGE = ("experiments", "configs")  # only the controller imports them
_LIBRARIES = ("torch", "vllm", "torchtitan", "torchmonarch", "transformers")
_CODE = "code of torchtitan-rl"


@functools.cache
def installed() -> dict[str, str]:
    """Versions by name, and a digest of this package's code."""
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
    # Another version has other code anyway.
    return found[:-1] if len(found) > 1 and found[-1].startswith(_CODE) else found


def code_digest(package: Path) -> str:
    """Of the names and contents of all Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if inner.parts[0] not in _USERS_OF_THE_PACKAGE:
            digest.update(f"{inner}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    """Without what says which accelerator it is built for (``2.13.0+cpu``)."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"
