"""Environments that use chat messages, and the wrapper that turns them into token environments.

``MessageTokenEnv(MyEnv(), make_renderer(tokenizer))`` is the `TokenEnv` that a task returns. It
parses completions into messages, calls the environment with them, and renders the answer as the
next prompt, which extends the previous prompt and completion if the renderer can prove that this is
safe.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any, Protocol

from torchtitan_rl.images import PromptImage, place_images
from torchtitan_rl.rollout.calls import compute
from torchtitan_rl.rollout.chatml import Message, TokenIds
from torchtitan_rl.rollout.env import (
    Observation,
    Terminal,
    is_stateful,
    require_async,
    wrong_answer,
)
from torchtitan_rl.rollout.rendering import ChatRenderer
from torchtitan_rl.types import Completion, RolloutStatus

_SHORT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageObservation:
    """The messages that the environment adds to the conversation before the model's next turn.

    ``messages`` follow the assistant's last message; ``replace_messages``, if given, replaces the
    whole conversation, which is rendered from scratch, and the rollout continues in another
    episode. ``tools`` are read from the first observation and from such replacements.
    ``turn_reward`` is for the message that `MessageEnv.step` was called with.

    A message's content is a text or a list of parts: ``{"type": "text", "text": "What is it?"}``
    and, for a policy that takes images, ``{"type": "image", "image": PIL.Image or path}``, with
    ``max_pixels`` if it is to be scaled down further (see `docs/images.md`).
    """

    messages: Sequence[Message] = ()
    replace_messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    turn_reward: float | None = None


class MessageEnv(Protocol):
    """The environment of one rollout, in chat messages. The rules of `TokenEnv` apply.
    >>> import asyncio
    >>> class SumEnv:
    ...     async def reset(self) -> MessageObservation:
    ...         return MessageObservation(messages=[{"role": "user", "content": "1 + 1?"}])
    ...
    ...     async def step(self, message: dict[str, Any]) -> MessageObservation | Terminal:
    ...         return Terminal(reward=float("2" in message["content"]))
    ...
    ...     async def finish(self, status: RolloutStatus) -> Terminal:
    ...         return Terminal(reward=0.0)
    ...
    ...     async def close(self) -> None: ...
    >>> asyncio.run(SumEnv().step({"role": "assistant", "content": "It is 2."})).reward
    1.0
    """

    async def reset(self) -> MessageObservation:
        """Return the first system and user messages, and the tools."""

    async def step(self, message: dict[str, Any], /) -> MessageObservation | Terminal:
        """Return the answer to the assistant's message (see `ChatRenderer.parse`), or the end."""

    async def finish(self, status: RolloutStatus, /) -> Terminal:
        """Return the reward so far. Called once if a limit ended the rollout."""

    async def close(self) -> None:
        """Release the environment's resources. Called exactly once, on every path."""


