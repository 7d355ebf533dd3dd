"""Compares the account with its source: what replicas say they sampled.

Invariant: every token that a live replica sampled is held by a running request, or was entered when
its request ended. Anything else is reported, as a metric that must be 0.
"""

from __future__ import annotations

import asyncio

from torchtitan_rl.orchestration.records import AccountRecord, Recorder
from torchtitan_rl.orchestration.rows import Rows
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.sampling import SampledTokens
from torchtitan_rl.routing.router import GeneratorRouter


class AccountCheck:
    """Checks run in the background, one at a time; the last one is waited for."""

    def __init__(
        self,
        state: RunState,
        *,
        router: GeneratorRouter,
        sampled: SampledTokens,
        rows: Rows,
        recorder: Recorder,
    ) -> None:
        self._state = state
        self._router = router
        self._sampled = sampled
        self._rows = rows
        self._recorder = recorder
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check the account of now, unless a check still runs."""
        if self._running is None or self._running.done():
            step, version = self._state.step, self._state.version
            self._running = asyncio.create_task(self._check(step, version), name="account check")

    async def finish(self) -> None:
        """Wait for the check that runs, and check once more."""
        with self._state.waits.on("the account is compared with what replicas sampled"):
            if self._running is not None:
                await self._running
            await self._check(self._state.step, self._state.version)

    async def close(self) -> None:
        """Give up the check that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _check(self, step: int, version: int) -> None:
        replicas = (await self._router.account()).values()
        # No await from here on: what requests ended with was entered in the same moment.
        entered = self._sampled.for_groups + self._sampled.for_others
        missing = self._router.received_tokens() - self._router.held_tokens() - entered
        record = AccountRecord(
            step=step,
            version=version,
            sampled=sum(replica.sampled for replica in replicas),
            lost=sum(replica.lost_tokens for replica in replicas),
            unaccounted=missing + sum(replica.unaccounted or 0 for replica in replicas),
        )
        self._rows.account(record)
        if record.unaccounted:
            self._recorder.say(
                f"THE ACCOUNT IS WRONG: of {record.sampled} tokens that replicas sampled up to "
                f"step {step}, {record.unaccounted} were not entered; please report this"
            )
