"""Starts all processes of a run or of ``torchtitan-rl serve`` together, and ends all of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.backends.monarch.endpoint import MonarchEndpoint
from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import all_of, supervise
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.monarch.weight_replicator import WeightReplicator, weight_replicator
from torchtitan_rl.backends.specs import EndpointSpec, GeneratorSpec, TrainerSpec, WeightHostSpec
from torchtitan_rl.bounds import absolute
from torchtitan_rl.config.plan import ProcessGroup, replica_name
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.serve import PreparedServe, ServeConfig
from torchtitan_rl.distillation.config import CUDA_STEP_TOKENS, engine_options
from torchtitan_rl.errors import ReplicaError, TorchtitanRLError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.restarts import EXPECTED_S, first_name
from torchtitan_rl.tenancy.client import ServedPeer, owner_of
from torchtitan_rl.weights.config import (
    Transport,
    WeightSyncConfig,
    choose_transport,
    hosts_that_fetch,
)
from torchtitan_rl.weights.distribution import WeightDistribution

ServedReplica = ConnectedReplica[ServedPeer]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """The processes of a run. ``replicas``, ``teachers`` (by checkpoint) and ``trainers`` grow when
    lost ones are started again. ``groups`` are the planned and the added replicas, and those of
    teachers, by first name. ``weights`` fetches the trainer's weights to the replicas' hosts, by
    ``transport``."""

    trainers: list[MonarchTrainer]
    replicas: list[MonarchReplica | ServedReplica]
    teachers: dict[str, list[MonarchReplica]]
    groups: dict[str, ProcessGroup]
    endpoint: MonarchEndpoint | None
    prepared: PreparedRun
    hosts: Hosts
    weights: WeightDistribution
    weight_hosts: dict[int, WeightReplicator]
    transport: Transport
    trace_dir: Path | None

    async def restart_trainer(self, name: str) -> MonarchTrainer:
        """Start another trainer, under a new name. The processes of the one before must have ended.
        Raises TrainerLostError, ReplicaError, DeadlineError: the trainer did not start."""
        group = self.prepared.plan.trainer
        assert group is not None
        group = replace(group, name=name)
        spec = _trainer_spec(self.prepared, self.trace_dir)
        trainer = await MonarchTrainer.spawn(group, spec, self.hosts)
        self.trainers.append(trainer)  # closed at the end in any case
        try:
            await trainer.start(self.transport)
        except TorchtitanRLError as error:
            trainer.lose(error)
            with suppress(TorchtitanRLError):  # nothing answers
                await trainer.close()
            raise
        # A fetcher that is connected to the lost processes gets nothing from the new ones.
        fetchers = list(self.weight_hosts.values())
        for host in self.weight_hosts:
            self.lose_host(host)
        await asyncio.gather(*(fetcher.close() for fetcher in fetchers))
        return trainer

    async def restart(self, first: str, name: str) -> MonarchReplica | ServedReplica:
        """Start a replica of the group ``first``, again or for the first time, under the new
        ``name``. The processes of a lost replica must have ended. Raises ReplicaError,
        DeadlineError: the replica did not start."""
        if self.prepared.config.generator.endpoint and first == replica_name(0):
            served = await _served_replica(self.prepared, name, self.weights, patience_s=EXPECTED_S)
            self.replicas.append(served)
            return served
        source = {group.name: source for group, source in _teacher_groups(self.prepared)}.get(first)
        group = replace(self.groups[first], name=name)
        if source is None:
            spec = _generator_spec(self.prepared, group, trace_dir=self.trace_dir)
        else:
            spec = _teacher_spec(self.prepared, group, source, trace_dir=self.trace_dir)
        replica = await spawn_replica(group, spec, self.hosts, weights=self.weights)
        started = self.replicas if source is None else self.teachers[source]
        return await _started(replica, started)

    def lose_host(self, host: int) -> None:
        """Forget the weights on a lost host. A new process fetches them when the host is back."""
        if host in self.weight_hosts:
            fetcher = _weight_host(self.prepared, self.hosts, host, self.trace_dir)
            self.weight_hosts[host] = fetcher
            self.weights.replace(host, fetcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProcesses:
    """The processes of ``torchtitan-rl serve``. ``replicas`` grows when lost ones are started
    again."""

    replicas: list[MonarchReplica]
    endpoint: MonarchEndpoint | None
    prepared: PreparedRun | PreparedServe

    async def restart(self, lost: str, name: str) -> MonarchReplica:
        """Like `RunProcesses.restart`, in place of the replica ``lost``."""
        first = first_name(lost)
        (group,) = (one for one in self.prepared.plan.replicas if one.name == first)
        group = replace(group, name=name)
        replica = await spawn_replica(group, _generator_spec(self.prepared, group))
        return await _started(replica, self.replicas)


@asynccontextmanager
async def run_processes(
    prepared: PreparedRun, *, trace_dir: Path | None, hosts: Hosts | None = None
) -> AsyncIterator[RunProcesses]:
    """Start trainer, replicas and endpoint on the ``hosts`` of the plan, and end them when the
    block ends.

    Raises:
        ReplicaError, EndpointLostError, DeadlineError: one of them did not start.
        ConfigError: the configured transport does not reach from the trainer to a replica.
    """
    plan = prepared.plan
    hosts = hosts or Hosts()
    transport, weight_hosts = _weight_hosts(prepared, hosts, trace_dir)
    weights = WeightDistribution(weight_hosts, fan_out=prepared.config.weight_sync.fan_out)
    supervise()
    replicas: list[MonarchReplica | ServedReplica] = []
    trainers: list[MonarchTrainer] = []
    started: list[MonarchReplica] = []
    teachers: dict[str, list[MonarchReplica]] = defaultdict(list)
    endpoint: MonarchEndpoint | None = None
    try:
        if prepared.config.generator.endpoint:  # first, because the server may refuse the run
            replicas.append(await _served_replica(prepared, replica_name(0), weights))
        if plan.trainer is not None:
            spec = _trainer_spec(prepared, trace_dir)
            trainers.append(await MonarchTrainer.spawn(plan.trainer, spec, hosts))
        for group, source in _teacher_groups(prepared):
            of_teacher = _teacher_spec(prepared, group, source, trace_dir=trace_dir)
            teachers[source].append(await spawn_replica(group, of_teacher, hosts))
        for group in plan.replicas:
            of_replica = _generator_spec(prepared, group, trace_dir=trace_dir)
            started.append(await spawn_replica(group, of_replica, hosts, weights=weights))
            replicas.append(started[-1])
        if plan.endpoint is not None:
            endpoint = await MonarchEndpoint.spawn(plan.endpoint, _endpoint_spec(prepared))
        start = _start(trainers, started, transport, is_shared=plan.is_shared)
        starts = [start, *(host.start() for host in weight_hosts.values())]
        starts += [one.peer.start() for of_source in teachers.values() for one in of_source]
        await all_of(*starts, *([] if endpoint is None else [endpoint.start()]))
        yield RunProcesses(
            trainers=trainers,
            replicas=replicas,
            teachers=teachers,
            groups={group.name: group for group in (*plan.replicas, *plan.teachers)},
            endpoint=endpoint,
            prepared=prepared,
            hosts=hosts,
            weights=weights,
            weight_hosts=weight_hosts,
            transport=transport,
            trace_dir=trace_dir,
        )
    finally:
        closes = [one.close() for one in trainers] + [one.close() for one in replicas]
        closes += [one.close() for of_source in teachers.values() for one in of_source]
        if endpoint is not None:
            closes.append(endpoint.close())
        await weights.close()
        await asyncio.gather(*closes, *(host.close() for host in weight_hosts.values()))


@asynccontextmanager
async def serve_processes(prepared: PreparedRun | PreparedServe) -> AsyncIterator[ServeProcesses]:
    """Start the replicas and the plan's endpoint, and end them when the block ends. Raises
    EndpointLostError, ReplicaError, DeadlineError: a process did not start."""
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
        yield ServeProcesses(endpoint=endpoint, replicas=replicas, prepared=prepared)
    finally:
        closes = [replica.close() for replica in replicas]
        if endpoint is not None:
            closes.append(endpoint.close())
        await asyncio.gather(*closes)


async def _started(replica: MonarchReplica, among: list[Any]) -> MonarchReplica:
    among.append(replica)  # closed at the end in any case
    try:
        await replica.peer.start()
    except TorchtitanRLError:
        await replica.close()
        raise
    return replica


async def _start(
    trainers: Sequence[MonarchTrainer],
    replicas: Sequence[MonarchReplica],
    transport: Transport,
    *,
    is_shared: bool,
) -> None:
    """Start trainer and replicas; on shared devices the engines last, because they use all free
    memory."""
    starts = [trainer.start(transport) for trainer in trainers]
    if is_shared:
        await all_of(*starts)
        await all_of(*(trainer.offload() for trainer in trainers))
        starts = []
    await all_of(*starts, *(replica.peer.start() for replica in replicas))


def _weight_hosts(
    prepared: PreparedRun, hosts: Hosts, trace_dir: Path | None
) -> tuple[Transport, dict[int, WeightReplicator]]:
    config, replicas, trainer = prepared.config, prepared.plan.replicas, prepared.plan.trainer
    if trainer is None:
        return Transport.SHARED_MEMORY, {}
    trainer_hosts = trainer.rank_hosts or (trainer.host,)
    replica_hosts = [group.host for group in replicas]
    transport = choose_transport(
        config.weight_sync.transport, trainer_hosts=trainer_hosts, replica_hosts=replica_hosts
    )
    fetching = hosts_that_fetch(transport, trainer_hosts=trainer_hosts, replica_hosts=replica_hosts)
    fetchers = {host: _weight_host(prepared, hosts, host, trace_dir) for host in fetching}
    return transport, fetchers


def _weight_host(
    prepared: PreparedRun, hosts: Hosts, host: int, trace_dir: Path | None
) -> WeightReplicator:
    config = prepared.config
    group = ProcessGroup(name=f"weights{host}", ranks=1, threads=1, host=host)
    spec = WeightHostSpec(
        name=f"host {host}",
        run_dir=config.run_dir.absolute(),
        log_dir=config.log_dir.absolute(),
        weight_sync=config.weight_sync,
        trace_dir=trace_dir,
    )
    return weight_replicator(group, spec, hosts)


def _trainer_spec(prepared: PreparedRun, trace_dir: Path | None) -> TrainerSpec:
    config, loss = prepared.config, prepared.config.trainer.loss
    return TrainerSpec(
        checkpoint=prepared.policy_dir,
        trainer=replace(config.trainer, loss=replace(loss, function=absolute(loss.function))),
        device=prepared.plan.device,
        dtype=config.policy.dtype,
        seed=config.seed,
        num_steps=config.num_steps,
        run_dir=config.run_dir.absolute(),
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
        weight_sync=config.weight_sync,
        profile=config.profile,
        lora=config.adapters,
        teachers=_teachers_in_trainer(prepared),
        python_path=tuple(map(os.path.abspath, sys.path)) if loss.function else (),
    )


def _generator_spec(
    prepared: PreparedRun | PreparedServe, group: ProcessGroup, *, trace_dir: Path | None = None
) -> GeneratorSpec:
    config = prepared.config
    profiled_versions: tuple[int, ...] = ()
    if isinstance(config, RunConfig) and group.name in map(replica_name, config.profile.replicas):
        profiled_versions = tuple(step - 1 for step in config.profile.steps)
    return GeneratorSpec(
        name=group.name,
        model=prepared.policy_dir,
        device=prepared.plan.device,
        dtype=_dtype(config),
        seed=group.seed,
        generator=_generator(prepared),
        weight_sync=_weight_sync(prepared),
        log_dir=config.log_dir.absolute(),
        trace_dir=trace_dir,
        stream_interval_s=config.endpoint.stream_interval_s,
        sleeps=prepared.plan.is_shared,
        reasoning_parser=config.endpoint.reasoning_parser,
        lora=config.adapters if isinstance(config, RunConfig) else None,
        adapters=prepared.adapters if isinstance(prepared, PreparedServe) else (),
        tenants=prepared.slots if isinstance(prepared, PreparedServe) else None,
        records_routing=isinstance(config, RunConfig)
        and config.rollout.replay_routing is not False,
        profiled_versions=profiled_versions,
        profile_dir=config.log_dir.absolute().parent / "profile",
    )


def _weight_sync(prepared: PreparedRun | PreparedServe) -> WeightSyncConfig:
    if isinstance(prepared, PreparedRun):
        return prepared.config.weight_sync
    if prepared.slots is None:
        return WeightSyncConfig()
    # A pull brings an adapter that no running request uses, and that has a name of its own.
    return WeightSyncConfig(reset_prefix_cache_on_pull=False, recompute_running_on_pull=False)


def _generator(prepared: PreparedRun | PreparedServe) -> GeneratorConfig:
    config, plan = prepared.config, prepared.plan
    if plan.endpoint is None or not config.endpoint.prompt_logprobs or plan.device == "cpu":
        return config.generator
    vllm = config.generator.vllm | {"max_num_batched_tokens": CUDA_STEP_TOKENS}
    return replace(config.generator, vllm=vllm)


async def _served_replica(
    prepared: PreparedRun, name: str, weights: WeightDistribution, *, patience_s: float = 0.0
) -> ServedReplica:
    config = prepared.config
    assert config.adapters is not None
    peer = ServedPeer(
        name,
        config.generator.endpoint,
        tenant=config.name,
        owner=owner_of(config.run_dir),
        policy=await asyncio.to_thread(policy_digest, prepared.policy_dir),
        lora=config.adapters,
        max_model_len=config.generator.max_model_len,
        weights=weights,
    )
    try:
        await peer.start(patience_s=patience_s)
    except ReplicaError:
        await peer.close()
        raise
    return ConnectedReplica(peer)


def _teachers_in_trainer(prepared: PreparedRun) -> tuple[Path, ...]:
    if not prepared.config.teacher.is_in_trainer:
        return ()
    directories = [prepared.teachers[one].directory for one in prepared.config.teacher.sources]
    return tuple(one for one in directories if one is not None)


def _teacher_groups(prepared: PreparedRun) -> list[tuple[ProcessGroup, str]]:
    """The teachers' replicas in the plan, each with its checkpoint's name."""
    teacher = prepared.config.teacher
    sources = [source for source in teacher.checkpoints for _ in range(teacher.replicas)]
    return list(zip(prepared.plan.teachers, sources, strict=bool(prepared.plan.teachers)))


def _teacher_spec(
    prepared: PreparedRun, group: ProcessGroup, source: str, *, trace_dir: Path | None
) -> GeneratorSpec:
    """The specification of a replica that only scores, and never loads other weights."""
    config, device = prepared.config, prepared.plan.device
    directory = prepared.teachers[source].directory
    assert directory is not None
    generator = config.teacher.generator(config.generator, config.rollout.max_total_tokens)
    return replace(
        _generator_spec(prepared, group, trace_dir=trace_dir),
        model=directory,
        generator=replace(generator, vllm=engine_options(config.teacher, device)),
        sleeps=False,
        reasoning_parser="",
        lora=None,
        records_routing=False,
    )


def _endpoint_spec(prepared: PreparedRun | PreparedServe) -> EndpointSpec:
    config = prepared.config
    return EndpointSpec(
        model=prepared.policy_dir,
        device=prepared.plan.device,
        dtype=_dtype(config),
        max_model_len=config.generator.max_model_len,
        # The configuration of a run determines its sampling, not the checkpoint's configuration.
        generation_config="vllm" if isinstance(config, RunConfig) else "auto",
        endpoint=config.endpoint,
        keys=prepared.keys,
        log_dir=config.log_dir.absolute(),
        adapters=prepared.adapters if isinstance(prepared, PreparedServe) else (),
    )


def _dtype(config: RunConfig | ServeConfig) -> Literal["float32", "bfloat16"]:
    return config.policy.dtype if isinstance(config, RunConfig) else config.dtype
