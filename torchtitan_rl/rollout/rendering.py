"""Converts chat messages to token ids and back, for conversations that are trained on.

The next prompt *extends* the tokens that the engine saw and sampled; history is tokenized again
only if there is no other way. Tokens that the template adds after an assistant's turn (an
end-of-turn token that was not sampled, a newline) belong to the next prompt, never to a completion.
Control strings inside messages are encoded as text (`ContentTokenizer`). No other module uses the
`renderers` package.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.images import ImageReader
from torchtitan_rl.rollout.chatml import (
    ChatMLRenderer,
    ContentTokenizer,
    Message,
    TokenIds,
    apply_template,
    has_token,
    is_plain_json,
    spoken_tokens,
)

RendererKind = Literal["auto", "qwen3", "chatml", "library", "template"]
Thinking = Literal["off", "keep", "strip"]

_CACHED_TEXTS = 4096
_XML_TAGS, _MAX_TAGS = ("<function=", "<parameter="), 256  # the library rereads the text per tag
_QWEN3_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


class ChatRenderer(Protocol):
    """Renders one model family's conversations. Stateless, and may be called from any thread.
    ``image_token_id`` stands once for each image in a prompt; None: it takes no images."""

    image_token_id: int | None

    @property
    def image_reader(self) -> ImageReader | None:
        """Reads images for the policy; None if it takes none."""

    @property
    def stop_token_ids(self) -> TokenIds:
        """Tokens that end an assistant's turn."""

    def initial_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        """Render the whole conversation and the header of the assistant's next turn."""

    def extend(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds | None:
        """Return the next prompt, which begins with ``prompt + completion``; None if it cannot be
        proven that the template renders the same tokens. The caller then renders the conversation
        from scratch."""

    def completion(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        """Return the tokens that a policy samples to write the last message, an assistant's, after
        ``initial_prompt(messages[:-1], tools)``. The last token ends the turn. Raises ValueError:
        the template does not continue that prompt with the message."""

    def parse(self, completion: TokenIds, prompt: TokenIds) -> dict[str, Any]:
        """Convert the completion to an assistant message. Never raises.

        The message has ``content`` (a text, maybe empty), and what the model wrote of
        ``reasoning_content``, ``tool_calls`` and ``invalid_tool_calls`` (as raw text). A tool call
        is ``{"type": "function", "function": {"name": ..., "arguments": ...}}``; its arguments are
        a dict, or a text if the model wrote one.
        """

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text, special tokens included."""


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in a policy's folder, as `AutoTokenizer` does.

    To choose a class, `AutoTokenizer` imports the code of models, which takes seconds; this does
    not where the files of a ``llama`` or ``qwen3`` model name the general class.
    """
    files = (folder / "tokenizer_config.json", folder / "config.json")
    fields: dict[str, Any] = {}
    for file in files:
        fields |= json.loads(file.read_text()) if file.is_file() else {}
    is_general = fields.get("tokenizer_class") == "TokenizersBackend"
    if is_general and fields.get("model_type") in ("llama", "qwen3"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@functools.lru_cache(maxsize=16)
def make_renderer(
    tokenizer: Any, *, kind: RendererKind = "auto", thinking: Thinking = "off"
) -> ChatRenderer:
    """Return the renderer for a `transformers` tokenizer; it is created once for each tokenizer.

    ``kind``:

    - "qwen3", "chatml": our renderers of these chat formats;
    - "library": the `renderers` package's own renderer of the model;
    - "template": the tokenizer's chat template, which renders every turn from scratch;
    - "auto": "library" if `renderers` knows the model by name; else "qwen3" if the vocabulary has
      its special tokens and the chat template agrees; else "chatml", else "template".

    ``thinking`` is for Qwen3: "off" prefills an empty thought; "keep" leaves earlier thoughts in
    the history, so that a rollout stays one episode; "strip" drops them at each new user message,
    as Qwen3's own template does, so that each turn becomes an episode.

    Raises:
        ConfigError: the vocabulary or the template does not fit ``kind``.
    """
    if kind == "auto":
        kind, thinking = _detect(tokenizer, thinking)
    if kind == "qwen3":
        _require_tokens(tokenizer, _QWEN3_TOKENS, "qwen3")
        return _qwen3(tokenizer, thinking)
    if kind == "chatml":
        _require_tokens(tokenizer, ("<|im_start|>", "<|im_end|>"), "chatml")
        return ChatMLRenderer(tokenizer)
    if kind == "library":
        from renderers import create_renderer

        return LibraryRenderer(tokenizer, create_renderer)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"tokenizer {_name(tokenizer)}: no chat template and no <|im_start|> token; "
            "give it a chat_template, or write a TokenEnv that makes token ids itself"
        )
    from renderers import DefaultRendererConfig
    from renderers.default import DefaultRenderer

    return LibraryRenderer(tokenizer, lambda one: DefaultRenderer(one, DefaultRendererConfig()))


class LibraryRenderer:
    """Adapts a renderer of the `renderers` package; ``make`` creates it for a tokenizer. Renders
    text only."""

    image_token_id: int | None = None
    image_reader: ImageReader | None = None

    def __init__(self, tokenizer: Any, make: Callable[[Any], Any]) -> None:
        self._tokenizer = ContentTokenizer(tokenizer)
        self._renderer = make(_CachingTokenizer(self._tokenizer))

    @property
    def stop_token_ids(self) -> TokenIds:
        return tuple(self._renderer.get_stop_token_ids())

    def initial_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        return self._render(messages, tools, has_header=True)

    def completion(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> TokenIds:
        prompt = self.initial_prompt(messages[:-1], tools)
        whole = self._render(messages, tools, has_header=False)
        return spoken_tokens(prompt, whole, self.stop_token_ids)

    def extend(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds | None:
        sampled = prompt + completion
        extended = self._bridge(prompt, completion, new_messages)
        if extended is None and completion and completion[-1] in self.stop_token_ids:
            # The library refuses a turn that ended inside a thought. The tokens after a turn do not
            # depend on its content, so take them from a turn without content.
            empty = prompt + completion[-1:]
            extended = self._bridge(prompt, completion[-1:], new_messages)
            if extended is not None and extended[: len(empty)] == empty:
                return sampled + extended[len(empty) :]
        # The library drops tokens sampled after a turn's end: then the result is no extension.
        if extended is not None and extended[: len(sampled)] == sampled:
            return extended
        return None

    def parse(self, completion: TokenIds, prompt: TokenIds) -> dict[str, Any]:
        text = self.decode(completion)
        unread = {"role": "assistant", "content": "", "invalid_tool_calls": [text]}
        if any(text.count(tag) > _MAX_TAGS for tag in _XML_TAGS):
            return unread
        try:
            parsed = self._renderer.parse_response(list(completion), prompt_ids=list(prompt))
        except (ValueError, RecursionError):  # JSON with long numbers or deep nesting
            return unread
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [call for call in parsed.tool_calls if _is_sound(call)]
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        if invalid := [call.raw for call in parsed.tool_calls if not _is_sound(call)]:
            message["invalid_tool_calls"] = invalid
        return message

    def decode(self, token_ids: TokenIds) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, has_header: bool
    ) -> TokenIds:
        ids = self._renderer.render_ids(
            self._tokenizer.marked_messages(messages),
            tools=self._tokenizer.marked(tools) or None,
            add_generation_prompt=has_header,
        )
        return tuple(ids)

    def _bridge(
        self, prompt: TokenIds, completion: TokenIds, new_messages: Sequence[Message]
    ) -> TokenIds | None:
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt), list(completion), self._tokenizer.marked_messages(new_messages)
        )
        return None if rendered is None else tuple(rendered.token_ids)


def _is_sound(call: Any) -> bool:
    return call.status == "ok" and isinstance(call.name, str) and is_plain_json(call.arguments)


def _detect(tokenizer: Any, thinking: Thinking) -> tuple[RendererKind, Thinking]:
    from renderers.base import MODEL_RENDERER_MAP

    if MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""), "qwen3") != "qwen3":
        return "library", thinking
    if all(has_token(tokenizer, token) for token in _QWEN3_TOKENS):
        # Templates of Qwen3 models that never think add no empty thought: "off" is "keep" there.
        for candidate in dict.fromkeys((thinking, "keep" if thinking == "off" else thinking)):
            if _template_agrees(tokenizer, candidate, enable_thinking=thinking != "off"):
                return "qwen3", candidate
    if all(has_token(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>")):
        return "chatml", thinking
    return "template", thinking


def _qwen3(tokenizer: Any, thinking: Thinking) -> LibraryRenderer:
    from renderers import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    config = Qwen3RendererConfig(
        enable_thinking=thinking != "off",
        thinking_retention="all" if thinking == "keep" else None,
    )
    return LibraryRenderer(tokenizer, lambda one: Qwen3Renderer(one, config))


def _template_agrees(tokenizer: Any, thinking: Thinking, *, enable_thinking: bool) -> bool:
    """Whether the tokenizer's template, if any, renders as Qwen3's does, whose vocabulary other
    models share."""
    if not getattr(tokenizer, "chat_template", None):
        return True
    renderer = _qwen3(tokenizer, thinking)
    user = {"role": "user", "content": " one \n"}
    probes = [[{"role": "system", "content": "s"}, user], [user]]
    if thinking != "off":  # with "off" the library deviates from Qwen3's template on purpose
        probes.append([user, {"role": "assistant", "content": "two"}, user])
    return all(
        renderer.initial_prompt(probe)
        == apply_template(tokenizer, probe, enable_thinking=enable_thinking)
        for probe in probes
    )


def _require_tokens(tokenizer: Any, tokens: Sequence[str], kind: str) -> None:
    missing = [token for token in tokens if not has_token(tokenizer, token)]
    if missing:
        raise ConfigError(
            f"tokenizer {_name(tokenizer)}: the {kind} renderer needs {' '.join(missing)} in the "
            "vocabulary; add them, or choose another renderer"
        )


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


class _CachingTokenizer:
    """Caches encodings for the `renderers` package, which encodes the same headers and messages for
    all siblings of a group. Thread-safe. Results of ``__call__`` (not of `encode`) are shared and
    must not be changed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        cached = functools.lru_cache(maxsize=_CACHED_TEXTS)
        self._encode = cached(lambda text, options: tokenizer.encode(text, **dict(options)))
        self._call = cached(lambda text, options: tokenizer(text, **dict(options)))

    def encode(self, text: Any, **options: Any) -> list[int]:
        if not isinstance(text, str):
            return list(self._tokenizer.encode(text, **options))
        return list(self._encode(text, tuple(sorted(options.items()))))

    def __call__(self, text: Any, **options: Any) -> Any:
        if not isinstance(text, str):
            return self._tokenizer(text, **options)
        return self._call(text, tuple(sorted(options.items())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
