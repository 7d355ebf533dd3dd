"""Which checkpoint a run goes on from: the newest one of which every part can be read and fits.

Reads files only, before any process starts. Complete checkpoints are tried newest first; one whose
document, account, groups or journal do not fit is passed over with a message, and the next older
one is tried.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.recovery import groups_from_bytes
from torchtitan_rl.training.checkpoint_files import (
    CheckpointUnreadableError,
    load_attachment,
    read_document,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint, step_of

GROUPS = "groups.jsonl"
"""The attachment of a checkpoint that holds its groups."""

JOURNAL_MARK = "journal_mark"
"""Where the document says from which line on the journal of its step goes on from it."""


def choose_checkpoint(
    checkpoints: CheckpointDirectory, journals: JournalDirectory, *, checksums: bool = True
) -> NewestCheckpoint:
    """The checkpoint to go on from, with what is wrong with newer ones, which are set aside. None
    where there was never one: the run goes on from its journal.

    Raises:
        CheckpointError: there are checkpoints, and none can be gone on from, or a newer one cannot
            be read; nothing is changed.
    """
    found = checkpoints.choose(lambda path: why_not_resumable(path, journals), checksums=checksums)
    if found.path is None:
        return found
    return replace(found, passed_over=(*found.passed_over, *journals.passed_over))


def why_not_resumable(path: Path, journals: JournalDirectory) -> str | None:
    """What of a complete checkpoint cannot be read, or does not fit its journal; None for one that
    can be gone on from.

    Raises:
        CheckpointUnreadableError: the system cannot read a file of it, or of its journal.
    """
    try:
        marker = read_document(path)
        document, step = marker.get("extra", marker), step_of(path)
        if document["step"] != step:
            return f"its document is of step {document['step']}"
        TokenLedger().load_state_dict(document["ledger"])
        groups = groups_from_bytes(load_attachment(path, GROUPS))
        journals.restore(step, groups.rollouts, mark=document.get(JOURNAL_MARK, 0))
    except CheckpointUnreadableError:
        raise
    except OSError as error:
        raise CheckpointUnreadableError(f"the journal of {path} cannot be read: {error}") from error
    except TorchtitanRLError as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"not as this version writes it ({error!r})"
    return None
