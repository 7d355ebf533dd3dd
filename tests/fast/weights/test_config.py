import pytest

from torchtitan_rl.weights.config import Transport, choose_transport, hosts_that_fetch


@pytest.mark.parametrize(
    ("configured", "trainer", "replicas", "expected", "fetching"),
    [
        ("auto", [0, 0], [0], Transport.SHARED_MEMORY, []),
        ("auto", [0], [1, 2, 2], Transport.RDMA, [1, 2]),
        ("auto", [0], [0, 1, 2], Transport.BOTH, [1, 2]),
        ("auto", [0, 1], [0, 1], Transport.RDMA, [0, 1]),
        ("rdma", [0], [0], Transport.RDMA, [0]),
        ("rdma", [0], [0, 1], Transport.RDMA, [0, 1]),
        ("shared_memory", [3], [3], Transport.SHARED_MEMORY, []),
    ],
)
def test_hosts_without_the_trainers_shared_memory_fetch(
    configured: str, trainer: list[int], replicas: list[int], expected: Transport, fetching: list
) -> None:
    transport = choose_transport(configured, trainer_hosts=trainer, replica_hosts=replicas)
    assert transport is expected
    assert hosts_that_fetch(transport, trainer_hosts=trainer, replica_hosts=replicas) == fetching
