"""One case: a plan and faults from a seed, life after life, with all rules checked after each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from tests.campaign.agents import draw_agents, draw_losses_of_endpoint
from tests.campaign.conversations import (
    CONVERSATION_RULES,
    ConversationsPlan,
    draw_conversations,
    equals_the_undisturbed_conversations,
)
from tests.campaign.faults import (
    draw_faults,
    draw_faults_and_losses,
    draw_faults_and_scalings,
)
from tests.campaign.invariants import (
    AGENT_RULES,
    ROLLOUT_RULES,
    Rule,
    Violation,
    equals_the_undisturbed_run,
    had_nothing_to_train,
    violations_of,
)
from tests.campaign.lives import Ending, Life, live
from tests.campaign.machine import Fault, Machine
from tests.campaign.plan import CampaignPlan, draw, draw_elastic, draw_restarts
from tests.campaign.tenants import TenantsPlan, draw_tenants, play

_MEMORY = Path("/dev/shm")

Kind = Literal["rollouts", "restarts", "elastic", "agents", "conversations", "tenants"]


class _Parts(NamedTuple):
    """What draws a plan from a seed, what draws the faults of a life, the rules after each life,
    and the one that compares the last life to the undisturbed one."""

    draw: Callable[[int], CampaignPlan | ConversationsPlan]
    faults: Callable[[int, int, Machine], list[Fault]]
    rules: Sequence[Rule]
    compare: Callable[[Life, Life, list[Fault]], list[Violation]]


_PARTS: dict[Kind, _Parts] = {
    "rollouts": _Parts(draw, draw_faults, ROLLOUT_RULES, equals_the_undisturbed_run),
    "restarts": _Parts(
        draw_restarts, draw_faults_and_losses, ROLLOUT_RULES, equals_the_undisturbed_run
    ),
    "elastic": _Parts(
        draw_elastic, draw_faults_and_scalings, ROLLOUT_RULES, equals_the_undisturbed_run
    ),
    "agents": _Parts(draw_agents, draw_losses_of_endpoint, AGENT_RULES, equals_the_undisturbed_run),
    "conversations": _Parts(
        draw_conversations,
        draw_faults,
        CONVERSATION_RULES,
        equals_the_undisturbed_conversations,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    kind: Kind
    plan: CampaignPlan | ConversationsPlan | TenantsPlan
    lives: tuple[str, ...]
    schedule: tuple[tuple[Fault, ...], ...]
    violations: tuple[Violation, ...]
    trace: int  # equal for two runs of one seed
    awaits: int
    fired: tuple[str, ...]

    def describe(self) -> str:
        drawn = [
            f"  life {number}: " + ("; ".join(map(str, faults)) or "nothing")
            for number, faults in enumerate(self.schedule)
        ]
        return "\n".join(
            [
                f"seed {self.seed}: {len(self.violations)} violations",
                *(f"  {violation}" for violation in self.violations),
                f"plan: {self.plan.describe()}",
                "drawn faults:",
                *drawn,
                "what happened:",
                *self.lives,
                f"again: python -m tests.campaign {self.seed} --of {self.kind}",
            ]
        )


def run_case(seed: int, kind: Kind = "rollouts") -> Case:
    """Play it through. An undisturbed life comes first, for its counts and its weights, and one
    comes last, for it must be possible to go on from whatever the others left."""
    if kind == "tenants":
        return _run_tenants(seed)
    parts = _PARTS[kind]
    plan = parts.draw(seed)
    with _place() as root:
        dry = live(-1, plan, root / "dry", [])
        violations = violations_of(dry, parts.rules)
        lives, schedule = [dry], [()]
        path, life = root / "run", None
        for number in range(plan.lives + 1):
            is_last = number == plan.lives
            faults = [] if is_last else parts.faults(seed, number, dry.machine)
            life = live(number, plan, path, faults, before=life)
            violations += violations_of(life, parts.rules)
            lives.append(life)
            schedule.append(tuple(faults))
            path = life.root
            if is_last:
                violations += _ends_well(life)
        fired = [one.fault for life in lives for one in life.machine.fired]
        violations += parts.compare(lives[-1], dry, fired)
        return _case(seed, kind, plan, lives, schedule, violations, [])


def _run_tenants(seed: int) -> Case:
    plan = draw_tenants(seed)
    with _place() as root:
        dry = play(seed, plan, root / "dry")
        played = play(seed, plan, root / "run", dry)
        violations = dry.violations + played.violations
        lives = [life for one in (dry, played) for name in one.lives for life in one.lives[name]]
        for name in played.lives:
            violations += _ends_well(played.lives[name][-1])
        schedule = [life.machine.faults for life in lives]
        return _case(seed, "tenants", plan, lives, schedule, violations, played.servers)


def _case(
    seed: int,
    kind: Kind,
    plan: CampaignPlan | ConversationsPlan | TenantsPlan,
    lives: Sequence[Life],
    schedule: Sequence[Sequence[Fault]],
    violations: Sequence[Violation],
    servers: Sequence[Machine],
) -> Case:
    machines = [*servers, *(life.machine for life in lives)]
    struck = [
        f"  server {number}: {one}" for number, server in enumerate(servers) for one in server.fired
    ]
    return Case(
        seed=seed,
        kind=kind,
        plan=plan,
        lives=(*(life.describe() for life in lives), *struck),
        schedule=tuple(map(tuple, schedule)),
        violations=tuple(violations),
        trace=hash(tuple(machine.trace for machine in machines)),
        awaits=sum(machine.num_awaits for machine in machines),
        fired=tuple(
            f"{one.fault.zone} {one.fault.point} {one.fault.action}"
            for machine in machines
            for one in machine.fired
        ),
    )


def _ends_well(life: Life) -> list[Violation]:
    if life.ending is Ending.SUCCESS or had_nothing_to_train(life):
        return []
    text = f"undisturbed, it {life.ending}: {type(life.error).__name__}: {life.error}"
    return [Violation("can_be_finished", life.number, text)]


@contextmanager
def _place() -> Iterator[Path]:
    """In memory, where there is such a place; without the garbage collector, which would end
    abandoned coroutines at moments of its own."""
    gc.disable()
    try:
        with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as root:
            yield Path(root)
    finally:
        gc.enable()
