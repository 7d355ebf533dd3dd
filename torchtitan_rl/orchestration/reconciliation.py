"""Reconciles the ledger with its source: the tokens that the replicas say they sampled.

Invariant: every token that a live replica sampled belongs to a running request or was entered when
its request ended. Any other token is recorded in a metric that must be 0.
"""

from __future__ import annotations

from torchtitan_rl.aio import BackgroundTask
from torchtitan_rl.orchestration.records import AccountRecord
from torchtitan_rl.orchestration.run_state import RunState


class Reconciliation:
    """Runs one comparison at a time in the background, and a last one at the end of the run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._running = BackgroundTask()

    def start(self) -> None:
        """Compare the ledger of now, unless a comparison still runs."""
        if not self._running.is_running:
            step, version = self._state.step, self._state.version
            self._running.start("ledger reconciliation", self._compare, step, version)

    async def finish(self) -> None:
        """Wait for the running comparison, then compare once more."""
        with self._state.waits.track("the ledger is compared with what the replicas sampled"):
            await self._running.wait()
            await self._compare(self._state.step, self._state.version)

    async def close(self) -> None:
        """Cancel the running comparison."""
        await self._running.close()

    async def _compare(self, step: int, version: int) -> None:
        router = self._state.parts.router
        replicas = (await router.account()).values()
        # No await below: a request leaves the router and enters the ledger in one moment.
        missing = router.received_tokens() - router.held_tokens() - self._state.ledger.entered
        record = AccountRecord(
            step=step,
            version=version,
            sampled=sum(replica.sampled for replica in replicas),
            lost=sum(replica.lost_tokens for replica in replicas),
            unaccounted=missing + sum(replica.unaccounted or 0 for replica in replicas),
        )
        self._state.recorder.record_account(record)
        if record.unaccounted:
            self._state.recorder.say(
                f"LEDGER MISMATCH: {record.unaccounted} of the {record.sampled} tokens that "
                f"replicas sampled up to step {step} are not in the ledger; please report this"
            )
