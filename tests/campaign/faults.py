"""Which faults strike a life, drawn from a seed and from what an undisturbed run of the plan did.

Awaits are drawn by place as well as by number, so that those which are rare (around a step, a pull,
a checkpoint) are struck as often as the many of sampling.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from tests.campaign.machine import Fault, Machine, Zone

_NEVER_S = 1e7

_REPLICA = ["die", "die", "freeze", "wedge", "slow", "late", "die_soon"]
_HTTP = ["lose_request", "lose_answer", "unavailable", "duplicate", "late", "down"]
ACTIONS: dict[str, list[str]] = {
    "trainer.train_step": ["late", "late_after", "lost", "lost_after", "diverge", "kill"],
    "trainer.publish": ["late", "late_after", "lost", "kill"],
    "trainer.publish.write": ["no_space"],
    "trainer.save_checkpoint": ["late", "lost", "kill"],
    "trainer.checkpoint.begin": ["no_space", "kill"],
    "trainer.checkpoint.write": ["late", "kill"],
    "trainer.checkpoint.middle": ["no_space", "kill"],
    "trainer.checkpoint.end": ["no_space", "kill"],
    "trainer.load_checkpoint": ["late", "lost", "kill"],
    "trainer.logprobs": ["late", "lost", "kill"],
    "trainer.offload": ["late", "lost", "kill"],
    "trainer.onload": ["late", "lost", "kill"],
    "replica.generate": _REPLICA,
    "replica.read": _REPLICA,
    "replica.abort": _REPLICA,
    "replica.pause": _REPLICA,
    "replica.resume": _REPLICA,
    "replica.stage": _REPLICA,
    "replica.pull": _REPLICA,
    "replica.sleep": _REPLICA,
    "replica.wake_up": _REPLICA,
    "env.reset": ["raise", "late", "nonsense"],
    "env.step": ["raise", "late", "nonsense"],
    "env.finish": ["raise", "late", "nonsense"],
    "env.close": ["raise", "late"],
    "reward": ["raise", "late", "nonsense"],
    "teacher.score": ["raise", "late", "kill"],
    "dataset.next": ["end"],
    "http.tenant.open": _HTTP,
    "http.tenant.send": _HTTP,
    "http.tenant.receive": _HTTP,
    "http.tenant.upload": _HTTP,
    "http.tenant.stage": _HTTP,
    "http.tenant.close": _HTTP,
    "disk.journal": ["no_space", "torn"],
    "disk.checkpoint": ["no_space", "torn"],
    "disk.rows": ["no_space", "torn"],
    "disk.open": ["no_space", "kill"],
    "disk.os.mkdir": ["no_space", "kill"],
    "disk.os.rename": ["kill"],
    "disk.os.remove": ["kill"],
    "disk.os.rmdir": ["kill"],
}
"""What can happen at each kind of point."""

HARMLESS = {"stop", "cancel", "kill", "torn", "block", "slow", "grow", "lose_endpoint", *_HTTP}
"""After these a run at S = 0 arrives at the weights of an undisturbed one."""

_RARE = {"trainer": 6, "replica": 4, "env": 2, "reward": 2, "teacher": 2, "dataset": 1, "disk": 4}
_RARE["http"] = 12
_REPEATED = ("no_space", "raise", "late", "lose_request", "lose_answer", "unavailable")
_REPLICA_NAME = re.compile(r"^r\d+(-\d+)?\.")


def draw_faults(seed: int, life: int, dry: Machine) -> list[Fault]:
    """Of one life; ``dry`` lived undisturbed."""
    rng = random.Random(f"faults {seed} {life}")
    faults = [_of_a_part(rng, dry) for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3]))]
    ending = rng.choice(["kill", "kill", "stop", "stop", "cancel", "block", "disk_full", ""])
    if ending:
        faults.append(at_an_await(rng, dry, ending))
    if ending == "stop" and rng.random() < 0.3:
        faults.append(at_an_await(rng, dry, rng.choice(["cancel", "kill"])))
    return faults + _idle_trainer(random.Random(f"idle trainer {seed} {life}"), dry)


def draw_faults_and_losses(seed: int, life: int, dry: Machine) -> list[Fault]:
    """As `draw_faults`, and a replica dies early enough for another to take its place. The trainer
    is lost now and then."""
    rng = random.Random(f"losses {seed} {life}")
    calls = dry.counts["call"]
    points = sorted(point for point in calls if _REPLICA_NAME.match(point))
    point = rng.choice(points)
    nth = _nth(rng, calls[point]) // 2
    action, seconds = rng.choice([("die", 0.0), ("die_soon", 0.2)])
    lost = Fault(zone="call", point=point, nth=nth, action=action, seconds=seconds)
    return [*draw_faults(seed, life, dry), lost, *_lost_trainers(seed, life, dry)]


def draw_faults_and_scalings(seed: int, life: int, dry: Machine) -> list[Fault]:
    """As `draw_faults_and_losses`, and replicas are added and removed."""
    rng = random.Random(f"scalings {seed} {life}")
    changes = rng.choices(["grow", "shrink"], k=rng.randint(1, 4))
    faults = [at_an_await(rng, dry, change) for change in changes]
    if rng.random() < 0.4:
        replicas = {point.partition(".")[0] for point in dry.counts["call"]}
        added = f"r{sum(_REPLICA_NAME.match(f'{name}.') is not None for name in replicas)}"
        point = f"{added}.{rng.choice(['generate', 'stage', 'pull', 'read', 'abort'])}"
        action = rng.choice(_REPLICA[:4])
        faults.append(Fault(zone="call", point=point, nth=rng.randrange(6), action=action))
    if rng.random() < 0.7:
        faults += rng.choice([draw_faults, draw_faults_and_losses])(seed, life, dry)
    return faults


def _lost_trainers(seed: int, life: int, dry: Machine) -> list[Fault]:
    rng = random.Random(f"lost trainers {seed} {life}")
    calls = dry.counts["call"]
    points = sorted(one for one in calls if one.startswith("trainer.") and one in ACTIONS)
    points = [one for one in points if "lost" in ACTIONS[one]]
    faults = []
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        point = rng.choice(points)
        action, seconds = rng.choice(
            [
                ("lost", 0.0),
                ("lost_after", 0.0),
                ("lost_soon", 0.01),
                ("lost_soon", 1.0),
                ("lost_soon", 5.0),
                ("late", 450.0),
                ("late_after", 450.0),
                ("late", _NEVER_S),
            ]
        )
        faults.append(
            Fault(
                zone="call",
                point=point,
                nth=_nth(rng, calls[point]),
                action=action,
                seconds=seconds,
            )
        )
    return faults


def draw_tenant_faults(seed: int, life: int, dry: Machine) -> list[Fault]:
    """As `draw_faults`, and more of them on the way to the server."""
    rng = random.Random(f"tenant {seed} {life}")
    more = [_of_a_part(rng, dry, group="http") for _ in range(rng.choice([0, 1, 2, 4]))]
    return [*draw_faults(seed, life, dry), *more]


def draw_server_faults(seed: int, life: int, dry: Machine) -> list[Fault]:
    """Of a server of several runs."""
    rng = random.Random(f"server {seed} {life}")
    faults = [_of_a_part(rng, dry) for _ in range(rng.choice([0, 0, 1, 2])) if _points(dry)]
    ending = rng.choice(["kill", "kill", "stop", "block", "", ""])
    return faults + ([at_an_await(rng, dry, ending)] if ending else [])


def _idle_trainer(rng: random.Random, dry: Machine) -> list[Fault]:
    """Now and then the trainer dies a while after a call. Drawn apart, so that all else is as it
    was for seeds that tests name."""
    point = "trainer.train_step"
    count = dry.counts["call"][point]
    if count == 0 or rng.random() > 0.05:
        return []
    seconds = rng.choice([0.01, 0.2, 1.0])
    return [
        Fault(zone="call", point=point, nth=_nth(rng, count), action="lost_soon", seconds=seconds)
    ]


def at_an_await(rng: random.Random, dry: Machine, action: str) -> Fault:
    seconds = 0.0
    if action == "block":
        seconds = rng.choice([0.5, 5.0, 70.0, 700.0])
    if action == "disk_full":
        seconds = rng.choice([0.1, 2.0, 30.0])
    places = dry.counts["await"]
    if rng.random() < 0.3 or not places:
        return Fault(
            zone="await",
            point="",
            nth=rng.randrange(max(1, dry.num_awaits)),
            action=action,
            seconds=seconds,
        )
    point = rng.choice(sorted(places))
    return Fault(
        zone="await", point=point, nth=_nth(rng, places[point]), action=action, seconds=seconds
    )


def _of_a_part(rng: random.Random, dry: Machine, *, group: str = "") -> Fault:
    points = _points(dry)
    groups = sorted({kind.partition(".")[0] for _, _, kind, _ in points})
    if group not in groups:
        group = rng.choices(groups, weights=[_RARE[name] for name in groups])[0]
    zone_, point, kind, count = rng.choice([p for p in points if p[2].partition(".")[0] == group])
    action = rng.choice(ACTIONS[kind])
    return Fault(
        zone=zone_,
        point=point,
        nth=_nth(rng, count),
        action=action,
        seconds=_seconds(rng, kind, action),
        span=rng.choice([1, 1, 1, 2, 4]) if action in _REPEATED else 1,
    )


def _points(dry: Machine) -> list[tuple[Zone, str, str, int]]:
    """Where a part can fail: zone, point, kind in `ACTIONS`, and how often ``dry`` came there."""
    points: list[tuple[Zone, str, str, int]] = []
    for zone in ("call", "disk"):
        counts: Counter[str] = dry.counts[zone]  # type: ignore[index]
        for point in sorted(counts):
            kind = f"disk.{point}" if zone == "disk" else _REPLICA_NAME.sub("replica.", point)
            if kind in ACTIONS:
                points.append((zone, point, kind, counts[point]))  # type: ignore[arg-type]
    return points


def _seconds(rng: random.Random, kind: str, action: str) -> float:
    match action:
        case "die_soon":
            return rng.choice([0.01, 0.2, 1.0])
        case "late_after":
            return rng.choice([401.0, 450.0])
        case "late" | "duplicate" if kind.startswith("http"):
            return rng.choice([0.0, 0.5, 4.0, 12.0, 70.0])
        case "down":
            return rng.choice([0.5, 5.0, 20.0, 45.0, 100.0])
        case "late" if kind.startswith("trainer"):
            return rng.choice([0.5, 10.0, 401.0, 450.0, _NEVER_S])
        case "late" if kind.startswith("replica"):
            return rng.choice([0.1, 2.0, 40.0, 400.0])
        case "late":
            return rng.choice([0.2, 3.0, 100.0, _NEVER_S])
    return 0.0


def _nth(rng: random.Random, count: int) -> int:
    return int(count * rng.random())
