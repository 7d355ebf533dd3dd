"""Reading a configuration: a Python file with a `RunConfig` named ``config``, then the options."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.config.options import parse_options
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration in ``path`` with command-line ``overrides`` applied.

    Raises:
        ConfigError: no such file, one that does not run, no `RunConfig` in it, or a wrong option.
        SystemExit: ``--help``.
    """
    if not path.is_file():
        raise ConfigError(
            f"CONFIG is {path}: there is no such file; give one like those in configs/"
        )
    spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"CONFIG is {path}: give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # tyro reads the help texts from its source
    try:
        spec.loader.exec_module(module)
    except (ConfigError, SystemExit):
        raise
    except Exception as error:
        raise ConfigError(f"CONFIG is {path}: {_cause(error, path)}; correct the file") from error
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"CONFIG is {path}: it has no RunConfig named 'config'; write config = RunConfig(...)"
        )
    return parse_options(RunConfig, overrides, prog=f"torchtitan-rl train {path}", default=config)


def _cause(error: Exception, path: Path) -> str:
    """In one line, with the line of the file that it came from."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"line {frames[-1].lineno}, " if frames else ""
    return " ".join(f"{where}{type(error).__name__}: {error}".split())
