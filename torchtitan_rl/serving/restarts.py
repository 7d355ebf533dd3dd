"""The endpoint's process, as the controller sees it, and its restarts on the same port: at most
``max_restarts`` in a row soon after its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torchtitan_rl.aio import loop_s
from torchtitan_rl.errors import EndpointLostError, TorchtitanRLError
from torchtitan_rl.failures import Failure, Part, restart_delay_s
from torchtitan_rl.routing.restarts import SETTLED_S
from torchtitan_rl.serving.link import ToController, ToEndpoint


class Endpoint(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def base_url(self) -> str:
        """The base of its URLs, such as ``http://127.0.0.1:8000/v1``."""

    def send(self, messages: tuple[ToEndpoint, ...]) -> None:
        """Pass a batch to the endpoint, without waiting for it."""

    async def receive(self) -> tuple[ToController, ...]:
        """Wait for the next batch. After each `SystemStatus` that was sent to the endpoint, a batch
        arrives, even if it is empty. Only one call may wait at a time. Raises EndpointLostError:
        the endpoint's process is gone, has failed, or is closed."""

    async def restart(self) -> None:
        """End what is left of a lost process, and start another one, under another name; `start`
        then makes it serve under the same URLs. Raises TorchtitanRLError, OSError: it did not
        start."""

    async def start(self) -> None:
        """Serve. Raises as `restart` does."""

    async def drain(self, grace_s: float) -> None:
        """Stop accepting connections. Running requests have ``grace_s`` seconds to end, during
        which batches still pass in both directions; requests that have not ended then are refused.
        """

    async def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class EndpointRestarts:
    """Restarts of one endpoint. ``on_failure`` is called with the ended report of each loss."""

    max_restarts: int
    say: Callable[[str], None]
    on_failure: Callable[[Failure], None]
    _num_quick: int = 0  # consecutive restarts
    _begun_s: float = -SETTLED_S  # when it began to serve

    async def restart(self, endpoint: Endpoint, error: EndpointLostError) -> Failure:
        """Return the report of the loss when the endpoint serves again. Raises EndpointLostError:
        the endpoint is given up."""
        failure = Failure.of(Part.ENDPOINT, endpoint.name, error, now_s=loop_s())
        if loop_s() - self._begun_s >= SETTLED_S:
            self._num_quick = 0
        cause: Exception = error
        num_failed = 0
        while self._num_quick < self.max_restarts:
            self._num_quick += 1
            self.say(f"{endpoint.name} is lost and is started again: {cause}")
            try:
                try:
                    await endpoint.restart()
                    failure = failure.restarted(endpoint.name, now_s=loop_s())
                    await endpoint.start()
                except (TorchtitanRLError, OSError) as another:
                    cause, num_failed = another, num_failed + 1
                    await asyncio.sleep(restart_delay_s(num_failed))
                    continue
            except asyncio.CancelledError:
                self.on_failure(failure.ended("the run ended first"))
                raise
            self._begun_s = loop_s()
            self.say(f"{endpoint.name} serves again")
            return failure.serving(now_s=loop_s())
        why = f"after {self.max_restarts} restarts in a row" if self.max_restarts else "disabled"
        self.on_failure(failure.ended(why))
        raise EndpointLostError(f"{cause}; it is not started again ({why})") from error
