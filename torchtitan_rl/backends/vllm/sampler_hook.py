"""Records which tokens vLLM's sampler kept, for the requests that are to be trained on.

vLLM reports such sets itself only with its V2 model runner, and then for requests with a top_k
alone. Here they are read where its sampler has the distribution that it draws from: of every way to
cut tokens (top_p, top_k, min_p, minimum lengths, allowed tokens, grammars), together. Requests that
are not recorded cost nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl.token_sets import WHOLE_VOCABULARY, pack_kept
from torchtitan_rl.types import Grammar, KeptTokens

_MAX_GRAMMARS = 64  # serialized ones that are kept


class KeptSets:
    """The set of the newest token of each recorded request, by vLLM's internal request id.

    A set of more than ``max_tokens`` entries is None: its token is not trained on.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_bytes = 4 * max_tokens
        self._sets: dict[str, KeptTokens] = {}

    def record(self, request_id: str) -> None:
        self._sets[request_id] = None

    def forget(self, request_id: str) -> None:
        self._sets.pop(request_id, None)

    def __getitem__(self, request_id: str) -> KeptTokens:
        return self._sets[request_id]

    def observe(self, runner: Any, *, is_v2: bool) -> None:
        """Read the sets of every batch that the sampler of vLLM's model runner draws from."""
        draw = runner.sampler.sample
        names: Callable[..., Sequence[str]]
        names = _v2_names(runner) if is_v2 else lambda *_: runner.input_batch.req_ids

        def draw_and_read(*args: Any, **options: Any) -> Any:
            sampled, processed = draw(*args, **options)
            if self._sets and processed is not None:
                self._read(names(*args), processed)
            return sampled, processed

        runner.sampler.sample = draw_and_read

    def _read(self, names: Sequence[str], processed_RV: Any) -> None:
        """Record the sets of ``processed_RV``: logits or logprobs, one row for each request, -inf
        where a token is cut."""
        rows = [row for row, name in enumerate(names) if name in self._sets]
        if not rows:
            return
        if len(rows) < len(processed_RV):  # a copy, which is slow
            processed_RV = processed_RV[rows]
        for row, kept_V in zip(rows, (processed_RV > -math.inf).cpu().numpy(), strict=True):
            # A row of NaN keeps nothing; the token's logprob is NaN, too, and is masked for that.
            packed = pack_kept(kept_V) if kept_V.any() else WHOLE_VOCABULARY
            self._sets[names[row]] = packed if len(packed) <= self._max_bytes else None


class Grammars:
    """The grammars of requests; one that several requests have is serialized once."""

    def __init__(self) -> None:
        self._data: dict[Any, bytes] = {}  # by what vLLM compiled them from

    def replayable(self, core: Any, request: Any) -> Grammar | None:
        """The grammar of a request of vLLM's core, if each of its tokens is sampled under it and
        `training/grammars.py` can replay it."""
        from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

        structured = request.structured_output_request
        if structured is None or not isinstance(structured.grammar, XgrammarGrammar):
            return None
        has_reasoner = core.structured_output_manager.reasoner_cls is not None
        if has_reasoner and not structured.reasoning_ended:
            return None  # it applies from the end of the reasoning on
        key = structured.structured_output_key
        if key not in self._data:
            if len(self._data) == _MAX_GRAMMARS:
                self._data.clear()
            text = structured.grammar.ctx.grammar.serialize_json()
            self._data[key] = zlib.compress(text.encode())
        stop_token_ids = tuple(sorted(request.sampling_params.all_stop_token_ids))
        return Grammar(data=self._data[key], stop_token_ids=stop_token_ids)


def _v2_names(runner: Any) -> Callable[..., Sequence[str]]:
    """The request of each row, from the arguments of the V2 runner's ``Sampler.sample``."""

    def names(_logits: Any, _expanded: Any, _mapping: Any, rows: Any, *_: Any) -> Sequence[str]:
        return [runner.req_states.index_to_req_id[row] for row in rows.tolist()]

    return names
