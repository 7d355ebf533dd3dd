"""All processes of a run, started together and ended in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.adapters.monarch_generator import GeneratorSpec, MonarchReplica
from torchtitan_rl.adapters.monarch_runtime import all_of, supervise
from torchtitan_rl.adapters.monarch_trainer import MonarchTrainer, TrainerSpec
from torchtitan_rl.adapters.vllm_cpu import engine_environment
from torchtitan_rl.prepare import PreparedRun
from torchtitan_rl.weights.transport import Transport, choose_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    trainer: MonarchTrainer
    replicas: tuple[MonarchReplica, ...]


@asynccontextmanager
async def run_processes(
    prepared: PreparedRun, *, trace_dir: Path | None
) -> AsyncIterator[RunProcesses]:
    """Trainer and replicas, ready to be called; gone when the context is left.

    Raises:
        ReplicaError, DeadlineError: one of them did not start; the others are ended.
        ConfigError: the configured transport does not reach from the trainer to a replica.
    """
    supervise()
    plan = prepared.plan
    trainer = await MonarchTrainer.spawn(plan.trainer, _trainer_spec(prepared, trace_dir))
    replicas: list[MonarchReplica] = []
    try:
        for index, group in enumerate(plan.replicas):
            spec = _generator_spec(prepared, index, trace_dir)
            environment = engine_environment(group.threads, plan.device)
            replicas.append(await MonarchReplica.spawn(group, spec, environment))
        transport = await _transport(prepared, trainer, replicas)
        await _start(trainer, replicas, transport, is_shared=plan.is_shared)
        yield RunProcesses(trainer=trainer, replicas=tuple(replicas))
    finally:
        await asyncio.gather(trainer.close(), *(replica.close() for replica in replicas))


async def _start(
    trainer: MonarchTrainer,
    replicas: Sequence[MonarchReplica],
    transport: Transport,
    *,
    is_shared: bool,
) -> None:
    """On shared devices the engines, which take what memory they find, come second."""
    if not is_shared:
        await all_of(trainer.start(transport), *(replica.start() for replica in replicas))
        return
    await trainer.start(transport)
    await trainer.offload()
    await all_of(*(replica.start() for replica in replicas))


async def _transport(
    prepared: PreparedRun, trainer: MonarchTrainer, replicas: Sequence[MonarchReplica]
) -> Transport:
    """From where the processes are, which they themselves know best."""
    hosts = await asyncio.gather(*(replica.hosts() for replica in replicas))
    return choose_transport(
        prepared.config.weight_sync.transport,
        trainer_host=await trainer.host(),
        replica_hosts=[host for of_replica in hosts for host in of_replica],
    )


def _trainer_spec(prepared: PreparedRun, trace_dir: Path | None) -> TrainerSpec:
    config = prepared.config
    return TrainerSpec(
        checkpoint=prepared.policy_dir,
        trainer=config.trainer,
        dtype=config.policy.dtype,
        seed=prepared.plan.trainer.seed,
        num_steps=config.num_steps,
        run_dir=config.run_dir.absolute(),
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
    )


def _generator_spec(prepared: PreparedRun, index: int, trace_dir: Path | None) -> GeneratorSpec:
    config, group = prepared.config, prepared.plan.replicas[index]
    return GeneratorSpec(
        name=group.name,
        model=prepared.policy_dir,
        device=prepared.plan.device,
        dtype=config.policy.dtype,
        seed=group.seed,
        generator=config.generator,
        weight_sync=config.weight_sync,
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
        stream_interval_s=config.endpoint.interval_s,
        sleeps=prepared.plan.is_shared,
    )
