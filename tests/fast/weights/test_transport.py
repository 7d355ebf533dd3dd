import pytest

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.weights.transport import Transport, choose_transport


def test_auto_takes_shared_memory_on_one_host_and_rdma_between_hosts() -> None:
    one = choose_transport("auto", trainer_host="a", replica_hosts=["a", "a"])
    two = choose_transport("auto", trainer_host="a", replica_hosts=["a", "b"])
    assert (one, two) == (Transport.SHARED_MEMORY, Transport.RDMA)


def test_either_can_be_forced_on_one_host() -> None:
    rdma = choose_transport("rdma", trainer_host="a", replica_hosts=["a"])
    shared = choose_transport("shared_memory", trainer_host="a", replica_hosts=["a"])
    assert (rdma, shared) == (Transport.RDMA, Transport.SHARED_MEMORY)


def test_shared_memory_forced_across_hosts_is_refused_with_the_hosts_and_a_fix() -> None:
    with pytest.raises(ConfigError, match=r"from a \(trainer\) to b, c \(generator\); use auto"):
        choose_transport("shared_memory", trainer_host="a", replica_hosts=["c", "a", "b"])
