"""Cases of two runs with adapters on the engines of one server: what they run, and what must hold.

Each run lives its lives, and so does the server, all on one loop: whatever a process does or
suffers, the others go on. In the end everything is left undisturbed, and both runs must finish.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.campaign.disk import disk_of
from tests.campaign.faults import draw_server_faults, draw_tenant_faults
from tests.campaign.invariants import (
    ROLLOUT_RULES,
    Rule,
    Violation,
    equals_the_undisturbed_run,
    lets_no_rollout_wait,
    validates_undisturbed,
    violations_of,
)
from tests.campaign.lives import Life, born, continue_timeline, supervise, was_killed
from tests.campaign.loop import CampaignLoop
from tests.campaign.machine import Fault, Fired, Machine
from tests.campaign.plan import CampaignPlan, draw
from tests.support.simulated_faults import Fate
from tests.support.simulated_tenants import ServedReplica, SimServer, mark_of, token_of
from tests.support.simulated_trainer import SimTrainer
from tests.support.simulation import Simulation
from torchtitan_rl.aio import cancel_all
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.rollout.calls import abandoned
from torchtitan_rl.routing.restarts import EXPECTED_S
from torchtitan_rl.types import Completion, GenerationRequest

_RUNS = ("a", "b")
_PATIENCE_S = 100.0  # of a run that starts: the server may be starting, too
_LIVES = 3  # of a disturbed server


@dataclass(frozen=True, kw_only=True)
class RunPlan(CampaignPlan):
    """Of one run on ``there``. ``earlier``: the trainers of all its processes so far."""

    run: str
    earlier: list[SimTrainer] = field(default_factory=list, repr=False, compare=False)
    there: Any = field(default=None, repr=False, compare=False)

    def simulation(self, root: Path, fate: Fate, recorder: Recorder) -> Simulation:
        return TenantSimulation(self, root, fate=fate, recorder=recorder)

    def describe(self) -> str:
        return super(RunPlan, replace(self, there=None, earlier=[])).describe()


@dataclass(frozen=True, kw_only=True)
class TenantsPlan:
    runs: tuple[RunPlan, ...]
    engines: int
    token_s: float
    request_timeout_s: float
    restart_s: float  # until a server that has ended is there again
    start_s: float  # between the starts of the two runs
    chance: int

    def describe(self) -> str:
        runs = "\n  ".join(one.describe() for one in self.runs)
        return f"{replace(self, runs=())}\n  {runs}"


def draw_tenants(seed: int) -> TenantsPlan:
    rng = random.Random(f"tenants {seed}")
    return TenantsPlan(
        runs=tuple(_draw_run(rng, name) for name in _RUNS),
        engines=rng.randint(1, 3),
        token_s=rng.choice([0.1, 0.3]),
        request_timeout_s=rng.choice([4.0, 600.0, 600.0]),
        restart_s=rng.choice([0.5, 5.0, 20.0]),
        start_s=rng.choice([0.0, 0.0, 3.0, 30.0]),
        chance=rng.randrange(10**6),
    )


def _draw_run(rng: random.Random, name: str) -> RunPlan:
    plan = draw(rng.randrange(10**6))
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    during_step = "aborted" if plan.during_step == "aborted" else "running"
    own = {
        "during_step": during_step,
        "replicas": 1,
        "reserves": False,
        "restarts": 2,
        "trainer_restarts": rng.choice([0, 2]),
        "restart_s": rng.choice([0.5, 3.0]),
        "teacher_s": None,
        "checks_idleness": False,
        "num_steps": min(plan.num_steps, 4),
        "max_rollouts": plan.max_rollouts or 6,
        "request_timeout_s": max(plan.request_timeout_s, 8.0),
        "rollout_timeout_s": max(plan.rollout_timeout_s, 20.0),
        "lives": min(plan.lives, 2),
        "sync_timeout_s": rng.choice([20.0, 60.0]),
    }
    return RunPlan(**{**fields, **own}, run=name)


class TenantSimulation(Simulation):
    """A run whose only replica is its place on a server. Notes tokens that are not of its own
    adapter, in the version that they have."""

    plan: RunPlan
    replicas: list[ServedReplica]  # type: ignore[assignment]

    def __init__(self, plan: RunPlan, root: Path, **options: Any) -> None:
        self.plan = plan
        self.root = root
        self.strange: list[str] = []
        self._num_earlier = len(plan.earlier)
        super().__init__(plan, root, **options)
        self._publish_as_this_run(self.trainer)

    def _publish_as_this_run(self, trainer: SimTrainer) -> None:
        trainers = self.plan.there.trainers
        trainer.path = f"{self.plan.run}#{len(trainers)}"
        trainer.replays_routing = False
        trainers[trainer.path] = trainer
        self.plan.earlier.append(trainer)

    async def _start_trainer(self) -> SimTrainer:
        trainer = await super()._start_trainer()
        self._publish_as_this_run(trainer)
        return trainer

    def _replica(self, name: str) -> Any:
        own: dict[str, Any] = {"run": self.plan.run, "root": self.root, "fate": self.fate}
        return ServedReplica(name, self.plan.there, weights=self.weights, **own)

    def alongside(self) -> tuple[Any, ...]:
        return (self._registered(), *super().alongside())

    @asynccontextmanager
    async def _registered(self) -> AsyncIterator[None]:
        await self.replicas[0].peer.start(patience_s=_PATIENCE_S)
        try:
            yield
        finally:
            await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _start_again(self, lost: str, name: str) -> Any:
        """As `backends.monarch.run` does it."""
        replica = self._replica(name)
        try:
            await replica.peer.start(patience_s=EXPECTED_S)
        except ReplicaError:
            await replica.peer.close()
            raise
        self.replicas.append(replica)
        return replica

    def on_ended(self, request: GenerationRequest, done: Completion, is_given: bool) -> None:
        super().on_ended(request, done, is_given)
        before, plan = request.prompt_token_ids, self.plan
        num_resumed = 0 if request.resume_from is None else len(request.resume_from.token_ids)
        if list(done.versions) != sorted(done.versions):
            self.strange.append(f"{request.request_id}: versions {done.versions}")
        told = zip(done.token_ids, done.logprobs, done.versions, strict=True)
        for index, (token, logprob, version) in enumerate(told):
            could_be = [
                token_of(request.request_id, before, mark_of(plan.run, version, weights))
                for trainer in plan.earlier[0 if index < num_resumed else self._num_earlier :]
                if (weights := trainer.published.get(version, 0 if version == 0 else None))
                is not None
            ]
            if (token, logprob) not in could_be:
                self.strange.append(f"{request.request_id}: token {index} is not of {version}")
            if index >= num_resumed and version < request.min_version:
                self.strange.append(f"{request.request_id}: token {index} of old {version}")
            before += (token,)


def has_its_own_tokens(life: Life) -> Iterator[str]:
    if isinstance(life.simulation, TenantSimulation):
        yield from life.simulation.strange[:4]


def is_told_every_token(life: Life) -> Iterator[str]:
    """Where nothing failed anywhere."""
    if life.number < 0 and life.simulation is not None:
        lost = [replica.lost for replica in life.simulation.replicas]
        if any(lost):
            yield f"{lost} tokens were sampled and not received"


TENANT_RULES: tuple[Rule, ...] = (
    *(rule for rule in ROLLOUT_RULES if rule is not validates_undisturbed),
    has_its_own_tokens,
    is_told_every_token,
)


@dataclass(kw_only=True)
class Played:
    """What came of a case: lives of runs, faults of each process, by name."""

    lives: dict[str, list[Life]] = field(default_factory=dict)
    servers: list[Machine] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def fired(self) -> list[Fired]:
        machines = [life.machine for lives in self.lives.values() for life in lives]
        return [one for machine in [*self.servers, *machines] for one in machine.fired]


def play(seed: int, plan: TenantsPlan, root: Path, dry: Played | None = None) -> Played:
    """All lives of both runs, on one loop. Without a ``dry`` one, nothing fails."""
    played = Played()
    base = Machine(root / "elsewhere")
    loop = CampaignLoop(base)
    abandoned._running.clear()
    with disk_of(base):
        world = _World(seed, plan, root, loop, dry, played)
        loop.run_until_complete(loop.create_task(world.play(), name="machine: world"))
    loop.discard()
    texts = [*world.there.complaints, *played.strays, *loop.strays]
    played.violations += [Violation("serves_each_its_own", -1, text) for text in texts[:4]]
    return played


class _World:
    def __init__(
        self,
        seed: int,
        plan: TenantsPlan,
        root: Path,
        loop: CampaignLoop,
        dry: Played | None,
        played: Played,
    ) -> None:
        self._seed = seed
        self._plan = plan
        self._root = root
        self._loop = loop
        self._dry = dry
        self._played = played
        self._is_calm = dry is None  # from now on, nothing fails
        self._num_disturbed = 0 if dry is None else len(plan.runs)
        self._calm = asyncio.Event()
        self._machines: list[Machine] = []  # of runs
        self.there = SimServer(
            random.Random(plan.chance), engines=plan.engines, token_s=plan.token_s
        )

    async def play(self) -> None:
        self.there.outside = contextvars.copy_context()
        if self._is_calm:
            self._calm.set()
        with self.there.in_place():
            serving = asyncio.create_task(self._serve(), name="machine: server")
            runs = [
                asyncio.create_task(
                    self._run(plan, number * self._plan.start_s), name=f"machine: run {plan.run}"
                )
                for number, plan in enumerate(self._plan.runs)
            ]
            ended = asyncio.gather(*runs)
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await cancel_all([serving])
            ended.result()

    async def _serve(self) -> None:
        """Start the server again whenever it has ended, as a supervisor of services."""
        for number in range(1_000_000):
            is_calm = self._calm.is_set()
            faults: list[Fault] = []
            if not is_calm and self._dry is not None and number < _LIVES:
                faults = draw_server_faults(self._seed, number, self._dry.servers[0])
            machine = Machine(self._root / f"server{number}", faults)
            self._played.servers.append(machine)
            work = self.there.serve(
                machine,
                request_timeout_s=self._plan.request_timeout_s if not is_calm else 600.0,
                sync_timeout_s=30.0,
            )
            self.there.context = context = self._loop.process_on(machine)
            main = self._loop.create_task(work, name="server", context=context)
            machine.controls = {"stop": main.cancel, "cancel": main.cancel}
            calm = asyncio.create_task(self._calm.wait(), name="machine: calm")
            try:
                waited = {main} if is_calm else {main, calm}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                # A server that nothing has happened to goes on.
                while not main.done() and not machine.fired:
                    machine._by_point.clear()
                    await asyncio.wait({main})
            finally:
                self.there.context = None
                calm.cancel()
                self._loop.end_process(machine)
                if main.done() and not main.cancelled() and main.exception() is not None:
                    self._played.strays.append(f"the server failed: {main.exception()!r}")
            await asyncio.sleep(self._plan.restart_s)

    async def _run(self, plan: RunPlan, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        lives = self._played.lives[plan.run] = []
        plan = replace(plan, earlier=[])
        root, before = self._root / plan.run / "run", None
        if self._dry is not None:
            for number in range(plan.lives):
                dry = self._dry.lives[plan.run][0].machine
                faults = draw_tenant_faults(_seed_of(self._seed, plan.run), number, dry)
                before = await self._live(number, plan, root, faults, before)
                root = before.root
            self._num_disturbed -= 1
            if self._num_disturbed == 0:
                self._calm.set()
            await self._calm.wait()
        number = plan.lives if self._dry is not None else -1
        last = await self._live(number, plan, root, [], before)
        # A server's own limit ends rollouts, also of groups that are not trained.
        if self._dry is not None and self._plan.request_timeout_s >= plan.request_timeout_s:
            dry_life = self._dry.lives[plan.run][0]
            fired = [one.fault for one in self._played.fired()]
            self._played.violations += equals_the_undisturbed_run(last, dry_life, fired)
        assert lives[-1] is last

    async def _live(
        self, number: int, plan: RunPlan, root: Path, faults: list[Fault], before: Life | None
    ) -> Life:
        plan = replace(plan, there=self.there)
        life = born(number, plan, root, faults)
        self._machines.append(life.machine)
        started_s = self._loop.time()
        num_servers = len(self._played.servers)
        work = supervise(life, self._loop, resume=before is not None)
        context = self._loop.process_on(life.machine)
        main = self._loop.create_task(work, name="machine: supervisor", context=context)
        await asyncio.wait({main})
        if life.machine.remains is not None:
            was_killed(life, self._loop)
        elif not main.cancelled():
            main.result()
        life.seconds = self._loop.time() - started_s
        self._loop.end_process(life.machine)
        continue_timeline(life, before)
        life.excuse = self._excuse(life, num_servers)
        self._played.lives[plan.run].append(life)
        is_near = self._plan.request_timeout_s < plan.request_timeout_s  # the server's own limit
        rules = [one for one in TENANT_RULES if not (is_near and one is lets_no_rollout_wait)]
        self._played.violations += violations_of(life, rules)
        return life

    def _excuse(self, life: Life, num_servers: int) -> str:
        """What a run need not survive."""
        servers = self._played.servers
        harm = [one for machine in servers for one in machine.fired]
        if any(one.fault.zone == "call" or one.fault.action == "block" for one in harm):
            return "an engine failed"
        if len(servers) - num_servers > 1:
            return "the server ended several times"
        if len(servers) > num_servers and life.plan.request_timeout_s <= self._plan.restart_s:
            return "the server was away for longer than the run waits for an answer"
        blocks = [one.fault for machine in self._machines for one in machine.fired]
        if any(one.action == "block" and one.seconds > 5.0 for one in blocks):
            return "all stood still"
        for one in life.machine.fired:
            if one.fault.action == "down" or one.fault.seconds > 5.0:
                return "the server was not reached"
            if one.fault.point == "http.tenant.open":
                return "it was registered twice"
        return ""


def _seed_of(seed: int, run: str) -> int:
    return seed * 2 + _RUNS.index(run) + 10**8
