"""Loops of several ranks: what they apply, and what is broadcast."""

from __future__ import annotations

import threading

import pytest

from tests.support.scripted_engine import WAIT_S, ScriptedEngine, SteppedEngine, request
from tests.support.threaded_channel import make_threaded_channels
from torchtitan_rl.errors import LoopFailedError, WeightSyncError
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.loop import EngineLoop


def test_all_ranks_apply_the_same_decisions_in_the_same_order() -> None:
    world_size = 3

    class Recording(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(vocab_size=50, eos_token_id=7, max_running=4)
            self.journal: list[object] = []

        def add_request(self, request, *, arrival_s: float) -> None:
            self.journal.append((request.request_id, arrival_s))
            super().add_request(request, arrival_s=arrival_s)

        def abort(self, request_ids):
            self.journal.append(request_ids)
            return super().abort(request_ids)

        def step(self):
            outputs = super().step()
            self.journal.append([(o.request_id, o.token_ids) for o in outputs])
            return outputs

        def swap_weights(self, version: int) -> None:
            self.journal.append(version)
            super().swap_weights(version)

    engines = [Recording() for _ in range(world_size)]
    loops = [
        EngineLoop(engine, channel, is_leader=rank == 0, config=LoopConfig(heartbeat_s=0.01))
        for rank, (engine, channel) in enumerate(
            zip(engines, make_threaded_channels(world_size), strict=True)
        )
    ]
    for loop in loops:
        loop.start()
    leader = loops[0]
    futures = [leader.submit(request(f"r{n}", 5 + n, prompt=(n,))) for n in range(12)]
    pull = leader.execute(Pull(1))
    leader.abort(("r11",))
    for future in futures:
        future.result(WAIT_S)
    assert pull.result(WAIT_S).version == 1
    leader.close(WAIT_S)
    assert all(loop.join(WAIT_S) for loop in loops)
    assert all(loop.failure is None for loop in loops)
    assert all(engine.is_closed for engine in engines)
    assert all(engine.journal == engines[0].journal for engine in engines)
    with pytest.raises(RuntimeError, match="rank 0"):
        loops[1].submit(request("x"))


def test_what_decodes_waits_for_no_further_decision_behind_a_pull() -> None:
    journal: list[str] = []

    class Recording(SteppedEngine):
        def step(self) -> list:
            outputs = super().step()
            journal.append("step")
            return outputs

        def swap_weights(self, version: int) -> None:
            journal.append("swap")
            super().swap_weights(version)

    class Channel:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            assert data is not None
            journal.append("broadcast")
            return data

        def barrier(self) -> None:
            pass

    engine = Recording()
    loop = EngineLoop(
        engine, Channel(), is_leader=True, config=LoopConfig(max_steps_per_decision=1)
    )
    loop.start()
    future = loop.submit(request("a", 100))
    engine.allow(2)
    pull = loop.execute(Pull(1))
    engine.allow(2)
    engine.permits.release(1000)
    assert pull.result(WAIT_S).running_requests == 1
    future.result(WAIT_S)
    loop.close(WAIT_S)
    swap = journal.index("swap")
    assert journal[swap - 1 : swap + 3] == ["broadcast", "swap", "step", "broadcast"]


def test_an_idle_leader_of_several_ranks_sends_empty_decisions() -> None:
    channels = make_threaded_channels(2)
    sent = threading.Semaphore(0)
    broadcast = channels[0].broadcast

    class Counting:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            sent.release()
            return broadcast(data)

    config = LoopConfig(heartbeat_s=0.005)
    loops = [
        EngineLoop(ScriptedEngine(), Counting(), is_leader=True, config=config),
        EngineLoop(ScriptedEngine(), channels[1], is_leader=False, config=config),
    ]
    for loop in loops:
        loop.start()
    for _ in range(3):
        assert sent.acquire(timeout=WAIT_S)
    loops[0].close(WAIT_S)
    assert loops[1].join(WAIT_S)


def test_a_swap_that_fails_on_another_rank_is_no_request_s_fault() -> None:
    channels = make_threaded_channels(2)

    class Leader(SteppedEngine):
        has_swapped = False

        def swap_weights(self, version: int) -> None:
            super().swap_weights(version)
            self.has_swapped = True

        def step(self) -> list:
            if self.has_swapped:
                raise ConnectionError("another rank is gone")  # in a collective of the model
            return super().step()

    leader_engine, follower_engine = Leader(), SteppedEngine(fail_at_pull=1)
    leader = EngineLoop(leader_engine, channels[0], is_leader=True)
    follower = EngineLoop(
        follower_engine, channels[1], is_leader=False, on_end=lambda failure: channels[1].break_up()
    )
    leader.start()
    follower.start()
    future = leader.submit(request("a", 50))
    leader_engine.allow(1)
    leader.execute(Pull(1))
    for engine in (leader_engine, follower_engine):
        engine.permits.release(1000)
    with pytest.raises(LoopFailedError) as caught:
        future.result(WAIT_S)
    assert type(caught.value) is LoopFailedError
    assert isinstance(follower.failure.__cause__, WeightSyncError)


def test_trap_14_a_failed_broadcast_fails_everything() -> None:
    class Broken:
        world_size = 2

        def broadcast(self, data: bytes | None) -> bytes:
            raise ConnectionError("peer is gone")

    loop = EngineLoop(ScriptedEngine(), Broken(), is_leader=True)
    loop.start()
    with pytest.raises(LoopFailedError) as caught:
        loop.submit(request("a")).result(WAIT_S)
    assert isinstance(caught.value.__cause__, ConnectionError)
