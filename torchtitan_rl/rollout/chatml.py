"""ChatML, the chat format of SmolLM2, Qwen2.5 and many others, as a renderer without a library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl.rollout.content_tokens import ContentTokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ..., ...}, as in chat APIs
TokenIds = tuple[int, ...]

_MAX_DEPTH = 64


class ChatMLRenderer:
    """Renders messages as ``<|im_start|>role\\ncontent<|im_end|>\\n``.

    The first prompt comes from the tokenizer's own chat template if it has one (default system
    prompts, tools). Later ones extend it, by messages of those roles for which a test conversation
    has shown at construction that the template appends exactly that.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = ContentTokenizer(tokenizer)
        self._im_end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ends = {self._im_end, tokenizer.eos_token_id}
        if has_token(tokenizer, "<|endoftext|>"):
            ends.add(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        self._stop_token_ids = tuple(sorted(end for end in ends if end is not None))
        self._extendable_roles = frozenset(
            role for role in ("user", "system", "tool") if self._template_appends(role)
        )

    @property
    def stop_token_ids(self) -> TokenIds:
        return self._stop_token_ids

    def initial_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        if not getattr(self._tokenizer, "chat_template", None):
            return self._encode(self._chatml(messages) + "<|im_start|>assistant\n")
        return apply_template(self._tokenizer, messages, tools)

    def extend(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds | None:
        for message in new_messages:
            plain = set(message) == {"role", "content"} and isinstance(message["content"], str)
            if not plain or message["role"] not in self._extendable_roles:
                return None
        return self._append(prompt, completion, new_messages)

    def parse(self, completion: TokenIds, prompt: TokenIds) -> dict[str, Any]:
        end = len(completion)
        while end and completion[end - 1] in self._stop_token_ids:
            end -= 1
        return {"role": "assistant", "content": self.decode(completion[:end])}

    def decode(self, token_ids: TokenIds) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _append(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds:
        ended = bool(completion) and completion[-1] in self._stop_token_ids
        missing_end = () if ended else (self._im_end,)
        text = f"\n{self._chatml(new_messages)}<|im_start|>assistant\n"
        return prompt + completion + missing_end + self._encode(text)

    def _template_appends(self, role: str) -> bool:
        """Whether the template appends a message of this role as it is, with its white space."""
        import jinja2

        history = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
        reply = {"role": "assistant", "content": "four"}
        new = {"role": role, "content": " five \n"}
        try:
            rendered = self.initial_prompt([*history, reply, new])
            extended = self._append(self.initial_prompt(history), self._encode("four"), [new])
        except jinja2.TemplateError:  # the template refuses the role
            return False
        return rendered == extended

    def _chatml(self, messages: Sequence[Message]) -> str:
        return "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in self._tokenizer.marked_messages(messages)
        )

    def _encode(self, text: str) -> TokenIds:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def is_plain_json(value: Any) -> bool:
    """Whether what a policy wrote as JSON is that for every reader: of finite numbers and whole
    characters, and not nested deeply."""
    level, depth = [value], 0
    while level and depth < _MAX_DEPTH:
        nests = [one for one in level if isinstance(one, dict | list)]
        level = [i for one in nests for i in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    try:
        json.dumps(None if level else value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return not level


def apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> TokenIds:
    """The conversation by the tokenizer's own template, with the header of the next turn."""
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return tuple(ids)


def has_token(tokenizer: Any, token: str) -> bool:
    found = tokenizer.convert_tokens_to_ids(token)
    return isinstance(found, int) and found != tokenizer.unk_token_id
