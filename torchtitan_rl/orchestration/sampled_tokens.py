"""Enters every token that replicas sample into the ledger, when its request ends.

Invariants: each request is entered once, however it ends, with the tokens that this process sampled
for it. Tokens that the caller does not receive are discarded in the same call, so the ledger holds
for a group exactly what its rollouts hold.
"""

from __future__ import annotations

from torchtitan_rl.orchestration.ids import group_of_request
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.types import Completion, GenerationRequest

CUT = "cut"
"""Cause of tokens whose request was cancelled, timed out or lost with its replica."""


class SampledTokens:
    """The router's observer: ``GeneratorRouter(on_ended=sampled.on_ended)``.

    ``for_groups`` counts tokens sampled for groups in the ledger, ``for_others`` those of
    evaluations and of the endpoint's clients; both since this process started.
    """

    def __init__(self) -> None:
        self.for_groups = 0
        self.for_others = 0
        self._ledger: TokenLedger | None = None

    def bind(self, ledger: TokenLedger) -> None:
        """Enter the tokens of groups into this ledger from now on."""
        self._ledger = ledger

    def on_ended(self, request: GenerationRequest, tokens: Completion, is_returned: bool) -> None:
        """A request ended with ``tokens``; ``is_returned`` says whether its caller gets them."""
        resumed = len(request.resume_from.token_ids) if request.resume_from is not None else 0
        sampled = len(tokens.token_ids) - resumed
        group_id = group_of_request(request)
        ledger = self._ledger
        if ledger is None or group_id is None or group_id not in ledger:
            self.for_others += sampled
            return
        self.for_groups += sampled
        ledger.generate(group_id, sampled)
        if not is_returned:
            ledger.discard_tokens(group_id, CUT, sampled + resumed)
