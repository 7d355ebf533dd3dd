"""The forward pass of one microbatch, and the policy loss of one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_rl.backends.titan.context_parallel import gather_entries
from torchtitan_rl.backends.titan.frozen import taught_rows
from torchtitan_rl.backends.titan.model import PolicyModel, without_adapters
from torchtitan_rl.backends.titan.setup import Layout, to_device
from torchtitan_rl.backends.titan.vision import image_inputs, rope_positions
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_bits
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.logprobs import selected_logprobs
from torchtitan_rl.training.losses import LossFunction, LossOutput, LossTokens, StepTotals
from torchtitan_rl.training.losses.teacher import add_teacher, teacher_kl
from torchtitan_rl.training.trees import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The E entries of a microbatch, in any order. ``sources_E`` are the entries' tokens, as
    indices into the batch. Every rank must run the forward pass, so a microbatch without entries
    gets a placeholder, whose ``is_entry_E`` is False. ``taught_EK`` are the logprobs of
    `TrainingBatch.teacher_ids`, and ``teachers_kl_E`` is the KL to `TrainingBatch.teachers`; None
    if they were not requested."""

    logprobs_E: torch.Tensor
    entropy_E: torch.Tensor
    is_entry_E: torch.Tensor
    sources_E: npt.NDArray[np.int64]
    taught_EK: torch.Tensor | None = None
    teachers_kl_E: torch.Tensor | None = None


