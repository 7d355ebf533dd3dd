"""A trainer as the controller sees it: one thread of work, deadlines, and checkpoints that are
written while training goes on.

Work goes on in tasks named ``machine: ...``, which stand for another process: a step that outlives
its deadline, or whose caller was cancelled, still ends.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tests.support.scripted_engine import scripted_experts
from tests.support.simulated_faults import Fate, Undisturbed
from tests.support.simulated_replica import pack_pair
from torchtitan_rl.aio import deadline
from torchtitan_rl.errors import (
    CheckpointError,
    DeadlineError,
    DivergedError,
    TrainerLostError,
    WeightSyncError,
)
from torchtitan_rl.training import checkpoint_files as files
from torchtitan_rl.training.batch import PreferenceLoss, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.weights.distribution import SharedMemoryHandle

if TYPE_CHECKING:
    from tests.support.simulated_replica import SimReplica

_T = TypeVar("_T")


class SimTrainer:
    """Weights are a checksum over every batch and its references, in order: equal only where
    all of them are.

    ``shares``: with the replicas, which have the devices at the beginning. ``complaints`` say who
    used them out of turn. ``write_s``: how long a checkpoint is being written. ``cuts_tokens``: the
    run samples with a top_p. ``successor`` is the trainer that was started in this one's place.
    """

    def __init__(
        self,
        *,
        chance: random.Random,
        step_s: float = 0.0,
        shares: bool = False,
        write_s: float = 0.0,
        timeout_s: float = 1_000.0,
        waits_alone: bool = False,
        cuts_tokens: bool = False,
        fate: Fate | None = None,
    ) -> None:
        self._chance = chance
        self._step_s = step_s
        self._write_s = write_s
        self._timeout_s = timeout_s
        self._waits_alone = waits_alone
        self._cuts_tokens = cuts_tokens
        self._fate = fate or Undisturbed()
        self._is_offloaded = shares
        self._is_beside_replicas = False
        self._shares = shares
        self._thread = asyncio.Lock()
        self._work: set[asyncio.Task[Any]] = set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._writing: asyncio.Task[None] | None = None
        self.successor: SimTrainer | None = None
        self.is_alone = False  # takes a step for which replicas are to be empty
        self.complaints: list[str] = []
        self.awake: list[SimReplica] = []
        self.switches = 0
        self.path = ""  # of what is published
        self.replays_routing = True
        self.weights = 0
        self.version = 0
        self.batches: list[TrainingBatch] = []
        self.losses: list[StepLoss | None] = []
        self.examples: list[TrainingBatch | None] = []
        self.num_logprobs = 0  # calls
        self.ages: list[int] = []  # the oldest token of each batch
        self.readable: set[int] = set()
        self.published: dict[int, int] = {}  # weights by version
        self.most_readable = 0

    @property
    def has_devices(self) -> bool:
        """For itself alone."""
        return self._shares and not (self._is_offloaded or self._is_beside_replicas)

    async def offload(self) -> None:
        await self._call("offload", self._offload)

    async def _offload(self) -> None:
        await asyncio.sleep(0.02)
        self._is_offloaded, self._is_beside_replicas = True, False

    async def onload(self) -> None:
        await self._call("onload", self._onload)

    async def _onload(self) -> None:
        self.switches += self._is_offloaded
        self._is_offloaded = False
        holders = [replica.name for replica in self.awake if replica.is_sound]
        if self._shares and holders:
            self.complaints.append(f"the trainer comes while {holders} are awake")
        await asyncio.sleep(0.02)

    def started_again(self) -> SimTrainer:
        """A new trainer, with the devices, that has the initial weights. Replicas need not be empty
        while it takes steps again, so it does not look. If this one was offloaded, they have the
        devices as well until the new one is (docs/recovery.md: one of them needed its weights)."""
        other = SimTrainer(
            chance=self._chance,
            step_s=self._step_s,
            write_s=self._write_s,
            timeout_s=self._timeout_s,
            cuts_tokens=self._cuts_tokens,
            fate=self._fate,
        )
        other._shares, other.switches = self._shares, self.switches
        other._is_beside_replicas = self._is_offloaded or self._is_beside_replicas
        other.complaints, other.awake = self.complaints, self.awake
        other.most_readable = self.most_readable
        self.successor = other
        return other

    @property
    def name(self) -> str:
        return "trainer"

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def lose(self, cause: BaseException | None = None) -> None:
        if not self._lost.done():
            self._lost.set_result(str(cause or "a process of the trainer died"))

    async def wait_until_lost(self) -> None:
        raise TrainerLostError(await asyncio.shield(self._lost))

    async def train_step(
        self,
        batch: TrainingBatch,
        loss: StepLoss | None = None,
        *,
        examples: TrainingBatch | None = None,
    ) -> StepOutput:
        self.losses.append(loss)
        self.examples.append(examples)
        return await self._call("train_step", lambda: self._train_step(batch, loss))

    async def _train_step(self, batch: TrainingBatch, loss: StepLoss | None) -> StepOutput:
        self._uses_the_devices("steps")
        self.is_alone = self._waits_alone
        await asyncio.sleep(self._step_s * self._chance.uniform(0.5, 2.0))
        self.is_alone = False
        self._uses_the_devices("stepped")
        for rows in (batch.token_ids, batch.logprobs, batch.advantages, batch.versions):
            self.weights = zlib.crc32(rows.tobytes(), self.weights)
        if isinstance(loss, PreferenceLoss):
            self.weights = zlib.crc32(loss.references.tobytes(), self.weights)
        if self._cuts_tokens:
            require_kept_tokens(batch)
            assert batch.routed_experts is not None or not self.replays_routing
        require_experts(batch)
        self.batches.append(batch)
        self.ages.append(self.version - int(batch.versions[batch.loss_mask].min()))
        self.version += 1
        return StepOutput(version=self.version)

    async def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        return await self._call("logprobs", lambda: self._logprobs(batch))

    async def _logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        self._uses_the_devices("computes logprobs")
        self.num_logprobs += 1
        salt = self.weights % 997 + 1
        return -((batch.token_ids * salt) % 89 / 89).astype(np.float32)

    async def publish(self, keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
        return await self._call("publish", lambda: self._publish(keep))

    async def _publish(self, keep: frozenset[int]) -> SharedMemoryHandle:
        self._uses_the_devices("publishes")
        self.readable &= {max(self.readable, default=0), *keep}
        strike = self._fate.at("trainer.publish.write")
        if strike is not None and strike.action == "no_space":
            raise WeightSyncError(f"version {self.version} cannot be published: no space")
        self.readable.add(self.version)
        self.published[self.version] = self.weights
        self.most_readable = max(self.most_readable, len(self.readable))
        return SharedMemoryHandle(version=self.version, path=self.path, num_bytes=0)

    async def save_checkpoint(
        self,
        path: Path,
        attachments: Mapping[str, bytes],
        *,
        version: int,
    ) -> None:
        await self._until_written()
        await self._call("save_checkpoint", lambda: self._begin_checkpoint(path, version))
        content = json.dumps([self.weights, self.version]).encode()
        self._writing = asyncio.create_task(
            self._write(path, content, attachments), name=f"machine: {path.name}"
        )
        self._writing.add_done_callback(_look)

    async def _begin_checkpoint(self, path: Path, version: int) -> None:
        self._uses_the_devices("saves")
        if version != self.version:
            raise CheckpointError(f"the trainer holds {self.version}, the run is at {version}")
        folder = files.temporary_path(path)
        try:
            self._require_space("trainer.checkpoint.begin")
            files.shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} was not written: {error}") from error

    async def _write(self, path: Path, content: bytes, attachments: Mapping[str, bytes]) -> None:
        folder = files.temporary_path(path)
        late_s = self._seconds(self._fate.at("trainer.checkpoint.write"))
        if late_s or self._write_s:
            await asyncio.sleep(late_s + self._write_s * self._chance.uniform(0.0, 2.0))
        try:
            files.write_file(folder / "weights.json", content)
            await asyncio.sleep(0)
            self._require_space("trainer.checkpoint.middle")
            files.write_attachments(folder, attachments)
            records = {name: files.fingerprint(folder / name) for name in files.list_files(folder)}
            await asyncio.sleep(0)
            self._require_space("trainer.checkpoint.end")
            files.seal(folder, {}, records)
            files.publish(path)
        except OSError as error:
            files.discard(path)
            raise CheckpointError(f"checkpoint {path} was not written: {error}") from error

    async def finish_checkpoint(self) -> None:
        await self._until_written()

    async def _until_written(self) -> None:
        """A failure is told once, to all who wait."""
        writing = self._writing
        if writing is None:
            return
        try:
            await asyncio.wait({writing, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise TrainerLostError(self._lost.result())
            writing.result()
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    async def load_checkpoint(self, path: Path) -> None:
        await self._call("load_checkpoint", lambda: self._load(path))

    async def _load(self, path: Path) -> None:
        self._uses_the_devices("loads")
        self.weights, self.version = json.loads((path / "weights.json").read_text())

    async def export_hf(self, path: Path) -> None:
        self._uses_the_devices("exports")

    async def close(self) -> None:
        """Finish what is being written; what failed then is said nowhere any more. A lost trainer
        works and writes no further."""
        for task in self._work if self.is_lost else ():
            task.cancel()
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait({writing}, timeout=0.0 if self.is_lost else 300.0)
            writing.cancel()

    async def _call(self, method: str, work: Callable[[], Awaitable[_T]]) -> _T:
        strike = self._fate.at(f"trainer.{method}")
        task: asyncio.Task[_T] = asyncio.create_task(
            self._in_thread(work, strike.action if strike else "", self._seconds(strike)),
            name=f"machine: trainer {method}",
        )
        task.add_done_callback(_look)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            async with deadline(self._timeout_s):
                await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            message = f"trainer: {method} did not end within {self._timeout_s:.0f} s"
            raise DeadlineError(message) from None
        if not task.done():
            raise TrainerLostError(self._lost.result())
        return task.result()

    async def _in_thread(
        self, work: Callable[[], Awaitable[_T]], action: str, seconds: float
    ) -> _T:
        async with self._thread:
            if action == "lost":
                self.lose()
            if self._lost.done():
                raise TrainerLostError(self._lost.result())
            if action == "diverge":
                raise DivergedError("loss is nan")
            if action == "late":
                await asyncio.sleep(seconds)
            result = await work()
            if action == "lost_after":
                self.lose()
                raise TrainerLostError(self._lost.result())
            if action == "lost_soon":
                asyncio.get_running_loop().call_later(seconds, self.lose)
            if action == "late_after":
                await asyncio.sleep(seconds)
            return result

    def _require_space(self, point: str) -> None:
        strike = self._fate.at(point)
        if strike is not None and strike.action == "no_space":
            raise OSError(errno.ENOSPC, "No space left on device")

    def _seconds(self, strike: Any) -> float:
        return strike.seconds if strike is not None else 0.0

    def _uses_the_devices(self, what: str) -> None:
        if self._is_offloaded:
            self.complaints.append(f"the trainer {what} offloaded")


def _look(task: asyncio.Task[Any]) -> None:
    """What a process meant for a caller that has left is no news."""
    if not task.cancelled():
        task.exception()


def require_experts(batch: TrainingBatch) -> None:
    """Each trained token came with the experts from which it was sampled, under its version."""
    if batch.routed_experts is None:
        return
    before = np.flatnonzero(batch.loss_mask) - 1
    positions = np.arange(batch.num_tokens) - batch.episode_starts[batch.episode_ids]
    for index in before:
        token, version = int(batch.token_ids[index]), int(batch.versions[index + 1])
        expected = scripted_experts(token, int(positions[index]), version)
        assert batch.routed_experts[index].tobytes() == expected


def require_kept_tokens(batch: TrainingBatch) -> None:
    """Each trained token came with the set that it was sampled from."""
    assert batch.kept is not None
    trained = batch.loss_mask
    for token, number in zip(batch.token_ids[trained], batch.kept[trained], strict=True):
        assert number >= 0
        assert batch.kept_sets[number] == pack_pair(token)
