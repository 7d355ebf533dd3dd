"""Checks whether a run fits on its CUDA devices by the estimate of `memory.py`, and chooses options
with which it does.

A candidate must leave `_MARGIN` of each device free. Candidates are tried in an order in which the
first that fits is the fastest by a rule of thumb: the run's own sizes before others; separate
devices before shared ones; little tensor parallelism, which communicates in each layer, and then
little context parallelism, which communicates less; as many devices for the trainer as for the
replicas; experts over as many ranks of a host as possible; passes of at least 4,096 tokens; as
little recomputation as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

from torchtitan_rl.config.machine import HostFacts, NoRoomError, place
from torchtitan_rl.config.memory import (
    BYTES,
    MemoryPlan,
    describe_parts,
    memory_plan,
    teacher_memory,
)
from torchtitan_rl.config.model import PolicyFacts
from torchtitan_rl.config.run import RunConfig

_MARGIN = 0.06  # of a device: the allocator's fragments, and what other processes hold
_ENOUGH_TOKENS = 4096  # of a forward pass; fewer leave a device partly idle
_REQUESTS = (8, 1)  # of the full length that the KV cache of a replica should hold, then must hold
_DEGREES = (1, 2, 4, 8)
_CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
_PLACEMENTS: tuple[Literal["separate", "colocated"], ...] = ("separate", "colocated")
_FIELDS = (
    *("placement", "generator.replicas", "generator.tensor_parallel"),
    *("trainer.data_parallel_replicate", "trainer.data_parallel_shard"),
    *("trainer.context_parallel", "trainer.tensor_parallel", "trainer.expert_parallel"),
    *("trainer.max_tokens_per_microbatch", "trainer.activation_checkpointing"),
    "generator.gpu_memory_utilization",
)


def device_bytes(hosts: Sequence[HostFacts]) -> int:
    """The memory of the smallest CUDA device; 0 if it is unknown, or there is no device."""
    return min((host.device_bytes for host in hosts if host.cuda_devices), default=0)


def device_memory_errors(
    config: RunConfig,
    policy: PolicyFacts,
    hosts: Sequence[HostFacts],
    teachers: Sequence[PolicyFacts] = (),
) -> list[str]:
    """Errors if a rank does not fit on its CUDA device, with options that fit. ``teachers`` are the
    teachers' checkpoints."""
    size = device_bytes(hosts)
    if not size:
        return []
    plan = memory_plan(config, policy, device="cuda", device_bytes=size, teachers=teachers)
    has = f"a device has {size / 2**30:.1f} GiB"
    errors = []
    if sum(plan.trainer.values()) > size:
        tokens = config.trainer.max_tokens_per_microbatch
        errors.append(
            f"trainer.max_tokens_per_microbatch is {tokens}: a trainer rank needs about "
            f"{describe_parts(plan.trainer)}, and {has}"
        )
    if plan.replica and plan.kv_tokens < config.generator.max_model_len:
        share, length = config.generator.gpu_memory_utilization, config.generator.max_model_len
        errors.append(
            f"generator.gpu_memory_utilization is {share}: a replica's rank has "
            f"{describe_parts(plan.replica)}, which holds no request of generator.max_model_len "
            f"({length}) tokens, and {has}"
        )
    fix = ""
    if errors:
        fix = f"; {describe_fit(fitting_options(config, policy, hosts, teachers=teachers))}"
    errors = [error + fix for error in errors]
    for teacher in teachers if config.teacher_ranks else ():
        parts = teacher_memory(
            config, teacher, device="cuda", dtype=config.policy.dtype, device_bytes=size
        )
        ranks, length = config.teacher.tensor_parallel, config.rollout.max_total_tokens
        token = teacher.kv_values("cuda", ranks) * BYTES[config.policy.dtype]
        if parts["KV cache"] < length * token:
            errors.append(
                f"teacher.tensor_parallel is {ranks}: a teacher's rank has {describe_parts(parts)}"
                f", which holds no rollout of rollout.max_total_tokens ({length}), and {has}; give "
                "more, a smaller teacher, or a server by teacher.url"
            )
    return errors


def describe_fit(options: dict[str, Any] | None) -> str:
    if options is None:
        return "no options fit; give more or larger devices, or a smaller policy"
    return f"give {' '.join(option_words(options))}"


