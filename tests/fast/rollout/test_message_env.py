"""Environments in chat messages, through the wrapper and the rollouter, to episodes."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.rollouts import PROBLEM, ScriptedGenerate, make_rollouter
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.types import RolloutStatus

END = ord("$")


class LetterRenderer:
    """One token a character: ``<role>:<content>$``. Refuses to extend by roles that it strips."""

    stop_token_ids = (END,)

    def __init__(self) -> None:
        self.rendered = 0

    def initial_prompt(self, messages, tools=()):
        self.rendered += 1
        text = "".join(f"{message['role'][0]}:{message['content']}$" for message in messages)
        return tuple(map(ord, "".join(tool["name"] for tool in tools) + text + "a:"))

    def extend(self, prompt, completion, new_messages):
        if any(message["role"] == "tool" for message in new_messages):
            return None
        missing = () if completion[-1:] == (END,) else (END,)
        text = "".join(f"{message['role'][0]}:{message['content']}$" for message in new_messages)
        return prompt + completion + missing + tuple(map(ord, text + "a:"))

    def parse(self, completion, prompt):
        return {"role": "assistant", "content": self.decode(completion).rstrip("$")}

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class Dialogue:
    """A `MessageEnv` with a list of answers, which records the messages it gets."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.messages_seen: list[dict] = []
        self.closed = 0

    async def reset(self):
        return MessageObservation(
            messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        )

    async def step(self, message):
        self.messages_seen.append(message)
        return self.answers[len(self.messages_seen) - 1]

    async def finish(self, status):
        return Terminal(reward=0.5)

    async def close(self):
        self.closed += 1


def user(content: str, **changes) -> MessageObservation:
    return MessageObservation(messages=[{"role": "user", "content": content}], **changes)


def play(env: Dialogue, *completions: str, **limits):
    script = [tuple(map(ord, completion)) for completion in completions]
    generate = ScriptedGenerate(script)
    rollouter = make_rollouter(
        lambda problem: MessageTokenEnv(env, LetterRenderer()), generate=generate, **limits
    )
    group = asyncio.run(rollouter.run_group("g", PROBLEM, size=1, seed=0))
    assert env.closed == 1
    return group.rollouts[0], generate


def texts(rollout) -> list[str]:
    return ["".join(map(chr, turn.prompt_token_ids)) for turn in rollout.turns]


def test_a_conversation_extends_and_is_one_episode():
    env = Dialogue(user("V", turn_reward=0.25), Terminal(reward=1.0, turn_reward=0.75))
    rollout, generate = play(env, "x$", "y$")
    assert texts(rollout) == ["s:S$u:U$a:", "s:S$u:U$a:x$u:V$a:"]
    assert env.messages_seen == [
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.75]
    assert [turn.text for turn in rollout.turns] == ["x$", "y$"]
    assert [message["content"] for message in rollout.messages] == ["S", "U", "x", "V", "y"]
    assert len(rollout_to_episodes(rollout, 1.0)) == 1
    assert generate.requests[0].sampling.stop_token_ids == (END,)


def test_a_completion_cut_at_its_budget_gets_its_end_in_the_next_prompt():
    rollout, _ = play(
        Dialogue(user("V"), Terminal(reward=1.0)), "xxxx", "y$", max_tokens_per_turn=2
    )
    assert texts(rollout)[1] == "s:S$u:U$a:xx$u:V$a:"
    (episode,) = rollout_to_episodes(rollout, 1.0)
    trained = [t for t, m in zip(episode.token_ids, episode.loss_mask, strict=True) if m]
    assert "".join(map(chr, trained)) == "xxy$"


def test_a_replaced_history_is_rendered_from_scratch_and_branches():
    edited = MessageObservation(replace_messages=[{"role": "user", "content": "W"}])
    rollout, _ = play(Dialogue(edited, user("V"), Terminal(reward=1.0)), "x$", "y$", "z$")
    assert texts(rollout) == ["s:S$u:U$a:", "u:W$a:", "u:W$a:y$u:V$a:"]
    assert [message["content"] for message in rollout.messages] == ["W", "y", "V", "z"]
    assert [len(e.token_ids) for e in rollout_to_episodes(rollout, 1.0)] == [12, 16]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "expected a MessageObservation or a Terminal, got None; does every path"),
        (1.0, "expected a MessageObservation or a Terminal, got 1.0"),
        (MessageObservation(messages="go on"), "expected a message like {"),
        (MessageObservation(messages=[{"content": "go on"}]), "got {'content': 'go on'}"),
        (MessageObservation(messages=None), "expected a list as messages, got None"),
        (MessageObservation(messages=iter([])), "expected a list as messages, got <"),
        (MessageObservation(tools=["add"]), "expected a tool's schema as tools[0], got 'add'"),
        *(
            (
                MessageObservation(replace_messages=[{"role": "user", "content": content}]),
                f"as replace_messages[0].content{cause}",
            )
            for content, cause in (
                (None, ", got None"),
                (5, ", got 5"),
                (["V"], "[0], got 'V'"),
                ([{"text": "V"}], "[0], got {'text': 'V'}"),
                ([{"type": "text"}], "[0], got {'type': 'text'}"),
                ([{"type": "text", "text": "V"}, {"type": "image"}], "[1], got {'type': 'image'}"),
                ([{"type": "video", "video": "v.mp4"}], "[0], got {'type': 'video', 'vid"),
                ([{"type": "thinking", "thinking": "V"}], "[0], got {'thinking': 'V'"),
                (
                    [{"type": "image", "image": "a.png", "max_pixels": "5"}],
                    "[0].max_pixels, got '5'",
                ),
                ([{"type": "image", "image": "a.png", "max_pixels": 0}], "[0].max_pixels, got 0"),
            )
        ),
    ],
)
def test_an_answer_that_is_none_names_what_is_expected(answer, cause):
    rollout, _ = play(Dialogue(answer), "x$")
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert cause in rollout.cause
