"""The policy's trainer, one instance in each trainer rank.

Public methods are collective unless they say otherwise: all ranks call them with the same arguments
in the same order. Each rank gets the whole batch and takes its share. A step either ends with new
weights and ``version + 1``, or raises and changes neither weights nor optimizer nor version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtitan_rl.backends.titan import setup as titan_setup  # before torchtitan
from torchtitan_rl.backends.titan.checkpoint import CheckpointWriter, load_state
from torchtitan_rl.backends.titan.forward import ForwardOutput, forward
from torchtitan_rl.backends.titan.hf import hf_parts, hf_state, load_hf, write_hf
from torchtitan_rl.backends.titan.memory import DeviceMemory
from torchtitan_rl.backends.titan.model import build_policy
from torchtitan_rl.backends.titan.objective import PolicyObjective, StepSums, load_reference
from torchtitan_rl.backends.titan.optim import PolicyOptimizer
from torchtitan_rl.config.hf_model import read_architecture
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.losses import LossOutput, cross_entropy_loss
from torchtitan_rl.training.splitting import (
    microbatches,
    num_masked_nonfinite,
    pad_rows,
    predicted_mask,
    rank_share,
    trained_mask,
)
from torchtitan_rl.weights.image import TensorPart

_Objective = Callable[[TrainingBatch, ForwardOutput], LossOutput]


class PolicyTrainer:
    """torchtitan's model, parallelism, optimizer and checkpoints for policy training.

    Args:
        checkpoint_dir: policy in Hugging Face format.
        seed: of the random generators (nothing uses them today; they are checkpointed).
        max_steps: of the whole run, for the learning-rate schedule.
        dtype: of matrix multiplications; the CPU always uses float32.

    Raises:
        ConfigError: the checkpoint is missing or of an unsupported model.
        ValueError: the world size differs from the configuration's.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        config: TrainerConfig,
        *,
        seed: int,
        max_steps: int,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
    ) -> None:
        self._source = Path(checkpoint_dir)
        self._config = config
        self._architecture = read_architecture(self._source)
        torch.set_num_threads(config.threads)
        self._layout = titan_setup.set_up(config)
        torch.manual_seed(seed)
        self._dtype = "float32" if self._layout.device.type == "cpu" else dtype
        self._model = build_policy(self._architecture, config, self._layout, dtype=self._dtype)
        load_hf(self._model, self._source)
        self._reference = load_reference(
            self._source, self._architecture, config, self._layout, dtype=self._dtype
        )
        self._optimizer = PolicyOptimizer(self._model, config.optimizer, max_steps=max_steps)
        self._memory = DeviceMemory(self.state_tensors)
        self._version = 0
        self._writer = CheckpointWriter(timeout=timedelta(seconds=config.step_timeout_s))

    @property
    def version(self) -> int:
        """Number of optimizer steps that led to the weights."""
        return self._version

    def train_step(self, batch: TrainingBatch) -> StepOutput:
        """One optimizer step of the clipped policy loss.

        Raises:
            DivergedError: on all ranks, if loss or gradient is NaN or Inf.
            ValueError: no token is trained on, or rows are longer than the configured length.
        """
        trained = replace(batch, loss_mask=trained_mask(batch))
        objective = PolicyObjective(
            self._config.loss,
            trained,
            version=self._version,
            reference=self._reference,
            layout=self._layout,
        )
        num_trained = int(trained.loss_mask.sum())
        output = self._step(trained, num_trained, objective)
        output.metrics["masked_nonfinite"] = float(num_masked_nonfinite(batch))
        return output

    def supervised_step(self, batch: TrainingBatch) -> StepOutput:
        """One optimizer step on the mean negative logprob (temperature 1) over ``loss_mask``.

        Raises:
            DivergedError, ValueError: as `train_step`.
        """
        mask = batch.loss_mask & predicted_mask(batch)
        num_trained = int(mask.sum())

        def objective(part: TrainingBatch, output: ForwardOutput) -> LossOutput:
            return cross_entropy_loss(
                output.logprobs_S, output.is_selected_S, num_trained=num_trained
            )

        return self._step(replace(batch, loss_mask=mask, temperature=1.0), num_trained, objective)

    def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        """Logprob [R, L] of every token given the tokens before it in its document, at the batch's
        temperature; 0 on first tokens and padding. Every rank returns the whole array."""
        self._memory.require()
        num_rows, row_len = batch.token_ids.shape
        parts = self._parts(replace(batch, loss_mask=predicted_mask(batch)))
        rows = []
        for part in parts:
            with torch.no_grad():
                output = forward(self._model, part, self._layout)
            part_BL = torch.zeros(part.token_ids.shape, device=self._layout.device)
            part_BL.view(-1)[output.index_S] = output.logprobs_S * output.is_selected_S
            rows.append(part_BL)
        share_BL = torch.cat(rows)
        if self._layout.data_group is None:
            return share_BL.cpu().numpy()[:num_rows]
        shares = [torch.empty_like(share_BL) for _ in range(self._layout.data_ranks)]
        dist.all_gather(shares, share_BL, group=self._layout.data_group)
        # The inverse of rank_share: row r is row r // n of rank r % n.
        return torch.stack(shares, dim=1).view(-1, row_len).cpu().numpy()[:num_rows]

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights in Hugging Face names on rank 0 (elsewhere: empty), in the type that the
        policy computes in. May share memory with the model: valid until the next step."""
        self._memory.require()
        return hf_state(self._model, getattr(torch, self._dtype))

    def hf_parts(self) -> dict[str, TensorPart] | None:
        """This rank's part of the same weights; None if they must be gathered (see `hf.hf_parts`).
        Not collective; valid until the next step."""
        self._memory.require()
        return hf_parts(self._model, getattr(torch, self._dtype))

    def export_hf(self, path: Path, *, dtype: str | None = None) -> None:
        """Write a Hugging Face directory, in ``dtype`` (default: the source checkpoint's type)."""
        self._memory.require()
        state = hf_state(self._model, getattr(torch, dtype or self._architecture.dtype))
        if self._layout.rank == 0:
            write_hf(Path(path), state, source=self._source)
        dist.barrier()

    def save_checkpoint(
        self, path: Path, extra: dict[str, Any], attachments: Mapping[str, bytes] | None = None
    ) -> None:
        """Copy model, optimizer, schedule, random state, version, ``extra`` (for JSON) and rank 0's
        ``attachments``, and write them to ``path`` in the background: see `CheckpointWriter.save`.
        """
        self._memory.require()
        self._writer.save(
            Path(path),
            self._model,
            self._optimizer,
            version=self._version,
            extra=extra,
            attachments=attachments or {},
        )

    def finish_checkpoint(self) -> None:
        """Wait until the last saved checkpoint is on disk; from any thread, at any time.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.finish()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Resume from a checkpoint of this or another parallel layout; returns its ``extra``.

        Raises:
            CheckpointError: as `load_state`, or a checkpoint that was being written failed.
        """
        self._memory.require()
        self._writer.finish()
        self._version, extra = load_state(Path(path), self._model, self._optimizer)
        return extra

    def offload(self) -> None:
        """Move everything to host memory and free the device's until `onload`; meanwhile only
        `finish_checkpoint`, `onload` and `close` may be called. Without effect on the CPU."""
        if self._layout.device.type != "cpu":
            self._memory.offload()

    def onload(self) -> None:
        """Move everything back to the device, bit for bit."""
        self._memory.onload()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """All current tensors that are kept between two steps. Not collective."""
        for model in (self._model, self._reference):
            if model is not None:
                yield from model.parameters()
                yield from model.buffers()
        yield from self._optimizer.tensors()

    def close(self) -> None:
        """Finish writing and leave the process group; the trainer cannot be used afterwards.

        Raises:
            CheckpointError: the last saved checkpoint could not be written.
        """
        try:
            self._writer.close()
        finally:
            titan_setup.tear_down(self._layout)

    def _step(self, batch: TrainingBatch, num_trained: int, objective: _Objective) -> StepOutput:
        self._memory.require()
        started = time.perf_counter()
        if num_trained == 0:
            raise ValueError(f"version {self._version}: the batch has no token to train on")
        sums = StepSums()
        for part in self._parts(batch):
            output = forward(self._model, part, self._layout)
            loss = objective(part, output)
            loss.loss.backward()  # type: ignore[no-untyped-call]
            sums.add(loss, (output.entropy_S * output.is_selected_S).sum())
        metrics = sums.metrics(num_trained, self._layout.data_group)
        learning_rate = self._optimizer.learning_rate
        metrics["grad_norm"] = self._optimizer.clip()
        self._refuse_divergence(metrics)
        self._optimizer.step()
        self._version += 1
        step_s = time.perf_counter() - started
        metrics |= {
            "learning_rate": learning_rate,
            "trained_tokens": float(num_trained),
            "padding_share": batch.padding_share,
            "step_s": step_s,
            "tokens_per_second": batch.num_tokens / step_s,
        }
        return StepOutput(version=self._version, metrics=metrics)

    def _parts(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """This rank's microbatches; every rank has the same number of the same sizes."""
        row_len = batch.token_ids.shape[1]
        if row_len > self._config.row_len:
            raise ValueError(f"rows of {row_len} tokens; trainer.row_len is {self._config.row_len}")
        ranks, rows = self._layout.data_ranks, self._config.rows_per_microbatch
        # A smaller last microbatch would make a compiled model compile again.
        padded = pad_rows(batch, ranks * rows if self._config.compile else ranks)
        return microbatches(rank_share(padded, self._layout.data_rank, ranks), rows)

    def _refuse_divergence(self, metrics: dict[str, float]) -> None:
        """Raise if the loss or gradient norm is not finite; both are global, so all ranks raise."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                self._optimizer.discard()
                raise DivergedError(
                    f"{name} is {metrics[name]} in the step after version {self._version}; the "
                    f"weights are still those of version {self._version}"
                )
