"""Simulated runs: the same every time, failures that cost what the replica's model says, and the
command."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fast.simulation.test_profile import RUN
from torchtitan_rl.commands.simulate import best_splits, main
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.simulation.clock import Load, run_virtually
from torchtitan_rl.simulation.profile import profile_run, write_profile
from torchtitan_rl.simulation.replica import SimulatedReplica, Speeds
from torchtitan_rl.simulation.run import simulate
from torchtitan_rl.types import GenerationRequest, SamplingParams

SMALL = ("--rollout.groups-per-step", "2", "--rollout.group-size", "2", "--num-steps", "6")
OF_THIS_MACHINE = ("loop_cpu_s", "loop_cpu_us", "loop_busy_share", "loop_lag_max_s", "late_share")


def config(*options: str):
    return load_config(Path("alphabet_sort_tiny"), [*SMALL, *options])


def figures(**settings):
    found = simulate(config("--schedule.staleness", "2"), profile_run(RUN), **settings).to_json()
    return {name: found[name] for name in found if name not in (*OF_THIS_MACHINE, "wall_s")}


@pytest.mark.parametrize("deaths", [(), ((1.0, 0),)])
def test_a_simulated_run_is_the_same_every_time(deaths):
    first = figures(deaths=deaths)
    assert first == figures(deaths=deaths)
    assert first["groups"] == 12
    assert first["losses"] == len(deaths)


def test_staleness_0_alternates_and_staleness_2_overlaps():
    profile = profile_run(RUN)
    synchronous, ahead = (
        simulate(config("--schedule.staleness", s, "--num-steps", "12"), profile) for s in "02"
    )
    assert list(synchronous.staleness) == ["0"]
    assert synchronous.trainer_idle_share + synchronous.generator_idle_share > 0.9
    assert max(map(int, ahead.staleness)) <= 2
    assert ahead.steps_per_hour > synchronous.steps_per_hour


def test_a_killed_replica_costs_the_tokens_since_the_last_whole_second():
    speeds = Speeds(prefill_s=0.0, step_s=0.01, token_s=0.0)

    async def kill():
        replicas = [SimulatedReplica(f"r{n}", speeds) for n in range(2)]
        router = GeneratorRouter(replicas)
        asyncio.get_running_loop().call_later(2.355, replicas[0].die, 1.0)
        request = GenerationRequest(
            request_id="one", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=400)
        )
        done = await router.generate(request)
        return replicas, done, asyncio.get_running_loop().time()

    replicas, done, seconds = run_virtually(kill())
    assert len(done.token_ids) == 400
    assert done.replica == "r1"
    # 235 tokens in 2.355 s, of which the 200 of the first two seconds were reported. The loss is
    # seen a second later.
    assert replicas[0].lost_tokens == 35
    assert seconds == pytest.approx(2.355 + 1.0 + (400 - 200) * 0.01)


def test_the_loss_of_the_only_replica_costs_a_run_its_restart():
    profile = profile_run(RUN)
    whole = replace(profile, losses=replace(profile.losses, restart_s=50.0))
    run = config("--generator.replicas", "1", "--num-steps", "8")
    calm, failing = simulate(run, whole), simulate(run, whole, deaths=[(1.0, 0)])
    assert (calm.losses, calm.lost_tokens) == (0, 0)
    assert failing.losses == 1
    assert failing.replica_down_s == pytest.approx(50.0, abs=1.0)
    assert failing.simulated_s - calm.simulated_s == pytest.approx(50.0, abs=1.0)
    assert failing.groups == calm.groups


def test_replicas_fail_as_often_as_their_mean_time_says():
    profile = profile_run(RUN)
    whole = replace(profile, losses=replace(profile.losses, restart_s=0.1))
    run = config("--num-steps", "60", "--generator.replicas", "4", "--generator.max-restarts", "99")
    failing = simulate(run, whole, mtbf_hours=4.0 / 3600)
    assert failing.losses == pytest.approx(4 * failing.simulated_s / 4.0, rel=0.5)


def test_the_lag_of_the_loop_is_its_work_that_the_time_between_events_does_not_cover(monkeypatch):
    seconds = iter([0.0, 0.3, 0.3, 0.4])
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    load = Load(_at_s=next(seconds))
    load.jump(0.1)  # 0.3 s of work: the next event would be 0.2 s late
    load.jump(0.1)  # nothing to do
    load.jump(1.0)
    assert load.cpu_s == pytest.approx(0.4)
    assert load.max_lag_s == pytest.approx(0.3)
    assert load.late_s == pytest.approx(0.1 + 0.1 + 0.1)


def test_the_best_split_is_the_fastest_of_all_splits():
    profile = profile_run(RUN)
    run = config("--schedule.staleness", "1", "--num-steps", "5")
    found = best_splits(run, profile, 5)
    assert sorted((one.trainer_ranks, one.replicas) for one in found) == [
        (1, 4),
        (2, 3),
        (3, 2),
        (4, 1),
    ]
    speeds = [one.steps_per_hour for one in found]
    assert speeds == sorted(speeds, reverse=True)


def test_a_split_counts_context_parallel_ranks(tmp_path, capsys):
    write_profile(profile_run(RUN), tmp_path / "p.json")
    words = ["alphabet_sort_tiny", "--profile", str(tmp_path / "p.json"), "--devices", "5", *SMALL]
    assert main([*words, "--trainer.context-parallel", "3"]) == 0
    *_, row, last = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["3", "2"]
    assert last.endswith("--trainer.data-parallel-shard 1 --generator.replicas 2")


def test_the_command_writes_what_it_says(tmp_path, capsys):
    write_profile(profile_run(RUN), tmp_path / "p.json")
    words = ["alphabet_sort_tiny", "--profile", str(tmp_path / "p.json"), "--replicas", "3", *SMALL]
    assert main([*words, "--mtbf-hours", "100", "--output", str(tmp_path / "out.json")]) == 0
    (document,) = json.loads((tmp_path / "out.json").read_text())
    said = capsys.readouterr().out
    assert document["replicas"] == 3
    assert f"{document['steps_per_hour']:,.1f} steps an hour" in said
    assert "lags" in said
    expected = 3 * document["simulated_s"] / 3600 / 100
    assert f"0 replicas lost ({expected:.2g} expected)" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--profile is missing"),
        (["--profile", "absent.json"], "--profile is absent.json: No such file"),
        (["--profile", "p", "--mtbf-hours", "0"], "--mtbf-hours is '0'"),
        (["--profile", "p", "--devices", "1"], "--devices is 1: give a whole number of at least 2"),
        (
            ["--profile", "p", "--replicas", "2", "--devices", "4"],
            "--replicas: leave it out; --devices finds the best number of them",
        ),
        (["--profile", "p", "--devices", "1e8"], "--devices is 1e8: .* at most 8192"),
        (["--profile", "p", "--placement", "colocated"], "placement is colocated"),
        (["--profile", "p", "--replicas"], "--replicas is given without a value"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options, said):
    with pytest.raises(ConfigError, match=said):
        main(["alphabet_sort_tiny", *options])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["calculator_agent_tiny"],
            "task is .*Calculator.*: the profile is of a run with .*Alphabet",
        ),
        (["alphabet_sort_tiny", "--rollout.max-turns", "2"], "rollout.max_turns is 2: .* with 3"),
        (
            ["alphabet_sort_tiny", "--rollout.sampling.top-p", "0.5"],
            "rollout.sampling.top_p is 0.5",
        ),
    ],
)
def test_the_profile_of_another_task_is_refused(tmp_path, words, said):
    write_profile(profile_run(RUN), tmp_path / "p.json")
    with pytest.raises(ConfigError, match=said):
        main([*words, "--profile", str(tmp_path / "p.json"), *SMALL])
