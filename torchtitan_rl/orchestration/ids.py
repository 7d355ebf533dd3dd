"""How ids nest: request ``e0/p12/r3/t1`` is turn 1 of rollout ``e0/p12/r3`` of group ``e0/p12``.

A group is named ``e{epoch}/{problem}``, a rollout ``{group}/r{sibling}``, and its requests
``{rollout}/t{turn}`` or, after a restart, ``{rollout}/a{attempt}/t{turn}``.
"""

from __future__ import annotations

from torchtitan_rl.types import GenerationRequest


def group_of(rollout_id: str) -> str:
    """The group that a rollout belongs to."""
    return rollout_id.rsplit("/", 1)[0]


def group_of_request(request: GenerationRequest) -> str | None:
    """The group that a request samples for; None for requests of other clients.

    A rollout's requests run in a session named after the rollout.
    """
    session = request.session_id
    if session is None or not request.request_id.startswith(f"{session}/"):
        return None
    return group_of(session)
