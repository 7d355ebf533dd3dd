"""`SampledLogprobs`: logprobs and kept tokens of a running request, instead of vLLM's
`LogprobsProcessor`.

vLLM's own also ranks, decodes and indexes each entry. Here that is not used, and would cost 0.2 ms
a step with 64 running requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torchtitan_rl.types import KeptTokens, SamplingParams, TopLogprobs


class SampledLogprobs:
    """Has the attributes that vLLM's `RequestState` uses of a `LogprobsProcessor`.

    ``sampled``: the logprob of each token, NaN where none were requested. ``top``: where
    alternatives were requested, the pairs of each position, the sampled token first. ``kept``:
    where ``read_kept`` is given, what it returned for each token.
    """

    logprobs = None
    cumulative_logprob = None
    prompt_logprobs = None
    prompt_token_id_logprobs = None

    def __init__(
        self, sampling: SamplingParams, read_kept: Callable[[], KeptTokens] | None = None
    ) -> None:
        self._has_any = sampling.with_logprobs
        self._width = sampling.num_logprobs + 1
        self._read_kept = read_kept
        self.sampled: list[float] = []
        self.top: list[TopLogprobs] = []
        self.kept: list[KeptTokens] = []

    def update_from_output(self, output: Any) -> None:
        """Take the logprobs of an `EngineCoreOutput`: arrays [tokens, the batch's widest + 1]."""
        if self._read_kept is not None and output.new_token_ids:  # at most one in a step
            self.kept.append(self._read_kept())
        if not self._has_any:
            self.sampled += [math.nan] * len(output.new_token_ids)
        new = output.new_logprobs
        if new is None:
            return
        self.sampled += new.logprobs[:, 0].tolist()
        if self._width > 1:
            for ids, logprobs in zip(
                new.logprob_token_ids[:, : self._width].tolist(),
                new.logprobs[:, : self._width].tolist(),
                strict=True,
            ):
                self.top.append(tuple(zip(ids, logprobs, strict=True)))
