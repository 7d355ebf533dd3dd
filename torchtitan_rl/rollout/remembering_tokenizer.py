"""A tokenizer that remembers what it encoded: the siblings of a group render the same texts."""

from __future__ import annotations

import functools
from typing import Any

_REMEMBERED_TEXTS = 4096


class RememberingTokenizer:
    """Wraps a `transformers` tokenizer for the `renderers` package, which encodes the same headers
    and messages again and again. What is not an encoding goes to the tokenizer itself.

    May be called from any thread. Results of a call (not of `encode`) are shared: read them only.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        remembered = functools.lru_cache(maxsize=_REMEMBERED_TEXTS)
        self._encode = remembered(lambda text, options: tokenizer.encode(text, **dict(options)))
        self._call = remembered(lambda text, options: tokenizer(text, **dict(options)))

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
