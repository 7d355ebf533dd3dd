"""Rollouts that are stopped at any moment and continued by another rollouter."""

from __future__ import annotations

import json

import pytest

from tests.fast.rollout.test_message_env import LetterRenderer
from tests.support.resuming import (
    SIZE,
    Counter,
    Replaying,
    Run,
    Saving,
    contents,
    sampled_tokens,
    stops,
    stops_by_tokens,
    through_bytes,
)
from torchtitan_rl.experiments.alphabet_sort.env import AlphabetSortEnv
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.rollout.records import RecordedRollout, with_turn
from torchtitan_rl.types import FinishReason, RolloutStatus


@pytest.mark.parametrize("limits", [{}, {"max_turns": 2}, {"max_total_tokens": 9}])
def test_a_replaying_environment_continues_from_any_moment_as_if_undisturbed(limits):
    """No finished turn is sampled again, and the tokens of the running one are kept as tokens."""
    undisturbed = Run(Replaying, **limits).whole()
    num_continued = 0
    for before, recorded in stops(Replaying, **limits):
        after = Run(Replaying, **limits)
        assert contents(after.whole(recorded)) == contents(undisturbed)
        assert after.discarded == []
        asked = {request.request_id: request for request in after.generate.requests}
        for entry in recorded:
            assert not {f"{entry.rollout_id}/t{i}" for i in range(len(entry.turns))} & set(asked)
            if entry.partial and (request := asked.get(entry.partial.request_id)):
                num_continued += 1
                assert request.resume_from == entry.partial
                assert entry.partial.finish_reason is FinishReason.ABORT
        assert after.closed()
        assert before.closed()
    assert num_continued


def test_an_environment_with_a_state_is_loaded_and_neither_reset_nor_stepped_with_old_turns():
    loaded = 0
    for _, recorded in stops(Saving):
        after = Run(Saving)
        group = after.whole(recorded)
        assert after.discarded == []
        assert after.closed()
        for entry, rollout in zip(recorded, group.rollouts, strict=True):
            assert rollout.turns[: len(entry.turns)] == entry.turns
            assert rollout.status is RolloutStatus.COMPLETED
            tokens = sum(sum(turn.completion.token_ids) for turn in rollout.turns)
            assert rollout.reward == 2.0 * tokens
        if all(entry.env_state is not None and not entry.ended for entry in recorded):
            loaded += 1
            assert not any("reset" in env.calls for env in after.factory.made)
    assert loaded


def test_an_environment_that_cannot_be_resumed_starts_again_and_its_tokens_are_discarded():
    undisturbed = Run(Counter).whole()
    lost = 0
    for _, recorded in stops(Counter):
        after = Run(Counter)
        assert contents(after.whole(recorded)) == contents(undisturbed)
        assert after.closed()
        for rollout_id, cause, num_tokens in after.discarded:
            (entry,) = [entry for entry in recorded if entry.rollout_id == rollout_id]
            assert (cause, num_tokens) == ("env_not_resumable", entry.num_tokens)
            assert entry.turns
            lost += 1
    assert lost


def middle_of(*makers, turns=1):
    """The snapshot of a run whose rollouts have so many finished turns."""
    for _, recorded in stops(*makers):
        if all(len(entry.turns) == turns and not entry.ended for entry in recorded):
            return recorded
    raise AssertionError("there was no such moment")


class Different(Replaying):
    """Declares that it replays, but does not."""

    async def reset(self):
        await super().reset()
        self.prompt = (1, 2, 77)
        return await Counter.reset(self)


class EndsEarly(Replaying):
    def __init__(self):
        super().__init__(turns=1)


class CannotReplay(Replaying):
    """Raises in the replay, and works when it starts again."""

    made = 0

    def __init__(self):
        super().__init__()
        CannotReplay.made += 1
        self.raises = CannotReplay.made <= SIZE

    async def step(self, completion):
        if self.raises:
            raise OSError("gone")
        return await super().step(completion)


@pytest.mark.parametrize("maker", [Different, EndsEarly, CannotReplay])
def test_a_replay_that_differs_starts_again(maker):
    recorded = middle_of(Replaying)
    after = Run(maker)
    group = after.whole(recorded)
    assert [d[:2] for d in after.discarded] == [(f"g/r{i}", "env_not_resumable") for i in (0, 1)]
    assert sum(d[2] for d in after.discarded) == sampled_tokens(recorded) > 0
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert len(after.factory.made) == 2 * SIZE
    assert after.closed()


def test_a_rollout_whose_last_recorded_turn_ended_it_needs_no_environment():
    """As from a journal, which has no `ended`; even where the environment could not resume."""
    run = Run(Counter)
    whole = contents(run.whole())
    recorded = []
    for rollout_id, lines in run.records.items():
        entry = RecordedRollout(rollout_id=rollout_id)
        for index, turn, state in lines:
            entry = with_turn(entry, index, turn, state)
        recorded.append(through_bytes(entry))
    after = Run(lambda: pytest.fail("an environment was made"))
    assert contents(after.whole(recorded)) == whole
    assert after.turns == []


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


def test_a_saved_conversation_continues_with_its_messages_its_tools_and_its_secret():
    """The prompts of an edited history come from the messages, extensions from the last prompt."""
    loaded = 0
    for _, recorded in stops_by_tokens(lambda: Run(lambda: Watched(SavedSecret()), **LIMITS)):
        after = Run(lambda: Watched(SavedSecret()), **LIMITS)
        group = after.whole(recorded)
        for entry, rollout in zip(recorded, group.rollouts, strict=True):
            assert rollout.turns[: len(entry.turns)] == entry.turns
            if entry.env_state is None or entry.env_state.state is None:
                continue
            loaded += 1
            secret = json.loads(entry.env_state.state)["env"]["secret"]
            assert rollout.reward == 2.0 * secret
            texts = ["".join(map(chr, turn.prompt_token_ids)) for turn in rollout.turns]
            assert [f" {secret} {i}$" in text for i, text in enumerate(texts)] == [True] * 3
            assert texts[1].startswith(texts[0])
            assert texts[2].startswith("Tu:again")
            assert len(rollout.messages) == 2
    assert loaded
