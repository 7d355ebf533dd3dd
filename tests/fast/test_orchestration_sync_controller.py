"""The synchronous loop over scripted parts: a countable dataset, runners that answer at once or
wait, a trainer whose weights are the list of batches it saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fast.replicas import GatedReplica, request
from torchtitan_rl.errors import DivergedError, GenerationError, TorchtitanRLError
from torchtitan_rl.orchestration.records import StepRecord, TokenCounts, ValidationRecord
from torchtitan_rl.orchestration.sync_controller import (
    LoopSettings,
    StopRequested,
    SyncController,
)
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoint_files import MARKER, seal
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Problem, RolloutGroup
from torchtitan_rl.weights.handle import SharedMemoryHandle

SETTINGS = LoopSettings(
    num_steps=6,
    groups_per_step=2,
    group_size=2,
    temperature=1.0,
    seed=0,
    sync_mode="hot_swap",
    validate_every=2,
    validation_samples=1,
    validation_temperature=0.0,
    checkpoint_every=3,
    checkpoints_kept=2,
)
VALIDATION = [Problem(problem_id="v0", data={})]


class Counting:
    """Problems 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.position = 0

    @property
    def epoch(self) -> int:
        return 0

    def next(self) -> Problem:
        self.position += 1
        return Problem(problem_id=f"p{self.position - 1}", data={})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Runner:
    """Groups without rollouts; from `blocks_at` on, groups that never end."""

    def __init__(self, blocks_at: str | None = None) -> None:
        self.blocks_at = blocks_at
        self.reached_block = asyncio.Event()

    async def run_group(
        self, group_id: str, problem: Problem, *, size: int, seed: int, temperature: float
    ) -> RolloutGroup:
        await asyncio.sleep(0)
        if problem.problem_id == self.blocks_at:
            self.reached_block.set()
            await asyncio.Event().wait()
        return RolloutGroup(group_id=group_id, problem=problem, rollouts=())


