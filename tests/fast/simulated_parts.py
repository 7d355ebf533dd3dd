"""Replicas, environments, a dataset, a trainer and a recorder for simulated runs: small, and real
in what the controller sees of them."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import CheckpointError, ReplicaError, WeightSyncError
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.generation.scripted import scripted_token
from torchtitan_rl.orchestration.records import AccountRecord, StepRecord, ValidationRecord
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoint_files import (
    fingerprint,
    list_files,
    publish,
    read_document,
    seal,
    temporary_path,
    write_attachments,
)
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnProgress,
    OnReading,
    Problem,
    PullReport,
    RolloutStatus,
    VersionRun,
)
from torchtitan_rl.weights.handle import SharedMemoryHandle, WeightHandle

VOCAB = 50


class SimReplica:
    """Samples `scripted_token` one by one; each takes ``token_s`` times the chance's whim."""

    def __init__(
        self, name: str, *, chance: random.Random, trainer: SimTrainer, token_s: float = 0.1
    ) -> None:
        self._name = name
        self._trainer = trainer
        self._chance = chance
        self._token_s = token_s
        self._is_open = True
        self._runs: dict[str, asyncio.Event] = {}  # by request: not frozen, or to be ended
        self._running: dict[str, tuple[list[int], list[float], list[VersionRun]]] = {}
        self._aborted: set[str] = set()
        self.version = 0
        self.pull_s = 0.05
        self.is_dead = False
        self.sampled = 0
        self.requested: list[str] = []
        self.has_weights = True
        trainer.awake.append(self)

    @property
    def name(self) -> str:
        return self._name

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        runs: list[VersionRun] = []
        name, sampling = request.request_id, request.sampling
        self.requested.append(name)
        self._running[name] = (tokens, logprobs, runs)
        runs_on = self._runs[name] = asyncio.Event()
        if self._is_open:
            runs_on.set()
        reason = FinishReason.LENGTH
        try:
            while len(tokens) < sampling.max_tokens:
                await asyncio.sleep(self._token_s * self._chance.uniform(0.1, 2.0))
                await runs_on.wait()
                if self.is_dead:
                    raise ReplicaError(f"{self.name} is dead")
                if name in self._aborted:
                    reason = FinishReason.ABORT
                    break
                self._uses_the_devices("samples a token")
                token, logprob = scripted_token(
                    (*request.prompt_token_ids, *tokens),
                    seed=sampling.seed,
                    version=self.version,
                    vocab_size=VOCAB,
                )
                if not runs or runs[-1].version != self.version:
                    runs.append(VersionRun(len(tokens), self.version))
                tokens.append(token)
                logprobs.append(logprob)
                self.sampled += 1
                if token < VOCAB // 8:
                    reason = FinishReason.STOP
                    break
        finally:
            del self._running[name], self._runs[name]
            self._aborted.discard(name)
        return _completion(name, tokens, logprobs, runs, reason)

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        partials = {
            name: _completion(name, *parts, FinishReason.ABORT)
            for name, parts in self._running.items()
        }
        reading = EngineReading(partials=partials, sampled_tokens=self.sampled)
        if on_reading is not None:
            on_reading(reading)
        await asyncio.sleep(0.3)  # the answer travels, and sampling goes on
        return reading

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        for name in request_ids:
            if name in self._running:
                self._aborted.add(name)
                self._runs[name].set()  # a frozen one ends, too

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._aborted.update(self._running)
        if mode == "keep":
            self._is_open = False
            for name in self._running.keys() - self._aborted:
                self._runs[name].clear()
        else:
            while self._running:
                await asyncio.sleep(0.01)

    async def resume(self) -> None:
        self._is_open = True
        for runs_on in self._runs.values():
            runs_on.set()

    async def stage(self, handle: WeightHandle) -> None:
        await asyncio.sleep(self.pull_s)
        if handle.version not in self._trainer.readable:
            raise WeightSyncError(f"version {handle.version} is gone")

    async def pull(self, version: int) -> PullReport:
        self.has_weights = True
        self._uses_the_devices("begins to swap weights")
        await asyncio.sleep(self.pull_s)
        self._uses_the_devices("swaps weights")
        self.version = version
        return PullReport(
            version=version, stall_s=0.0, running_requests=len(self._running), recomputed=False
        )

    async def sleep(self) -> None:
        await self.pause("abort")
        await asyncio.sleep(0.02)
        self.has_weights = False
        self._trainer.awake.remove(self)

    async def wake_up(self) -> None:
        self._trainer.awake.append(self)
        self._uses_the_devices("wakes up", without_weights=True)
        await asyncio.sleep(0.02)

    def _uses_the_devices(self, what: str, *, without_weights: bool = False) -> None:
        if self._trainer.has_devices:
            self._trainer.complaints.append(f"{self.name} {what} on the trainer's devices")
        if not (self.has_weights or without_weights):
            self._trainer.complaints.append(f"{self.name} {what} without weights")

    async def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=len(self._running),
            waiting=0,
            kv_use=0.0,
            preemptions=0,
            generated_tokens=self.sampled,
            tokens_per_second=0.0,
            steps=0,
        )

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Of an environment; shares are of its calls."""

    turns: int = 2
    reward_levels: int = 5
    env_fails: float = 0.0
    env_hangs: float = 0.0
    env_delay_s: float = 1.0


class SimEnv:
    """A turn is the prompt so far and a separator; the reward is a hash of what was sampled."""

    replays = True

    def __init__(
        self, problem: Problem, habits: Habits, chance: random.Random, answered: list[Completion]
    ) -> None:
        self._answered = answered
        self._prompt: tuple[int, ...] = (1, problem.data["seed"] % VOCAB)
        self._habits = habits
        self._chance = chance
        self._turns = 0

    async def reset(self) -> Observation:
        await self._delay()
        return Observation(prompt_token_ids=self._prompt)

    async def step(self, completion: Completion) -> Observation | Terminal:
        await self._delay()
        if self._chance.random() < self._habits.env_fails:
            raise RuntimeError("the environment failed by chance")
        self._prompt = (*self._prompt, *completion.token_ids, 0)
        self._turns += 1
        self._answered.append(completion)
        if self._turns == self._habits.turns:
            return self._terminal()
        return Observation(prompt_token_ids=self._prompt)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return self._terminal()

    async def close(self) -> None: ...

    def _terminal(self) -> Terminal:
        levels = self._habits.reward_levels
        return Terminal(reward=float(zlib.crc32(bytes(self._prompt)) % levels))

    async def _delay(self) -> None:
        if self._chance.random() < self._habits.env_hangs:
            await asyncio.sleep(10_000.0)
        await asyncio.sleep(self._chance.uniform(0.0, self._habits.env_delay_s))


class SimDataset:
    """Problems 0 .. ``size`` - 1, epoch after epoch, in another order each."""

    def __init__(self, size: int = 7) -> None:
        self._size = size
        self._position = 0

    @property
    def epoch(self) -> int:
        return (self._position - 1) // self._size

    def next(self) -> Problem:
        self._position += 1
        order = list(range(self._size))
        random.Random(self.epoch).shuffle(order)
        index = order[(self._position - 1) % self._size]
        return Problem(problem_id=f"p{index}", data={"seed": index})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class SimTrainer:
    """Weights are a checksum over every batch, in order: equal only where all of them are.

    ``shares``: with the replicas, which have the devices at the beginning. ``complaints`` say who
    used them out of turn.
    """

    def __init__(self, *, chance: random.Random, step_s: float = 0.0, shares: bool = False) -> None:
        self._chance = chance
        self._step_s = step_s
        self._is_offloaded = shares
        self._shares = shares
        self.complaints: list[str] = []
        self.awake: list[SimReplica] = []
        self.switches = 0
        self.weights = 0
        self.version = 0
        self.batches: list[TrainingBatch] = []
        self.readable: set[int] = set()

    @property
    def has_devices(self) -> bool:
        """For itself alone."""
        return self._shares and not self._is_offloaded

    async def offload(self) -> None:
        await asyncio.sleep(0.02)
        self._is_offloaded = True

    async def onload(self) -> None:
        self.switches += self._is_offloaded
        self._is_offloaded = False
        holders = [replica.name for replica in self.awake if not replica.is_dead]
        if self._shares and holders:
            self.complaints.append(f"the trainer comes while {holders} are awake")
        await asyncio.sleep(0.02)

    def _uses_the_devices(self, what: str) -> None:
        if self._is_offloaded:
            self.complaints.append(f"the trainer {what} offloaded")

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        self._uses_the_devices("steps")
        await asyncio.sleep(self._step_s * self._chance.uniform(0.5, 2.0))
        self._uses_the_devices("stepped")
        for rows in (batch.token_ids, batch.logprobs, batch.advantages, batch.versions):
            self.weights = zlib.crc32(rows.tobytes(), self.weights)
        self.batches.append(batch)
        self.version += 1
        return StepOutput(version=self.version)

    async def publish(self, keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
        self._uses_the_devices("publishes")
        self.readable &= {max(self.readable, default=0), *keep}
        self.readable.add(self.version)
        return SharedMemoryHandle(version=self.version, path="", num_bytes=0)

    async def save_checkpoint(
        self,
        path: Path,
        state: dict[str, Any],
        attachments: Mapping[str, bytes] | None = None,
        *,
        version: int,
    ) -> None:
        self._uses_the_devices("saves")
        if version != self.version:
            raise CheckpointError(f"the trainer holds {self.version}, the run is at {version}")
        folder = temporary_path(path)
        folder.mkdir(parents=True)
        (folder / "weights.json").write_text(json.dumps([self.weights, self.version]))
        write_attachments(folder, attachments or {})
        files = {name: fingerprint(folder / name) for name in list_files(folder)}
        seal(folder, state, files)
        publish(path)

    async def finish_checkpoint(self) -> None: ...

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        self._uses_the_devices("loads")
        self.weights, self.version = json.loads((path / "weights.json").read_text())
        return read_document(path)

    async def export_hf(self, path: Path) -> None:
        self._uses_the_devices("exports")

    async def close(self) -> None: ...


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.validations: list[ValidationRecord] = []
        self.accounts: list[AccountRecord] = []
        self.said: list[str] = []

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def record_validation(self, record: ValidationRecord) -> None:
        self.validations.append(record)

    def record_account(self, record: AccountRecord) -> None:
        self.accounts.append(record)

    def phase(self, name: str) -> Any:
        return nullcontext()

    def say(self, message: str) -> None:
        self.said.append(message)


def _completion(
    name: str,
    tokens: list[int],
    logprobs: list[float],
    runs: list[VersionRun],
    reason: FinishReason,
) -> Completion:
    return Completion(
        request_id=name,
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        version_runs=tuple(runs),
        finish_reason=reason,
    )
