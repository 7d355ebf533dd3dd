"""The recorded choices of a policy's routers: joined over pieces of a completion and over the turns
of an episode. No I/O and no state.

`RoutedExperts` of a completion end with the token before its last token, which no engine computed.
They may begin after the prompt's first token (`GenerationRequest.routed_from`): the experts of
earlier tokens are then those of earlier turns, or unknown.

Shapes: T tokens, X layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torchtitan_rl.types import UNKNOWN_EXPERT, Progress, RoutedExperts, Turn


def to_routed(experts_TXK: npt.NDArray[np.uint8]) -> RoutedExperts:
    _, num_layers, per_token = experts_TXK.shape
    data = experts_TXK.astype(np.uint8, copy=False).tobytes()
    return RoutedExperts(data=data, num_layers=num_layers, per_token=per_token)


def to_array(routed: RoutedExperts) -> npt.NDArray[np.uint8]:
    """Undo `to_routed`; read-only."""
    flat = np.frombuffer(routed.data, dtype=np.uint8)
    return flat.reshape(-1, routed.num_layers, routed.per_token)


def last(routed: RoutedExperts, num_tokens: int) -> RoutedExperts:
    return routed.part(max(0, routed.num_tokens - num_tokens))


def join_routed(
    first: RoutedExperts | None, second: RoutedExperts | None, *, num_sampled: int
) -> RoutedExperts | None:
    """Join the experts of a completion's first piece with those of a second piece, of
    ``num_sampled`` tokens. The second replica computed the first piece's tokens again; those of the
    first computation, from which they were sampled, are kept. If only one piece has experts, the
    result has the second's."""
    if not num_sampled:
        return first
    if first is None or second is None:
        return second
    return _joined([first, last(second, num_sampled)])


def num_known(prompt: tuple[int, ...], earlier: Iterable[Turn]) -> int:
    known = 0
    for one in earlier:
        tokens = one.token_ids
        is_kept = one.is_seen and one.completion.routed_experts is not None
        if is_kept and known < len(tokens) and prompt[: len(tokens)] == tokens:
            known = len(tokens) - 1
    return known


def of_new_tokens(turn: Turn, earlier: Iterable[Turn]) -> Turn:
    """Return the turn without experts that an earlier one has, so that long conversations take
    linear space."""
    completion = turn.completion
    if completion.routed_experts is None:
        return turn
    num_new = len(turn.token_ids) - 1 - num_known(turn.prompt_token_ids, earlier)
    own = last(completion.routed_experts, num_new)
    return replace(turn, completion=replace(completion, routed_experts=own))


def of_progress(progress: Iterable[Progress]) -> RoutedExperts | None:
    """Join the experts of consecutive progress reports; None if a report has none."""
    parts = [one.routed_experts for one in progress]
    found = [one for one in parts if one is not None]
    return _joined(found) if found and len(found) == len(parts) else None


def of_episode(
    turns: Iterable[tuple[int, RoutedExperts | None]], length: int
) -> RoutedExperts | None:
    """Return the experts of an episode of ``length`` tokens; None if no turn has any. ``turns``:
    for each turn, in order, the number of the episode's tokens at its end, and its experts.

    The experts of a token are those of the first turn that has them, which sampled its tokens with
    them; later turns may have computed them again. Tokens without experts, such as the last one,
    get `UNKNOWN_EXPERT`.
    """
    experts_TXK: npt.NDArray[np.uint8] | None = None
    num_known = 0
    for end, routed in turns:
        if routed is None:
            continue
        of_turn_TXK = to_array(routed)
        if experts_TXK is None:
            shape = (length, *of_turn_TXK.shape[1:])
            experts_TXK = np.full(shape, UNKNOWN_EXPERT, dtype=np.uint8)
        start = max(num_known, end - 1 - len(of_turn_TXK))
        num_known = end - 1
        experts_TXK[start:num_known] = of_turn_TXK[len(of_turn_TXK) - (num_known - start) :]
    return None if experts_TXK is None else to_routed(experts_TXK)


def routed_error(routed: RoutedExperts | None, *, num_sampled: int, num_prompt: int | None) -> str:
    """Return the error in the experts of a completion, or "". ``num_prompt`` None: unknown."""
    if routed is None:
        return ""
    width = routed.bytes_per_token
    if routed.num_layers < 1 or routed.per_token < 1 or len(routed.data) % width:
        return (
            f"routed experts have {len(routed.data)} bytes, for {routed.num_layers} layers of "
            f"{routed.per_token} experts"
        )
    found, most = routed.num_tokens, None if num_prompt is None else num_prompt + num_sampled - 1
    if found < num_sampled or (most is not None and found > most):
        return f"routed experts are of {found} tokens, for {num_sampled} sampled tokens"
    return ""


def _joined(parts: list[RoutedExperts]) -> RoutedExperts:
    return RoutedExperts(
        data=b"".join(one.data for one in parts),
        num_layers=parts[0].num_layers,
        per_token=parts[0].per_token,
    )