def option_words(options: dict[str, Any]) -> list[str]:
    """As words of a command line."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def fitting_options(
    config: RunConfig,
    policy: PolicyFacts,
    hosts: Sequence[HostFacts],
    *,
    uses_all: bool = False,
    teachers: Sequence[PolicyFacts] = (),
) -> dict[str, Any] | None:
    """The fields to change so that the run fits, and their values. Empty if it fits as it is, None
    if nothing fits. With ``uses_all`` it does not fit unless it uses every device."""
    size = device_bytes(hosts)
    for requests in _REQUESTS:
        for sized in _sizes(config, policy, hosts, uses_all=uses_all):
            for candidate in _memory_options(sized):
                plan = memory_plan(
                    candidate, policy, device="cuda", device_bytes=size, teachers=teachers
                )
                if _fits(candidate, plan, size, requests) and _has_room(candidate, hosts):
                    return {
                        name: value
                        for name in _FIELDS
                        if (value := attrgetter(name)(candidate)) != attrgetter(name)(config)
                    }
    return None


def describe_shortage(
    config: RunConfig,
    policy: PolicyFacts,
    hosts: Sequence[HostFacts],
    teachers: Sequence[PolicyFacts] = (),
) -> str:
    """Why `fitting_options` found nothing: what the closest options lack."""
    size = device_bytes(hosts)
    plans = [
        memory_plan(candidate, policy, device="cuda", device_bytes=size, teachers=teachers)
        for sized in _sizes(config, policy, hosts, uses_all=True)
        for candidate in _memory_options(sized)
        if _has_room(candidate, hosts)
    ]
    if not plans:
        more = " and teachers" if config.teacher_ranks else ""
        return f"there are too few devices for trainer, replicas{more}"
    usable = (1 - _MARGIN) * size
    small = [plan for plan in plans if sum(plan.trainer.values()) <= usable]
    if not small:
        least = min((plan.trainer for plan in plans), key=lambda parts: sum(parts.values()))
        return (
            f"a trainer rank needs at least about {describe_parts(least)}, and "
            f"{100 * (1 - _MARGIN):.0f} % of a device is {usable / 2**30:.1f} GiB"
        )
    most = max(small, key=lambda plan: plan.kv_tokens)
    return (
        f"a replica's rank has at most {describe_parts(most.replica)}, which holds no request of "
        f"generator.max_model_len ({config.generator.max_model_len}) tokens"
    )


def _fits(config: RunConfig, plan: MemoryPlan, size: int, requests: int) -> bool:
    if plan.replica and plan.kv_tokens < requests * config.generator.max_model_len:
        return False
    return sum(plan.trainer.values()) <= (1 - _MARGIN) * size


def _has_room(config: RunConfig, hosts: Sequence[HostFacts]) -> bool:
    try:
        place(config, hosts)
    except NoRoomError:
        return False
    return True


def _memory_options(config: RunConfig) -> Iterator[RunConfig]:
    """The run with less and less memory for activations, and more for the engines."""
    trainer, generator = config.trainer, config.generator
    least = max(trainer.max_episode_tokens, 1)
    tokens = [trainer.max_tokens_per_microbatch]
    while tokens[-1] // 2 >= least:
        tokens.append(tokens[-1] // 2)
    if tokens[-1] > least:
        tokens.append(least)
    large = [number for number in tokens if number >= _ENOUGH_TOKENS] or tokens[:1]
    kinds = _CHECKPOINTING[_CHECKPOINTING.index(trainer.activation_checkpointing) :]
    small = [number for number in tokens if number not in large]
    shares = sorted({generator.gpu_memory_utilization, 0.92})
    pairs = [*itertools.product(kinds, large), *((kinds[-1], number) for number in small)]
    for share, (kind, number) in itertools.product(shares, pairs):
        yield replace(
            config,
            trainer=replace(
                trainer, max_tokens_per_microbatch=number, activation_checkpointing=kind
            ),
            generator=replace(generator, gpu_memory_utilization=share),
        )


def _sizes(
    config: RunConfig, policy: PolicyFacts, hosts: Sequence[HostFacts], *, uses_all: bool
) -> Iterator[RunConfig]:
    """The run, and then with other numbers of ranks, which use all devices."""
    devices = [len(host.cuda_devices) for host in hosts]
    total, most = sum(devices) - config.teacher_ranks, max(devices, default=0)
    if (
        not uses_all
        or config.together(config.generator.num_ranks, config.trainer.world_size) == total
    ):
        yield config
    if total < 1:  # teachers take every device
        return

    def can_split(degree: int) -> bool:
        return degree <= most and not (policy.num_heads % degree or policy.num_kv_heads % degree)

    degrees = list(filter(can_split, _DEGREES))
    placements = _PLACEMENTS if config.mode == "both" else _PLACEMENTS[:1]
    given = config.trainer.context_parallel
    contexts = [given, *(degree for degree in _DEGREES if degree > given)]
    takes_images = policy.architecture is not None and policy.architecture.vision is not None
    for placement, trained, context, generated in itertools.product(
        placements, degrees, contexts, degrees
    ):
        if not can_split(context * trained) or (takes_images and context * trained > 1):
            continue
        if placement == "colocated":
            splits = [(total, total)]
        else:
            middle = sorted(range(1, total), key=lambda number: abs(2 * number - total))
            splits = [(number, total - number) for number in middle]
            splits = splits if config.mode == "both" else [(total, total)]
        for training, generating in splits:
            expert_parallel = _expert_parallel(policy, training, trained, most)
            ranks = trained * context
            if training % ranks or generating % generated or not expert_parallel:
                continue
            yield replace(
                config,
                placement=placement,
                trainer=replace(
                    config.trainer,
                    data_parallel_replicate=1,
                    data_parallel_shard=training // ranks,
                    context_parallel=context,
                    tensor_parallel=trained,
                    expert_parallel=expert_parallel,
                ),
                generator=replace(
                    config.generator,
                    replicas=generating // generated,
                    tensor_parallel=generated,
                ),
            )


def _expert_parallel(policy: PolicyFacts, ranks: int, tensor: int, most: int) -> int:
    """The largest ``expert_parallel`` within a host of ``most`` devices; 0 if there is none."""
    if policy.architecture is None or policy.architecture.experts is None:
        return 1
    can_be_split = policy.architecture.experts.can_be_split
    degrees = (
        degree
        for degree in _DEGREES
        if degree <= most and ranks % degree == 0 and degree % tensor == 0
    )
    return max((one for one in degrees if can_be_split(one, ranks=ranks)), default=0)
