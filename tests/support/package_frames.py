"""Where coroutines of the package are suspended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torchtitan_rl

_PACKAGE = f"{Path(torchtitan_rl.__file__).parent}/"


def is_of_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def file_and_line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def suspended_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of the package, outermost first. Of a wrapper, those of its ``inner`` one."""
    while coroutine is not None:
        coroutine = getattr(coroutine, "inner", coroutine)
        frame = _first(coroutine, "cr_frame", "ag_frame", "gi_frame")
        if frame is not None and is_of_package(frame):
            yield frame
        coroutine = _first(coroutine, "cr_await", "ag_await", "gi_yieldfrom")


def _first(coroutine: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(coroutine, name, None))), None)
