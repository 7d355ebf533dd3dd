"""Refusals: what a client is told of an error, a status and a message without internals."""

from __future__ import annotations

import logging

from torchtitan_rl.errors import GenerationError, GenerationTimeoutError, InvalidRequestError
from torchtitan_rl.serving.messages import Refusal, RefusedError

logger = logging.getLogger(__name__)


def refused(status: int, code: str, message: str) -> RefusedError:
    return RefusedError(Refusal(status=status, message=message, code=code))


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error; unexpected ones are logged with their traceback."""
    match error:
        case RefusedError():
            return error.refusal
        case InvalidRequestError():
            return Refusal(status=400, message=str(error), code="invalid_request")
        case GenerationTimeoutError():
            message = "the request was not completed in time"
            return Refusal(status=504, message=message, code="timeout")
        case GenerationError():
            logger.warning("a client's request failed: %s", error)
            message = "no replica could complete the request"
            return Refusal(status=503, message=message, code="no_replica")
        case _:
            logger.error("a client's request failed unexpectedly", exc_info=error)
            return Refusal(status=500, message="internal error", code="internal_error")
