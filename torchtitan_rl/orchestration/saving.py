"""Checkpoints of a whole run, written while it goes on, and how a run continues from one.

Invariants: what a checkpoint holds is of one moment: trainer, dataset position and every untrained
group; turns that finish after that moment are in the journal begun at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.recovery import (
    RecordedGroups,
    SavedGroups,
    groups_from_bytes,
    groups_to_bytes,
)
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import (
    CheckpointDirectory,
    NewestCheckpoint,
    load_attachment,
)
from torchtitan_rl.types import Completion

_GROUPS = "groups.jsonl"


class RunSaver:
    """Saves and restores; one checkpoint is written at a time."""

    def __init__(
        self,
        state: RunState,
        *,
        dataset: Dataset,
        trainer: Trainer,
        rollouter: Rollouter,
        router: GeneratorRouter,
        checkpoints: CheckpointDirectory,
        journals: JournalDirectory,
        recorder: Recorder,
        keep: int,
    ) -> None:
        self._state = state
        self._dataset = dataset
        self._trainer = trainer
        self._rollouter = rollouter
        self._router = router
        self._checkpoints = checkpoints
        self._journals = journals
        self._recorder = recorder
        self._keep = keep
        self._recorded = RecordedGroups()
        self._saved_step: int | None = None
        self._writing: asyncio.Task[None] | None = None

    async def restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        """Go on from a checkpoint; where there is none, from the beginning, but with the turns that
        were finished then. None starts anew. Returns what the groups go on with."""
        if resume_from is None:
            self._journals.begin(0, version=self._state.version)
            return self._recorded
        groups = SavedGroups()
        if resume_from.path is not None:
            document = await self._trainer.load_checkpoint(resume_from.path)
            groups = groups_from_bytes(
                await asyncio.to_thread(load_attachment, resume_from.path, _GROUPS)
            )
            self._load(document, groups)
            self._recorder.say(f"resumed after step {self._state.step} from {resume_from.path}")
        step = self._state.step
        self._recorded = RecordedGroups(
            self._journals.restore(step, groups.rollouts),
            restored_version=self._state.version,
            admitted_versions={entry.group_id: entry.admitted_version for entry in groups.entries},
        )
        self._journals.restart(
            step, self._recorded.rollouts, groups.rollouts, version=self._state.version
        )
        return self._recorded

    async def save(self) -> None:
        """Take the run as it is now; returns when training may go on. The files are complete after
        `finish`."""
        if self._saved_step == self._state.step:
            return
        await self.finish()
        with self._recorder.phase("checkpoint"):
            step = self._state.step
            self._journals.begin(step, version=self._state.version)
            # At staleness 0 the same weights and seeds sample these tokens again, bit for bit; a
            # request that goes on in the middle would draw others.
            partials = await self._router.partials() if self._state.staleness else {}
            document, groups = self._document(), self._groups(partials)
            await self._trainer.save_checkpoint(
                self._checkpoints.path(step), document, {_GROUPS: groups}
            )
        self._saved_step = step
        self._writing = asyncio.create_task(self._complete(), name=f"checkpoint {step}")

    async def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises what writing it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._state.waits.on("a checkpoint is being written"):
                await writing

    async def _complete(self) -> None:
        await self._trainer.finish_checkpoint()
        await asyncio.to_thread(self._checkpoints.prune, self._keep)
        self._journals.prune(self._checkpoints.steps()[0])

    def _document(self) -> dict[str, Any]:
        state, buffer = self._state, self._state.buffer
        unfinished = {entry.group_id for entry in buffer.entries if entry.group is None}
        return {
            "step": state.step,
            "version": state.version,
            "evaluated_step": state.evaluated_step,
            "dataset": self._dataset.state_dict(),
            "ledger": state.ledger.state_dict(without=unfinished),
            "admitted": buffer.admitted,
            "trained": buffer.trained,
            "discarded": dict(buffer.discarded),
        }

    def _groups(self, partials: Mapping[str, Completion]) -> bytes:
        entries = [
            entry for entry in self._state.buffer.entries if entry.state is not GroupState.BATCHED
        ]
        unfinished = {
            entry.group_id: self._rollouter.snapshot(entry.group_id, partials)
            if entry.state is GroupState.RUNNING
            else self._recorded.waiting(entry.group_id)
            for entry in entries
            if entry.group is None
        }
        return groups_to_bytes(entries, unfinished)

    def _load(self, document: Mapping[str, Any], groups: SavedGroups) -> None:
        state = self._state
        state.step = self._saved_step = document["step"]
        state.version = document["version"]
        state.evaluated_step = document["evaluated_step"]
        state.ledger.load_state_dict(document["ledger"])
        state.buffer.restore(
            groups.entries,
            admitted=document["admitted"],
            trained=document["trained"],
            discarded=document["discarded"],
        )
        self._dataset.load_state_dict(document["dataset"])
