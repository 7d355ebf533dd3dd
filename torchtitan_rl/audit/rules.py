"""The rules that metrics, checkpoints and journal of a run must satisfy. Without I/O.

A rule yields a sentence for each violation. `Check` counts the checked items, and keeps the
sentences with their places. `audit/run.py` applies the rules to the files of a run, and the
campaign of simulated faults (`tests/campaign/`) whenever its simulated run has stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError, one_line
from torchtitan_rl.images import recorded_images_error
from torchtitan_rl.observability.rollouts import LOGGED
from torchtitan_rl.observability.sinks import Line, Row, RowKind, Split
from torchtitan_rl.orchestration.checkpointing import RunPosition, SavedRun
from torchtitan_rl.orchestration.journal import Row as JournalRow
from torchtitan_rl.orchestration.journal import newest_version
from torchtitan_rl.orchestration.ledger import LedgerError, TokenLedger, require_sums
from torchtitan_rl.orchestration.records import LedgerTotals, group_of
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.routed_experts import routed_error
from torchtitan_rl.token_sets import kept_error
from torchtitan_rl.types import Completion, RolloutStatus, Turn

Errors = Iterator[str]

_UNREADABLE = (
    *(TorchtitanRLError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(OverflowError, RecursionError),
)
RESTORE = "restore the file from a copy"
_BY_CAUSE = ("tokens_masked", "tokens_discarded", "groups_discarded")
_COUNTS = tuple(one.name for one in fields(LedgerTotals) if one.name not in _BY_CAUSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What the configuration of a run guarantees; None if unknown."""

    staleness: int | None = None
    groups_per_step: int | None = None
    group_size: int | None = None
    num_steps: int | None = None
    exports: bool | None = None
    has_adapters: bool = False

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Promises:
        """Read the promises from the identity in a checkpoint or in ``identity.json``."""
        is_bounded = identity.get("mode") != "train"  # recorded rollouts may be of any age
        return cls(
            staleness=identity.get("schedule.staleness") if is_bounded else None,
            groups_per_step=identity.get("rollout.groups_per_step"),
            group_size=identity.get("rollout.group_size"),
            num_steps=identity.get("num_steps"),
            exports=identity.get("checkpoint.export_hf"),
            has_adapters=bool(identity.get("policy.lora.rank")),
        )


