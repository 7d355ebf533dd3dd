"""What must hold after each life of a run, each rule in a function of its own.

A rule yields a sentence for each violation; the name of the function is the violation's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.campaign.agents import AgentsPlan
from tests.campaign.faults import HARMLESS
from tests.campaign.lives import Ending, Life
from tests.campaign.machine import Fault
from tests.campaign.plan import CampaignPlan
from tests.campaign.timeline import finishes_its_work, keeps_the_order, trains_each_group_once
from torchtitan_rl.audit.run import audit
from torchtitan_rl.errors import (
    CheckpointError,
    DivergedError,
    EndpointLostError,
    NothingTrainedError,
    OutputError,
    ReplicaError,
    TeacherError,
    TorchtitanRLError,
    TrainerLostError,
)
from torchtitan_rl.orchestration.checkpointing import read_saved_run
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.ledger import LedgerError
from torchtitan_rl.orchestration.work_buffer import StalenessError
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.restarts import first_name
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import RolloutStatus

_USUAL = {RolloutStatus.COMPLETED, RolloutStatus.MAX_TURNS, RolloutStatus.MAX_TOKENS}

_DEATHS = ("die", "die_soon", "freeze", "wedge")  # of a replica, which is started again
_TRAINER_LOSSES = ("lost", "lost_after", "lost_soon")

Rule = Callable[[Life], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Violation:
    name: str
    life: int
    text: str

    def __str__(self) -> str:
        return f"{self.name} (life {self.life}): {self.text}"


def violations_of(life: Life, rules: Sequence[Rule]) -> list[Violation]:
    """After one life."""
    return [Violation(rule.__name__, life.number, text) for rule in rules for text in rule(life)]


def ends_in_a_named_way(life: Life) -> Iterator[str]:
    """A bug is no way to end."""
    if life.ending is Ending.BROKEN:
        yield f"{type(life.error).__name__}: {life.error}"
    if isinstance(life.error, (LedgerError, StalenessError)):
        yield f"{type(life.error).__name__}: {life.error}"


def ends(life: Life) -> Iterator[str]:
    if life.ending is Ending.HUNG:
        yield f"after {life.seconds:.0f} s: " + "; ".join(life.leftovers[:8])


def fails_for_a_reason(life: Life) -> Iterator[str]:
    """A life fails where something failed that it cannot do without."""
    if life.ending is not Ending.FAILED or isinstance(life.error, (LedgerError, StalenessError)):
        return
    if life.excuse or had_nothing_to_train(life):
        return
    if not any(_may_end_a_run(life, type(life.error), one) for one in _strikes(life)):
        yield f"{type(life.error).__name__}: {life.error}"


def had_nothing_to_train(life: Life) -> bool:
    """No step trained, as too many rollouts failed: time-outs may be that short."""
    if life.simulation is None or not isinstance(life.error, NothingTrainedError):
        return False
    groups = [group for record in life.simulation.recorder.steps for group in record.groups]
    whole = [[one for one in group.rollouts if not one.status.is_failure] for group in groups]
    if life.plan.advantage == "pair":
        whole = [group for group in whole if len({one.reward for one in group}) > 1]
    return not any(whole) and life.simulation.controller._state.version == 0


def _strikes(life: Life) -> list[tuple[str, str]]:
    return [(one.fault.point, one.fault.action) for one in life.machine.fired]


def _may_end_a_run(life: Life, error: type, strike: tuple[str, str]) -> bool:
    point, action = strike
    if _is_mended(life, action):
        return False
    if point.startswith("trainer"):
        is_checkpoint = "checkpoint" in point and action == "no_space"
        return not is_checkpoint or _num(life, action) > 2 or _is_last_save(life)
    if action == "end":
        return True
    if point[:1] == "r" and point[1:2].isdigit():
        assert life.simulation is not None
        able = [one for one in life.simulation.replicas if one.is_sound]
        reserved = life.simulation.reserved
        able = [one for one in able if first_name(one.name) not in reserved]
        return not able or action in ("late", "slow")
    if point == "teacher.score":
        return issubclass(error, TeacherError)
    if action == "lose_endpoint":
        assert isinstance(life.plan, AgentsPlan)
        is_lost = issubclass(error, EndpointLostError)
        return is_lost and _num(life, action) > life.plan.endpoint_restarts
    if action in ("no_space", "disk_full"):
        return point in ("journal", "rows") or issubclass(
            error, (JournalError, CheckpointError, OutputError, TrainerLostError)
        )
    return False


def _is_mended(life: Life, action: str) -> bool:
    """Whether the part is started again as often as it was struck, before requests time out."""
    plan = life.plan
    if not isinstance(plan, CampaignPlan):
        return False  # a run on conversations, which starts nothing again
    if action in _TRAINER_LOSSES:
        return _num(life, *_TRAINER_LOSSES) <= plan.trainer_restarts
    if action in _DEATHS:
        hurries = plan.request_timeout_s < plan.restart_s + 10.0
        return not hurries and _num(life, *_DEATHS) <= plan.restarts
    return False


def _is_last_save(life: Life) -> bool:
    """There was no later occasion to try again."""
    assert life.simulation is not None
    state = life.simulation.controller._state
    return state.step == life.plan.num_steps or state.is_stopping


def _num(life: Life, *actions: str) -> int:
    return sum(one.fault.action in actions for one in life.machine.fired)


def bounds_the_age_of_tokens(life: Life) -> Iterator[str]:
    if life.simulation is None:
        return
    for index, age in enumerate(life.simulation.trainer.ages):
        if age > life.plan.staleness:
            yield f"batch {index} of this life has a token of age {age}"


def keeps_the_rules_of_shared_devices(life: Life) -> Iterator[str]:
    if life.simulation is not None:
        yield from list(dict.fromkeys(life.simulation.trainer.complaints))[:2]


def bounds_published_versions(life: Life) -> Iterator[str]:
    if life.simulation is not None and life.simulation.trainer.most_readable > most_published(
        life.plan
    ):
        yield f"{life.simulation.trainer.most_readable} versions were readable at once"


def most_published(plan: CampaignPlan) -> int:
    """The current version, the one before, and one that an evaluation pins; where each step may be
    evaluated, those that wait for their evaluation as well."""
    return max(3, plan.staleness + 2) if plan.validate_every else 3


def leaves_nothing_behind(life: Life) -> Iterator[str]:
    if life.ending not in (Ending.KILLED, Ending.HUNG) and life.leftovers:
        yield "; ".join(life.leftovers[:4])


def accounts_for_every_token(life: Life) -> Iterator[str]:
    """What replicas sampled, and what was recorded before, is in the account of a whole run."""
    simulation = life.simulation
    if life.ending is not Ending.SUCCESS or simulation is None:
        return
    totals = simulation.controller._state.ledger.totals()
    before = life.start.saved.position.ledger.get("generated", 0)
    accounted = totals.tokens_generated - before
    entries = life.start.saved.entries
    asked = set(simulation.dataset.drawn) | {e.group_id for e in entries}
    # Turns of groups that the checkpoint has finished are counted only where those begin anew.
    most = sum(n for name, n in life.start.recorded.items() if name in asked)
    asked -= {entry.group_id for entry in entries if entry.group is not None}
    recorded = sum(n for name, n in life.start.recorded.items() if name in asked)
    sampled = sum(r.sampled - r.sampled_aside for r in simulation.replicas)
    states = simulation.router.states()
    lost = sum(
        r.lost
        for r in simulation.replicas
        if states.get(r.name) is Phase.DEAD or isinstance(r, ConnectedReplica)
    )
    # At S = 0 groups that are left over at the end are not begun again.
    least = recorded if life.plan.staleness and life.start.step != life.plan.num_steps else 0
    if not sampled + least - lost <= accounted <= sampled + most:
        yield (
            f"{accounted} tokens accounted, {sampled} sampled (of them {lost} lost with replicas) "
            f"and {recorded} recorded before"
        )


def passes_the_audit(life: Life) -> Iterator[str]:
    """What is on disk satisfies all rules of ``torchtitan-rl audit``."""
    with suppress(FileNotFoundError):  # nothing was written yet
        for check in audit(life.root, is_running=True):
            yield from (f"{check.name}: {violation}" for violation in check.violations)


def writes_checkpoints_of_one_moment(life: Life) -> Iterator[str]:
    """Each that is complete fits into the work buffer, and has weights of its version."""
    directory, plan = CheckpointDirectory(life.root / "checkpoints"), life.plan
    for path in map(directory.path, directory.steps()):
        with suppress(TorchtitanRLError):  # the audit reports it
            saved = read_saved_run(path)
            num_groups, version = len(saved.entries), saved.position.version
            if num_groups > plan.buffer:
                yield f"{path.name}: {num_groups} groups, and room for {plan.buffer}"
            weights = json.loads((path / "weights.json").read_text())[1]
            if weights != version:
                yield f"{path.name}: weights {weights}, position of {version}"


def can_be_resumed(life: Life) -> Iterator[str]:
    """What a life starts on can be read."""
    if life.start.unreadable is not None:
        yield life.start.unreadable


def saves_what_it_has(life: Life) -> Iterator[str]:
    """A run that ends cleanly leaves a checkpoint of where it was."""
    if life.simulation is None or life.ending not in (
        Ending.STOPPED,
        Ending.SUCCESS,
        Ending.FAILED,
    ):
        return
    if isinstance(life.error, (DivergedError, TrainerLostError, CheckpointError)):
        return
    if isinstance(life.error, EndpointLostError):  # the run is cancelled
        return
    if life.excuse and isinstance(life.error, ReplicaError):  # it had no server to begin with
        return
    if any(point.startswith("trainer") or act == "block" for point, act in _strikes(life)):
        return
    if _disk_failed(life) or life.start.unreadable:
        return
    steps = CheckpointDirectory(life.root / "checkpoints").steps()
    step = life.simulation.controller._state.step
    if not steps or steps[-1] != step:
        yield f"ended after step {step}; checkpoints: {steps}"


def _disk_failed(life: Life) -> bool:
    return any(action in ("no_space", "disk_full") for _, action in _strikes(life))


def lets_no_rollout_wait(life: Life) -> Iterator[str]:
    """Where nothing failed and limits are far away, no rollout reaches one."""
    if life.number > 0 or life.machine.fired or life.simulation is None:
        return
    if life.plan.rollout_timeout_s < 100.0:
        return
    if life.excuse:  # its server has limits of its own
        return
    recorder = life.simulation.recorder
    groups = [group for record in recorder.steps for group in record.groups]
    groups += [group for record in recorder.evaluations for group in record.groups]
    strange = [r for group in groups for r in group.rollouts if r.status not in _USUAL]
    if strange:
        yield f"{len(strange)}, such as {strange[0].rollout_id}: {strange[0].status}"


def runs_no_request_of_an_agent_twice(life: Life) -> Iterator[str]:
    """An agent repeats the requests that a lost endpoint did not answer; they are no more turns."""
    if life.simulation is None or any(one.fault.seconds > 5.0 for one in life.machine.fired):
        return
    for record in life.simulation.recorder.steps:
        for rollout in (one for group in record.groups for one in group.rollouts):
            if rollout.status is not RolloutStatus.COMPLETED:
                continue
            num_seen = sum(turn.is_seen for turn in rollout.turns)
            if not num_seen == len(rollout.turns) == life.plan.turns:
                yield f"{rollout.rollout_id}: {len(rollout.turns)} turns, {num_seen} of them seen"


def validates_undisturbed(life: Life) -> Iterator[str]:
    """An evaluation's answers do not depend on when it ran."""
    simulation = life.simulation
    if simulation is None:
        return
    states = simulation.router.states()  # without those that have left
    if any(not replica.is_sound for replica in simulation.replicas if replica.name in states):
        return
    cut = [name for name in simulation.requested if name.startswith("validation/") and "#" in name]
    if cut:
        yield f"cut and continued: {cut[:3]}"