def forward(
    model: PolicyModel,
    batch: TrainingBatch,
    part: Microbatch,
    layout: Layout,
    *,
    is_taught: bool = False,
    teachers: Sequence[PolicyModel] = (),
) -> ForwardOutput:
    """Compute logprobs of the part's entries, at the batch's temperature; with ``is_taught``,
    also those of `TrainingBatch.teacher_ids`; with ``teachers``, also the KL to the batch's.
    Collective."""
    sources_E, predecessors_E = part.sources_E, part.predecessors_E
    is_empty = len(sources_E) == 0
    if is_empty:
        sources_E = predecessors_E = np.zeros(1, dtype=np.int64)
    rows = _rows(batch, predecessors_E, sources_E)
    sources_E = rows.sources_E
    tokens, own, entries = _own(rows, len(part.token_ids_T), layout)
    taught = list(taught_rows(teachers, part, rows.predecessors_S, rows.teachers_S, layout))
    positions_1T = to_device(part.position_ids_T, layout)[None]
    routed_TXK = part.routed_experts_TXK
    logits_1SV = model(
        to_device(part.token_ids_T[tokens], layout)[None],
        to_device(rope_positions(part, model.reader)[tokens], layout)[None],
        model.get_attention_masks(positions_1T, to_device(part.subtree_end_T, layout)),
        to_device(own.predecessors_S, layout),
        None if routed_TXK is None else to_device(routed_TXK[tokens], layout)[None],
        image_inputs(batch, part, model.reader, layout.device),
    )
    vocab_size = shard_size = logits_1SV.shape[-1]
    if isinstance(logits_1SV, DTensor):
        shard_size = -(-vocab_size // dist.get_world_size(layout.tensor_group))  # as DTensor splits
        logits_1SV = logits_1SV.to_local()
    targets_EW = batch.token_ids[own.sources_E, None]  # the token, then the teacher's
    if is_taught and batch.teacher_ids is not None:
        targets_EW = np.concatenate([targets_EW, batch.teacher_ids[own.sources_E]], axis=1)
    width = targets_EW.shape[1]
    logprobs, entropy, kl_S = selected_logprobs(
        logits_1SV[0],
        to_device(targets_EW.reshape(-1), layout),
        to_device(np.repeat(own.rows_E, width), layout),
        temperature=batch.temperature,
        group=layout.tensor_group,
        shard_size=shard_size,
        kept_SB=None if own.kept_S is None else _bits(batch, own.kept_S, vocab_size, layout),
        taught=taught,
    )
    for teacher in teachers:
        teacher.lm_head.reshard()
    logprobs_EW, entropy_E = logprobs.view(-1, width), entropy.view(-1, width)[:, 0]
    if layout.context_group is not None:
        group, num_own = layout.context_group, entries.stop - entries.start
        logprobs_EW, entropy_E = (
            gather_entries(one[:num_own], entries.start, len(sources_E), group)
            for one in (logprobs_EW, entropy_E)
        )
    logprobs_E = logprobs_EW[:, 0]
    return ForwardOutput(
        logprobs_E=logprobs_E,
        entropy_E=entropy_E,
        is_entry_E=torch.full_like(logprobs_E, not is_empty, dtype=torch.bool),
        sources_E=sources_E,
        taught_EK=logprobs_EW[:, 1:] if width > 1 else None,
        teachers_kl_E=kl_S[to_device(rows.rows_E, layout)] if teachers else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The S rows of logits that the entries read, and the entries, sorted by row."""

    predecessors_S: npt.NDArray[np.int64]
    kept_S: npt.NDArray[np.int32] | None  # like `TrainingBatch.kept`; None: no row is truncated
    teachers_S: npt.NDArray[np.int64]  # ascending; like `TrainingBatch.teachers`
    rows_E: npt.NDArray[np.int64]  # ascending
    sources_E: npt.NDArray[np.int64]


def _rows(
    batch: TrainingBatch, predecessors_E: npt.NDArray[np.int64], sources_E: npt.NDArray[np.int64]
) -> _Rows:
    """Assign rows of logits to entries. Entries with the same predecessor (the first tokens of
    siblings) read the same row, unless they were sampled from different sets of tokens, or have
    different teachers. The order is the same for all models, so that their entries match."""
    kept_E = teachers_E = np.full(len(sources_E), -1)
    if batch.kept is not None:
        kept_E = batch.kept[sources_E].astype(np.int64)
    if batch.teachers is not None:
        teachers_E = batch.teachers[batch.episode_ids[sources_E]]
    order = np.lexsort((kept_E, predecessors_E, teachers_E))
    keys_3E = np.stack([predecessors_E, kept_E, teachers_E])[:, order]
    is_new_E = np.append(True, (np.diff(keys_3E) != 0).any(axis=0))
    predecessors_S, kept_S, teachers_S = keys_3E[:, is_new_E]
    return _Rows(
        predecessors_S=predecessors_S,
        kept_S=None if (kept_S < 0).all() else kept_S.astype(np.int32),
        teachers_S=teachers_S,
        rows_E=np.cumsum(is_new_E) - 1,
        sources_E=sources_E[order],
    )


def _own(rows: _Rows, num_tokens: int, layout: Layout) -> tuple[slice, _Rows, slice]:
    """Return this rank's part of a pass of ``num_tokens``: its tokens, the rows that it computes
    (with indices into its tokens), and the entries that read them. Without entries, the rows are a
    placeholder with one entry, because every rank must run the head."""
    if layout.context_ranks == 1:
        return slice(0, num_tokens), rows, slice(0, len(rows.rows_E))
    size = num_tokens // layout.context_ranks
    tokens = slice(size * layout.context_rank, size * (layout.context_rank + 1))
    of_S = slice(*np.searchsorted(rows.predecessors_S, [tokens.start, tokens.stop]).tolist())
    entries = of_E = slice(*np.searchsorted(rows.rows_E, [of_S.start, of_S.stop]).tolist())
    if of_E.start == of_E.stop:
        of_S = of_E = slice(0, 1)
    own = _Rows(
        predecessors_S=(rows.predecessors_S[of_S] - tokens.start).clip(0, size - 1),
        kept_S=None if rows.kept_S is None else rows.kept_S[of_S],
        teachers_S=rows.teachers_S[of_S],
        rows_E=rows.rows_E[of_E] - of_S.start,
        sources_E=rows.sources_E[of_E],
    )
    return tokens, own, entries


def _bits(
    batch: TrainingBatch, kept_S: npt.NDArray[np.int32], vocab_size: int, layout: Layout
) -> torch.Tensor:
    numbers_D, sets_S = np.unique(kept_S, return_inverse=True)
    sets = [WHOLE_VOCABULARY if number < 0 else batch.kept_sets[number] for number in numbers_D]
    return to_device(kept_bits(sets, vocab_size)[sets_S], layout)


@dataclass(kw_only=True)
class PolicyObjective:
    """The policy loss of one update. Call it with each microbatch."""

    function: LossFunction  # `policy_loss`, or the user's
    config: LossConfig
    batch: TrainingBatch
    selected_N: npt.NDArray[np.bool_]  # True for each token on which this update trains
    version: int  # of the weights before the step
    layout: Layout
    before_N: npt.NDArray[np.float32] | None = None  # logprobs under these weights, if needed
    reference: PolicyModel | None = None

    def __post_init__(self) -> None:
        self._episode_ids_N = self.batch.episode_ids
        self._totals = StepTotals(
            num_tokens=int(self.selected_N.sum()),
            num_sequences=len(np.unique(self._episode_ids_N[self.selected_N])),
        )

    def __call__(self, part: Microbatch, output: ForwardOutput) -> LossOutput:
        batch, sources_E = self.batch, output.sources_E
        reference_E = None
        if self.reference is not None:
            with torch.no_grad(), without_adapters(self.reference):
                reference_E = forward(self.reference, batch, part, self.layout).logprobs_E

        def of_entries(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(values[sources_E], self.layout)

        _, sequences_E = np.unique(self._episode_ids_N[sources_E], return_inverse=True)
        tokens = LossTokens(
            logprobs_T=output.logprobs_E,
            behaviour_T=of_entries(batch.logprobs),
            advantages_T=of_entries(batch.advantages),
            trained_T=output.is_entry_E,
            ages_T=self.version - of_entries(batch.versions),
            sequences_T=to_device(sequences_E, self.layout),
            reference_T=reference_E,
            before_T=None if self.before_N is None else of_entries(self.before_N),
        )
        loss = self.function(tokens, totals=self._totals, config=self.config)
        if output.teachers_kl_E is not None:
            zero = torch.zeros_like(output.teachers_kl_E)
            kl_E = torch.where(output.is_entry_E, output.teachers_kl_E, zero)
        elif output.taught_EK is not None and batch.teacher_logprobs is not None:
            is_whole_E = np.ones(len(sources_E), dtype=np.bool_)
            if batch.kept is not None:  # a grammar may exclude tokens that the teacher finds likely
                is_whole_E = batch.kept[sources_E] < 0
            kl_E = teacher_kl(
                output.taught_EK,
                of_entries(batch.teacher_logprobs),
                output.is_entry_E & to_device(is_whole_E, self.layout),
            )
        else:
            return loss
        return add_teacher(
            loss,
            tokens,
            kl_E,
            coefficient=batch.teacher_coefficient,
            totals=self._totals,
            config=self.config,
        )


class TokenColumns:
    """Values of a batch's N tokens, collected from microbatches and ranks."""

    def __init__(self, num_columns: int, num_tokens: int, layout: Layout) -> None:
        self._layout = layout
        self._values_CN = torch.zeros(num_columns, num_tokens, device=layout.device)

    def add(self, output: ForwardOutput, *columns_E: torch.Tensor | None) -> None:
        """Add the values of a microbatch's entries. None stands for unknown values (NaN)."""
        unknown_E = torch.full_like(output.logprobs_E, torch.nan)
        values = [unknown_E if one is None else one.detach().float() for one in columns_E]
        # A placeholder writes to the first token, which is never selected.
        self._values_CN[:, to_device(output.sources_E, self._layout)] = torch.stack(values)

    def of_all_ranks(
        self, selected_N: npt.NDArray[np.bool_], *, missing: float
    ) -> tuple[npt.NDArray[np.float32], ...]:
        """Return each column, with ``missing`` for tokens that are not selected. Collective."""
        if self._layout.data_group is not None:
            dist.all_reduce(self._values_CN, group=self._layout.data_group)
        values_CN = self._values_CN.cpu().numpy()
        return tuple(np.where(selected_N, values_N, np.float32(missing)) for values_N in values_CN)


@dataclass(slots=True)
class StepSums:
    """Sums and maxima of any shapes, over one or more microbatches."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, other: StepSums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def add_microbatch(self, output: LossOutput, entropy: torch.Tensor) -> None:
        """Add a microbatch. ``entropy`` is the sum over the microbatch's trained tokens."""
        sums = {**output.sums, "loss": output.loss.detach(), "entropy": entropy}
        self.add(StepSums(sums, output.maxima))

    def of_all_ranks(self, group: dist.ProcessGroup | None) -> StepSums:
        """Reduce over the data-parallel ranks of ``group``. Collective."""
        return StepSums(
            _reduced(self.sums, dist.ReduceOp.SUM, group),
            _reduced(self.maxima, dist.ReduceOp.MAX, group),
        )


def _reduced(
    values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    if not values:
        return {}
    flat = torch.cat([value.double().flatten() for value in values.values()])
    if group is not None:
        dist.all_reduce(flat, op=op, group=group)
    parts = torch.split(flat.cpu(), [value.numel() for value in values.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }
