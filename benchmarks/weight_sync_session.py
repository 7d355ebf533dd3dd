"""One trainer and one replica in processes of their own, and weight syncs between them.

A repeat is two real optimizer steps, each followed by a sync of its weights. The first sync is into
the idle replica, and measures publishing, fetch and swap alone. The second sync happens while
requests are decoded, and measures the stall of decoding. The plain copies run between the syncs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.weight_sync_copies import MemoryCopy, TcpCopy
from benchmarks.weight_sync_trace import read_traces, seconds_of, seconds_together, standstill_s
from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.monarch.trainer import MonarchTrainer
from torchtitan_rl.backends.monarch.weight_replicator import WeightReplicator, weight_replicator
from torchtitan_rl.backends.specs import GeneratorSpec, TrainerSpec, WeightHostSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.generation.commands import AbortRequests, Pull, ReadStats
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Completion, Episode, GenerationRequest, SamplingParams
from torchtitan_rl.weights.config import Transport, WeightSyncConfig
from torchtitan_rl.weights.distribution import WeightDistribution

_PROBE_TOKENS = 8
MAX_MODEL_LEN = 1024
_SECONDS_OF_DECODING = 0.5  # on each side of a pull


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of one measurement. ``policy`` is a directory; the policy's number of heads is
    divisible by ``generator_ranks``."""

    policy: str
    transport: Transport
    trainer_ranks: int = 1
    generator_ranks: int = 1
    threads: int = 1  # OpenMP threads of each rank
    running: int = 16  # requests that are decoded while weights change
    max_model_len: int = MAX_MODEL_LEN
    kv_cache_bytes: int = 512 << 20  # of each rank, on a CPU
    device: str = "cpu"

    @property
    def writing_threads(self) -> int:
        """Number of threads that write weights: those of all ranks of the trainer."""
        return self.threads * self.trainer_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """The results of one repeat, in seconds. ``gather_s`` and ``write_s`` are parts of
    ``publish_s``; ``gather_s`` is 0 if each rank writes its share.

    ``load_s``: the swap of staged weights by the idle engine. ``standstill_s``: the time without an
    engine step while requests run. ``stall_s``: the stall that the engine loop reports.
    """

    publish_s: float
    gather_s: float
    write_s: float
    fetch_s: float  # with an idle engine
    fetch_while_decoding_s: float
    load_s: float
    load_while_decoding_s: float
    standstill_s: float
    stall_s: float
    memory_copy_s: float
    tcp_copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one setting. ``probe_token_ids``: the greedy answer of the last weights to a
    fixed prompt."""

    setting: Setting
    num_bytes: int
    last_version: int
    running_at_pulls: tuple[int, ...]
    probe_token_ids: tuple[int, ...]
    repeats: tuple[Repeat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Syncs:
    """The measurements of one repeat in the controller. The traces have the other measurements."""

    idle_version: int
    busy_version: int
    stall_s: float
    running: int
    memory_copy_s: float
    tcp_copy_s: float


async def measure(setting: Setting, *, repeats: int, work_dir: Path) -> Measured:
    """Start all processes, measure the repeats, and end the processes. A first repeat is not
    counted.

    ``work_dir`` exists and is empty.
    """
    trace_dir = work_dir / "trace"
    async with _processes(setting, work_dir, trace_dir, num_steps=2 * repeats + 2) as (
        trainer,
        replica,
    ):
        handle = await trainer.publish()
        num_bytes = handle.num_bytes
        await replica.stage(handle)
        await replica.execute(Pull(handle.version))
        memory = MemoryCopy(num_bytes, threads=setting.writing_threads)
        tcp = TcpCopy(num_bytes, readers=1)
        try:
            syncs = [
                await _sync_twice(setting, trainer, replica, memory, tcp)
                for _ in range(repeats + 1)
            ]
        finally:
            tcp.close()
        probe = await replica.generate(_request("probe", _PROBE_TOKENS, temperature=0.0))
    # The last spans are written when the processes end.
    publishers = read_traces(trace_dir, "trainer")
    engines = read_traces(trace_dir, "replica0")
    fetchers = read_traces(trace_dir, "weights-of-host-0")

    def fetch_s(version: int) -> float:
        """The seconds of the fetch to the host and then to the slowest rank."""
        to_host_s = seconds_of(fetchers, "fetch to host", version, default=0.0)
        return to_host_s + seconds_of(engines, "fetch weights", version)

    return Measured(
        setting=setting,
        num_bytes=num_bytes,
        last_version=syncs[-1].busy_version,
        running_at_pulls=tuple(sync.running for sync in syncs),
        probe_token_ids=probe.token_ids,
        repeats=tuple(
            Repeat(
                publish_s=seconds_of(publishers, "publish", sync.idle_version),
                gather_s=seconds_of(publishers, "gather weights", sync.idle_version, default=0.0),
                write_s=seconds_together(publishers, "write weights", sync.idle_version),
                fetch_s=fetch_s(sync.idle_version),
                fetch_while_decoding_s=fetch_s(sync.busy_version),
                load_s=seconds_of(engines, "swap weights", sync.idle_version),
                load_while_decoding_s=seconds_of(engines, "swap weights", sync.busy_version),
                standstill_s=standstill_s(engines, sync.busy_version),
                stall_s=sync.stall_s,
                memory_copy_s=sync.memory_copy_s,
                tcp_copy_s=sync.tcp_copy_s,
            )
            for sync in syncs[1:]
        ),
    )


async def _sync_twice(
    setting: Setting,
    trainer: MonarchTrainer,
    replica: MonarchReplica,
    memory: MemoryCopy,
    tcp: TcpCopy,
) -> _Syncs:
    await trainer.train_step(batch())
    idle = await trainer.publish()
    await replica.stage(idle)
    await replica.execute(Pull(idle.version))
    memory_copy_s, tcp_copy_s = memory.run(), tcp.run()

    await trainer.train_step(batch())
    busy = await trainer.publish()
    names = tuple(f"{busy.version}/{index}" for index in range(setting.running))
    longest = setting.max_model_len - len(_PROMPT)
    decoding = [asyncio.ensure_future(replica.generate(_request(n, longest))) for n in names]
    await _until_all_run(replica, setting.running)
    await asyncio.sleep(_SECONDS_OF_DECODING)
    await replica.stage(busy)
    report = await replica.execute(Pull(busy.version))
    await asyncio.sleep(_SECONDS_OF_DECODING)
    await replica.execute(AbortRequests(tuple(names)))
    ended: list[Completion] = await asyncio.gather(*decoding)
    for completion in ended:
        if [run.version for run in completion.version_runs] != [idle.version, busy.version]:
            raise RuntimeError(f"{completion.request_id} did not run through the pull")
    return _Syncs(
        idle_version=idle.version,
        busy_version=busy.version,
        stall_s=report.stall_s,
        running=report.running_requests,
        memory_copy_s=memory_copy_s,
        tcp_copy_s=tcp_copy_s,
    )


async def _until_all_run(replica: MonarchReplica, number: int) -> None:
    deadline = time.monotonic() + 60.0
    while (await replica.execute(ReadStats())).running < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{number} requests do not run at once; give the cache more room")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _processes(
    setting: Setting, work_dir: Path, trace_dir: Path, *, num_steps: int
) -> AsyncIterator[tuple[MonarchTrainer, MonarchReplica]]:
    from torchtitan_rl.backends.monarch.runtime import all_of

    on_cuda = setting.device == "cuda"
    generators, trainers = setting.generator_ranks, setting.trainer_ranks
    generator_group = ProcessGroup(
        name="replica0",
        ranks=generators,
        threads=setting.threads,
        devices=tuple(map(str, range(generators))) if on_cuda else (),
    )
    trainer_group = ProcessGroup(
        name="trainer",
        ranks=trainers,
        threads=setting.threads,
        devices=tuple(map(str, range(generators, generators + trainers))) if on_cuda else (),
    )
    spec = _generator_spec(setting, work_dir, trace_dir)
    hosts = {0: _weight_host(spec)} if setting.transport is not Transport.SHARED_MEMORY else {}
    weights = WeightDistribution(hosts, fan_out=0)
    replica = await spawn_replica(generator_group, spec, weights=weights)
    try:
        trainer = await MonarchTrainer.spawn(
            trainer_group, _trainer_spec(setting, work_dir, trace_dir, num_steps=num_steps)
        )
        try:
            starts = [host.start() for host in hosts.values()]
            await all_of(replica.peer.start(), trainer.start(setting.transport), *starts)
            yield trainer, replica
        finally:
            await trainer.close()
    finally:
        await weights.close()
        await asyncio.gather(replica.close(), *(host.close() for host in hosts.values()))


def _weight_host(spec: GeneratorSpec) -> WeightReplicator:
    return weight_replicator(
        ProcessGroup(name="weights0", ranks=1, threads=1),
        WeightHostSpec(
            name="host 0",
            run_dir=spec.log_dir,
            log_dir=spec.log_dir,
            weight_sync=spec.weight_sync,
            trace_dir=spec.trace_dir,
        ),
    )


def _generator_spec(setting: Setting, work_dir: Path, trace_dir: Path) -> GeneratorSpec:
    return GeneratorSpec(
        name="replica0",
        model=Path(setting.policy),
        device="cuda" if setting.device == "cuda" else "cpu",
        dtype="bfloat16",
        seed=0,
        generator=GeneratorConfig(
            tensor_parallel=setting.generator_ranks,
            threads=setting.threads,
            max_model_len=setting.max_model_len,
            max_running_requests=setting.running,
            kv_cache_bytes=setting.kv_cache_bytes,
        ),
        weight_sync=WeightSyncConfig(),
        log_dir=work_dir,
        trace_dir=trace_dir,
    )


def _trainer_spec(
    setting: Setting, work_dir: Path, trace_dir: Path, *, num_steps: int
) -> TrainerSpec:
    return TrainerSpec(
        checkpoint=Path(setting.policy),
        trainer=TrainerConfig(
            data_parallel_shard=setting.trainer_ranks,
            max_episode_tokens=ROW_LEN,
            max_tokens_per_microbatch=ROW_LEN,
            threads=setting.threads,
            optimizer=OptimizerConfig(learning_rate=1e-4),
        ),
        dtype="bfloat16",
        seed=0,
        num_steps=num_steps,
        run_dir=work_dir,
        log_dir=work_dir,
        trace_dir=trace_dir,
    )


ROW_LEN = 16
_PROMPT = tuple(range(2, 34))


def _request(name: str, tokens: int, *, temperature: float = 1.0) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_token_ids=_PROMPT, sampling=sampling)


def batch() -> TrainingBatch:
    """Make a batch of two rows, just enough to change the weights on each rank."""
    rng = np.random.default_rng(0)
    mask = (False,) * 4 + (True,) * (ROW_LEN - 4)
    episodes = [
        Episode(
            rollout_id=f"rollout{index}",
            group_id="group",
            token_ids=tuple(rng.integers(0, 256, ROW_LEN).tolist()),
            loss_mask=mask,
            logprobs=tuple(-5.0 if on else 0.0 for on in mask),
            advantages=tuple(float(2 * index - 1) if on else 0.0 for on in mask),
            versions=tuple(0 if on else -1 for on in mask),
        )
        for index in range(2)
    ]
    packed = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0).batch
    assert packed is not None  # each episode fills a row
    return packed
