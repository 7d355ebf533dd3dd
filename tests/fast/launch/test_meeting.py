"""What torchrun tells a launcher, and how the launchers of a run meet in its store, over restarts
of
one or all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.meeting import (
    Joining,
    Node,
    Round,
    Store,
    resume_options,
    without_torchrun,
)


class DictStore:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def launchers_of(store: Store, num_nodes: int) -> list[Joining]:
    return [Joining(store, rank, num_nodes) for rank in range(num_nodes)]


def meet(launchers: list[Joining]) -> list[Round]:
    """They look in turn until all have met."""
    found: list[Round | None] = [None] * len(launchers)
    for _ in range(4):
        for rank, launcher in enumerate(launchers):
            found[rank] = found[rank] or launcher.look()
    rounds = [one for one in found if one is not None]
    assert len(rounds) == len(launchers)
    return rounds


def test_a_restarted_run_reads_nothing_of_the_round_before() -> None:
    store = DictStore()
    before = meet(launchers_of(store, 3))
    before[1].say("address/1", "tcp://10.0.0.2:26600")
    before[0].say("end", 1)
    assert not before[0].is_repeated()
    after = meet(launchers_of(store, 3))
    assert {one.token for one in after} != {one.token for one in before}
    assert len({one.token for one in after}) == 1
    assert after[2].hear("end") is None
    assert after[0].hear_of_nodes("address") == [None, None, None]
    assert after[0].is_repeated()


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
)
def test_whoever_starts_again_while_they_meet_all_end_in_one_round(before, events) -> None:
    """``before``: looks of the launchers of an earlier round. An event is a look of one rank, or
    the restart of one that has not met the others; with rank 0 all start again."""
    store, num_nodes = DictStore(), 4
    earlier = launchers_of(store, num_nodes)
    for rank in before:
        earlier[rank].look()
    launchers = launchers_of(store, num_nodes)
    found: dict[int, Round] = {}
    for rank, restarts in events:
        if restarts and rank == 0:
            launchers, found = launchers_of(store, num_nodes), {}
        elif restarts and rank not in found:
            launchers[rank] = Joining(store, rank, num_nodes)
        elif rank not in found and (met := launchers[rank].look()) is not None:
            found[rank] = met
    for _ in range(4):
        for rank, launcher in enumerate(launchers):
            if rank not in found and (met := launcher.look()) is not None:
                found[rank] = met
    assert len(found) == num_nodes
    assert len({one.token for one in found.values()}) == 1


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_a_launcher_of_torchrun_knows_its_place() -> None:
    assert Node.of(TORCHRUN) == Node(
        rank=1, num_nodes=4, store_host="node0", store_port=29500, restarts=2
    )


def test_rank_0_provides_the_store_where_no_agent_does() -> None:
    by_hand = {name: TORCHRUN[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert Node.of({**by_hand, "RANK": "0"}).provides_store
    assert not Node.of({**by_hand, "RANK": "1"}).provides_store
    assert not Node.of({**TORCHRUN, "RANK": "0"}).provides_store


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is 2 and WORLD_SIZE 4: start one launcher"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many': it must be a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '': it must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999: give 1 to 65535"),
        ({"RANK": "4"}, "RANK is 4: it must be from 0 to 3"),
        ({"MASTER_ADDR": "", "RANK": ""}, "RANK, MASTER_ADDR not set, but WORLD_SIZE is 4"),
    ],
)
def test_wrong_variables_are_named(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Node.of({**TORCHRUN, **changes})


def test_what_a_launcher_starts_knows_nothing_of_torchrun() -> None:
    others = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert (
        without_torchrun({**TORCHRUN, "GROUP_RANK": "1", "OMP_NUM_THREADS": "1", **others})
        == others
    )


def test_a_run_that_is_started_again_resumes() -> None:
    assert resume_options(["tiny"], is_again=True) == ["--checkpoint.resume"]
    assert resume_options(["tiny", "--checkpoint.resume"], is_again=True) == []
    assert resume_options(["tiny"], is_again=False) == []
