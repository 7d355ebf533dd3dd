"""Converts whole conversations to episodes with loss on the assistant's turns: the demonstrations
of supervised training.

The tokens are those of a rollout in which the policy samples each turn of the assistant: the tokens
after the turn's header, up to the one that ends the turn. Headers, other messages, tokens that the
chat format adds after a turn, and a prefilled thought have no loss.

Invariants: each turn of the assistant has loss in exactly one episode. Episodes are those of
`rollout_to_episodes`: several if the chat format rewrites the history (drops earlier thoughts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from torchtitan_rl.rollout.chatml import Message, TokenIds
from torchtitan_rl.rollout.rendering import ChatRenderer
from torchtitan_rl.types import Episode


def conversation_to_episodes(
    name: str,
    messages: Sequence[Message],
    *,
    renderer: ChatRenderer,
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 1,
) -> list[Episode]:
    """Convert a conversation. The loss is on the assistant's messages from index ``first`` on.
    ``name`` becomes the id of the episodes and of their group. Raises ValueError: no such message
    is an assistant's, or the chat format cannot render one of them as a policy would sample it."""
    episodes: list[Episode] = []
    token_ids: TokenIds = ()
    mask: list[bool] = []
    before = -1  # index of the previous turn
    for index in range(first, len(messages)):
        if messages[index].get("role") != "assistant":
            continue
        prompt = None
        if token_ids:
            spoken = sum(1 for _ in takewhile(bool, reversed(mask)))
            prompt = renderer.extend(
                token_ids[:-spoken], token_ids[-spoken:], messages[before + 1 : index]
            )
        prompt = prompt or renderer.initial_prompt(messages[:index], tools)
        if prompt[: len(token_ids)] != token_ids:
            episodes.append(_imitated(name, token_ids, mask))
            token_ids, mask = (), []
        said = renderer.completion(messages[: index + 1], tools)
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(said)
        token_ids, before = prompt + said, index
    if not token_ids:
        raise ValueError("it has no assistant message to learn")
    return [*episodes, _imitated(name, token_ids, mask)]


def _imitated(name: str, token_ids: TokenIds, mask: Sequence[bool]) -> Episode:
    zeros = (0.0,) * len(token_ids)
    return Episode(
        rollout_id=name,
        group_id=name,
        token_ids=token_ids,
        loss_mask=tuple(mask),
        logprobs=zeros,
        advantages=zeros,
        versions=tuple(0 if said else -1 for said in mask),
    )
