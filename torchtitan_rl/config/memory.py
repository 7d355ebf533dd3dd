"""Estimates the memory of a run from the sizes of its policy. Pure arithmetic.

A trainer rank keeps float32 weights, gradients and AdamW's two moments, and needs more during a
step. Its estimate is what it keeps, plus the largest of these moments:

* The backward pass begins: activations of all layers, the logits and their gradient.
* The backward pass of one layer: activations of all layers, one layer computed again (with
  activation checkpointing), and that layer's gradients, before and while they are reduced over the
  ranks.
* The backward pass of the output head, or of the embeddings: their gradients, before and while they
  are reduced.

Sizes of tensors are in elements of one token, or of the weights. D is the model dimension, F the
hidden dimension (of an expert), Q and K are the sizes of a token's queries and keys, V is the
vocabulary.

With adapters (LoRA), gradients and moments are those of the adapters, the reference policy is the
base, and only the adapters are published. Teachers in the trainer keep their weights; during a step
their layers are computed one after another, before the policy's, and their heads stay gathered
until the loss. The weights of a vision tower are gathered during the whole step; its activations
are not counted.

On a CPU the trainer's part was measured: it is within 15 % of the allocator's peak. On CUDA nothing
was measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torchtitan_rl.config.lora import LoraConfig, adapter_shapes, engine_rank, num_adapter_weights
from torchtitan_rl.config.model import PolicyArchitecture, PolicyFacts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.distillation.config import CUDA_STEP_TOKENS
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.training.config import TrainerConfig

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
BYTES = {"float32": 4, "bfloat16": 2}

PUBLISHED = "published weights"
PINNED = "pinned copies of the trainer's state"
SLEEPING = "weights of sleeping engines"  # with adapters; otherwise a pull loads them again
PROCESS_BYTES = 1 << 30  # imported libraries, or contexts and communicators on a device
_SHOWN_BYTES = 1 << 27
_SLEEPING_BYTES = 5 << 29  # an engine that is asleep: its context, communicators and CUDA graphs
_CHUNK_BYTES = {"cpu": 4 << 22, "cuda": 4 << 24}  # of `training.logprobs`
_TOWER = {  # what transformers takes for missing fields of a vision_config
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_CHUNKS, _TAUGHT_CHUNKS = 3, 5  # that exist at the same time, without and with a teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of each rank on its device (without CUDA, on its host), and what the run takes
    from its hosts besides, in bytes, by part."""

    trainer: dict[str, int]
    replica: dict[str, int]
    host: dict[str, int]
    teacher: dict[str, int] = field(default_factory=dict)  # of the largest teacher
    kv_tokens: int = 0  # that the KV cache of a replica holds; 0: unknown

    def describe(self) -> list[str]:
        """One line for each kind of rank, and for the hosts."""
        tokens = f"; its KV cache holds {self.kv_tokens:,} tokens" if self.kv_tokens else ""
        lines = {
            "memory of each trainer rank": (self.trainer, ""),
            "memory of each replica rank": (self.replica, tokens),
            "memory of each teacher rank": (self.teacher, ""),
            "additional host memory": (self.host, ""),
        }
        return [
            f"{name}: about {describe_parts(parts)}{more}"
            for name, (parts, more) in lines.items()
            if sum(parts.values()) >= _SHOWN_BYTES
        ]


