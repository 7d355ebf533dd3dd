"""What clients say of sessions, checked, and what they are told of one that is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_rl.serving.messages import RefusedError
from torchtitan_rl.serving.refusals import refused
from torchtitan_rl.serving.session_record import SessionReport

_MAX_REWARD = 1e30  # in JSON there are numbers that no float can hold


def checked_reward(reward: object) -> float | None:
    """Raises:
    RefusedError: it is no finite number.
    """
    if reward is None:
        return None
    if isinstance(reward, int | float) and -_MAX_REWARD <= reward <= _MAX_REWARD:
        return float(reward)
    raise refused(400, "invalid_request", f"reward has to be a number of at most {_MAX_REWARD}")


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Raises:
    RefusedError: it is left out, empty or no text.
    """
    value = arguments.get(name)
    if isinstance(value, str) and value:
        return value
    raise refused(400, "invalid_request", f"{name} has to be a text that is not empty")


def closed(session_id: str, report: SessionReport | None = None) -> RefusedError:
    how = f" ({report.ending.value})" if report is not None and report.ending else ""
    return refused(
        400, "session_closed", f"session {session_id!r} is closed{how}; begin another one"
    )
