"""All processes of a run or of ``torchtitan-rl serve``, started together and ended in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan_rl.backends.monarch.endpoint import MonarchEndpoint
from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import all_of, supervise
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.specs import EndpointSpec, GeneratorSpec, TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.serve import PreparedServe, ServeConfig
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.transport import Transport, choose_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    trainer: MonarchTrainer
    replicas: tuple[MonarchReplica, ...]
    endpoint: MonarchEndpoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProcesses:
    """``endpoint`` is None where the plan has none."""

    replicas: tuple[MonarchReplica, ...]
    endpoint: MonarchEndpoint | None


@asynccontextmanager
async def run_processes(
    prepared: PreparedRun, *, trace_dir: Path | None, hosts: Hosts | None = None
) -> AsyncIterator[RunProcesses]:
    """Trainer, replicas and endpoint, ready to be called; gone when the context is left. ``hosts``
    are those that the plan was made for.

    Raises:
        ReplicaError, EndpointLostError, DeadlineError: one of them did not start; the others are
            ended.
        ConfigError: the configured transport does not reach from the trainer to a replica.
    """
    plan = prepared.plan
    assert plan.trainer is not None
    supervise()
    hosts = hosts or Hosts()
    trainer = await MonarchTrainer.spawn(plan.trainer, _trainer_spec(prepared, trace_dir), hosts)
    replicas: list[MonarchReplica] = []
    endpoint: MonarchEndpoint | None = None
    try:
        for group in plan.replicas:
            spec = _generator_spec(prepared, group, trace_dir=trace_dir)
            replicas.append(await spawn_replica(group, spec, hosts))
        if plan.endpoint is not None:
            endpoint = await MonarchEndpoint.spawn(plan.endpoint, _endpoint_spec(prepared))
        transport = choose_transport(
            prepared.config.weight_sync.transport,
            trainer_host=trainer.host,
            replica_hosts=[host for replica in replicas for host in replica.peer.hosts],
        )
        start = _start(trainer, replicas, transport, is_shared=plan.is_shared)
        await all_of(start, *([] if endpoint is None else [endpoint.start()]))
        yield RunProcesses(trainer=trainer, replicas=tuple(replicas), endpoint=endpoint)
    finally:
        closes = [trainer.close(), *(replica.close() for replica in replicas)]
        if endpoint is not None:
            closes.append(endpoint.close())
        await asyncio.gather(*closes)


@asynccontextmanager
async def serve_processes(
    prepared: PreparedRun | PreparedServe,
) -> AsyncIterator[ServeProcesses]:
    """Replicas, and the plan's endpoint, ready to be called; gone when the context is left.

    Raises:
        EndpointLostError, ReplicaError, DeadlineError: one did not start; the others are ended.
    """
    plan = prepared.plan
    supervise()
    replicas: list[MonarchReplica] = []
    endpoint: MonarchEndpoint | None = None
    try:
        if plan.endpoint is not None:
            endpoint = await MonarchEndpoint.spawn(plan.endpoint, _endpoint_spec(prepared))
        for group in plan.replicas:
            replicas.append(await spawn_replica(group, _generator_spec(prepared, group)))
        starts = [] if endpoint is None else [endpoint.start()]
        await all_of(*starts, *(replica.peer.start() for replica in replicas))
        yield ServeProcesses(endpoint=endpoint, replicas=tuple(replicas))
    finally:
        closes = [replica.close() for replica in replicas]
        if endpoint is not None:
            closes.append(endpoint.close())
        await asyncio.gather(*closes)


async def _start(
    trainer: MonarchTrainer,
    replicas: Sequence[MonarchReplica],
    transport: Transport,
    *,
    is_shared: bool,
) -> None:
    """On shared devices the engines, which take what memory they find, come second."""
    if not is_shared:
        await all_of(trainer.start(transport), *(replica.peer.start() for replica in replicas))
        return
    await trainer.start(transport)
    await trainer.offload()
    await all_of(*(replica.peer.start() for replica in replicas))


def _trainer_spec(prepared: PreparedRun, trace_dir: Path | None) -> TrainerSpec:
    config = prepared.config
    return TrainerSpec(
        checkpoint=prepared.policy_dir,
        trainer=config.trainer,
        dtype=config.policy.dtype,
        seed=config.seed,
        num_steps=config.num_steps,
        run_dir=config.run_dir.absolute(),
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
    )


def _generator_spec(
    prepared: PreparedRun | PreparedServe, group: ProcessGroup, *, trace_dir: Path | None = None
) -> GeneratorSpec:
    config = prepared.config
    return GeneratorSpec(
        name=group.name,
        model=prepared.policy_dir,
        device=prepared.plan.device,
        dtype=_dtype(config),
        seed=group.seed,
        generator=config.generator,
        weight_sync=config.weight_sync if isinstance(config, RunConfig) else WeightSyncConfig(),
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
        stream_interval_s=config.endpoint.interval_s,
        sleeps=prepared.plan.is_shared,
        reasoning_parser=config.endpoint.reasoning_parser,
    )


def _endpoint_spec(prepared: PreparedRun | PreparedServe) -> EndpointSpec:
    config = prepared.config
    return EndpointSpec(
        model=prepared.policy_dir,
        device=prepared.plan.device,
        dtype=_dtype(config),
        max_model_len=config.generator.max_model_len,
        # What a run samples is its own decision, not the checkpoint's.
        generation_config="vllm" if isinstance(config, RunConfig) else "auto",
        endpoint=config.endpoint,
        keys=prepared.keys,
        log_dir=config.log_dir.absolute(),
    )


def _dtype(config: RunConfig | ServeConfig) -> Literal["float32", "bfloat16"]:
    return config.policy.dtype if isinstance(config, RunConfig) else config.dtype
