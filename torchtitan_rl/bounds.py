"""Allowed values of configuration fields: bounds, as annotations that pydantic checks, and
functions given by name (``package.module:function`` or ``path/file.py:function``).

`config.checks.field_errors` checks the bounds. Configurations are plain dataclasses: they are
built, changed or read from a file without checks, and then all errors are reported together.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

from annotated_types import Interval

from torchtitan_rl.errors import ConfigError, one_line

MAX_SECONDS = 1e7  # four months; Python's own waits overflow at a few centuries
MAX_COUNT = 2**31 - 1
MAX_FLOAT = 1e30  # float32 has 3e38


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on a value of the right type, and the fix that its error message names."""

    holds: Callable[[Any], bool]
    fix: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError, core_schema  # which loads slowly

        def check(value: Any) -> Any:
            if not self.holds(value):
                raise PydanticCustomError("check", "{fix}", {"fix": self.fix})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


def is_line(text: object) -> bool:
    """Whether a text or path is not empty and prints on one line."""
    return bool(str(text).strip()) and str(text).isprintable()


NAMED = Check(is_line, "give one line of text, not empty, without control characters")
"""For texts and paths that must not be empty."""
OPTIONAL = Check(lambda text: text == "" or is_line(text), "give one line of text, or '' for none")
"""For texts that may be empty."""

Count = Annotated[int, Interval(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Interval(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Interval(ge=1, le=1 << 24)]
Ranks = Annotated[int, Interval(ge=1, le=4096)]
Threads = Annotated[int, Interval(ge=1, le=1024)]
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
Seconds = Annotated[float, Interval(ge=0.01, le=MAX_SECONDS)]  # some loops poll at this interval
LongSeconds = Annotated[float, Interval(ge=1.0, le=MAX_SECONDS)]
Share = Annotated[float, Interval(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Interval(gt=0.0, le=1.0)]
ShareBelowOne = Annotated[float, Interval(ge=0.0, lt=1.0)]
Weight = Annotated[float, Interval(ge=0.0, le=MAX_FLOAT)]
PositiveFloat = Annotated[float, Interval(gt=0.0, le=MAX_FLOAT)]
CallSeconds = Annotated[float, Interval(gt=0.0, lt=1e6)]
OpenShare = Annotated[float, Interval(gt=0.0, lt=1.0)]
NotNegative = Annotated[float, Interval(ge=0.0)]
Name = Annotated[str, NAMED]
OptionalName = Annotated[str, OPTIONAL]


def import_file(file: Path, name: str, folder: Path) -> ModuleType:
    """Run a Python file as the module ``name``; it may import the modules of ``folder``.

    Raises:
        Exception: the file's code raised it.
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
    """Import the function called ``name``: ``package.module:function`` or
    ``path/file.py:function``.

    Raises:
        ConfigError: the name contains no module, the module cannot be imported, or it has no such
            function.
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
    """Return the name by which a process in another working folder finds the same function."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


@functools.cache
def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve()
    return import_file(file, str(file), file.parent)