@dataclass(slots=True, kw_only=True)
class Check:
    """The result of one check. ``looked_at`` is the number of checked items, which ``what`` names;
    each violation says where and what."""

    name: str
    what: str = "files"
    looked_at: int = 0
    violations: list[str] = field(default_factory=list)

    def look(self, where: str, errors: Iterable[str], number: int = 1) -> None:
        """Count ``number`` more items, and keep their errors as violations."""
        self.looked_at += number
        self.violations += [f"{where}: {error}" for error in errors]

    def require(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    @contextmanager
    def reports_errors(self, where: str, fix: str = "restore it from a copy") -> Iterator[None]:
        """Report an exception in the block as a violation. The block reads a file of the run."""
        try:
            yield
        except _UNREADABLE as error:
            self.violations.append(f"{where}: {one_line(error)}; {fix}")

    @property
    def summary(self) -> str:
        number = len(self.violations)
        verdict = "ok" if not number else f"{number} violation{'s' if number > 1 else ''}"
        return f"{self.name}: {verdict} ({self.looked_at} {self.what})"


class MetricsRules:
    """Checks that each row of ``metrics.jsonl`` adds up, and fits the rows before it.

    Pass the rows to `take`; `results` are complete after the last one. The keys of ``totals`` and
    ``versions`` are steps. ``logged`` has the `logged_metrics` of the rows, by step and split;
    ``num_problems`` is the number of problems of the largest evaluation.
    """

    def __init__(self, promises: Promises) -> None:
        self._promises = promises
        self.order = Check(name="metrics: steps", what="steps")
        self._sums = Check(name="metrics: totals", what="rows with totals")
        self._growth = Check(name="metrics: growth of totals", what="pairs of rows")
        self._steps = Check(name="metrics: tokens and groups of a step", what="steps")
        self._ages = Check(name="metrics: ages", what="rows with ages")
        self._account = Check(name="metrics: account against replicas", what="rows with it")
        self._evaluations = Check(name="metrics: evaluations", what="evaluations")
        self.evaluated: dict[int, int] = {}  # step -> `Line.life` of its last evaluation
        self.totals: dict[int, LedgerTotals] = {0: _totals(_NOTHING)}
        self.versions: dict[int, int] = {0: 0}
        self.logged: dict[tuple[int, str], dict[str, float]] = {}
        self.last_step = 0
        self.num_problems: int | None = None

    def results(self) -> list[Check]:
        metrics = [self.order, self._sums, self._growth, self._steps, self._ages]
        return [*metrics, self._account, self._evaluations]

    def take(self, line: Line) -> None:
        where, row = line.where, line.row
        if not isinstance(row.get("step"), int) or not isinstance(row.get("version"), int):
            self.order.violations.append(f"{where}: no step, or no version")
            return
        for split in Split:
            if of_split := {n: row[n] for n in row if n.startswith(f"{LOGGED}/{split}/")}:
                self.logged[row["step"], split.value] = of_split
        match row.get("kind"):
            case RowKind.ACCOUNT:
                self._account.look(where, [*_account_errors(row), *self._place_errors(row)])
            case RowKind.EVALUATION:
                self._evaluations.look(where, self._evaluation_errors(row, line.life))
                self.evaluated[row["step"]] = line.life
                number = int(row.get("evaluation/groups", 0))
                self.num_problems = max(self.num_problems or 0, number)
            case RowKind.STEP:
                self._take_step(where, row)
            case kind:
                self.order.violations.append(f"{where}: a row of kind {kind}")

    def _evaluation_errors(self, row: Row, life: int) -> Errors:
        if self.evaluated.get(row["step"]) == life:
            yield f"step {row['step']} is validated again"
        yield from self._place_errors(row)

    def _place_errors(self, row: Row) -> Errors:
        """Check a row about the weights after a step against the row of that step."""
        step, version = row["step"], row["version"]
        if step > self.last_step:
            yield f"the step {step} of the row comes later"
        elif version != self.versions.get(step, version):
            yield f"version {version}; the row of step {step} has {self.versions[step]}"

    def _take_step(self, where: str, row: Row) -> None:
        step = row["step"]
        self.order.look(where, self._order_errors(row))
        self._steps.look(where, _step_errors(row, self._promises))
        if "policy/staleness_max" in row:
            self._ages.look(where, _age_errors(row, self._promises.staleness))
        if "total/tokens_generated" in row:
            totals = self.totals[step] = _totals(row)
            self._sums.look(where, _sum_errors(totals))
            if step - 1 in self.totals:
                self._growth.look(where, _growth_errors(row, totals, self.totals[step - 1]))
        self.versions[step] = row["version"]
        self.last_step = step

    def _order_errors(self, row: Row) -> Errors:
        step, version, before = row["step"], row["version"], self.versions[self.last_step]
        if step != self.last_step + 1:
            yield f"step {step} comes after step {self.last_step}"
        elif not before <= version <= before + 1:
            yield f"version {version} comes after version {before}"
        if version > step:
            yield f"version {version} at step {step}"


def _account_errors(row: Row) -> Errors:
    if number := row["account/unaccounted_tokens"]:
        yield f"{number} tokens were sampled and are in no account"


def _step_errors(row: Row, promises: Promises) -> Errors:
    sampled = row["tokens/generated"]
    parts = row["tokens/trained"] + row["tokens/discarded"]
    if sampled != parts:
        yield f"a batch of {sampled} tokens, of which {parts} are trained or discarded"
    groups, rollouts = row["train/groups"], row["train/rollouts"]
    if promises.groups_per_step not in (None, groups):
        yield f"a batch of {groups} groups; rollout.groups_per_step is {promises.groups_per_step}"
    if promises.group_size is not None and rollouts != groups * promises.group_size:
        yield f"{rollouts} rollouts of {groups} groups of {promises.group_size}"
    if rollouts and row.get(f"{LOGGED}/train/rollouts") == rollouts:  # all were logged
        expected = [sampled, row.get("train/reward_sum", 0.0)]
        logged = [row[f"{LOGGED}/train/{name}"] for name in ("tokens", "reward_sum")]
        if logged != expected:
            yield f"tokens and rewards are {expected}; rollouts.jsonl has them with {logged}"
    if "buffer/capacity" in row:
        held, room = sum(row[f"buffer/{state}"] for state in GroupState), row["buffer/capacity"]
        if held > room:
            yield f"{held} groups in a buffer of {room}"


def _age_errors(row: Row, limit: int | None) -> Errors:
    age = row["policy/staleness_max"]
    if age < 0:
        yield "tokens of a later version than the step's"
    if limit is not None and age > limit:
        yield f"tokens {age} versions old; schedule.staleness is {limit}"


def _sum_errors(totals: LedgerTotals) -> Errors:
    try:
        require_sums(totals)
    except LedgerError as error:
        yield str(error)


def _growth_errors(row: Row, now: LedgerTotals, then: LedgerTotals) -> Errors:
    """Check that totals do not fall, and grow by the counts in the row (but not tokens_generated: a
    killed run loses the tokens of unfinished groups)."""
    counts = [(name, getattr(now, name), getattr(then, name)) for name in _GROWING]
    for name in _BY_CAUSE:
        later, earlier = getattr(now, name), getattr(then, name)
        counts += [(f"{name}/{one}", later.get(one, 0), earlier[one]) for one in earlier]
    for name, new, old in counts:
        if new < old:
            yield f"{name} falls from {old} to {new}"
    masked = now.tokens_masked.get("loss_mask", 0) - then.tokens_masked.get("loss_mask", 0)
    grown = {
        "tokens/trained": now.tokens_trained - then.tokens_trained + masked,
        "train/groups": now.groups_trained - then.groups_trained,
    }
    for name, growth in grown.items():
        if row[name] != growth:
            yield f"{name} is {row[name]}, but the total grows by {growth}"


_GROWING = ("tokens_trained", "groups_admitted", "groups_trained")
_NOTHING: Row = {f"total/{one.name}": 0 for one in fields(LedgerTotals)}


def _totals(row: Row) -> LedgerTotals:
    """The totals in a row. What a count exceeds the sum of its causes by is "cause not named"."""
    counts: dict[str, Any] = {name: int(row[f"total/{name}"]) for name in _COUNTS}
    for name in _BY_CAUSE:
        start = f"total/{name}/"
        causes = {key.removeprefix(start): int(row[key]) for key in row if key.startswith(start)}
        rest = int(row[f"total/{name}"]) - sum(causes.values())
        counts[name] = causes | ({"cause not named": rest} if rest else {})
    return LedgerTotals(**counts)


def check_checkpoint(where: str, step: int, saved: SavedRun, promises: Promises) -> list[Check]:
    """Check the position in the checkpoint of ``step``, by itself and against the saved groups; a
    KeyError, TypeError or ValueError if another version of this package wrote the checkpoint."""
    account = Check(name=f"checkpoint {step}: account", what="groups")
    entries = saved.entries
    account.look(where, _position_errors(step, saved, promises), len(entries))
    groups = Check(name=f"checkpoint {step}: groups", what="rollouts")
    ledger, version = saved.position.ledger["tokens_of"], saved.position.version
    oldest = max(0, version - (version if promises.staleness is None else promises.staleness))
    for entry in entries:
        at, held = f"{where}: group {entry.group_id}", ledger.get(entry.group_id)
        number = 0 if entry.group is None else len(entry.group.rollouts)
        errors = _group_errors(entry, version, oldest, held, promises.group_size)
        groups.look(at, errors, number)
    unfinished = {entry.group_id for entry in entries if entry.group is None}
    for name, recorded in saved.rollouts.items():
        at = f"{where}: rollout {name}"
        if group_of(name) not in unfinished:
            groups.violations.append(f"{at} is of no unfinished group")
        groups.look(at, _recorded_errors(recorded, version))
    return [account, groups]


def _position_errors(step: int, saved: SavedRun, promises: Promises) -> Errors:
    position, ledger = saved.position, saved.position.ledger
    try:
        TokenLedger().load_state_dict(ledger)
    except LedgerError as error:
        yield one_line(error)
    version, trained = position.version, ledger["groups_trained"]
    if position.step != step:
        yield f"its position is step {position.step}"
    if not 0 <= version <= step:
        yield f"version {version} at step {step}"
    per_step = promises.groups_per_step
    if per_step is not None and trained != step * per_step:
        yield f"{trained} groups trained in {step} steps of {per_step}"
    ids = [entry.group_id for entry in saved.entries]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        yield f"groups that are there twice: {', '.join(twice)}"
    if differing := sorted(ledger["tokens_of"].keys() ^ set(ids)):
        yield f"groups in the ledger or in the buffer only: {differing}"


def _group_errors(
    entry: Entry, version: int, oldest: int, held: int | None, group_size: int | None
) -> Errors:
    if not oldest <= entry.admitted_version <= version:
        yield f"was admitted at version {entry.admitted_version}, not from {oldest} to {version}"
    if entry.group is None:
        if held:
            yield "unfinished, and has tokens in the ledger"
        return
    rollouts = entry.group.rollouts
    found = sum(rollout.num_sampled_tokens for rollout in rollouts)
    if held != found:
        yield f"{found} tokens; {held} in the ledger"
    if group_size not in (None, len(rollouts)):
        yield f"{len(rollouts)} rollouts, not {group_size}"
    if len({rollout.rollout_id for rollout in rollouts}) != len(rollouts):
        yield "a rollout is there twice"
    for rollout in rollouts:
        yield from ending_errors(rollout.rollout_id, rollout.status, rollout.reward)
        for turn in rollout.turns:
            yield from _completion_errors(turn.completion, version, entry.admitted_version)
            yield from _prompt_errors(turn)


def _recorded_errors(recorded: RecordedRollout, version: int) -> Errors:
    """Errors of a recorded rollout that continues at ``version``."""
    completions = [turn.completion for turn in recorded.turns]
    if recorded.partial is not None:
        completions.append(recorded.partial)
    for turn in recorded.turns:
        yield from _prompt_errors(turn)
    turns: set[str] = set()  # concurrent turns are in the order of their ends
    for index, completion in enumerate(completions):
        yield from _completion_errors(completion, version)
        prefix, _, name = completion.request_id.rpartition("/")
        is_turn = name[:1] == "t" and name[1:].isdigit() and name not in turns
        turns.add(name)
        if not is_turn or not prefix.startswith(recorded.rollout_id):
            yield f"turn {index} is request {completion.request_id}"
    if recorded.ended is not None and recorded.ended.turns != recorded.turns:
        yield "ended with other turns than were recorded"


def _prompt_errors(turn: Turn) -> Errors:
    """Check that each image is at the placeholders of the prompt."""
    if error := recorded_images_error(turn.images, turn.prompt_token_ids):
        yield f"{turn.completion.request_id}: {error}"


def _completion_errors(completion: Completion, newest: int, oldest: int = 0) -> Errors:
    """Check that all lengths are equal, and that versions are in order and in range."""
    name, num_tokens = completion.request_id, len(completion.token_ids)
    lengths = {"logprobs": len(completion.logprobs), "versions": len(completion.versions)}
    if set(lengths.values()) != {num_tokens}:
        found = " and ".join(f"{number} {what}" for what, number in lengths.items())
        yield f"{name}: {num_tokens} tokens, {found}"
    if error := kept_error(completion.kept_tokens, num_tokens):
        yield f"{name}: {error}"
    if error := routed_error(completion.routed_experts, num_sampled=num_tokens, num_prompt=None):
        yield f"{name}: {error}"
    starts = [run.start for run in completion.version_runs]
    if starts != sorted(starts) or (num_tokens and (not starts or starts[0] != 0)):
        yield f"{name}: runs of versions start at {starts}"
    if wrong := sorted({v for v in completion.versions if not oldest <= v <= newest}):
        yield f"{name}: tokens of versions {wrong}, not from {oldest} to {newest}"


def ending_errors(name: str, status: RolloutStatus | str, reward: float | None) -> Errors:
    """Check that a rollout has a reward exactly if it did not fail."""
    try:
        if RolloutStatus(status).is_failure != (reward is None):
            yield f"rollout {name}: status {status} with reward {reward}"
    except ValueError:
        yield f"rollout {name}: status {status}"


def errors_against_row(step: int, position: RunPosition, metrics: MetricsRules) -> Errors:
    """Compare the position in a checkpoint with the row of its step, which is written before: in
    between counts may grow."""
    evaluated = position.evaluated_step
    if evaluated is not None and evaluated not in metrics.evaluated:
        yield f"there is no row of the evaluation of step {evaluated}"
    if step == 0:
        return
    if step not in metrics.versions:
        yield f"there is no row of step {step}"
        return
    version, row_version = position.version, metrics.versions[step]
    if row_version != version:
        yield f"version {version}; {row_version} in the row of step {step}"
    totals, ledger = metrics.totals.get(step), position.ledger
    if totals is None:
        return
    masked = sum(ledger["masked"].values()), sum(totals.tokens_masked.values())
    discarded = sum(ledger["discarded"].values()), sum(totals.tokens_discarded.values())
    for name, saved, recorded, may_grow in (
        ("tokens trained", ledger["trained"], totals.tokens_trained, False),
        ("tokens masked", *masked, False),
        ("groups trained", ledger["groups_trained"], totals.groups_trained, False),
        ("groups admitted", ledger["groups_admitted"], totals.groups_admitted, True),
        ("tokens discarded", *discarded, True),
    ):
        if may_grow and saved < recorded:
            yield f"{saved} {name}; already {recorded} in the row before"
        if not may_grow and saved != recorded:
            yield f"{saved} {name}; {recorded} in the row of step {step}"


def check_journal(
    check: Check, rows: Iterable[JournalRow], saved: SavedRun, promises: Promises
) -> None:
    """Check the rows of the journal that follow the checkpoint ``saved``."""
    version = saved.position.version
    finished = {entry.group_id for entry in saved.entries if entry.group is not None}
    if not promises.staleness:  # groups that are not in the next batch are started again
        finished.clear()
    for row in rows:
        check.looked_at += 1
        where = f"{check.name}: turn {row.number} of {row.rollout_id}"
        if not row.is_intact:
            check.violations.append(f"{where} has a wrong checksum")
            continue
        if group_of(row.rollout_id) in finished:
            why = f"the checkpoint of step {row.step} holds its group as finished"
            check.violations.append(f"{where}: {why}")
        if newest_version(row.completion) > version:
            check.violations.append(f"{where} has tokens of a version after {version}")
