"""ChatML, the chat format of SmolLM2, Qwen2.5 and many others, as a renderer without a library.

Contents never become control tokens. A tool's output, a question or a row may contain
``<|im_end|>``, which no tokenizer can distinguish from the template's own control strings. So
`ContentTokenizer` inserts a break after the first character of each control string in messages
before they are rendered. It then splits the rendered text at the breaks and encodes the pieces: a
control string in a message is encoded as plain text.

Every added token of the vocabulary counts as a control string, unless it is white space. Assistant
messages keep added tokens that are not marked special, such as ``<think>``: the policy can sample
them within its turn, and templates read them.

Invariant: a message without control strings is encoded as by the tokenizer alone.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.images import ImageReader, image_reader

Message = Mapping[str, Any]  # {"role": ..., "content": ..., ...}, as in chat APIs
TokenIds = tuple[int, ...]

_MAX_DEPTH = 64
_IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # Qwen2.5-VL's
_PROBES: Mapping[type, Any] = {  # contents of a test message, by their type
    str: " five \n",
    list: [{"type": "text", "text": " five"}, {"type": "image"}, {"type": "text", "text": " \n"}],
}


class ChatMLRenderer:
    """Renders messages as ``<|im_start|>role\\ncontent<|im_end|>\\n``. A content is a text, or a
    list of parts of type ``text`` and ``image``.

    The first prompt comes from the tokenizer's own chat template if it has one (default system
    prompts, tools). Later prompts extend it only by messages of certain roles. A test conversation,
    rendered at construction, shows for which roles the template appends exactly this text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = ContentTokenizer(tokenizer)
        self._im_end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ends = {self._im_end, tokenizer.eos_token_id}
        if has_token(tokenizer, "<|endoftext|>"):
            ends.add(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        self.stop_token_ids: TokenIds = tuple(sorted(end for end in ends if end is not None))
        self.image_token_id: int | None = None
        if all(has_token(tokenizer, token) for token in _IMAGE_TOKENS):
            self.image_token_id = tokenizer.convert_tokens_to_ids(_IMAGE_TOKENS[1])
        self._extendable = frozenset(
            (role, kind)
            for role in ("user", "system", "tool")
            for kind, content in _PROBES.items()
            if self._template_appends(role, content)
        )

    @property
    def image_reader(self) -> ImageReader | None:
        return image_reader(Path(self._tokenizer.name_or_path))

    def initial_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        if not getattr(self._tokenizer, "chat_template", None):
            return self._encode(self._chatml(messages) + "<|im_start|>assistant\n")
        return apply_template(self._tokenizer, messages, tools)

    def completion(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        prompt = self.initial_prompt(messages[:-1], tools)
        if getattr(self._tokenizer, "chat_template", None):
            whole = apply_template(self._tokenizer, messages, tools, has_header=False)
        else:
            whole = self._encode(self._chatml(messages))
        return spoken_tokens(prompt, whole, (self._im_end,))

    def extend(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds | None:
        for message in new_messages:
            kind = type(message.get("content"))
            if (
                set(message) != {"role", "content"}
                or (message["role"], kind) not in self._extendable
            ):
                return None
        return self._append(prompt, completion, new_messages)

    def parse(self, completion: TokenIds, prompt: TokenIds) -> dict[str, Any]:
        end = len(completion)
        while end and completion[end - 1] in self.stop_token_ids:
            end -= 1
        return {"role": "assistant", "content": self.decode(completion[:end])}

    def decode(self, token_ids: TokenIds) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _append(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds:
        ended = bool(completion) and completion[-1] in self.stop_token_ids
        missing_end = () if ended else (self._im_end,)
        text = f"\n{self._chatml(new_messages)}<|im_start|>assistant\n"
        return prompt + completion + missing_end + self._encode(text)

    def _template_appends(self, role: str, content: Any) -> bool:
        """Whether the template appends a message of this role unchanged, white space included."""
        import jinja2

        history = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
        reply = {"role": "assistant", "content": "four"}
        new = {"role": role, "content": content}
        try:
            rendered = self.initial_prompt([*history, reply, new])
            extended = self._append(self.initial_prompt(history), self._encode("four"), [new])
        except (jinja2.TemplateError, TypeError):  # the template refuses the role or the parts
            return False
        return rendered == extended

    def _chatml(self, messages: Sequence[Message]) -> str:
        return "".join(
            f"<|im_start|>{message['role']}\n{_text_with_places(message.get('content'))}<|im_end|>\n"
            for message in self._tokenizer.marked_messages(messages)
        )

    def _encode(self, text: str) -> TokenIds:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _text_with_places(content: Any) -> str:
    if not isinstance(content, list | tuple):
        return content or ""  # None: an assistant's message with calls only
    place = "".join(_IMAGE_TOKENS)
    return "".join(place if one["type"] == "image" else one.get("text", "") for one in content)


def is_plain_json(value: Any) -> bool:
    """Whether every JSON reader accepts this parsed value: its numbers are finite, its strings are
    valid Unicode, and it is not nested deeply."""
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
    *,
    has_header: bool = True,
    **options: Any,
) -> TokenIds:
    """Render the conversation with the tokenizer's own template. With ``has_header``, the header of
    the assistant's next turn follows."""
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=has_header,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return tuple(ids)


def spoken_tokens(prompt: TokenIds, whole: TokenIds, ends: TokenIds) -> TokenIds:
    """Return the tokens of ``whole`` after ``prompt`` up to the first one that ends a turn; without
    one, because the next header would end the turn, the first of ``ends`` is appended. Raises
    ValueError: ``whole`` does not begin with ``prompt``."""
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat format does not write an assistant's message after its header")
    rest = whole[len(prompt) :]
    end = next((place for place, token in enumerate(rest) if token in ends), None)
    return (*rest, ends[0]) if end is None else rest[: end + 1]


def has_token(tokenizer: Any, token: str) -> bool:
    found = tokenizer.convert_tokens_to_ids(token)
    return isinstance(found, int) and found != tokenizer.unk_token_id


_BREAK = "\ufdd0"  # a Unicode noncharacter; counts as a break only inside a control string
_SPACES = " \t\r\n\v\f\N{LOWER ONE EIGHTH BLOCK}"
_WORD = re.compile(r"[\w.-]*")


class ContentTokenizer:
    """Wraps a `transformers` tokenizer and changes only rendering and encoding. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.values()
        controls = [one for one in added if len(one.content) > 1 and one.content.strip(_SPACES)]
        self._tokenizer = tokenizer
        self._all = _Marker(controls, tokenizer)
        self._special = _Marker([one for one in controls if one.special], tokenizer)

    def marked_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the messages with breaks in their control strings, whose rendered text
        this tokenizer must encode. Marking the copies again changes nothing."""
        return [
            {
                key: (self._special if _is_speech(one, key) else self._all).field(key, value)
                for key, value in one.items()
            }
            for one in messages
        ]

    def marked(self, value: Any) -> Any:
        """Like `marked_messages`, for tools and other arguments of a template."""
        return self._all.value(value)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = False,
        **values: Any,
    ) -> str | list[int]:
        """Like the tokenizer's method, for one conversation only; token ids are a list."""
        text: str = self._tokenizer.apply_chat_template(
            self.marked_messages(conversation),
            chat_template=chat_template,
            tokenize=False,
            **self.marked(values),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: Any, **options: Any) -> list[int]:
        if isinstance(text, str) and _BREAK in text:
            return list(self(text, **options)["input_ids"])
        return list(self._tokenizer.encode(text, **options))

    def __call__(self, text: Any, **options: Any) -> Any:
        if not (isinstance(text, str) and _BREAK in text):
            return self._tokenizer(text, **options)
        first, *others = self._all.breaks.split(text)
        whole = {name: list(values) for name, values in self._tokenizer(first, **options).items()}
        if others:  # in one call, because there may be thousands
            more = self._tokenizer(others, **options | {"add_special_tokens": False})
        start = len(first) + len(_BREAK)
        for index, piece in enumerate(others):
            for name, values in whole.items():
                shift = start if name == "offset_mapping" else 0
                new = more[name][index]
                values += [(a + shift, b + shift) for a, b in new] if shift else new
            start += len(piece) + len(_BREAK)
        return whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Marker:
    """Inserts a break into each occurrence of ``controls`` in a value, so that the occurrence is
    not encoded as a control token. The pattern ``breaks`` matches these breaks."""

    def __init__(self, controls: Sequence[Any], tokenizer: Any) -> None:
        rests = _by_first_character(one.content for one in controls).items()
        ends = {re.escape(first): f"(?={_beginning_with(rest)})" for first, rest in rests}
        # Only the first character is matched, so control strings may overlap.
        self._starts = _any_of(first + end for first, end in ends.items())
        self.breaks = _any_of(f"(?<={first}){_BREAK}{end}" for first, end in ends.items())
        self._longest = max((len(one.content) for one in controls), default=0)
        # The tokenizer searches for some control tokens in normalized text.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_raw = not any(one.normalized for one in controls)
        self._normalizer = None if is_raw else getattr(backend, "normalizer", None)

    def value(self, value: Any, after: str = "") -> Any:
        """Insert breaks into a value. ``after``: the text that a template may append to it."""
        if isinstance(value, str):
            return self._text(value, after)
        if isinstance(value, Mapping):
            return {self._name(key): self.field(key, one, after) for key, one in value.items()}
        if isinstance(value, list | tuple):
            marked = []
            for part in reversed(value):
                marked.append(self.value(part, after))
                after = (_text_of(part) + after)[: self._longest]
            return marked[::-1]
        return value

    def field(self, key: Any, value: Any, after: str = "") -> Any:
        if key == "name":
            return self._name(value)
        if key == "arguments" and isinstance(value, str):
            return self._arguments(value)
        return self.value(value, after if key == "text" else "")

    def _text(self, text: str, after: str = "") -> str:
        if self._normalizer is not None:
            normal = [self._normalizer.normalize_str(one) for one in (text, after)]
            if self._starts.search("".join(normal)):
                text, after = normal
        whole = text + after
        marked = self._starts.sub(rf"\g<0>{_BREAK}", whole)
        if not after or len(marked) == len(whole):
            return marked[: len(marked) - len(after)]
        num_breaks = sum(one.end() <= len(text) for one in self._starts.finditer(whole))
        return marked[: len(text) + num_breaks * len(_BREAK)]

    def _name(self, name: Any) -> Any:
        """Insert breaks into a name, also into ``<name>``, which templates may render."""
        if not isinstance(name, str):
            return name
        return self._text(name) if _WORD.fullmatch(name) else self._text(f"<{name}>")[1:-1]

    def _arguments(self, text: str) -> str:
        """Insert breaks into a call's arguments in JSON, which may escape a control string."""
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text)
        marked = self.value(arguments)
        return text if marked == arguments else json.dumps(marked, ensure_ascii=False)


def _by_first_character(words: Iterable[str]) -> dict[str, list[str]]:
    rests: defaultdict[str, list[str]] = defaultdict(list)
    for word in words:
        rests[word[0]].append(word[1:])
    return rests


def _beginning_with(words: Sequence[str]) -> str:
    """Return a pattern that matches if one of the words begins here: a tree, because there may be
    thousands."""
    if "" in words:
        return ""
    branches = _by_first_character(words).items()
    return f"(?:{'|'.join(re.escape(first) + _beginning_with(rest) for first, rest in branches)})"


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _is_speech(message: Mapping[str, Any], key: str) -> bool:
    return message.get("role") == "assistant" and key != "tool_calls"


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""