def memory_plan(
    config: RunConfig,
    policy: PolicyFacts,
    *,
    device: Device,
    device_bytes: int = 0,
    teachers: Sequence[PolicyFacts] = (),
) -> MemoryPlan:
    """Estimate the memory of a run. Without ``device_bytes``, nothing is known of a replica on
    CUDA. ``teachers`` are the teachers' checkpoints."""
    trainer, host = config.trainer, {}
    in_trainer = [
        facts.architecture
        for facts in teachers
        if config.teacher.is_in_trainer and facts.architecture is not None
    ]
    dtype: Dtype = config.policy.dtype if device == "cuda" else "float32"
    of_trainer: dict[str, int] = {}
    if config.mode != "generate" and policy.architecture is not None:
        of_trainer = trainer_memory(
            trainer,
            policy.architecture,
            device=device,
            dtype=dtype,
            lora=config.policy.lora,
            teachers=in_trainer,
        )
        of_trainer["process"] = PROCESS_BYTES
        if device == "cuda" and config.is_colocated:
            of_trainer["sleeping engine"] = _SLEEPING_BYTES
            host[PINNED] = trainer.data_parallel_replicate * (
                _pinned_bytes(policy.architecture, trainer, dtype, config.policy.lora)
                + 4 * sum(map(num_weights, in_trainer))
            )
    if config.mode == "both":
        number = config.num_published_versions
        host[PUBLISHED] = number * version_bytes(config, policy, dtype)
    of_replica: dict[str, int] = {}
    if config.mode != "train" and not config.generator.endpoint:
        of_replica = replica_memory(
            config.generator,
            policy,
            device=device,
            dtype=dtype,
            device_bytes=device_bytes,
            adapters=0 if config.adapters is None else engine_rank(config.adapters.rank),
        )
        if device == "cuda" and config.is_colocated and config.adapters is not None:
            ranks = config.generator.replicas * config.generator.tensor_parallel
            host[SLEEPING] = ranks * of_replica.get("weights", 0)
    token = policy.kv_values(device, config.generator.tensor_parallel) * BYTES[dtype]
    of_teachers = [
        teacher_memory(config, facts, device=device, dtype=dtype, device_bytes=device_bytes)
        for facts in (teachers if config.teacher_ranks else ())
    ]
    return MemoryPlan(
        trainer=of_trainer,
        replica=of_replica,
        host=host,
        teacher=max(of_teachers, key=lambda parts: parts.get("weights", 0), default={}),
        kv_tokens=of_replica.get("KV cache", 0) // token if token else 0,
    )


def replica_memory(
    generator: GeneratorConfig,
    policy: PolicyFacts,
    *,
    device: Device,
    dtype: Dtype = "float32",
    device_bytes: int = 0,
    adapters: int = 0,
) -> dict[str, int]:
    """The memory of a rank of a replica, in bytes, by part. On CUDA the KV cache gets what the
    other parts leave of the engine's share of the device. ``adapters`` is the sum of the ranks of
    all adapters, as the engine allocates them."""
    ranks = generator.tensor_parallel
    weights = _weight_bytes(policy, dtype) // ranks
    more: dict[str, int] = {}
    if adapters and policy.architecture is not None:
        one = num_adapter_weights(policy.architecture, LoraConfig(rank=1))
        more = {"adapters": 2 * adapters * one * BYTES[dtype]}  # in the layers, and a host copy
    if device == "cpu":  # plain and packed weights
        parts = {"weights": 2 * weights, "KV cache": generator.kv_cache_bytes}
        return parts | more | {"process": PROCESS_BYTES}
    if not device_bytes:
        return {}
    parts = {"weights": weights, **more, "process": PROCESS_BYTES}
    if policy.architecture is not None:
        tokens = generator.step_tokens(device)
        elements = 4 * policy.architecture.dim + _hidden_of_token(policy.architecture, 3) // ranks
        samples = generator.running_requests(device) * policy.vocab_size
        parts["a step"] = tokens * elements * BYTES[dtype] + 3 * 4 * samples
    share = int(generator.gpu_memory_utilization * device_bytes)
    return parts | {"KV cache": max(0, share - sum(parts.values()))}


def teacher_memory(
    config: RunConfig,
    teacher: PolicyFacts,
    *,
    device: Device,
    dtype: Dtype = "float32",
    device_bytes: int = 0,
) -> dict[str, int]:
    """The memory of a rank of a teacher's replica, in bytes, by part. Scores need the logits of
    all tokens of a prompt at once (of its part, on CUDA), and their float32 logprobs."""
    generator = config.teacher.generator(config.generator, config.rollout.max_total_tokens)
    parts = replica_memory(
        generator, teacher, device=device, dtype=dtype, device_bytes=device_bytes
    )
    if not parts:
        return {}
    tokens = CUDA_STEP_TOKENS if device == "cuda" else config.rollout.max_total_tokens
    scores = tokens * teacher.vocab_size * (BYTES[dtype] + 4)
    if device == "cuda":
        parts["KV cache"] = max(0, parts["KV cache"] - scores)
    return parts | {"scores": scores}


