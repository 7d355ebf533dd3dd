"""Whatever a model samples: no renderer raises, and no sampled token changes in the next prompt."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.real.test_rendering_renderers import (
    CHATML,
    FIRST,
    MORE,
    QWEN3,
    SMOLLM2_TEMPLATE,
    build_tokenizer,
)
from tests.support.rollouts import PROBLEM, ScriptedGenerate, config
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.message_env import MessageObservation, MessageTokenEnv
from torchtitan_rl.rollout.rendering import LibraryRenderer, make_renderer
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.types import RolloutStatus

TOKENIZERS = {
    "qwen3": build_tokenizer(QWEN3),
    "chatml": build_tokenizer(CHATML),
    "smollm2": build_tokenizer(CHATML, SMOLLM2_TEMPLATE),
}


@st.composite
def completions(draw, tokenizer) -> tuple[int, ...]:
    """Any tokens, the special ones often; like an engine's, they may end with an end of turn."""
    special = [tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()]
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    inside = st.integers(0, len(tokenizer) - 1) | st.sampled_from(special)
    body = draw(st.lists(inside.filter(lambda token: token not in ends), max_size=12))
    return tuple(body + draw(st.sampled_from([[], ends[:1], ends[1:]])))


class ThreeTurns:
    async def reset(self):
        self.turns = 0
        return MessageObservation(messages=FIRST)

    async def step(self, message):
        self.turns += 1
        return Terminal(reward=1.0) if self.turns == 3 else MessageObservation(messages=MORE)

    async def finish(self, status):
        return Terminal(reward=0.0)

    async def close(self):
        pass


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_an_unedited_rollout_of_any_tokens_is_one_episode(name, data):
    tokenizer = TOKENIZERS[name]
    renderer = make_renderer(tokenizer)
    script = [data.draw(completions(tokenizer)) for _ in range(3)]
    rollouter = Rollouter(
        generate=ScriptedGenerate(script),
        environment=lambda problem: MessageTokenEnv(ThreeTurns(), renderer),
        config=config(max_tokens_per_turn=20, max_total_tokens=2000),
    )
    group = asyncio.run(rollouter.run_group("g", PROBLEM, size=1, seed=0))
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.cause) == (RolloutStatus.COMPLETED, None)
    episodes = rollout_to_episodes(rollout, 1.0)
    assert len(episodes) == (1 if any(script) else 0)
    trained = [
        token
        for episode in episodes
        for token, mask in zip(episode.token_ids, episode.loss_mask, strict=True)
        if mask
    ]
    assert trained == [token for completion in script for token in completion]


LONG = 400_000  # characters: what is quadratic in them does not end in time
PIECES = ("<tool_call>", "<tool_call></tool_call>", "<think>", "</think>", " ", "\n", "hello")
HOSTILE = [piece * (LONG // len(piece)) for piece in PIECES] + [
    f"<tool_call>{body}</tool_call>"
    for body in (
        "[" * LONG,
        "[" * 900 + "]" * 900,
        f'{{"name": "f", "arguments": {"[" * 900 + "]" * 900}}}',
        f'{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": ["f"], "arguments": {}}',
        '{"name": "f", "arguments": ' + '{"a": ' * 70 + "1" + "}" * 71,
        "<function=f>" + "<parameter=a>" * (LONG // 13),
        "<function=" * (LONG // 10),
        "<function=f><parameter=a>" + "\n" * LONG + "</function>",
    )
]


def renderers():
    from renderers import PrimeQwen3RendererConfig
    from renderers.prime_qwen3 import PrimeQwen3Renderer

    def prime(tokenizer):
        return PrimeQwen3Renderer(tokenizer, PrimeQwen3RendererConfig())

    return {
        "qwen3": make_renderer(TOKENIZERS["qwen3"]),
        "prime-qwen3": LibraryRenderer(TOKENIZERS["qwen3"], prime),
        "chatml": make_renderer(TOKENIZERS["chatml"], kind="chatml"),
        "template": make_renderer(TOKENIZERS["smollm2"], kind="template"),
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", renderers())
def test_no_completion_stops_a_renderer_and_its_message_is_json(name):
    renderer = renderers()[name]
    tokenizer = TOKENIZERS.get(name.removeprefix("prime-"), TOKENIZERS["smollm2"])
    prompt = renderer.initial_prompt(FIRST)
    for text in HOSTILE:
        completion = tuple(tokenizer.encode(text, add_special_tokens=False))
        message = renderer.parse(completion, prompt)
        json.dumps(message, allow_nan=False, ensure_ascii=False).encode()
        calls = message.get("tool_calls", ())
        assert all(isinstance(call["function"]["name"], str) for call in calls)
        extended = renderer.extend(prompt, completion, MORE)
        assert extended is None or extended[: len(prompt + completion)] == prompt + completion
        renderer.initial_prompt([*FIRST, {"role": "assistant", "content": text}, *MORE])
