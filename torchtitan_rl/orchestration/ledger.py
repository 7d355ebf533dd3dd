"""The account of a whole run: where each sampled token and each admitted group went.

Tokens are entered twice, from two sources: as their requests end (by the router, see
`sampling.py`), and as their group leaves (by the batch's own account). The two must agree.

Invariants: generated = trained + masked + discarded by cause + buffered, of tokens; admitted =
trained + discarded by cause + buffered, of groups; at any moment. A group leaves once. A call that
would break this raises and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.records import LedgerTotals, TokenCounts

MASKED_CAUSES = frozenset({"nonfinite_logprob", "unseen_turn"})
"""Of `TokenCounts.discarded`: masked by a rule."""


class LedgerError(TorchtitanRLError):
    """The account does not add up: tokens or groups were lost, or counted twice."""


class TokenLedger:
    """Cumulative over the run; `state_dict` goes into the checkpoint."""

    def __init__(self) -> None:
        self._tokens_of: dict[str, int] = {}  # by group that is admitted and has not left
        self._generated = self._trained = 0
        self._masked: Counter[str] = Counter()
        self._discarded: Counter[str] = Counter()
        self._groups_admitted = self._groups_trained = 0
        self._groups_discarded: Counter[str] = Counter()

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._tokens_of

    def admit(self, group_id: str) -> None:
        """A group enters the buffer.

        Raises:
            LedgerError: it is there already.
        """
        if group_id in self._tokens_of:
            raise LedgerError(f"group {group_id} is admitted twice")
        self._tokens_of[group_id] = 0
        self._groups_admitted += 1

    def generate(self, group_id: str, num_tokens: int) -> None:
        """Tokens were sampled for a group.

        Raises:
            LedgerError: the group is not in the buffer.
        """
        self._tokens_of[group_id] = self._held(group_id) + num_tokens
        self._generated += num_tokens

    def train(
        self,
        group_ids: Iterable[str],
        counts: TokenCounts,
        *,
        masked_by_loss: Mapping[str, int] | None = None,
    ) -> None:
        """These groups were trained on, or had nothing to train on, and leave.

        Args:
            counts: the batch's account of them.
            masked_by_loss: of ``counts.trained``, what a rule of the loss left out, by rule.

        Raises:
            LedgerError: a group is not in the buffer; the batch's account does not add up, or
                differs from what was generated for these groups.
        """
        group_ids = list(group_ids)
        held = sum(self._held(group_id) for group_id in group_ids)
        lost = Counter(counts.discarded)
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"a group is trained twice in one batch: {sorted(group_ids)}")
        if counts.generated != counts.trained + lost.total():
            raise LedgerError(
                f"the batch has {counts.generated} tokens, but {counts.trained} trained and "
                f"{lost.total()} discarded"
            )
        if counts.generated != held:
            raise LedgerError(
                f"{held} tokens were generated for the groups of a batch that has "
                f"{counts.generated}: {', '.join(group_ids)}"
            )
        masked = Counter(masked_by_loss or {})
        if masked.total() > counts.trained:
            raise LedgerError(
                f"{masked.total()} tokens masked by the loss, of {counts.trained} in the batch"
            )
        self._trained += counts.trained - masked.total()
        for cause, number in lost.items():
            (self._masked if cause in MASKED_CAUSES else self._discarded)[cause] += number
        self._masked += masked
        for group_id in group_ids:
            del self._tokens_of[group_id]
        self._groups_trained += len(group_ids)

    def discard(self, group_id: str, cause: str) -> None:
        """A group leaves untrained, with all its tokens.

        Raises:
            LedgerError: the group is not in the buffer.
        """
        self._discarded[cause] += self._held(group_id)
        del self._tokens_of[group_id]
        self._groups_discarded[cause] += 1

    def discard_tokens(self, group_id: str, cause: str, num_tokens: int) -> None:
        """Tokens of a group that stays are thrown away (a turn rolled back, a rollout restarted).

        Raises:
            LedgerError: the group is not in the buffer, or has fewer tokens.
        """
        held = self._held(group_id)
        if num_tokens > held:
            raise LedgerError(
                f"{num_tokens} tokens of group {group_id} are discarded ({cause}); it has {held}"
            )
        self._tokens_of[group_id] = held - num_tokens
        if num_tokens:
            self._discarded[cause] += num_tokens

    def lose(self, group_id: str, cause: str, num_tokens: int) -> None:
        """Tokens were sampled for a group and thrown away before they were entered (a turn that
        was cancelled in the middle, recorded turns that may not be used).

        Raises:
            LedgerError: the group is not in the buffer.
        """
        self.generate(group_id, num_tokens)
        self.discard_tokens(group_id, cause, num_tokens)

    def check(self, tokens_of: Mapping[str, int]) -> None:
        """Compare with the buffer itself.

        Args:
            tokens_of: of each group in the buffer, the tokens that it holds.

        Raises:
            LedgerError: groups or tokens differ, or the totals do not add up.
        """
        differing = sorted(
            group_id
            for group_id in self._tokens_of.keys() | tokens_of.keys()
            if self._tokens_of.get(group_id) != tokens_of.get(group_id)
        )
        if differing:
            pairs = ", ".join(
                f"{one}: {self._tokens_of.get(one)} in the account, {tokens_of.get(one)} there"
                for one in differing[:5]
            )
            raise LedgerError(f"{len(differing)} groups differ from their account ({pairs})")
        require_sums(self.totals())

    def tokens_of(self, group_id: str) -> int:
        """Tokens of a group in the buffer."""
        return self._held(group_id)

    def totals(self) -> LedgerTotals:
        return LedgerTotals(
            tokens_generated=self._generated,
            tokens_trained=self._trained,
            tokens_masked=dict(self._masked),
            tokens_discarded=dict(self._discarded),
            tokens_buffered=sum(self._tokens_of.values()),
            groups_admitted=self._groups_admitted,
            groups_trained=self._groups_trained,
            groups_discarded=dict(self._groups_discarded),
            groups_buffered=len(self._tokens_of),
        )

    def state_dict(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """JSON-able.

        Args:
            without: groups whose tokens a resumed run will enter again (their rollouts go on from
                a record); the state has the groups, but not those tokens.
        """
        tokens_of = {name: 0 if name in without else n for name, n in self._tokens_of.items()}
        left_out = sum(self._tokens_of.values()) - sum(tokens_of.values())
        return {
            "tokens_of": tokens_of,
            "generated": self._generated - left_out,
            "trained": self._trained,
            "masked": dict(self._masked),
            "discarded": dict(self._discarded),
            "groups_admitted": self._groups_admitted,
            "groups_trained": self._groups_trained,
            "groups_discarded": dict(self._groups_discarded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            LedgerError: the state does not add up.
        """
        self._tokens_of = dict(state["tokens_of"])
        self._generated, self._trained = state["generated"], state["trained"]
        self._masked, self._discarded = Counter(state["masked"]), Counter(state["discarded"])
        self._groups_admitted = state["groups_admitted"]
        self._groups_trained = state["groups_trained"]
        self._groups_discarded = Counter(state["groups_discarded"])
        require_sums(self.totals())

    def _held(self, group_id: str) -> int:
        if group_id not in self._tokens_of:
            raise LedgerError(f"group {group_id} is not in the buffer: not admitted, or has left")
        return self._tokens_of[group_id]


def require_sums(totals: LedgerTotals) -> None:
    """
    Raises:
        LedgerError: tokens or groups do not add up.
    """
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
