"""What the endpoint's own routes share: the way to the controller, and the errors they document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel

from torchtitan_rl.serving.messages import CommandName


class Commands(Protocol):
    """Carries commands to the controller, as `ControllerLink` does."""

    async def command(self, name: CommandName, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises:
        RefusedError: the controller refused it.
        """
        ...


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(BaseModel):
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 409, 413, 422, 503)
}
