"""Checks that a checkpoint satisfies every invariant, and that metrics and journal fit it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchtitan_rl.audit.findings import Check, Rules
from torchtitan_rl.audit.rollout_checks import completion_errors, ending_error
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import LedgerTotals, group_of
from torchtitan_rl.orchestration.saved_run import SavedRun
from torchtitan_rl.orchestration.work_buffer import Entry
from torchtitan_rl.rollout.recorded import RecordedRollout


def check_document(where: str, step: int, saved: SavedRun, rules: Rules) -> Check:
    """Check the document of the checkpoint of ``step``, by itself and with its groups.

    Raises:
        LedgerError: its ledger does not add up.
        KeyError, TypeError, ValueError: this version did not write it.
    """
    document, groups = saved.document, saved.groups
    check = Check(name=f"checkpoint {step}: account", what="groups")
    check.looked_at = len(groups.entries)
    ledger = document["ledger"]
    TokenLedger().load_state_dict(ledger)
    version = document["version"]
    check.require(document["step"] == step, f"{where}: the document is of step {document['step']}")
    check.require(0 <= version <= step, f"{where}: version {version} at step {step}")

    if rules.groups_per_step is not None:
        trained = ledger["groups_trained"]
        check.require(
            trained == step * rules.groups_per_step,
            f"{where}: {trained} groups trained in {step} steps of {rules.groups_per_step}",
        )
    ids = [entry.group_id for entry in groups.entries]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    check.require(not twice, f"{where}: groups that are there twice: {', '.join(twice)}")
    differing = sorted(ledger["tokens_of"].keys() ^ set(ids))
    check.require(
        not differing, f"{where}: groups in the ledger or in the buffer only: {differing}"
    )
    return check


def check_groups(where: str, step: int, saved: SavedRun, rules: Rules) -> Check:
    """Check the groups of a checkpoint: versions, tokens and unfinished rollouts."""
    document, groups = saved.document, saved.groups
    check = Check(name=f"checkpoint {step}: groups", what="rollouts")
    version, tokens_of = document["version"], document["ledger"]["tokens_of"]
    for entry in groups.entries:
        oldest = version - rules.staleness if rules.staleness is not None else 0
        check.require(
            oldest <= entry.admitted_version <= version,
            f"{where}: group {entry.group_id} was admitted at version {entry.admitted_version}, "
            f"not from {max(0, oldest)} to {version}",
        )
        if entry.group is not None:
            _check_finished(check, where, entry, version, tokens_of.get(entry.group_id), rules)
        else:
            check.require(
                tokens_of.get(entry.group_id, 0) == 0,
                f"{where}: group {entry.group_id} is unfinished, and has tokens in the ledger",
            )
    unfinished = {entry.group_id: entry for entry in groups.entries if entry.group is None}
    for name, recorded in groups.rollouts.items():
        check.looked_at += 1
        check.require(
            group_of(name) in unfinished, f"{where}: rollout {name} is of no unfinished group"
        )
        check.violations += [f"{where}: {e}" for e in recorded_errors(recorded, version)]
    return check


def check_against_metrics(
    where: str,
    step: int,
    document: Mapping[str, Any],
    row: LedgerTotals | None,
    row_version: int | None,
    evaluated: Collection[int],
) -> Check:
    """Compare a checkpoint with the row of its step.

    The row is written first, so counts that grow between the two may be larger in the checkpoint.
    ``evaluated`` steps have rows of their evaluations.
    """
    check = Check(name=f"checkpoint {step}: against its row of the metrics", what="rows")
    evaluated_step = document["evaluated_step"]
    check.require(
        evaluated_step is None or evaluated_step in evaluated,
        f"{where}: there is no row of the evaluation of step {evaluated_step}",
    )
    if step == 0:
        return check
    check.require(row_version is not None, f"{where}: there is no row of step {step}")
    if row_version is None:
        return check
    check.looked_at = 1
    check.require(
        row_version == document["version"],
        f"{where}: version {document['version']}; {row_version} in the row of step {step}",
    )
    if row is None:
        return check
    ledger = document["ledger"]
    pairs = (
        ("tokens trained", ledger["trained"], row.tokens_trained),
        ("tokens masked", sum(ledger["masked"].values()), sum(row.tokens_masked.values())),
        ("groups trained", ledger["groups_trained"], row.groups_trained),
    )
    for name, saved, recorded in pairs:
        check.require(
            saved == recorded, f"{where}: {saved} {name}; {recorded} in the row of step {step}"
        )
    more = (
        ("groups admitted", ledger["groups_admitted"], row.groups_admitted),
        ("tokens discarded", sum(ledger["discarded"].values()), sum(row.tokens_discarded.values())),
    )
    for name, saved, recorded in more:
        check.require(
            saved >= recorded, f"{where}: {saved} {name}; already {recorded} in the row before"
        )
    return check


def check_journal(
    check: Check,
    rows: Iterable[Mapping[str, Any]],
    saved: SavedRun | None,
    rules: Rules,
    *,
    is_first: bool,
) -> None:
    """Check the lines of one journal file.

    Args:
        saved: the checkpoint of the file's step, if there is one.
        is_first: no file is read before this one, so no turn may be missing, except for those that
            the checkpoint holds, or held before it was removed.
    """
    version = None if saved is None else saved.document["version"]
    entries = () if saved is None else saved.groups.entries
    finished = {entry.group_id for entry in entries if entry.group is not None}
    if not rules.staleness:  # those that are not in the next batch begin again
        finished.clear()
    mark = 0 if saved is None else saved.journal_mark
    newest: int | None = None
    position = 0
    num_turns: dict[str, int] = {}  # of each rollout that began in this file
    for number, row in enumerate(rows, start=1):
        where = f"{check.name}, line {number}"
        if number == 1:
            newest = row.get("version")
            is_first = is_first and version is None and not row.get("mark", 0)
            check.require(
                newest is None or version is None or newest == version,
                f"{where}: begun at version {newest}; its checkpoint has version {version}",
            )
        if "rollout_id" not in row:
            position = row.get("mark", 0)
            continue
        rollout_id, index = row["rollout_id"], row["index"]
        if row["turn"] is None:
            num_turns.pop(rollout_id, None)
            continue
        check.looked_at += 1
        check.require(
            newest is None or position < mark or group_of(rollout_id) not in finished,
            f"{where}: a turn of group {group_of(rollout_id)}, which its checkpoint holds as "
            "finished",
        )
        if index == 0:
            num_turns[rollout_id] = 0
        if rollout_id in num_turns:
            check.require(
                index <= num_turns[rollout_id],
                f"{where}: turn {index} of {rollout_id} after turn {num_turns[rollout_id] - 1}",
            )
            num_turns[rollout_id] = index + 1
        elif is_first:
            check.violations.append(f"{where}: turn {index} of {rollout_id}, which did not begin")
        runs = row["turn"]["completion"]["version_runs"]
        has_tokens = bool(row["turn"]["completion"]["token_ids"])
        check.require(
            newest is None or not has_tokens or max(v for _, v in runs) <= newest,
            f"{where}: tokens of a version after {newest}",
        )


def recorded_errors(recorded: RecordedRollout, version: int) -> list[str]:
    """Errors of a recorded rollout that continues at ``version``."""
    errors: list[str] = []
    completions = [turn.completion for turn in recorded.turns]
    if recorded.partial is not None:
        completions.append(recorded.partial)
    turns: set[str] = set()  # that ran at once are in the order of their ends
    for index, completion in enumerate(completions):
        errors += completion_errors(completion, newest=version)
        prefix, _, turn = completion.request_id.rpartition("/")
        is_turn = turn[:1] == "t" and turn[1:].isdigit() and turn not in turns
        turns.add(turn)
        if not is_turn or not prefix.startswith(recorded.rollout_id):
            errors.append(
                f"rollout {recorded.rollout_id}: turn {index} is request {completion.request_id}"
            )
    if recorded.ended is not None and recorded.ended.turns != recorded.turns:
        errors.append(f"rollout {recorded.rollout_id} ended with other turns than were recorded")
    return errors


def _check_finished(
    check: Check, where: str, entry: Entry, version: int, held: int | None, rules: Rules
) -> None:
    group = entry.group
    assert group is not None
    check.looked_at += len(group.rollouts)
    found = sum(rollout.num_sampled_tokens for rollout in group.rollouts)
    check.require(
        held == found,
        f"{where}: group {entry.group_id} has {found} tokens; {held} in the ledger",
    )
    check.require(
        rules.group_size is None or len(group.rollouts) == rules.group_size,
        f"{where}: group {entry.group_id} has {len(group.rollouts)} rollouts, not "
        f"{rules.group_size}",
    )
    ids = {rollout.rollout_id for rollout in group.rollouts}
    check.require(
        len(ids) == len(group.rollouts), f"{where}: group {entry.group_id} has a rollout twice"
    )
    for rollout in group.rollouts:
        error = ending_error(rollout.status, rollout.reward)
        check.require(error is None, f"{where}: rollout {rollout.rollout_id}: {error}")
        for turn in rollout.turns:
            errors = completion_errors(
                turn.completion, newest=version, oldest=entry.admitted_version
            )
            check.violations += [f"{where}: {one}" for one in errors]