def _weight_bytes(policy: PolicyFacts, dtype: Dtype) -> int:
    if policy.architecture is None:
        return policy.num_weights * BYTES[dtype]
    return num_weights(policy.architecture) * BYTES[dtype]


def version_bytes(config: RunConfig, policy: PolicyFacts, dtype: Dtype) -> int:
    """The size of a published version: all weights that are trained, or the adapters."""
    if config.adapters is not None and policy.architecture is not None:
        return num_adapter_weights(policy.architecture, config.adapters) * BYTES[dtype]
    frozen: list[int] = []
    if policy.architecture is not None and not config.trainer.train_vision_tower:
        frozen = tower_matrices(policy.architecture)
    return _weight_bytes(policy, dtype) - BYTES[dtype] * sum(frozen)


def _pinned_bytes(
    policy: PolicyArchitecture, trainer: TrainerConfig, dtype: Dtype, lora: LoraConfig
) -> int:
    """The host memory of the offloaded weights and moments of a whole model. PyTorch rounds each
    pinned tensor up to a power of two."""
    shard, trains_tower = trainer.num_shards, trainer.train_vision_tower
    layers = [size for layer in _layers(policy) for size in layer_matrices(layer)]
    heads = [head_weights(policy)] * (1 if policy.has_tied_embeddings else 2)
    tower = tower_matrices(policy)
    sizes = [4 * size for size in 3 * (layers + heads) + (3 if trains_tower else 1) * tower]
    if lora.rank:
        shapes = adapter_shapes(policy, lora).values()
        sizes = [BYTES[dtype] * size for size in layers + heads]
        sizes += 3 * [4 * rows * columns for rows, columns in shapes]
    return sum(shard * (1 << (size // shard - 1).bit_length()) for size in sizes)


def layer_matrices(policy: PolicyArchitecture) -> list[int]:
    """The sizes of the matrices of one layer, without norms and biases. The matrices of all experts
    are one."""
    attention, experts = _attention_matrices(policy), policy.experts
    if experts is None:
        return [*attention, *[policy.dim * policy.hidden_dim] * 3]
    shared = [policy.dim * policy.hidden_dim * experts.num_shared] * 3 if experts.num_shared else []
    gate = policy.dim * experts.number
    return [*attention, gate, *[expert_weights(policy) // 3] * 3, *shared]


def _layers(policy: PolicyArchitecture) -> list[PolicyArchitecture]:
    """Each layer, as the policy of which all layers are like it: the first ones may be dense."""
    experts = policy.experts
    if experts is None or not experts.num_dense_layers:
        return [policy] * policy.num_layers
    dense = replace(policy, experts=None, hidden_dim=experts.dense_hidden_dim)
    return [dense] * experts.num_dense_layers + [policy] * policy.num_expert_layers


def _attention_matrices(policy: PolicyArchitecture) -> list[int]:
    dim, latent = policy.dim, policy.latent
    queries, keys = policy.num_heads * policy.head_dim, policy.num_kv_heads * policy.head_dim
    if latent is None:
        return [dim * size for size in (queries, keys, keys, queries)]
    of_queries, values = latent.query_rank, policy.num_heads * latent.value_dim
    return [
        *([dim * of_queries, of_queries * queries] if of_queries else [dim * queries]),
        dim * (latent.kv_rank + latent.rope_dim),
        latent.kv_rank * (keys - policy.num_heads * latent.rope_dim + values),
        values * dim,
    ]


def expert_weights(policy: PolicyArchitecture) -> int:
    """The number of weights of all experts of one layer; 0 without experts."""
    return 3 * policy.dim * policy.hidden_dim * (policy.experts.number if policy.experts else 0)


def _hidden_of_token(policy: PolicyArchitecture, copies: int, of_shared: int = 0) -> int:
    """The elements of ``copies`` hidden tensors of a token (``of_shared`` of shared experts, if
    they differ). With experts, also those of its inputs and outputs, one of each for each of the
    token's experts."""
    if policy.experts is None:
        return copies * policy.hidden_dim
    number, shared = policy.experts.per_token, policy.experts.num_shared
    hidden = number * copies + shared * (of_shared or copies)
    return hidden * policy.hidden_dim + number * 2 * policy.dim


def head_weights(policy: PolicyArchitecture) -> int:
    """The number of weights of the output head; the embeddings have as many."""
    return policy.vocab_size * policy.dim


def num_weights(policy: PolicyArchitecture) -> int:
    """The number of weights, without norms and biases; tied embeddings count once."""
    heads = 1 if policy.has_tied_embeddings else 2
    layers = sum(sum(layer_matrices(layer)) for layer in _layers(policy))
    return layers + heads * head_weights(policy) + sum(tower_matrices(policy))


def tower_matrices(policy: PolicyArchitecture) -> list[int]:
    """The sizes of the matrices of the vision tower, without norms and biases."""
    if policy.vision is None:
        return []
    tower = {**_TOWER, **policy.vision.tower}
    dim, merged = tower["hidden_size"], tower["hidden_size"] * tower["spatial_merge_size"] ** 2
    patch = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    block = [3 * dim * dim, dim * dim, *[dim * tower["intermediate_size"]] * 3]
    return [patch * dim, *block * tower["depth"], merged * merged, merged * policy.dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The memory of one moment of a step, in bytes, besides what is kept between steps."""

    gathered: int
    activations: int
    logits: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.activations + self.logits


def trainer_memory(
    config: TrainerConfig,
    policy: PolicyArchitecture,
    *,
    device: Device,
    dtype: Dtype,
    lora: LoraConfig | None = None,
    teachers: Sequence[PolicyArchitecture] = (),
) -> dict[str, int]:
    """The largest memory of a trainer rank during a step, in bytes, by part. ``dtype`` is the type
    in which the rank computes; ``teachers`` are those in the trainer."""
    lora = lora or LoraConfig()
    ranks, shard = config.tensor_parallel, config.num_shards
    own = trained = 4 * num_weights(policy) // (ranks * shard)
    if not config.train_vision_tower:
        trained -= 4 * sum(tower_matrices(policy)) // (ranks * shard)
    if lora.rank:  # tensor parallelism splits one of the two matrices of an adapter
        own = BYTES[dtype] * num_weights(policy) // (ranks * shard)
        trained = 4 * num_adapter_weights(policy, lora) // shard
    moments = _moments(config, policy, device, dtype, lora, teachers)
    tower = sum(tower_matrices(policy)) * BYTES[dtype]
    moments = [replace(one, gathered=one.gathered + tower) for one in moments]
    peak = max(moments, key=lambda one: one.total)
    has_reference = config.loss.needs_reference and not lora.rank
    parts = {
        "weights": own,
        "adapters": trained if lora.rank else 0,
        "gradients": trained,
        "optimizer": 2 * trained,
        "reference policy": own if has_reference else 0,
        "teachers": sum(4 * num_weights(one) // (ranks * shard) for one in teachers),
        "gathered weights": peak.gathered,
        "activations": peak.activations,
        "logits": peak.logits,
    }
    return {name: size for name, size in parts.items() if size}


def _moments(
    config: TrainerConfig,
    policy: PolicyArchitecture,
    device: Device,
    dtype: Dtype,
    lora: LoraConfig,
    teachers: Sequence[PolicyArchitecture],
) -> list[_Moment]:
    size, ranks, shard = BYTES[dtype], config.tensor_parallel, config.num_shards
    tokens = config.max_tokens_per_microbatch // config.context_parallel
    is_tied = policy.has_tied_embeddings
    head = head_weights(policy) // ranks
    layer = _layer_weights(config, policy)
    logits = tokens * policy.vocab_size // ranks
    every, one = _layer_activations(config, policy, device, size, lora)
    kept = sum(_layer_activations(config, at, device, size, lora)[0] for at in _layers(policy))
    all_layers = tokens * (kept + 3 * policy.dim * size)
    recomputed = tokens * (one - every)
    number = _TAUGHT_CHUNKS if teachers else _CHUNKS
    chunks = min(number * _CHUNK_BYTES[device], number * 4 * logits)
    heads = sum((head_weights(one) // ranks + tokens * one.dim) * size for one in teachers)
    taught = [
        _Moment(
            gathered=heads + 2 * _layer_weights(config, one) * size,
            activations=tokens * _layer_activations(config, one, device, size, LoraConfig())[1],
        )
        for one in teachers
    ]

    def reduced(weights: int) -> int:
        """The gradients of weights before and while they are reduced over the ranks."""
        copy = 4 if shard == 1 else 0  # which FSDP divides
        return weights * max(size + 4, 4 + copy + 4 // shard)

    begins = _Moment(
        gathered=head * size + heads, activations=all_layers, logits=2 * logits * size + chunks
    )
    queries = policy.num_heads * policy.head_dim // ranks
    gradients = max(_hidden_of_token(policy, 4) // ranks, 7 * queries) + 2 * policy.dim
    of_layer = all_layers + recomputed + tokens * gradients * size
    if lora.rank:
        adapters = num_adapter_weights(policy, lora) // policy.num_layers
        gathered = 2 * layer * size + adapters * size + reduced(adapters)
        return [*taught, begins, _Moment(gathered=gathered, activations=of_layer)]
    tied = head * size if is_tied else 0  # the head's gradient waits for that of the embeddings
    return [
        *taught,
        begins,
        _Moment(
            gathered=head * size + (tied or reduced(head)),
            activations=all_layers,
            logits=logits * size if is_tied else 0,
        ),
        _Moment(gathered=2 * tied + 3 * layer * size, activations=of_layer),
        _Moment(gathered=2 * tied + layer * size + reduced(layer), activations=all_layers),
        _Moment(gathered=head * size + max(2 * tied, reduced(head)), activations=0),
    ]


def _layer_weights(config: TrainerConfig, policy: PolicyArchitecture) -> int:
    experts = expert_weights(policy)
    others = sum(layer_matrices(policy)) - experts
    return others // config.tensor_parallel + experts // config.expert_parallel


def _layer_activations(
    config: TrainerConfig,
    policy: PolicyArchitecture,
    device: Device,
    size: int,
    lora: LoraConfig,
) -> tuple[int, int]:
    """The bytes of a token that a layer keeps for the backward pass: with the configured activation
    checkpointing, and without any."""
    ranks, is_cuda = config.tensor_parallel, device == "cuda"
    dim, experts = policy.dim, policy.experts
    queries = policy.num_heads * policy.head_dim // ranks
    keys = policy.num_kv_heads * policy.head_dim // ranks
    normalizers = 4 * policy.num_heads // ranks
    # The layer's input, both norms, rotated queries and keys, values and the attention's output.
    elements = 2 * dim // ranks + 2 * dim + 2 * queries + 2 * keys
    elements += queries + keys if policy.has_qk_norm else 0
    if policy.latent is not None:  # the latent vectors before and after their norms
        elements += 2 * ((policy.latent.query_rank or 0) + policy.latent.kv_rank)
    # The output is copied from FlexAttention's, or where ranks exchange heads for tokens. Autograd
    # composes SwiGLU of operations that keep 4 hidden tensors; `CpuFeedForward`, which is not for
    # adapters, and compiled layers keep 2.
    elements += queries if is_cuda or config.context_parallel > 1 else 0
    elements += lora.rank * len(lora.target_modules)
    of_dense = 2 if config.compile or not (is_cuda or lora.rank) else 4
    copies = of_dense if experts is None or config.compile else 4
    hidden = _hidden_of_token(policy, copies, of_dense) // ranks
    whole = (elements + hidden) * size + normalizers + 4 * 2 * policy.head_dim  # cosines and sines
    if experts is not None:  # float32 outputs of experts, scores of all experts
        whole += experts.per_token * dim * (4 - size) + 4 * 2 * experts.number
    kept = dim // ranks * size
    match config.activation_checkpointing:
        case "none":
            return whole, whole
        case "selective":  # every second product of matrices, and FlexAttention
            kept += (queries + keys + _hidden_of_token(policy, 1) // ranks + dim) * size
            kept += queries * size + normalizers if is_cuda else 0
            if config.context_parallel > 1:  # exchanged heads are not exchanged again
                kept += (2 * queries + 2 * keys) * size
    return kept, whole


def describe_parts(parts: Mapping[str, int]) -> str:
    """Such as ``12.3 GiB (weights 2.2, gradients 2.2, logits 7.9)``."""
    total = sum(parts.values()) / 2**30
    shown = [f"{name} {size / 2**30:.1f}" for name, size in parts.items() if size >= _SHOWN_BYTES]
    return f"{total:.1f} GiB" + (f" ({', '.join(shown)})" if shown else "")
