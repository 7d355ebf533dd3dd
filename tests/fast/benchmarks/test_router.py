"""The simulated replica on a virtual clock, and what the router's benchmark makes of it."""

from __future__ import annotations

from benchmarks.router import STRATEGIES, balance_of
from tests.support.virtual_clock import run_virtually


def test_every_strategy_does_the_same_work_and_sticky_finds_most_of_it_cached():
    balance = {
        name: run_virtually(balance_of(strategy(), 8, 200, 5.0))
        for name, strategy in STRATEGIES.items()
    }
    assert len({(one.requests, one.sampled_tokens) for one in balance.values()}) == 1
    assert balance["sticky"].requests == 600
    assert balance["sticky"].cached_share > 2 * balance["round-robin"].cached_share
    for one in balance.values():
        assert one.busiest_over_mean >= 1.0
        assert one.slowest_over_mean >= 1.0
        assert one.latency_p50_s < one.latency_p99_s < one.done_s
