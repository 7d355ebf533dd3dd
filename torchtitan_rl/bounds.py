"""Allowed values of configuration fields: bounds, as annotations that pydantic checks, and
functions given by name (``package.module:function`` or ``path/file.py:function``).

`field_errors` checks the bounds. Configurations are plain dataclasses: they are
built, changed or read from a file without checks, and then all errors are reported together.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast, get_type_hints

from annotated_types import Interval

from torchtitan_rl.errors import ConfigError, one_line

MAX_SECONDS = 1e7  # four months; Python's own waits overflow at a few centuries
MAX_COUNT = 2**31 - 1
MAX_FLOAT = 1e30  # float32 has 3e38
_MAX_NAMES = 12  # functions in a message


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

# A user, a password or both, also without a scheme; HOST:PORT/@PATH has none.
_LOGIN = re.compile(r"(?<=://)[^/?#@]*@|[^\s/@:]+:(?!//|\d+[/?#])[^\s\[\]]*@")


def without_login(instead: str) -> Check:
    """For URLs, which are printed and recorded. ``instead`` says where the key goes."""
    fix = f"leave user and password out of the URL; {instead}"
    return Check(lambda url: _LOGIN.search(url) is None, fix)


KEY_IN_HEADERS = without_login('name the key in headers ({"Authorization": "Bearer $KEY"})')


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


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise ConfigError, with one message for each wrong field; ``prefix`` as in `field_errors`."""
    if errors := field_errors(config, prefix):
        raise ConfigError(list(errors.values()))


def field_errors(config: Any, prefix: str = "") -> dict[str, str]:
    """One message per wrong field, by its dotted name, including nested configurations. With the
    prefix ``--``, the messages use the names of command-line options.

    The bounds of a field are annotations of its type. All numbers must be finite, including those
    of a task; `Task.errors` checks a task's other values.
    """
    from pydantic import ValidationError  # slow to import

    errors: dict[str, str] = {}
    kind: Any = type(config)
    for field, adapter in _adapters(kind).items():
        name, value = f"{prefix}{field}", getattr(config, field)
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            if prefix == "--":
                name = name.replace("_", "-")
            fixes = dict.fromkeys(
                one["msg"]
                .replace("Input should be", "it must be")
                .replace("Field required", "it must have more items")
                for one in error.errors()
            )
            errors[name] = f"{name} is {_shown(value)}: {' or '.join(fixes)}"
            continue
        parts = value if isinstance(value, dict) else {"": value}
        for part, one in parts.items():
            if dataclasses.is_dataclass(one) and not isinstance(one, type):
                errors |= field_errors(one, f"{name}.{part}." if part else f"{name}.")
    return errors


@functools.cache
def _adapters(kind: Any) -> dict[str, Any]:
    """The pydantic validator of each field."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter
    from pydantic_core import SchemaValidator, core_schema

    strict = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    names = [field.name for field in dataclasses.fields(kind)]
    hints: dict[str, Any] = dict.fromkeys(names, Any)
    for base in reversed(kind.__mro__):
        with suppress(NameError):  # a task's types may be imported for type checkers only
            hints |= get_type_hints(base, include_extras=True)
    adapters: dict[str, Any] = {}
    for name in names:
        hint = hints[name]
        try:
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                adapters[name] = SchemaValidator(core_schema.is_instance_schema(hint))
            else:
                adapters[name] = TypeAdapter(hint, config=strict)
        except PydanticUserError:  # pydantic does not know the type of a task's field
            adapters[name] = TypeAdapter(Any)
    return adapters


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, int | float | Path) else repr(value)
    return _LOGIN.sub("...@", text if text.isprintable() else repr(text))


def import_file(file: Path, name: str, folder: Path) -> ModuleType:
    """Run a Python file as the module ``name``; it may import the modules of ``folder``. Raises
    what the file's code raises."""
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
    ``path/file.py:function``. Raises ConfigError: the name contains no module, the module cannot be
    imported, or it has no such function."""
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
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [one for one, value in functions if value.__module__ == module.__name__]
        public = [one for one in own if not one.startswith("_")]
        found = ", ".join([*public[:_MAX_NAMES], *(["..."] if public[_MAX_NAMES:] else [])])
        raise ConfigError(f"{place} has no function {attribute!r}; it has {found or 'none'}")
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