class ListTrainer:
    """Weights: the ids of the problems it was trained on, in order."""

    def __init__(self, diverges_at: int | None = None) -> None:
        self.weights: list[int] = []
        self.version = 0
        self.diverges_at = diverges_at

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        if self.version + 1 == self.diverges_at:
            raise DivergedError(f"version {self.version}: loss is nan")
        self.weights += batch.token_ids[0].tolist()
        self.version += 1
        return StepOutput(version=self.version)

    async def publish(self, keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
        return SharedMemoryHandle(version=self.version, path="", num_bytes=0)

    async def save_checkpoint(
        self, path: Path, state: dict[str, Any], attachments: Mapping[str, bytes] | None = None
    ) -> None:
        path.mkdir(parents=True)
        document = {"weights": self.weights, "version": self.version, "state": state}
        seal(path, document, {})

    async def finish_checkpoint(self) -> None: ...

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        document = json.loads((path / MARKER).read_text())
        self.weights, self.version = document["weights"], document["version"]
        return document["state"]

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None: ...


def batch_of_ids(groups: Sequence[RolloutGroup]) -> tuple[TrainingBatch, TokenCounts]:
    ids = np.array([[int(group.problem.problem_id[1:]) for group in groups]])
    zeros = np.zeros(ids.shape, dtype=np.float32)
    batch = TrainingBatch(
        token_ids=ids,
        position_ids=ids,
        document_ids=ids,
        loss_mask=np.ones(ids.shape, dtype=np.bool_),
        logprobs=zeros,
        advantages=zeros,
        versions=ids,
        temperature=1.0,
        num_episodes=len(groups),
    )
    return batch, TokenCounts(generated=0, trained=0)


def no_batch(groups: Sequence[RolloutGroup]) -> tuple[None, TokenCounts]:
    return None, TokenCounts(generated=0, trained=0)


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.validations: list[ValidationRecord] = []
        self.said: list[str] = []

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def record_validation(self, record: ValidationRecord) -> None:
        self.validations.append(record)

    def phase(self, name: str):
        return nullcontext()

    def say(self, message: str) -> None:
        self.said.append(message)


class Rig:
    """A controller with all its parts in reach."""

    def __init__(self, root: Path, *, settings=SETTINGS, batcher=batch_of_ids, blocks_at=None):
        self.dataset = Counting()
        self.trainer = ListTrainer()
        self.runner = Runner(blocks_at)
        self.replica = GatedReplica("r0")
        self.router = GeneratorRouter([self.replica])
        self.recorder = Memory()
        self.checkpoints = CheckpointDirectory(root)
        self.controller = SyncController(
            settings,
            dataset=self.dataset,
            validation_problems=VALIDATION,
            rollouter=self.runner,
            batcher=batcher,
            trainer=self.trainer,
            router=self.router,
            recorder=self.recorder,
            checkpoints=self.checkpoints,
        )


def test_a_run_trains_every_problem_once_in_order_and_syncs_each_version(tmp_path):
    async def scenario():
        rig = Rig(tmp_path)
        await rig.controller.run(resume=False)
        assert rig.trainer.weights == list(range(12))
        assert [record.version for record in rig.recorder.steps] == [1, 2, 3, 4, 5, 6]
        assert rig.replica.version == 6
        assert [(v.step, v.version) for v in rig.recorder.validations] == [
            (0, 0),
            (2, 2),
            (4, 4),
            (6, 6),
        ]
        assert rig.checkpoints.steps() == [3, 6]

    asyncio.run(scenario())


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    async def scenario():
        rig = Rig(tmp_path, blocks_at="p9")
        run = asyncio.create_task(rig.controller.run(resume=False))
        await rig.runner.reached_block.wait()
        rig.controller.request_stop()
        with pytest.raises(StopRequested, match="after step 4"):
            await run
        assert rig.checkpoints.steps() == [3, 4]

        again = Rig(tmp_path)
        await again.controller.run(resume=True)
        assert again.trainer.weights == list(range(12))
        assert again.replica.version == 6
        assert [record.step for record in again.recorder.steps] == [5, 6]
        assert [record.step for record in again.recorder.validations] == [6]

    asyncio.run(scenario())


def test_trap_13_a_resumed_run_brings_replicas_to_the_restored_version_first(tmp_path):
    async def scenario():
        rig = Rig(tmp_path, blocks_at="p6")
        run = asyncio.create_task(rig.controller.run(resume=False))
        await rig.runner.reached_block.wait()
        rig.controller.request_stop()
        with pytest.raises(StopRequested):
            await run
        again = Rig(tmp_path, blocks_at="p6")
        run = asyncio.create_task(again.controller.run(resume=True))
        await again.runner.reached_block.wait()
        assert again.replica.version == 3
        again.controller.request_stop()
        with pytest.raises(StopRequested):
            await run

    asyncio.run(scenario())


def test_a_run_stopped_in_validation_validates_that_step_when_resumed(tmp_path):
    async def scenario():
        rig = Rig(tmp_path)
        rig.runner.blocks_at = "v0"
        run = asyncio.create_task(rig.controller.run(resume=False))
        await rig.runner.reached_block.wait()
        rig.controller.request_stop()
        with pytest.raises(StopRequested):
            await run
        again = Rig(tmp_path)
        await again.controller.run(resume=True)
        assert [record.step for record in again.recorder.validations] == [0, 2, 4, 6]

    asyncio.run(scenario())


def test_a_diverged_run_keeps_the_last_good_checkpoint(tmp_path):
    async def scenario():
        rig = Rig(tmp_path)
        rig.trainer.diverges_at = 5
        with pytest.raises(DivergedError):
            await rig.controller.run(resume=False)
        assert rig.checkpoints.steps() == [3]

    asyncio.run(scenario())


def test_trap_19_steps_with_nothing_to_train_on_say_so_and_end_the_run(tmp_path):
    async def scenario():
        rig = Rig(tmp_path, batcher=no_batch)
        with pytest.raises(TorchtitanRLError, match="5 steps in a row had no token"):
            await rig.controller.run(resume=False)
        assert len(rig.recorder.said) == 5
        assert rig.trainer.version == 0

    asyncio.run(scenario())


def test_a_run_whose_replicas_are_all_lost_saves_what_it_has_and_ends(tmp_path):
    async def scenario():
        rig = Rig(tmp_path, batcher=no_batch)
        rig.replica.is_dead = True
        with pytest.raises(GenerationError):
            await rig.router.generate(request("a"))
        with pytest.raises(GenerationError, match="no replica is left"):
            await rig.controller.run(resume=False)
        assert rig.checkpoints.steps() == [0]

    asyncio.run(scenario())
