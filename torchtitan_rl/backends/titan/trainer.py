"""The policy's trainer. Each trainer rank has one instance.

Public methods are collective unless they state otherwise: all ranks call them with the same
arguments in the same order. Each rank gets the whole batch and trains on its share. A step either
ends with new weights and ``version + 1``, or raises an error and changes neither weights nor
optimizer nor version. One exception: a step that fails after the first of several updates leaves
weights of no version; then every call except `load_checkpoint` and `close` is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtitan_rl.backends.titan import setup as titan_setup  # before torchtitan
from torchtitan_rl.backends.titan.checkpoint import CheckpointWriter, load_state
from torchtitan_rl.backends.titan.experts import routing_metrics
from torchtitan_rl.backends.titan.flops import (
    PolicySizes,
    num_logits,
    num_visible_pairs,
    peak_flops,
)
from torchtitan_rl.backends.titan.forward import (
    ForwardOutput,
    PolicyObjective,
    StepSums,
    TokenColumns,
    forward,
)
from torchtitan_rl.backends.titan.frozen import load_frozen, load_reference
from torchtitan_rl.backends.titan.hf import export, hf_names, hf_parts, hf_state, load_hf, published
from torchtitan_rl.backends.titan.model import (
    PolicyModel,
    build_policy,
    init_adapters,
    weights_digest,
    without_adapters,
)
from torchtitan_rl.backends.titan.optim import PolicyOptimizer
from torchtitan_rl.bounds import load_function
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.errors import DeviceMemoryError, DivergedError, WeightSyncError
from torchtitan_rl.training.batch import (
    Examples,
    PreferenceLoss,
    StepOutput,
    TokenTerms,
    TrainingBatch,
    cut_share,
    imitated_mask,
    num_masked_nonfinite,
    predicted_mask,
    sums_by_episode,
    trained_mask,
)
from torchtitan_rl.training.config import LossConfig, TrainerConfig
from torchtitan_rl.training.losses import (
    LossFunction,
    LossOutput,
    cross_entropy_loss,
    loss_metrics,
    policy_loss,
)
from torchtitan_rl.training.losses.preference import preference_loss
from torchtitan_rl.training.packing import Share, minibatches, rank_share, sum_of_shares
from torchtitan_rl.training.preference import (
    Preferences,
    halves_of,
    preference_metrics,
    preferences,
)
from torchtitan_rl.training.trees import Microbatch
from torchtitan_rl.types import UNKNOWN_EXPERT
from torchtitan_rl.weights.image import TensorPart

_Objective = Callable[[Microbatch, ForwardOutput], LossOutput]
# The mask [N] of an update's tokens, and a function from it to the update's objective, which is
# called under the weights that the update changes.
_Update = tuple[npt.NDArray[np.bool_], Callable[[npt.NDArray[np.bool_]], _Objective]]
_OF_LAST_UPDATE = ("loss", "grad_norm", "ratio_mean", "ratio_max", "clip_share", "kl_k1", "kl_k3")
_TORN = "an update of the step failed after earlier ones had changed the weights"


class PolicyTrainer:
    """torchtitan's model, parallelism, optimizer and checkpoints for policy training.

    Args:
        checkpoint_dir: the policy in Hugging Face format.
        seed: selects the minibatches, and seeds the (checkpointed) random generators.
        max_steps: the number of steps of the whole run, for the learning-rate schedule.
        dtype: the type of matrix multiplications; the CPU always uses float32.
        lora: adapters that are trained in place of all weights; of rank 0 for none.
        teachers: checkpoints of the teachers that `TrainingBatch.teachers` numbers.

    Raises:
        ConfigError: a checkpoint is missing, its model is not supported, or
            `LossConfig.function` cannot be loaded.
        ValueError: the world size differs from that of the configuration.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        config: TrainerConfig,
        *,
        seed: int,
        max_steps: int,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        lora: LoraConfig | None = None,
        teachers: Sequence[Path] = (),
    ) -> None:
        self._lora = lora or LoraConfig()
        self._source = Path(checkpoint_dir)
        self._config = config
        self._seed = seed
        self._loss = _loss_function(config.loss)
        self._architecture = read_architecture(self._source)
        torch.set_num_threads(config.threads)
        self._layout = titan_setup.set_up(config)
        try:
            self._build(max_steps, dtype, teachers)
        except BaseException:
            titan_setup.tear_down(self._layout)
            raise

    def _build(self, max_steps: int, dtype: str, teachers: Sequence[Path]) -> None:
        config = self._config
        torch.manual_seed(self._seed)
        self._dtype = "float32" if self._layout.device.type == "cpu" else dtype
        self._model = build_policy(
            self._architecture, config, self._layout, dtype=self._dtype, lora=self._lora
        )
        self._names = load_hf(self._model, self._source)
        init_adapters(self._model, self._seed)
        self._reference = load_reference(
            self._source, config, self._layout, policy=self._model, dtype=self._dtype
        )
        self._teachers = [load_frozen(one, config, self._layout, self._dtype) for one in teachers]
        self._sizes = PolicySizes.of(
            self._architecture,
            layer_parameters=sum(one.numel() for one in self._model.layers.parameters()),
            frozen_parameters=sum(
                one.numel() for one in self._model.layers.parameters() if not one.requires_grad
            ),
        )
        self._routers = self._model.routers()
        self._peak_flops: float | None = None
        if self._layout.device.type == "cuda" and self._dtype == "bfloat16":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(self._layout.device))
        self._optimizer = PolicyOptimizer(
            self._model,
            config.optimizer,
            max_steps=max_steps,
            has_expert_parallel=config.expert_parallel > 1,
        )
        self._memory = DeviceMemory(self.state_tensors)
        self.version = 0  # the number of training steps that made the weights
        self._is_between_updates = False
        self._writer = CheckpointWriter(
            timeout=timedelta(seconds=config.step_timeout_s), lora=self._lora
        )

    @property
    def cuda_device(self) -> int | None:
        """The index of this rank's CUDA device; None on other devices."""
        device = self._layout.device
        return device.index if device.type == "cuda" else None

    def train_step(
        self, batch: TrainingBatch, loss: LossConfig | None = None, examples: Examples = None
    ) -> StepOutput:
        """Take one training step of the policy loss, of `TrainerConfig.updates_per_batch` optimizer
        updates; each uses one minibatch and is normalized by that minibatch's totals.

        Args:
            loss: another loss for this step. It may only have a KL penalty if the configured loss
                has one, because the reference policy is loaded at the start.
            examples: demonstrations, whose mean negative logprob (at temperature 1) is added to
                the loss with the weight `TrainerConfig.sft_coefficient`. Each update takes a part.

        Raises:
            DivergedError: the loss or gradient is NaN or Inf. All ranks raise.
            ValueError: the batch has no trained token, or an episode is longer than
                `TrainerConfig.max_episode_tokens`.
        """
        self._require()
        selected_N = trained_mask(batch)
        config, seed = self._config, (self._seed, self.version)
        function = self._loss if loss is None else _loss_function(loss)
        loss = loss or config.loss
        parts = minibatches(batch, selected_N, config.updates_per_batch, seed=seed)
        rewards: list[npt.NDArray[np.float64]] = []
        if loss.surrogate == "dpo":
            assert self._reference is not None
            with without_adapters(self._reference):
                references_N = self._logprobs(batch, selected_N, self._reference)

            def begin(part_N: npt.NDArray[np.bool_]) -> _Objective:
                halves_E = halves_of(batch, part_N)
                references_H = _sums(halves_E, sums_by_episode(batch, references_N, part_N))
                objective, found = self._preference_objective(
                    batch, part_N, loss, halves_E, references_H
                )
                rewards.append(found.rewards_P2)
                return objective

        else:
            is_anchored = config.updates_per_batch > 1 and loss.proximal_policy != "behaviour"
            before_N = self._logprobs(batch, selected_N) if is_anchored else None

            def begin(part_N: npt.NDArray[np.bool_]) -> _Objective:
                return PolicyObjective(
                    function=function,
                    config=loss,
                    batch=batch,
                    selected_N=part_N,
                    version=self.version,
                    before_N=before_N,
                    reference=self._reference,
                    layout=self._layout,
                )

        output = self._step(batch, [(part_N, begin) for part_N in parts], examples)
        if rewards:
            output.metrics.update(preference_metrics(np.concatenate(rewards)))
        output.metrics["masked_nonfinite"] = float(num_masked_nonfinite(batch))
        output.metrics["cut_share"] = cut_share(batch, selected_N)
        return output

    def supervised_step(self, batch: TrainingBatch) -> StepOutput:
        """Take one update on the mean negative logprob of the tokens in ``loss_mask``, at
        temperature 1 over the whole vocabulary. Raises as `train_step`."""
        selected_N = imitated_mask(batch)
        num_trained = int(selected_N.sum())

        def objective(_: Microbatch, output: ForwardOutput) -> LossOutput:
            return cross_entropy_loss(output.logprobs_E, output.is_entry_E, num_trained=num_trained)

        return self._step(_as_demonstrations(batch), [(selected_N, lambda _: objective)])

    def preference_step(self, batch: TrainingBatch, loss: PreferenceLoss) -> StepOutput:
        """Take one update of DPO, at temperature 1 over the whole vocabulary. Raises as
        `train_step`."""
        self._require()
        batch, selected_N = _as_demonstrations(batch), imitated_mask(batch)
        objective, found = self._preference_objective(
            batch,
            selected_N,
            LossConfig(surrogate="dpo", dpo_beta=loss.beta),
            np.arange(batch.num_episodes),
            loss.references,
        )

        def without_metrics(part: Microbatch, output: ForwardOutput) -> LossOutput:
            """No policy sampled the tokens, so there is nothing to compare with."""
            return replace(objective(part, output), sums={}, maxima={})

        step = self._step(batch, [(selected_N, lambda _: without_metrics)])
        step.metrics.update(preference_metrics(found.rewards_P2))
        return step

    def _preference_objective(
        self,
        batch: TrainingBatch,
        selected_N: npt.NDArray[np.bool_],
        config: LossConfig,
        halves_E: npt.NDArray[np.int64],
        references_H: npt.NDArray[np.float64],
    ) -> tuple[_Objective, Preferences]:
        """Compute DPO's loss under the current weights, and the objective with its gradient.
        ``halves_E`` as `halves_of`; ``references_H`` has the sum of the reference logprobs of each
        continuation. Collective."""
        logprobs_E = sums_by_episode(batch, self._logprobs(batch, selected_N), selected_N)
        found = preferences(
            _sums(halves_E, logprobs_E).reshape(-1, 2),
            references_H.reshape(-1, 2),
            beta=config.dpo_beta,
        )
        derivative_N = found.weights_P2.reshape(-1)[halves_E][batch.episode_ids]
        objective = PolicyObjective(
            function=partial(preference_loss, mean_loss=float(found.losses_P.mean())),
            config=config,
            batch=replace(batch, advantages=-derivative_N.astype(np.float32)),
            selected_N=selected_N,
            version=self.version,
            layout=self._layout,
        )
        return objective, found

    def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        """Compute the logprob [N] of every token, given the preceding tokens of its episode, at the
        batch's temperature. The first token of an episode gets 0. Every rank returns the whole
        array."""
        self._require()
        return self._logprobs(batch, predicted_mask(batch))

    def _logprobs(
        self,
        batch: TrainingBatch,
        selected_N: npt.NDArray[np.bool_],
        model: PolicyModel | None = None,
    ) -> npt.NDArray[np.float32]:
        """Compute logprobs [N] under ``model`` (default: the policy); 0 if not selected."""
        columns = TokenColumns(1, batch.num_tokens, self._layout)
        for part in self._share(batch, selected_N).parts:
            with torch.no_grad():
                output = forward(model or self._model, batch, part, self._layout)
            columns.add(output, output.logprobs_E)
        (logprobs_N,) = columns.of_all_ranks(selected_N, missing=0.0)
        return logprobs_N

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a version consists of on rank 0, and nothing on other ranks: the whole
        weights under Hugging Face names, or the adapters under PEFT's, in the type that the policy
        computes in. They may share memory with the model, so they are valid only until the next
        step."""
        self._require()
        return hf_state(self._published(), getattr(torch, self._dtype))

    def hf_parts(self) -> dict[str, TensorPart] | None:
        """Return this rank's part of the tensors of `hf_state_dict`; None if they must be gathered
        (see `hf.hf_parts`). Not collective. The parts are valid until the next step."""
        self._require()
        return hf_parts(self._published(), getattr(torch, self._dtype))

    def _published(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a version. All ranks raise a WeightSyncError if one of the
        checkpoint is missing, because engines would keep its old weights."""
        tensors = published(self._model)
        if missing := set() if self._lora.rank else self._names - hf_names(tensors):
            raise WeightSyncError(f"version {self.version} lacks {sorted(missing)}")
        return tensors

    def export_hf(self, path: Path, *, dtype: str | None = None) -> None:
        """Write a Hugging Face directory, in ``dtype`` (default: the source checkpoint's); see
        `hf.export`."""
        self._require()
        kind = getattr(torch, dtype or self._architecture.dtype)
        export(self._model, Path(path), self._lora, source=self._source, dtype=kind)

    def save_checkpoint(self, path: Path, attachments: Mapping[str, bytes] | None = None) -> None:
        """Save with the ``attachments`` of rank 0, in the background: see
        `CheckpointWriter.save`."""
        self._require()
        self._writer.save(
            Path(path),
            self._model,
            self._optimizer,
            version=self.version,
            attachments=attachments or {},
        )

    def finish_checkpoint(self) -> None:
        self._writer.finish()

    def load_checkpoint(self, path: Path) -> None:
        """Resume from a checkpoint of this or another parallel layout. Raises CheckpointError: as
        in `load_state`, or a checkpoint that was being written failed."""
        self._memory.require()
        self._writer.finish()
        self.version = load_state(Path(path), self._model, self._optimizer, self._lora)
        self._is_between_updates = False

    def offload(self) -> None:
        """Move all state to host memory and free the device memory; only `finish_checkpoint`,
        `onload` and `close` may follow. No effect on the CPU."""
        if self._layout.device.type != "cpu":
            self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that are kept between two steps. Not collective."""
        for model in (self._model, self._reference, *self._teachers):
            if model is not None:
                yield from model.parameters()
                yield from model.buffers()
        yield from self._optimizer.tensors()

    def close(self) -> None:
        """Finish writing (raises as `CheckpointWriter.close`) and leave the process group, for
        good."""
        try:
            self._writer.close()
        finally:
            titan_setup.tear_down(self._layout)

    def _step(
        self, batch: TrainingBatch, updates: Sequence[_Update], examples: Examples = None
    ) -> StepOutput:
        """Take a step, as `_updated_step` does. Only a rank whose device has too little memory
        raises a DeviceMemoryError."""
        on_cuda = self._layout.device.type == "cuda"
        try:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            output = self._updated_step(batch, updates, examples)
        except torch.OutOfMemoryError as error:
            self._optimizer.discard()
            raise DeviceMemoryError(_memory_advice(self._config, self.version)) from error
        if on_cuda:
            peak = torch.cuda.max_memory_allocated()
            output.metrics["device_memory_peak_bytes"] = float(peak)
        return output

    def _updated_step(
        self, batch: TrainingBatch, updates: Sequence[_Update], examples: Examples
    ) -> StepOutput:
        self._require()
        started = time.perf_counter()
        num_trained = sum(int(selected_N.sum()) for selected_N, _ in updates)
        if num_trained == 0:
            raise ValueError(f"version {self.version}: the batch has no token to train on")
        total, shares, of_updates, flops = StepSums(), [], [], 0.0
        imitations = self._imitations(examples, len(updates))
        columns = TokenColumns(3, batch.num_tokens, self._layout)
        learning_rate = self._optimizer.learning_rate
        for router in self._routers:
            router.reset_counts()
        for number, (selected_N, begin) in enumerate(updates, start=1):
            objective = begin(selected_N)
            own_shares = [self._share(batch, selected_N)]
            parts = own_shares[0].parts
            own = StepSums(self._arithmetic(parts))
            for part in parts:
                output = forward(
                    self._model,
                    batch,
                    part,
                    self._layout,
                    is_taught=True,
                    teachers=() if batch.teachers is None else self._teachers,
                )
                output.logprobs_E.retain_grad()
                loss = objective(part, output)
                loss.loss.backward()  # type: ignore[no-untyped-call]
                columns.add(output, output.logprobs_E, loss.terms_T, output.logprobs_E.grad)
                own.add_microbatch(loss, (output.entropy_E * output.is_entry_E).sum())
            if number <= len(imitations):
                own_shares.append(self._imitate(*imitations[number - 1], own))
            shares += own_shares
            update = own.of_all_ranks(self._layout.data_group)
            flops += self._sizes.step_flops(
                num_tokens=sum(share.num_computed for share in own_shares),
                num_logits=update.sums.pop("num_logits").item(),
                num_pairs=update.sums.pop("num_pairs").item(),
            )
            total.add(update)
            of_update = loss_metrics(update.sums, update.maxima, num_trained=int(selected_N.sum()))
            of_update["grad_norm"] = self._optimizer.clip()
            self._refuse_divergence(of_update)
            self._optimizer.step()
            self._is_between_updates = number < len(updates)
            of_updates.append(of_update)
        self._optimizer.end_step()
        self.version += 1
        _synchronize()  # the optimizer's kernels are part of the step
        step_s = time.perf_counter() - started
        share = sum_of_shares(shares)
        metrics = loss_metrics(total.sums, total.maxima, num_trained=num_trained)
        for name in ("loss", "grad_norm"):
            metrics[name] = fmean(of_update[name] for of_update in of_updates)
        if imitations:
            metrics["sft_loss"] = fmean(one["sft_loss"] for one in of_updates[: len(imitations)])
            metrics["sft_tokens"] = float(sum(int(one_N.sum()) for _, one_N in imitations))
        if len(updates) > 1:
            first, last = of_updates[0], of_updates[-1]
            metrics = {n: v for n, v in metrics.items() if "logprob_diff_" not in n}
            metrics |= {n: v for n, v in first.items() if "logprob_diff_" in n}
            metrics |= {f"last_update/{n}": last[n] for n in _OF_LAST_UPDATE if n in last}
            metrics["updates"] = float(len(updates))
        metrics |= {
            "learning_rate": learning_rate,
            "trained_tokens": float(num_trained),
            "computed_tokens": float(share.num_computed),
            "shared_share": share.shared_share,
            "padding_share": share.padding_share,
            "step_s": step_s,
            "tokens_per_second": batch.num_tokens / step_s,
            "tokens_per_second_per_rank": batch.num_tokens / step_s / dist.get_world_size(),
            "flops_per_second_per_rank": flops / step_s / dist.get_world_size(),
        }
        if self._peak_flops is not None:
            metrics["mfu"] = metrics["flops_per_second_per_rank"] / self._peak_flops
        if (experts := self._architecture.experts) is not None:
            metrics |= routing_metrics(self._routers, first_layer=experts.num_dense_layers)
        metrics["weights_digest"] = float(
            weights_digest(one for one in self._model.parameters() if one.requires_grad)
        )
        selected_N = np.logical_or.reduce([one for one, _ in updates])
        logprobs_N, losses_N, gradients_N = columns.of_all_ranks(selected_N, missing=math.nan)
        tokens = TokenTerms(logprobs=logprobs_N, losses=losses_N, gradients=gradients_N)
        return StepOutput(version=self.version, metrics=metrics, tokens=tokens)

    def _imitations(
        self, examples: Examples, num_updates: int
    ) -> list[tuple[TrainingBatch, npt.NDArray[np.bool_]]]:
        """Split demonstrations into one part for each of the first updates."""
        if examples is None:
            return []
        selected_N, seed = imitated_mask(examples), (self._seed, self.version)
        parts = minibatches(examples, selected_N, num_updates, seed=seed)
        return [(_as_demonstrations(examples), part_N) for part_N in parts]

    def _imitate(
        self, examples: TrainingBatch, selected_N: npt.NDArray[np.bool_], own: StepSums
    ) -> Share:
        """Add the weighted loss of demonstrations to an update: its gradient to the weights', its
        values to ``own``."""
        share, num_trained = self._share(examples, selected_N), int(selected_N.sum())
        own.add(StepSums(self._arithmetic(share.parts)))
        for part in share.parts:
            output = forward(self._model, examples, part, self._layout)
            loss = cross_entropy_loss(
                output.logprobs_E, output.is_entry_E, num_trained=num_trained
            ).loss
            weighted = self._config.sft_coefficient * loss
            weighted.backward()  # type: ignore[no-untyped-call]
            own.add(StepSums({"loss": weighted.detach(), "sft_loss": loss.detach()}))
        return share

    def _arithmetic(self, parts: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
        counts = {"num_logits": num_logits(parts), "num_pairs": num_visible_pairs(parts)}
        device = self._layout.device
        return {
            name: torch.tensor(number, dtype=torch.float64, device=device)
            for name, number in counts.items()
        }

    def _share(self, batch: TrainingBatch, selected_N: npt.NDArray[np.bool_]) -> Share:
        config, longest = self._config, int(batch.episode_lengths.max())
        if longest > config.max_episode_tokens:
            raise ValueError(
                f"an episode of {longest} tokens; trainer.max_episode_tokens is "
                f"{config.max_episode_tokens}"
            )
        self._check_routing(batch)
        max_tokens, multiple = config.pass_sizes(self._layout.device.type)
        return rank_share(
            batch,
            selected_N,
            max_tokens=max_tokens,
            padding_multiple=multiple,
            share_prefixes=config.share_prefixes,
            rank=self._layout.data_rank,
            num_ranks=self._layout.data_ranks,
        )

    def _check_routing(self, batch: TrainingBatch) -> None:
        """Refuse experts that this policy does not have, which would end a GPU's process."""
        experts, routed_NXK = self._architecture.experts, batch.routed_experts
        if routed_NXK is None:
            return
        needed = (
            None if experts is None else (self._architecture.num_expert_layers, experts.per_token)
        )
        known = routed_NXK[routed_NXK != UNKNOWN_EXPERT]
        if experts is None or routed_NXK.shape[1:] != needed or (known >= experts.number).any():
            raise ValueError(
                f"the batch has routed experts {routed_NXK.shape[1:]}, up to number "
                f"{known.max(initial=0)}; the policy has {needed} of {experts}"
            )

    def _refuse_divergence(self, metrics: dict[str, float]) -> None:
        """Raise if the loss or gradient norm is not finite; both are global, so all ranks raise."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                self._optimizer.discard()
                state = f"the weights are still those of version {self.version}"
                if self._is_between_updates:
                    state = f"{_TORN}; nothing of the step is saved or published"
                raise DivergedError(
                    f"{name} is {metrics[name]} in the step after version {self.version}; {state}"
                )

    def _require(self) -> None:
        """Raise if the trainer is offloaded (RuntimeError), or a step failed between its
        updates."""
        self._memory.require()
        if self._is_between_updates:
            raise DivergedError(f"{_TORN}; resume from a checkpoint")


def _sums(halves_E: npt.NDArray[np.int64], values_E: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    is_in_E = halves_E >= 0
    return np.bincount(halves_E[is_in_E], weights=values_E[is_in_E])


def _as_demonstrations(batch: TrainingBatch) -> TrainingBatch:
    return replace(batch, temperature=1.0, kept=None)


def _loss_function(config: LossConfig) -> LossFunction:
    return load_function(config.function) if config.function else policy_loss


def _memory_advice(config: TrainerConfig, version: int) -> str:
    options = []
    if (tokens := config.max_tokens_per_microbatch) > config.max_episode_tokens:
        options.append(f"--trainer.max-tokens-per-microbatch (it is {tokens})")
    if config.activation_checkpointing != "full":
        options.append("--trainer.activation-checkpointing full")
    options += [
        f"a larger --trainer.data-parallel-shard (it is {config.data_parallel_shard})",
        f"a larger --trainer.context-parallel (it is {config.context_parallel})",
        "in a new run a lower --trainer.max-episode-tokens, --rollout.max-total-tokens and "
        "--rollout.sampling.max-tokens-per-turn",
    ]
    return (
        f"the step after version {version} needs more memory than the device has; change, in this "
        f"order: {', '.join(options)}; torchtitan-rl fit CONFIG --devices 1x24GB proposes options"
    )


class DeviceMemory:
    """Moves the trainer's state between device and host memory without creating new tensors.

    The storages of the tensors are emptied and refilled, bit for bit. Parameters, optimizer states,
    FSDP's shards and their views stay the same objects, so other code is not affected. ``tensors``
    returns all current tensors; several may share a storage. Between `offload` and `onload` they
    have no memory and must not be read.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._buffers: dict[int, torch.Tensor] = {}  # host memory by storage, kept for reuse

    def offload(self) -> None:
        if self._offloaded:
            return
        storages = _storages(self._tensors())
        buffers = {key: self._buffer(key, storage) for key, storage in storages.items()}
        for key, storage in storages.items():
            buffers[key].copy_(_bytes(storage), non_blocking=True)
        _synchronize()
        for key, storage in storages.items():
            self._offloaded.append((storage, buffers[key]))
            storage.resize_(0)
        self._buffers = buffers
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # for other processes on the device

    def onload(self) -> None:
        for storage, buffer in self._offloaded:
            storage.resize_(buffer.numel())
            _bytes(storage).copy_(buffer, non_blocking=True)
        _synchronize()
        self._offloaded.clear()

    def require(self) -> None:
        """Raise RuntimeError between `offload` and `onload`, when reading a tensor would crash."""
        if self._offloaded:
            raise RuntimeError("the trainer's state is offloaded; call onload first")

    def _buffer(self, key: int, storage: torch.UntypedStorage) -> torch.Tensor:
        held = self._buffers.get(key)
        if held is not None and held.numel() == storage.nbytes():
            return held
        is_pinned = storage.device.type == "cuda"
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, by a key that resizing does not change."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = titan_setup.local(tensor).untyped_storage()
        if storage.nbytes():
            found[storage._cdata] = storage
    return found


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
