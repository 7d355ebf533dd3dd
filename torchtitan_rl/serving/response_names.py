"""Which requests belong to a response, by the names that vLLM gives them.

A response has one request for each prompt and each of its ``n`` choices, named after the response:

| response | request |
|---|---|
| ``chatcmpl-ID`` (chat, messages) | ``chatcmpl-ID-RANDOM`` |
| ``cmpl-ID`` | ``cmpl-ID-PROMPT-RANDOM`` |
| ``resp_ID`` | ``resp_ID_NUMBER-RANDOM`` |

RANDOM is 8 hexadecimal digits; where ``n`` is above 1, the number of the choice and "_" come first.
ID may be the client's own (``X-Request-Id``), so a name is read from both of its ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FORMS = [
    re.compile(rf"(?:(?P<index>\d+)_)?{form}-[0-9a-f]{{8}}", re.DOTALL)
    for form in (
        r"(?P<response>chatcmpl-.*)",
        r"(?P<response>cmpl-.*)-(?P<prompt>\d+)",
        r"(?P<response>resp_.*)_\d+",
    )
]


@dataclass(frozen=True, slots=True)
class _Name:
    response: str
    prompt: int = 0
    index: int = 0  # among the choices of its prompt


def requests_of_response(
    request_ids: Iterable[str], response_id: str, choice: int | None = None
) -> list[str]:
    """Those of a session's requests that belong to a response, or to one choice of it.

    ``choice`` is the index in the response: those of its first prompt come first.
    """
    found = _choices(request_ids, response_id)
    return [key for key, index in found.items() if choice in (None, index)]


def choices_of_response(request_ids: Iterable[str], response_id: str) -> list[int]:
    """The choices of a response; none where there is no such response."""
    return sorted(set(_choices(request_ids, response_id).values()))


def _choices(request_ids: Iterable[str], response_id: str) -> dict[str, int]:
    """The requests of a response, with the choice that each one is."""
    names = {request_id: _name(request_id) for request_id in request_ids}
    found = {key: name for key, name in names.items() if name.response == response_id}
    per_prompt = 1 + max((name.index for name in found.values()), default=0)
    return {key: name.prompt * per_prompt + name.index for key, name in found.items()}


def _name(request_id: str) -> _Name:
    """A request of none of the forms is a response of its own."""
    for form in _FORMS:
        if match := form.fullmatch(request_id):
            parts = match.groupdict()
            return _Name(parts["response"], int(parts.get("prompt") or 0), int(parts["index"] or 0))
    return _Name(request_id)
