"""What a launcher reads in torchrun's environment variables."""

from __future__ import annotations

import pytest

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.node import Node, resume_options, without_torchrun

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


def test_one_launcher_needs_no_store() -> None:
    assert Node.of({}) == Node()
    assert Node.of({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}).num_nodes == 1


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
