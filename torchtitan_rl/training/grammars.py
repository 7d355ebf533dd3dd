"""What tokens were sampled from under a grammar, by a replay of the grammar on the tokens.

A grammar allows nearly the whole vocabulary inside a string, so its sets are not recorded with the
tokens. The same xgrammar, given the same grammar and tokens, allows the same ones again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_runs, pack_kept
from torchtitan_rl.types import Episode, Grammar, KeptRun, KeptTokens, spans


def without_grammars(episode: Episode) -> Episode:
    """The episode without loss on tokens that were sampled under a grammar."""
    return _replayed(episode, lambda _grammar, _token_ids: iter(()))


class GrammarReplay:
    """Replays grammars on the policy's vocabulary. Not thread-safe.

    ``tokenizer`` is that of the engine. xgrammar is imported for the first grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None

    def __call__(self, episode: Episode) -> Episode:
        """The episode with the tokens that its grammars allowed.

        Tokens have no loss where that cannot be found out: another version of xgrammar wrote the
        grammar, or, from there on, it rejects a token.
        """
        return _replayed(episode, self._allowed)

    def _allowed(self, grammar: Grammar, token_ids: tuple[int, ...]) -> Iterator[KeptTokens]:
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        try:
            parsed = xgrammar.Grammar.deserialize_json(zlib.decompress(grammar.data).decode())
        except RuntimeError:  # of another version
            return
        matcher = xgrammar.GrammarMatcher(
            self._compiler.compile_grammar(parsed),
            override_stop_tokens=list(grammar.stop_token_ids) or None,
        )
        bits = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        packed: dict[bytes, bytes] = {}  # most tokens of a string have the same
        for token_id in token_ids:
            if matcher.is_terminated():
                yield WHOLE_VOCABULARY
                continue
            bits.fill_(-1)
            matcher.fill_next_token_bitmask(bits)
            row = bits.numpy().tobytes()
            if not matcher.accept_token(token_id):
                return
            if row not in packed:
                row_B = np.frombuffer(row, dtype=np.uint8)
                kept_V = np.unpackbits(row_B, count=self._vocab_size, bitorder="little")
                packed[row] = pack_kept(kept_V.astype(np.bool_))
            yield packed[row]


def _replayed(
    episode: Episode, allowed: Callable[[Grammar, tuple[int, ...]], Iterator[KeptTokens]]
) -> Episode:
    """The episode with the sets that ``allowed`` finds for each grammar; the tokens after the last
    set have no loss."""
    if not any(isinstance(run.kept, Grammar) for run in episode.kept_tokens):
        return episode
    runs: list[KeptRun] = []
    mask = list(episode.loss_mask)
    for start, end, kept in spans(episode.kept_tokens, len(episode.token_ids)):
        found: list[KeptTokens] = [kept]
        if isinstance(kept, Grammar):
            found = list(allowed(kept, episode.token_ids[start:end]))
            unknown = start + len(found)
            mask[unknown:end] = [False] * (end - unknown)
            found += [None] * (end - unknown)
        runs += (KeptRun(start + run.start, run.kept) for run in kept_runs(found))
    return replace(episode, loss_mask=tuple(mask), kept_tokens=tuple(runs))
