"""Conversations from data files, as episodes to imitate (`ExamplesConfig`) or to prefer one to
another (`PairsConfig`).

The examples of step k are the next ``per_step`` rows of an endless sequence of shuffled epochs, so
they depend only on the files, the seed and the step, and a resumed run needs no saved position.

Invariants: a row that cannot be used is an error, which names the row; it is never skipped. An
example with an episode that is too long is left out whole, and counted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.bounds import Name, Positive
from torchtitan_rl.data.columns import column
from torchtitan_rl.data.row_dataset import RowDataset
from torchtitan_rl.data.rows import DataError, Row, contents_of, open_sources
from torchtitan_rl.errors import one_line
from torchtitan_rl.rollout.chatml import Message
from torchtitan_rl.rollout.conversation import conversation_to_episodes
from torchtitan_rl.rollout.rendering import ChatRenderer, RendererKind, Thinking, make_renderer
from torchtitan_rl.types import Episode, Problem

_MOST_SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True, kw_only=True)
class ConversationsConfig:
    """Files of conversations, and how they become tokens."""

    train: tuple[str, ...] = ()
    """Files: ``.jsonl`` and ``.parquet`` files, patterns (``data/*.jsonl``), Hugging Face datasets
    (``hf:NAME:CONFIG:SPLIT``; the name may be a local folder)."""
    tools: Name = "tools"
    """Column with the tools of a conversation, a list of their schemas or its JSON. Rows without it
    have no tools."""
    per_step: Positive = 32
    """Number of rows that each step uses."""
    shuffle: bool = True
    """Whether the rows come in a different order in each epoch. If False, they come in the order of
    the files."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to rows longer than ``trainer.max_episode_tokens``: ``drop`` leaves them out and
    counts them; with ``refuse`` they are errors."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model. Give the one
    that the policy is used with later."""
    thinking: Thinking = "off"
    """How Qwen3 thinks: ``off`` prefills an empty thought; with ``keep`` and ``strip`` thoughts
    (``reasoning_content``) are learned."""

    def resume_identity(self) -> Mapping[str, Any]:
        """A resumed run must have files with the same names and contents."""
        return contents_of(self, "train")


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(ConversationsConfig):
    """Conversations to imitate. The loss is on the assistant's turns alone."""

    messages: Name = "messages"
    """Column with the conversation: a list of messages with ``role`` and ``content``, and for the
    assistant also ``tool_calls`` and ``reasoning_content``."""

    def episodes(self, name: str, place: str, row: Row, renderer: ChatRenderer) -> list[Episode]:
        """Convert a row; there are several episodes if the chat format rewrites the history.
        DataError: the row cannot be used."""
        messages = _messages(self.messages, row, place)
        return _rendered(name, place, messages, renderer, tools=_tools(self.tools, row, place))


@dataclass(frozen=True, kw_only=True)
class PairsConfig(ConversationsConfig):
    """Pairs of a chosen and a rejected continuation of one conversation. The loss is on the
    assistant's turns of the continuation."""

    prompt: str = "prompt"
    """Column with the conversation so far: messages, or the text of a user's message. Empty:
    ``chosen`` and ``rejected`` are whole conversations, whose common beginning is the prompt."""
    chosen: Name = "chosen"
    """Column with the better continuation: messages, or the text of the assistant's answer."""
    rejected: Name = "rejected"
    """Column with the worse continuation, like ``chosen``."""

    def episodes(self, name: str, place: str, row: Row, renderer: ChatRenderer) -> list[Episode]:
        """Convert a row to two episodes, the chosen one first. DataError: it cannot be used."""
        columns, tools = (self.chosen, self.rejected), _tools(self.tools, row, place)
        answers = [_messages(name, row, place, text_of="assistant") for name in columns]
        if self.prompt:
            prompt = _messages(self.prompt, row, place, text_of="user")
            answers = [[*prompt, *answer] for answer in answers]
        first = len(prompt) if self.prompt else _num_common(*answers)
        found = []
        for column_of, messages in zip(columns, answers, strict=True):
            at = f"{place}, {column_of}"
            made = _rendered(name, at, messages, renderer, tools=tools, first=first)
            if len(made) > 1:
                why = "the chat format rewrites the history within the continuation"
                raise DataError(f"{at}: {why}; give one turn alone, or another renderer")
            found += made
        if found[0].token_ids == found[1].token_ids:
            raise DataError(f"{place}: {self.chosen} and {self.rejected} are equal; leave it out")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row as episodes; the id of the row is their group."""

    name: str
    episodes: tuple[Episode, ...]

    @property
    def num_learned(self) -> int:
        """The number of tokens with loss."""
        return sum(episode.num_trained_tokens for episode in self.episodes)

    @property
    def longest(self) -> int:
        return max(len(episode.token_ids) for episode in self.episodes)


class Conversations:
    """The examples of a run's steps, or of a held-out file. Examples with an episode of more than
    ``max_tokens`` are left out; ``prefix`` is the beginning of their names. Raises ConfigError: a
    file cannot be read, or the policy's tokenizer does not fit the renderer."""

    def __init__(
        self,
        config: ExamplesConfig | PairsConfig,
        files: Sequence[str],
        tokenizer: Any,
        *,
        seed: int,
        shuffle: bool,
        max_tokens: int,
        prefix: str = "",
    ) -> None:
        kind, thinking = config.renderer, config.thinking
        self._renderer = make_renderer(tokenizer, kind=kind, thinking=thinking)
        self._config = config
        self._max_tokens = max_tokens
        self._prefix = prefix
        self.rows = rows_of(files, seed=seed, shuffle=shuffle)

    def numbers(self, step: int) -> range:
        last = step * self._config.per_step
        return range(last - self._config.per_step, last)

    def names(self, numbers: range) -> list[str]:
        problems = filter(None, map(self.rows.at, numbers))
        return [self._prefix + one.problem_id for one in problems]

    def read(self, numbers: range) -> tuple[list[Example], list[Example]]:
        """Return the examples of some rows, and those that are left out because they are too long.
        DataError: a row cannot be read or used."""
        fitting: list[Example] = []
        too_long: list[Example] = []
        for problem in filter(None, map(self.rows.at, numbers)):
            place, row = problem.data["place"], problem.data["row"]
            name = self._prefix + problem.problem_id
            episodes = self._config.episodes(name, place, row, self._renderer)
            example = Example(name=name, episodes=tuple(episodes))
            (fitting if example.longest <= self._max_tokens else too_long).append(example)
        return fitting, too_long


def rows_of(files: Sequence[str], *, seed: int, shuffle: bool) -> RowDataset:
    """Open the rows of files. ConfigError: a file cannot be read."""

    def problem(row_id: str, place: str, row: Row) -> Problem:
        return Problem(problem_id=row_id, data={"place": place, "row": row})

    files_read = open_sources(files)
    return RowDataset(files_read, problem, seed=seed, shuffle=shuffle, chosen_by="the files")


def _rendered(
    name: str,
    place: str,
    messages: Sequence[Message],
    renderer: ChatRenderer,
    *,
    tools: Sequence[Mapping[str, Any]],
    first: int = 0,
) -> list[Episode]:
    if messages[0]["role"] == "assistant":
        raise DataError(f"{place}: the first message is the assistant's; begin with another role")
    try:
        if part := _part_without_tokens(renderer, messages, tools):
            why = f"the policy's chat format leaves out {part}; remove it, or give another renderer"
            raise DataError(f"{place}: {why}")
        return conversation_to_episodes(
            name, messages, renderer=renderer, tools=tools, first=max(1, first)
        )
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error
    except Exception as error:  # the model's template may raise any exception
        raise DataError(f"{place}: {one_line(error)}") from error


def _part_without_tokens(
    renderer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> str:
    """What of a conversation would become no tokens, without an error; empty: nothing."""
    for message in messages:
        role, content = message["role"], message["content"]
        if not _has_tokens(renderer, role, False):
            return f"messages of role {role!r}"
        if message.get("tool_calls") and not _has_tokens(renderer, role, True):
            return "tool_calls"
        if message.get("reasoning_content") and not _has_thoughts(renderer):
            return "reasoning_content"
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                return "all content but texts"
    return "tools" if tools and not _has_tools(renderer) else ""


@functools.lru_cache(maxsize=256)
def _has_tokens(renderer: ChatRenderer, role: str, has_calls: bool) -> bool:
    """Whether messages of a role, or their tool calls, become tokens."""
    before: list[Message] = [] if role == "system" else [{"role": "user", "content": "a"}]
    after: list[Message] = [{"role": "user", "content": "b"}]
    message: Message = {"role": role, "content": "c"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    pairs: tuple[list[Message], ...] = ([], [message])
    if has_calls:
        pairs = ([message], [{**message, "tool_calls": [call]}])
    try:
        without, whole = (renderer.initial_prompt([*before, *one, *after]) for one in pairs)
    except Exception:  # a template that refuses such a conversation says so for the row
        return True
    return without != whole


@functools.lru_cache(maxsize=256)
def _has_thoughts(renderer: ChatRenderer) -> bool:
    """Whether thoughts become tokens of the turn that has them."""
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    thinking = [messages[0], {**messages[1], "reasoning_content": "c"}]
    try:
        return renderer.completion(messages) != renderer.completion(thinking)
    except Exception:  # as in `_has_tokens`
        return True


@functools.lru_cache(maxsize=256)
def _has_tools(renderer: ChatRenderer) -> bool:
    """Whether the schemas of tools become tokens."""
    messages: list[Message] = [{"role": "user", "content": "a"}]
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "c", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    try:
        return renderer.initial_prompt(messages) != renderer.initial_prompt(messages, tools)
    except Exception:  # as in `_has_tokens`
        return True


def _messages(name: str, row: Row, place: str, *, text_of: str = "") -> list[Message]:
    """Read a column of messages; with ``text_of``, a text is one message of that role."""
    value = column(name, row, place)
    if text_of and isinstance(value, str):
        value = [{"role": text_of, "content": value}]
    are_messages = isinstance(value, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value
    )
    if not are_messages or not value:
        what = f"{'a text, or ' if text_of else ''}a list of messages such as"
        example = '{"role": "user", "content": "Hi"}'
        raise DataError(f"{place}: column {name!r} is not {what} {example}")
    # Parquet files have a null for each field that only other messages have.
    messages = [{key: one[key] for key in one if one[key] is not None} for one in value]
    for number, message in enumerate(messages, start=1):
        at = f"{place}: message {number} of {name!r}"
        if wrong := _wrong_field(message):
            raise DataError(f"{at}: {wrong}")
        if message["role"] == "assistant" and not _says_something(message):
            why = "is the assistant's and is empty; give it content or tool_calls, or leave it out"
            raise DataError(f"{at} {why}")
        message.setdefault("content", "")
    return list(messages)


def _wrong_field(message: Message) -> str:
    """The error in a field that some chat formats would leave out silently; empty: none."""
    content, calls = message.get("content", ""), message.get("tool_calls", [])
    if not isinstance(content, str | list):
        return f"content is {_shown(content)}; give a text"
    if not isinstance(thoughts := message.get("reasoning_content", ""), str):
        return f"reasoning_content is {_shown(thoughts)}; give a text"
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        return f"tool_calls is {_shown(calls)}; give a list of objects"
    if (weight := message.get("weight", 1)) != 1:  # of OpenAI's format: 0 is without loss
        return f"weight is {_shown(weight)}, and every turn of the assistant has loss; remove it"
    return ""


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _says_something(message: Message) -> bool:
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return bool(said or message.get("tool_calls") or message.get("reasoning_content"))


def _tools(name: str, row: Row, place: str) -> list[Mapping[str, Any]]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{place}: column {name!r} is not JSON ({error})") from error
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise DataError(f"{place}: column {name!r} is not a list of tools")
    return value


def _num_common(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
