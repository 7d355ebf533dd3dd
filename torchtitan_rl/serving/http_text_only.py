"""The served policy reads text: a request with anything else is refused before it is rendered.

A chat template would drop an image, or leave its placeholder for the engine to read as text. So
each part of a message's content must be of a known kind of text, on every route, whoever the
message is from, however deeply the part is nested; and no field of a request, message or part may
carry another medium.
"""

from __future__ import annotations

from typing import Any

from torchtitan_rl.serving.http_errors import HttpError

_TEXT_PARTS = frozenset(
    {"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"}
)
_MEDIA = frozenset(
    {
        "audio",
        "audio_embeds",
        "audio_url",
        "document",
        "file",
        "image",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "input_video",
        "multi_modal_data",
        "prompt_embeds",
        "video",
        "video_embeds",
        "video_url",
    }
)


def check_text_only(content: dict[str, Any]) -> None:
    """Raises:
    HttpError: 400, naming the part.
    """
    _check_media(content, "")
    modalities = content.get("modalities")
    if isinstance(modalities, list) and any(name != "text" for name in modalities):
        raise _unsupported("modalities", "an answer other than text is asked for")
    for name in ("messages", "input"):
        _check_messages(content.get(name), name)


def _check_messages(messages: Any, place: str) -> None:
    """A list of messages, or of conversations."""
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        at = f"{place}[{index}]"
        if isinstance(message, dict):
            _check_media(message, at)
            _check_content(message.get("content"), f"{at}.content")
        else:
            _check_messages(message, at)


def _check_content(content: Any, place: str) -> None:
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_content(part, f"{place}[{index}]")
    elif isinstance(content, dict):
        kind = content.get("type", "text")
        if not (isinstance(kind, str) and kind in _TEXT_PARTS):
            raise _unsupported(place, f"it is of type {str(kind)[:40]!r}")
        _check_media(content, place)
        for name in ("content", *_TEXT_PARTS):
            _check_content(content.get(name), f"{place}.{name}")


def _check_media(fields: dict[str, Any], place: str) -> None:
    for name in _MEDIA & fields.keys():
        if fields[name] is not None:
            raise _unsupported(f"{place}.{name}" if place else name, "it is not text")


def _unsupported(place: str, why: str) -> HttpError:
    return HttpError(
        400, f"{place}: {why}, and the served policy is text only.", code="text_only", param=place
    )