def equals_the_undisturbed_run(
    life: Life, undisturbed: Life, fired: list[Fault]
) -> list[Violation]:
    """At S = 0, where no fault changed the data: bit for bit. ``fired``: in all lives."""
    plan = life.plan
    harm = [one for one in fired if one.action not in HARMLESS or one.seconds > 5.0]
    if plan.trainer_restarts:
        harm = [one for one in harm if not _is_loss_of_trainer(one)]
    if not plan.is_determined or harm or life.ending is not Ending.SUCCESS:
        return []
    assert life.simulation is not None
    assert undisturbed.simulation is not None
    if {
        rollout.status
        for one in (life, undisturbed)
        for record in one.timeline
        for group in record.groups
        for rollout in group.rollouts
    } - _USUAL:
        return []
    ours, theirs = life.simulation.trainer.weights, undisturbed.simulation.trainer.weights
    if undisturbed.ending is not Ending.SUCCESS or ours == theirs:
        return []
    return [Violation("equals_the_undisturbed_run", life.number, f"{ours:x} is not {theirs:x}")]


def _is_loss_of_trainer(fault: Fault) -> bool:
    return fault.point.startswith("trainer.") and fault.action in (
        "lost",
        "lost_after",
        "lost_soon",
        "late",
        "late_after",
    )


ROLLOUT_RULES: tuple[Rule, ...] = (
    ends,
    ends_in_a_named_way,
    fails_for_a_reason,
    can_be_resumed,
    bounds_the_age_of_tokens,
    keeps_the_rules_of_shared_devices,
    bounds_published_versions,
    leaves_nothing_behind,
    accounts_for_every_token,
    passes_the_audit,
    writes_checkpoints_of_one_moment,
    saves_what_it_has,
    finishes_its_work,
    trains_each_group_once,
    keeps_the_order,
    lets_no_rollout_wait,
    validates_undisturbed,
)

AGENT_RULES: tuple[Rule, ...] = (*ROLLOUT_RULES, runs_no_request_of_an_agent_twice)
