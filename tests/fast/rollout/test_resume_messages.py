"""Conversations that are stopped at any moment and continued by another rollouter."""

from __future__ import annotations

import asyncio

import pytest

from tests.fast.rollout.test_message_env import LetterRenderer
from tests.support.resuming import Run, contents, stops_by_tokens
from torchtitan_rl.experiments.alphabet_sort.env import AlphabetSortEnv
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv

LIMITS = {"max_total_tokens": 10_000, "max_tokens_per_turn": 4}
NAMES = [["Zoe", "Adam"], ["Mia"], ["Ben", "Eve"]]


class Watched(MessageTokenEnv):
    """Records its calls, for `Run.closed`."""

    def __init__(self, env) -> None:
        super().__init__(env, LetterRenderer())
        self.calls: list[str] = []

    async def reset(self):
        self.calls.append("reset")
        return await super().reset()

    async def step(self, completion):
        self.calls.append("step")
        return await super().step(completion)

    async def close(self) -> None:
        self.calls.append("close")
        await super().close()


def alphabet_sort() -> Watched:
    return Watched(AlphabetSortEnv(NAMES, power=2.0))


class Secret:
    """Its replies depend on a number in its state. Replaces the conversation in turn 2."""

    made = 0

    def __init__(self) -> None:
        Secret.made += 1
        self.secret = Secret.made
        self.heard: list[str] = []

    async def reset(self) -> MessageObservation:
        return MessageObservation(messages=[self._say("begin")], tools=[{"name": "T"}])

    async def step(self, message) -> MessageObservation | Terminal:
        self.heard.append(message["content"])
        if len(self.heard) == 3:
            return Terminal(reward=float(self.secret), metrics={"heard": len(self.heard)})
        if len(self.heard) == 2:
            return MessageObservation(replace_messages=[self._say("again")])
        return MessageObservation(messages=[self._say("more")])

    async def finish(self, status) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...

    def _say(self, text: str) -> dict[str, str]:
        return {"role": "user", "content": f"{text} {self.secret} {len(self.heard)}"}


class SavedSecret(Secret):
    async def state_dict(self):
        return {"secret": self.secret, "heard": self.heard}

    async def load_state_dict(self, state) -> None:
        self.secret, self.heard = state["secret"], list(state["heard"])


def test_alphabet_sort_is_replayed_and_continues_from_any_moment_as_if_undisturbed():
    undisturbed = Run(alphabet_sort, **LIMITS).whole()
    replayed = 0
    for _, recorded in stops_by_tokens(lambda: Run(alphabet_sort, **LIMITS)):
        after = Run(alphabet_sort, **LIMITS)
        assert contents(after.whole(recorded)) == contents(undisturbed)
        assert after.discarded == []
        assert after.closed()
        replayed += any(entry.turns and not entry.ended for entry in recorded)
    assert replayed


def test_a_saved_conversation_continues_with_its_messages_its_tools_and_its_secret():
    """The prompts of an edited history come from the messages, extensions from the last prompt."""
    loaded = 0
    for _, recorded in stops_by_tokens(lambda: Run(lambda: Watched(SavedSecret()), **LIMITS)):
        after = Run(lambda: Watched(SavedSecret()), **LIMITS)
        group = after.whole(recorded)
        for entry, rollout in zip(recorded, group.rollouts, strict=True):
            assert rollout.turns[: len(entry.turns)] == entry.turns
            if entry.env_state is None or not isinstance(entry.env_state.state, dict):
                continue
            loaded += 1
            secret = entry.env_state.state["env"]["secret"]
            assert rollout.reward == 2.0 * secret
            texts = ["".join(map(chr, turn.prompt_token_ids)) for turn in rollout.turns]
            assert [f" {secret} {i}$" in text for i, text in enumerate(texts)] == [True] * 3
            assert texts[1].startswith(texts[0])
            assert texts[2].startswith("Tu:again")
            assert len(rollout.messages) == 2
    assert loaded


def test_a_conversation_without_state_or_declaration_is_not_replayed():
    for _, recorded in stops_by_tokens(lambda: Run(lambda: Watched(Secret()), **LIMITS)):
        if all(entry.turns and not entry.ended for entry in recorded):
            after = Run(lambda: Watched(Secret()), **LIMITS)
            after.whole(recorded)
            assert len(after.discarded) == 2
            return
    raise AssertionError("there was no such moment")


def test_a_state_whose_environment_has_lost_its_loader_is_refused():
    with pytest.raises(TypeError, match="Secret has no load_state_dict"):
        asyncio.run(Watched(Secret()).load_state_dict({"env": {}, "messages": []}))
