"""What the page shows of one rollout: `rollout_details`, with the text of each token."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.explain import finite
from torchtitan_rl.page.values import (
    MAX_ITEMS,
    MAX_TEXT,
    Json,
    Row,
    at,
    cut,
    dicts,
    integer,
    integers,
    items,
    plain,
)

MAX_TOKEN_TEXT = 200
MAX_TOKENS = 20_000  # of one rollout in an answer
_MAX_INCOMPLETE = 8  # tokens without a whole character; a character has up to four
_MAX_TEXTS = 2_000_000  # characters of all turns, and of all messages

Decode = Callable[[Sequence[int]], list[str]]


def rollout_details(row: Row, decode: Decode | None) -> Json:
    """``decode``: the text of each token; None if there is no tokenizer."""
    turns, messages = dicts(row.get("turns"))[:MAX_ITEMS], dicts(row.get("messages"))
    most = min(MAX_TEXT, _MAX_TEXTS // max(1, len(turns), len(messages)))
    left = MAX_TOKENS
    shown = []
    for turn in turns:
        shown.append(_turn(row, turn, decode, left, most))
        left -= len(shown[-1]["tokens"])
    for parent, turn in zip(_parents(turns), shown, strict=True):
        turn["parent"] = parent
    return {
        "cause": plain(row.get("cause")),
        "problem": plain(row.get("problem")),
        "metrics": plain(row.get("metrics")),
        "phase_s": plain(row.get("phase_s")),
        "messages": plain(messages, most=most),
        "turns": shown,
    }


def _turn(row: Row, turn: Row, decode: Decode | None, most_tokens: int, most: int) -> Json:
    ids = items(turn.get("token_ids"))
    names = ("reward", "branch_reward", "is_seen", "finish_reason", "stop_reason", "replica")
    return {
        "text": plain(turn.get("text"), most=most),
        **{name: plain(turn.get(name)) for name in (*names, "metrics", "advantage")},
        "prompt_tokens": len(items(turn.get("prompt_token_ids"))),
        "num_tokens": len(ids),
        "tokens": list(_tokens(row, turn, ids[: max(0, most_tokens)], decode)),
    }


def _tokens(row: Row, turn: Row, ids: Sequence[Any], decode: Decode | None) -> Iterator[Json]:
    texts: Sequence[str | None] = [None] * len(ids)
    if decode is not None and all(integer(one) is not None for one in ids):
        texts = decode(ids)
    names = ("logprobs", "trainer_logprobs", "versions", "loss_mask", "num_kept")
    logprobs, trainer_logprobs, versions, mask, kept = (items(turn.get(name)) for name in names)
    of_turn, of_tokens = turn.get("advantage"), turn.get("advantages")
    newest = integer(row.get("version"))
    trained = newest - 1 if newest is not None and row.get("split") == "train" else None
    for index, (token, text) in enumerate(zip(ids, texts, strict=True)):
        logprob, of_trainer = (finite(at(values, index)) for values in (logprobs, trainer_logprobs))
        version = integer(at(versions, index))
        has_loss = at(mask, index) == 1
        yield {
            "text": None if text is None else cut(text, MAX_TOKEN_TEXT),
            "id": integer(token),
            "logprob": logprob,
            "trainer_logprob": of_trainer,
            "ratio": _ratio(of_trainer, logprob),
            "version": version,
            "age": None if trained is None or version is None else trained - version,
            "mask": int(has_loss),
            "advantage": finite(at(items(of_tokens), index) if of_tokens else of_turn)
            if has_loss
            else None,
            "kept": integer(at(kept, index)),
        }


def _ratio(of_trainer: float | None, logprob: float | None) -> float | None:
    if of_trainer is None or logprob is None:
        return None
    return math.exp(max(-50.0, min(50.0, of_trainer - logprob)))


def _parents(turns: Sequence[Row]) -> list[int | None]:
    """For each turn, the earlier turn whose prompt and completion its prompt extends; the longest
    of several. Beginnings are compared by digests, because a rollout may have many long prompts."""
    parents: list[int | None] = []
    by_digest: dict[bytes, int] = {}  # the earlier turns
    lengths: set[int] = set()  # theirs, in bytes
    for number, turn in enumerate(turns):
        prompt, completion = (
            array("q", integers(turn.get(name))).tobytes()
            for name in ("prompt_token_ids", "token_ids")
        )
        hashed, start, parent = sha256(), 0, None
        for end in sorted(length for length in lengths if length <= len(prompt)):
            hashed.update(prompt[start:end])
            start, parent = end, by_digest.get(hashed.digest(), parent)
        parents.append(parent)
        if whole := prompt + completion:
            by_digest.setdefault(sha256(whole).digest(), number)
            lengths.add(len(whole))
    return parents


# The texts of tokens.


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
    waiting: list[int] = []  # the stream decodes them again with each token
    for token in token_ids:
        try:
            text = stream.step(tokenizer, token) or ""
        except Exception:  # an id that the tokenizer does not have
            stream, text = DecodeStream(skip_special_tokens=False), f"[{token}]"
        waiting = [] if text else [*waiting, token]
        if len(waiting) == _MAX_INCOMPLETE:
            stream, text = DecodeStream(skip_special_tokens=False), tokenizer.decode(waiting, False)
            waiting = []
        texts.append(text)
    return texts
