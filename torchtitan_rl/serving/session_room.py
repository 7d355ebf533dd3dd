"""How many tokens all open sessions may hold together.

Invariant: what is held is the sum of what sessions have taken and not given back; it never exceeds
the limit, for a request takes all that it may come to before it runs.
"""

from __future__ import annotations

from torchtitan_rl.serving.refusals import refused
from torchtitan_rl.types import GenerationRequest

MAX_TOTAL_TOKENS = 1 << 26  # about 2.5 GB
TURN_TOKENS = 64  # what a turn takes on top of its tokens, as so many of them


def most_tokens(request: GenerationRequest) -> int:
    """What a turn may come to."""
    return TURN_TOKENS + len(request.prompt_token_ids) + request.sampling.max_tokens


class SessionRoom:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0

    def require(self, num_tokens: int = TURN_TOKENS) -> None:
        """Raises:
        RefusedError: there is no room for so many.
        """
        if self.num_tokens + num_tokens > self._max_tokens:
            message = (
                f"all sessions together hold {self.num_tokens} of {self._max_tokens} tokens and "
                f"{num_tokens} more do not fit: close some, or try again later"
            )
            raise refused(429, "sessions_full", message)

    def take(self, num_tokens: int) -> None:
        """Give back where they are negative."""
        self.num_tokens += num_tokens
