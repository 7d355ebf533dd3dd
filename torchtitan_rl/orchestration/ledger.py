"""Records what happened to each sampled token and each admitted group of a run, and compares this
with the replicas' own counts.

Tokens are recorded twice, and both records must agree: when a request ends (`on_ended`), and when a
group leaves the buffer (with the token counts of its batch).

Invariants, at any moment: tokens ``generated = trained + masked + discarded + buffered``; groups
``admitted = trained + discarded + buffered``. A group leaves once. A request is recorded once,
however it ends. Tokens that its caller does not receive are discarded in the same call, so the
ledger has exactly the tokens of a group's rollouts. A call that would break an invariant raises an
error and changes nothing. Every token that a live replica sampled belongs to a running request, or
was recorded at its end; `Reconciliation` counts all others in a metric that must be 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchtitan_rl.aio import BackgroundTask
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    LedgerTotals,
    Recorder,
    TokenCounts,
    group_of_request,
)
from torchtitan_rl.orchestration.watchdog import WaitRegistry
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest

MASKED_CAUSES = frozenset(
    {"nonfinite_logprob", "overlong", "truncated_sampling", "unpaired", "unseen_turn"}
)
"""Causes in `TokenCounts.discarded` that count as masked."""

CUT = "cut"
"""Cause of tokens whose request was cancelled, timed out or lost with its replica."""


class LedgerError(TorchtitanRLError):
    """The ledger does not add up: tokens or groups were lost or counted twice."""


class TokenLedger:
    """Totals since the run began; `state_dict` is part of each checkpoint.

    ``entered`` counts the tokens of all requests that ended since this process started, including
    the requests of evaluations and of the endpoint's clients. Methods with a group's id raise
    `LedgerError` if the group is not in the buffer.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.groups_admitted = self.groups_trained = 0
        self.groups_discarded: Counter[str] = Counter()  # by cause
        self._tokens_of: dict[str, int] = {}  # of each group in the buffer
        self._generated = self._trained = 0
        self._masked: Counter[str] = Counter()
        self._discarded: Counter[str] = Counter()

    def on_ended(self, request: GenerationRequest, tokens: Completion, is_returned: bool) -> None:
        """Record that a request ended with ``tokens``, which its caller gets if ``is_returned``.
        Called by the router."""
        resumed = len(request.resume_from.token_ids) if request.resume_from is not None else 0
        sampled = len(tokens.token_ids) - resumed
        self.entered += sampled
        group_id = group_of_request(request)
        if group_id is None or group_id not in self._tokens_of:
            return
        self.generate(group_id, sampled)
        if not is_returned:
            self.discard_tokens(group_id, CUT, sampled + resumed)

    def admit(self, group_id: str) -> None:
        """Record that a group enters the buffer; LedgerError if it is already there."""
        if group_id in self._tokens_of:
            raise LedgerError(f"group {group_id} is admitted twice")
        self._tokens_of[group_id] = 0
        self.groups_admitted += 1

    def generate(self, group_id: str, num_tokens: int) -> None:
        """Record that tokens were sampled for a group."""
        self._tokens_of[group_id] = self.tokens_of(group_id) + num_tokens
        self._generated += num_tokens

    def train(
        self,
        group_ids: Iterable[str],
        counts: TokenCounts,
        *,
        masked_by_loss: Mapping[str, int] | None = None,
    ) -> None:
        """Record that the groups of a batch were trained and leave the buffer. ``masked_by_loss``:
        number of tokens of ``counts.trained`` that the loss left out, by cause. Raises LedgerError:
        the counts do not add up, or differ from what was generated."""
        group_ids = list(group_ids)
        held = sum(self.tokens_of(group_id) for group_id in group_ids)
        lost = Counter(counts.discarded)
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"a group is trained twice in one batch: {sorted(group_ids)}")
        if counts.generated != counts.trained + lost.total():
            parts = f"{counts.trained} trained and {lost.total()} discarded"
            raise LedgerError(f"the batch has {counts.generated} tokens, but {parts}")
        if counts.generated != held:
            names = ", ".join(group_ids)
            raise LedgerError(
                f"{held} tokens were generated for a batch of {counts.generated}: {names}"
            )
        masked = Counter(masked_by_loss or {})
        if masked.total() > counts.trained:
            raise LedgerError(f"{masked.total()} tokens masked by the loss, of {counts.trained}")
        self._trained += counts.trained - masked.total()
        for cause, number in lost.items():
            (self._masked if cause in MASKED_CAUSES else self._discarded)[cause] += number
        self._masked += masked
        for group_id in group_ids:
            del self._tokens_of[group_id]
        self.groups_trained += len(group_ids)

    def discard(self, group_id: str, cause: str) -> None:
        """Record that a group leaves the buffer untrained, with all its tokens."""
        self._discarded[cause] += self.tokens_of(group_id)
        del self._tokens_of[group_id]
        self.groups_discarded[cause] += 1

    def discard_tokens(self, group_id: str, cause: str, num_tokens: int) -> None:
        """Record that tokens of a group are dropped (restarted, or recorded but not usable); the
        group stays in the buffer. LedgerError if it has fewer tokens."""
        held = self.tokens_of(group_id)
        if num_tokens > held:
            raise LedgerError(
                f"{num_tokens} of {held} tokens of {group_id} are discarded ({cause})"
            )
        self._tokens_of[group_id] = held - num_tokens
        if num_tokens:
            self._discarded[cause] += num_tokens

    def tokens_of(self, group_id: str) -> int:
        """Number of tokens of a group in the buffer."""
        if group_id not in self._tokens_of:
            raise LedgerError(f"group {group_id} is not in the buffer: not admitted, or has left")
        return self._tokens_of[group_id]

    def totals(self) -> LedgerTotals:
        return LedgerTotals(
            tokens_generated=self._generated,
            tokens_trained=self._trained,
            tokens_masked=dict(self._masked),
            tokens_discarded=dict(self._discarded),
            tokens_buffered=sum(self._tokens_of.values()),
            groups_admitted=self.groups_admitted,
            groups_trained=self.groups_trained,
            groups_discarded=dict(self.groups_discarded),
            groups_buffered=len(self._tokens_of),
        )

    def state_dict(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the totals as JSON-compatible values. The groups in ``without`` are saved without
        their tokens, because a resumed run adds those of their recorded turns again."""
        tokens_of = {name: 0 if name in without else n for name, n in self._tokens_of.items()}
        left_out = sum(self._tokens_of.values()) - sum(tokens_of.values())
        return {
            "tokens_of": tokens_of,
            "generated": self._generated - left_out,
            "trained": self._trained,
            "masked": dict(self._masked),
            "discarded": dict(self._discarded),
            "groups_admitted": self.groups_admitted,
            "groups_trained": self.groups_trained,
            "groups_discarded": dict(self.groups_discarded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved totals; LedgerError if they do not add up."""
        self._tokens_of = dict(state["tokens_of"])
        self._generated, self._trained = state["generated"], state["trained"]
        self._masked, self._discarded = Counter(state["masked"]), Counter(state["discarded"])
        self.groups_admitted = state["groups_admitted"]
        self.groups_trained = state["groups_trained"]
        self.groups_discarded = Counter(state["groups_discarded"])
        require_sums(self.totals())


def require_sums(totals: LedgerTotals) -> None:
    """Check that the sums of tokens and of groups are correct; otherwise raise LedgerError."""
    masked, discarded = sum(totals.tokens_masked.values()), sum(totals.tokens_discarded.values())
    tokens = totals.tokens_trained + masked + discarded + totals.tokens_buffered
    if totals.tokens_generated != tokens:
        raise LedgerError(
            f"{totals.tokens_generated} tokens generated, but {totals.tokens_trained} trained, "
            f"{masked} masked, {discarded} discarded and {totals.tokens_buffered} buffered"
        )
    groups_discarded = sum(totals.groups_discarded.values())
    if totals.groups_admitted != totals.groups_trained + groups_discarded + totals.groups_buffered:
        raise LedgerError(
            f"{totals.groups_admitted} groups admitted, but {totals.groups_trained} trained, "
            f"{groups_discarded} discarded and {totals.groups_buffered} buffered"
        )


class Reconciliation:
    """Compares the ledger with the replicas: one comparison at a time, in the background, and a
    last one at the end of the run."""

    def __init__(
        self, ledger: TokenLedger, router: GeneratorRouter, recorder: Recorder, waits: WaitRegistry
    ) -> None:
        self._ledger = ledger
        self._router = router
        self._recorder = recorder
        self._waits = waits
        self._running = BackgroundTask()

    def start(self, step: int, version: int) -> None:
        """Start a comparison, unless one still runs."""
        if not self._running.is_running:
            self._running.start("ledger reconciliation", self._compare, step, version)

    async def finish(self, step: int, version: int) -> None:
        """Wait for the running comparison, then compare once more."""
        with self._waits.track("the ledger is compared with what the replicas sampled"):
            await self._running.wait()
            await self._compare(step, version)

    async def close(self) -> None:
        """Cancel the running comparison."""
        await self._running.close()

    async def _compare(self, step: int, version: int) -> None:
        replicas = (await self._router.account()).values()
        # No await below: a request leaves the router and is recorded in the ledger without an
        # await.
        entered = self._router.received_tokens() - self._router.held_tokens()
        missing = sum(replica.unaccounted or 0 for replica in replicas)
        record = AccountRecord(
            step=step,
            version=version,
            sampled=sum(replica.sampled for replica in replicas),
            lost=sum(replica.lost for replica in replicas),
            unaccounted=entered - self._ledger.entered + missing,
        )
        self._recorder.record_account(record)
        if record.unaccounted:
            self._recorder.say(
                f"LEDGER MISMATCH: {record.unaccounted} of the {record.sampled} tokens that "
                f"replicas sampled up to step {step} are not in the ledger; please report this"
            )
