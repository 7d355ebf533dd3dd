"""The texts of single tokens, by a policy's own tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], list[str]]


async def token_texts(policy_dir: Path) -> Decode | None:
    """A function from token ids to the text of each; None if the tokenizer cannot be loaded.

    A character of several tokens is the text of the last of them; the others are empty.
    """
    try:
        changed_ns = (policy_dir / "tokenizer.json").stat().st_mtime_ns
        return await asyncio.to_thread(_load, policy_dir / "tokenizer.json", changed_ns)
    except Exception:  # the tokenizers package raises plain exceptions
        return None


@lru_cache(maxsize=4)
def _load(file: Path, changed_ns: int) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda token_ids: _texts(tokenizer, token_ids)


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    stream, texts = DecodeStream(skip_special_tokens=False), []
    for token in token_ids:
        try:
            texts.append(stream.step(tokenizer, token) or "")
        except Exception:  # an id that the tokenizer does not have
            stream = DecodeStream(skip_special_tokens=False)
            texts.append(f"[{token}]")
    return texts