class MessageTokenEnv:
    """A `MessageEnv` as a `TokenEnv`. It can be resumed if the `MessageEnv` can. Raises TypeError:
    a method of ``env`` is missing or not async."""

    def __init__(self, env: MessageEnv, renderer: ChatRenderer) -> None:
        require_async(env)
        self.wrapped_env = env
        self._renderer = renderer
        self._messages: list[Message] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._prompt: TokenIds = ()
        self._images: tuple[PromptImage, ...] = ()  # of the prompt

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far; after an edit, the edited conversation. Parts with images have
        their SHA-256 in place of the image."""
        return tuple(self._messages)

    async def state_dict(self) -> dict[str, Any] | None:
        """Return the conversation and the environment's state; None if it has none."""
        env: Any = self.wrapped_env
        state = await env.state_dict() if is_stateful(env) else None
        if state is None:
            return None
        return {
            "env": state,
            "messages": self._messages,
            "tools": list(self._tools),
            "prompt": self._prompt,
            "images": [
                asdict(one) | {"data": b64encode(one.data).decode()} for one in self._images
            ],
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        env: Any = self.wrapped_env
        await env.load_state_dict(state["env"])
        self._messages = list(state["messages"])
        self._tools = list(state["tools"])
        self._prompt = tuple(state["prompt"])
        self._images = tuple(
            PromptImage(**one | {"data": b64decode(one["data"])}) for one in state["images"]
        )

    async def reset(self) -> Observation:
        observation = _checked(await self.wrapped_env.reset(), "a MessageObservation")
        self._tools = observation.tools
        messages = observation.replace_messages or observation.messages
        first: Observation = await self._compute(
            self._render, observation, messages, None, size=_size(messages)
        )
        return first

    async def step(self, completion: Completion) -> Observation | Terminal:
        size = len(completion.token_ids)
        message, text = await self._compute(self._parse, completion, size=size)
        self._messages.append(message)
        answer = await self.wrapped_env.step(dict(message))
        if isinstance(answer, Terminal):
            return replace(answer, turn_text=text)
        answer = _checked(answer, "a MessageObservation or a Terminal")
        messages = answer.messages
        said: TokenIds | None = completion.token_ids
        if answer.replace_messages is not None:
            self._tools = answer.tools or self._tools
            messages, said = answer.replace_messages, None
        observation: Observation = await self._compute(
            self._render, answer, messages, said, size=_size(messages)
        )
        return replace(observation, turn_text=text)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return await self.wrapped_env.finish(status)

    async def close(self) -> None:
        await self.wrapped_env.close()

    async def _compute(self, function: Callable[..., Any], *args: Any, size: int = 0) -> Any:
        """Call ``function``, in another thread if the conversation with ``size`` more tokens or
        characters is so long that the change of threads takes less time than the call."""
        if size + _size(self._messages) < _SHORT_CHARS:
            return function(*args)
        return await compute(function, *args)

    def _parse(self, completion: Completion) -> tuple[dict[str, Any], str]:
        message = self._renderer.parse(completion.token_ids, self._prompt)
        return message, self._renderer.decode(completion.token_ids)

    def _render(
        self,
        observation: MessageObservation,
        messages: Sequence[Message],
        completion_ids: TokenIds | None,
    ) -> Observation:
        """Render the next prompt, with these messages. With ``completion_ids`` None they replace
        the conversation, and the prompt does not extend the previous one."""
        new, images = self._with_images_read(messages)
        extended, seen, first = None, self._images, 0
        if completion_ids is None:
            self._messages, seen = new, ()
        else:
            self._messages = [*self._messages, *new]
            extended = self._renderer.extend(self._prompt, completion_ids, new)
        if extended is None:
            extended = self._renderer.initial_prompt(self._messages, self._tools)
            images, seen = (*seen, *images), ()
        else:
            first = len(self._prompt) + len(completion_ids or ())
        self._prompt, self._images = extended, ()
        if images or seen:
            assert self._renderer.image_token_id is not None
            self._prompt, placed = place_images(
                extended, self._renderer.image_token_id, images, first=first
            )
            self._images = (*seen, *placed)
        return Observation(
            prompt_token_ids=self._prompt,
            max_tokens=observation.max_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            turn_reward=observation.turn_reward,
            images=self._images,
        )

    def _with_images_read(
        self, messages: Sequence[Message]
    ) -> tuple[list[Message], tuple[PromptImage, ...]]:
        """Read the images of messages. Return the messages without them, and the images. Raises
        ValueError: the policy or the renderer takes no images, or an image is not valid."""
        read: list[Message] = []
        images: list[PromptImage] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                parts = []
                for part in content:
                    if part["type"] == "image":
                        images.append(self._read(part))
                        part = {"type": "image", "sha256": images[-1].digest}
                    parts.append(part)
                message = {**message, "content": parts}
            read.append(message)
        return read, tuple(images)

    def _read(self, part: Mapping[str, Any]) -> PromptImage:
        reader = self._renderer.image_reader
        if reader is None or self._renderer.image_token_id is None:
            fix = "give a policy that takes images (docs/images.md), and the renderer chatml"
            raise ValueError(f"a message has an image: {fix}")
        return reader.read(part["image"], max_pixels=part.get("max_pixels"))


def _size(messages: Sequence[Message]) -> int:
    """Return the number of characters; reading an image counts as a long text."""
    parts = any(not isinstance(one.get("content"), str) for one in messages)
    return _SHORT_CHARS if parts else sum(len(str(one)) for one in messages)


def _checked(answer: object, expected: str) -> MessageObservation:
    """Return the answer, or raise WrongAnswerError if it, a message or a tool is not valid."""
    if not isinstance(answer, MessageObservation):
        raise wrong_answer(expected, answer)
    for name in ("messages", "replace_messages", "tools"):
        values = getattr(answer, name)
        if values is None and name == "replace_messages":
            continue
        if not isinstance(values, Sequence):
            raise wrong_answer(f"a list as {name}", values)
        for place, value in enumerate(values):
            if name != "tools":
                _check_message(value, f"{name}[{place}]")
            elif not isinstance(value, Mapping):
                raise wrong_answer(f"a tool's schema as {name}[{place}]", value)
    return answer


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        example = '{"role": "user", "content": "..."}'
        raise wrong_answer(f"a message like {example} as {where}", message)
    content, is_said = message.get("content"), message["role"] == "assistant"
    if isinstance(content, str) or (content is None and is_said):
        return
    if not isinstance(content, list | tuple):
        raise wrong_answer(f"a text or a list of parts as {where}.content", content)
    for place, part in enumerate(content):
        name = f"{where}.content[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        # Templates write a place for other media, or leave them out: the policy would see nothing.
        is_valid = (
            (kind == "text" and isinstance(part.get("text"), str))
            or (kind == "image" and part.get("image") is not None)
            or (kind == "thinking" and is_said)
        )
        if not is_valid:
            image = '{"type": "image", "image": PIL.Image, path or bytes}'
            raise wrong_answer(f'{{"type": "text", "text": "..."}} or {image} as {name}', part)
        pixels = part.get("max_pixels")
        if pixels is not None and not (isinstance(pixels, Integral) and int(pixels) > 0):
            raise wrong_answer(f"an integer above 0 as {name}.max_pixels", pixels)
