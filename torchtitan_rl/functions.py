"""Functions named by a configuration: ``package.module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torchtitan_rl.errors import ConfigError, one_line


def import_file(file: Path, name: str, folder: Path) -> ModuleType:
    """Run a Python file as the module ``name``; it may import the modules of ``folder``.

    Raises:
        Exception: what the file's code raises.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # tyro reads help texts from its source
    sys.path.insert(0, str(folder.resolve()))
    spec.loader.exec_module(module)
    return module


def load_function(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        ConfigError: the name has no module, or its module no such function.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ConfigError("give package.module:function or path/file.py:function")
    try:
        module = _module(place)
    except (Exception, SystemExit) as error:  # a script's last line: exit(main())
        cause = one_line(error)
        raise ConfigError(f"{place} cannot be imported ({cause})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{place} has no function {attribute!r}")
    return cast(Callable[..., Any], function)


def absolute(name: str) -> str:
    """The name by which a process in another folder finds the same function."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


@functools.cache
def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve()
    return import_file(file, str(file), file.parent)
