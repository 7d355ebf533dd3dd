"""How a run continues: which checkpoint it resumes from, and which recorded turns it may use.

Invariant: a sampled turn is never sampled again, unless its tokens are of a version that the
restored trainer has not reached, or that its group may not use; those tokens are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torchtitan_rl.errors import TorchtitanRLError, one_line
from torchtitan_rl.orchestration.journal import JournalUnreadableError
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import group_of
from torchtitan_rl.orchestration.saved_run import read_saved_run
from torchtitan_rl.orchestration.work_buffer import Entry
from torchtitan_rl.rollout.recorded import RecordedRollout, usable_turns
from torchtitan_rl.training.checkpoint_files import CheckpointUnreadableError
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint, step_of


def choose_checkpoint(
    checkpoints: CheckpointDirectory, journals: JournalDirectory, *, checksums: bool = True
) -> NewestCheckpoint:
    """The newest checkpoint of which every part can be read and fits. Call before a process starts.

    Newer ones are set aside, with the reason in ``passed_over``. ``path`` is None where there never
    was a checkpoint: the run continues from its journal.

    Raises:
        CheckpointError: there are checkpoints but none can be used, or a newer one cannot be read.
            Nothing is changed.
    """
    found = checkpoints.choose(lambda path: why_not_resumable(path, journals), checksums=checksums)
    if found.path is None:
        return found
    return replace(found, passed_over=(*found.passed_over, *journals.passed_over))


def why_not_resumable(path: Path, journals: JournalDirectory) -> str | None:
    """What of a complete checkpoint is wrong, or does not fit its journal; None if it is usable.

    Raises:
        CheckpointUnreadableError: the system cannot read a file of it, or of its journal.
    """
    try:
        saved, step = read_saved_run(path), step_of(path)
        if saved.document["step"] != step:
            return f"its document is of step {saved.document['step']}"
        TokenLedger().load_state_dict(saved.document["ledger"])
        journals.restore(step, saved.groups.rollouts, mark=saved.journal_mark)
    except CheckpointUnreadableError:
        raise
    except JournalUnreadableError as error:
        raise CheckpointUnreadableError(f"the journal of {path} cannot be read: {error}") from error
    except TorchtitanRLError as error:
        return one_line(error)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"not as this version writes it ({error!r})"
    return None


class RecordedGroups:
    """The recorded rollouts of a resumed run, until their groups start and take them.

    Args:
        entries: the groups in the checkpoint. Other groups began after it; their rollouts can be
            used if they are admitted at ``restored_version`` again.
    """

    def __init__(
        self,
        rollouts: Mapping[str, RecordedRollout] | None = None,
        entries: Iterable[Entry] = (),
        *,
        restored_version: int = 0,
    ) -> None:
        self._groups: dict[str, dict[str, RecordedRollout]] = {}
        self._rolled_back: dict[str, int] = {}  # unusable tokens
        self._restored_version = restored_version
        admitted_versions = {entry.group_id: entry.admitted_version for entry in entries}
        for name, recorded in (rollouts or {}).items():
            group_id = group_of(name)
            usable, lost = usable_turns(
                recorded,
                restored_version=restored_version,
                admitted_version=admitted_versions.get(group_id, restored_version),
            )
            self._groups.setdefault(group_id, {})[name] = usable
            self._rolled_back[group_id] = self._rolled_back.get(group_id, 0) + lost

    @property
    def rollouts(self) -> dict[str, RecordedRollout]:
        """All that have not been taken."""
        return {name: one for group in self._groups.values() for name, one in group.items()}

    def of_group(self, group_id: str) -> tuple[RecordedRollout, ...]:
        """Those of one group that have not been taken."""
        return tuple(self._groups.get(group_id, {}).values())

    def take(
        self, group_id: str, *, admitted_version: int
    ) -> tuple[Mapping[str, RecordedRollout], int]:
        """The rollouts that a group continues with, and how many of its tokens are rolled back."""
        usable = self._groups.pop(group_id, {})
        rolled_back = self._rolled_back.pop(group_id, 0)
        if admitted_version > self._restored_version:
            return {}, rolled_back + sum(one.num_tokens for one in usable.values())
        return usable, rolled_back
