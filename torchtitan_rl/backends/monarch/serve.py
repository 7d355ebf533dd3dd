"""All processes of ``torchtitan-rl serve``, started together and ended in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torchtitan_rl.backends.monarch.endpoint import MonarchEndpoint
from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.monarch.runtime import all_of, supervise
from torchtitan_rl.backends.specs import EndpointSpec, GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.serve import PreparedServe
from torchtitan_rl.weights.config import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProcesses:
    endpoint: MonarchEndpoint
    replicas: tuple[MonarchReplica, ...]


@asynccontextmanager
async def serve_processes(prepared: PreparedServe) -> AsyncIterator[ServeProcesses]:
    """Endpoint and replicas, ready to be called; gone when the context is left.

    Raises:
        EndpointLostError, ReplicaError, DeadlineError: one did not start; the others are ended.
    """
    supervise()
    plan = prepared.plan
    endpoint = await MonarchEndpoint.spawn(plan.endpoint, _endpoint_spec(prepared))
    replicas: list[MonarchReplica] = []
    try:
        for index, group in enumerate(plan.replicas):
            environment = engine_environment(group.threads, plan.device)
            spec = _generator_spec(prepared, index)
            replicas.append(await spawn_replica(group, spec, environment))
        await all_of(endpoint.start(), *(replica.peer.start() for replica in replicas))
        yield ServeProcesses(endpoint=endpoint, replicas=tuple(replicas))
    finally:
        await asyncio.gather(endpoint.close(), *(replica.close() for replica in replicas))


def _endpoint_spec(prepared: PreparedServe) -> EndpointSpec:
    config = prepared.config
    return EndpointSpec(
        model=prepared.model_dir,
        device=prepared.plan.device,
        dtype=config.dtype,
        max_model_len=config.generator.max_model_len,
        generation_config="auto",
        endpoint=config.endpoint,
        keys=prepared.keys,
        log_dir=config.log_dir.absolute(),
    )


def _generator_spec(prepared: PreparedServe, index: int) -> GeneratorSpec:
    config, group = prepared.config, prepared.plan.replicas[index]
    return GeneratorSpec(
        name=group.name,
        model=prepared.model_dir,
        device=prepared.plan.device,
        dtype=config.dtype,
        seed=group.seed,
        generator=config.generator,
        weight_sync=WeightSyncConfig(),
        log_dir=config.log_dir.absolute(),
        trace_dir=None,
        stream_interval_s=config.endpoint.interval_s,
        reasoning_parser=config.endpoint.reasoning_parser,
    )
