"""Clients that would take the memory, descriptors or places of ``torchtitan-rl serve``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.runs import ROOT
from tests.real.served import serve
from tests.support.http_attacks import ATTACKS, Target

POLICY = ROOT / "experiments" / "alphabet_sort" / "policy"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    served = serve(
        tmp_path_factory.mktemp("serve"),
        POLICY,
        *("--generator.max-model-len", "1024"),
        environment={"TORCHTITAN_RL_API_KEY": "key"},
    )
    try:
        port = int(served.url.rpartition(":")[2])
        yield Target(port, served.run.process_of("endpoint-rank0"))
    finally:
        served.run.kill_all()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attacked_endpoint_serves_within_its_memory_and_descriptors(
    attacked: Target, attack: str
) -> None:
    attacked.require_to_hold(attack, more_bytes=150 << 20)
