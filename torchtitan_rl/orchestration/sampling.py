"""Enters every token that replicas sample into the account, when its request ends.

Invariants: a request is entered once, however it ends, with the tokens that this process had
sampled for it; tokens that its caller did not get are discarded in the same call, so that what a
group holds is what its rollouts hold.
"""

from __future__ import annotations

from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.types import Completion, GenerationRequest

CUT = "cut"
"""Cause of tokens whose request did not end for its caller: cancelled, timed out or lost."""


class SampledTokens:
    """The router's observer (``on_ended`` of `GeneratorRouter`).

    ``for_groups`` counts tokens sampled for groups of the run, ``for_others`` those of evaluation
    and of the endpoint's other clients; both in this process alone.
    """

    def __init__(self) -> None:
        self.for_groups = 0
        self.for_others = 0
        self._ledger: TokenLedger | None = None

    def bind(self, ledger: TokenLedger) -> None:
        """Enter the tokens of groups into this ledger from now on."""
        self._ledger = ledger

    def on_ended(self, request: GenerationRequest, known: Completion, is_returned: bool) -> None:
        """A request has ended with the tokens ``known``; its caller gets them or does not."""
        resumed = len(request.resume_from.token_ids) if request.resume_from is not None else 0
        sampled = len(known.token_ids) - resumed
        group_id = _group_of(request)
        ledger = self._ledger
        if ledger is None or group_id is None or group_id not in ledger:
            self.for_others += sampled
            return
        self.for_groups += sampled
        ledger.generate(group_id, sampled)
        if not is_returned:
            ledger.discard_tokens(group_id, CUT, sampled + resumed)


def group_of(rollout_id: str) -> str:
    """The group of a rollout ``{group}/r{sibling}``."""
    return rollout_id.rsplit("/", 1)[0]


def _group_of(request: GenerationRequest) -> str | None:
    """A rollout's requests are ``{rollout}/t{turn}`` or ``{rollout}/a{attempt}/t{turn}``, in a
    session named after the rollout; those of other clients are not."""
    session = request.session_id
    if session is None or not request.request_id.startswith(f"{session}/"):
        return None
    return group_of(session)
