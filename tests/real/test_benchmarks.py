"""Each benchmark on its smallest setting: it leaves its JSON and its picture, and all of its sides
did the same work. Nothing here looks at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers_setup import peers_python, requirements
from benchmarks.peers_work import WORKLOADS
from tests.real.conftest import NUM_STEPS
from tests.real.runs import ROOT, run_module

PEERS_STEPS = 6
MODES = ("synchronous", "over-admit restart", "over-admit aborted", "async S=1")


def bench(script: str, *options: str) -> str:
    return run_module(f"benchmarks.{script}", *options, OMP_NUM_THREADS="1")


def report_of(path: Path, picture: Path | None = None) -> dict[str, Any]:
    """What it wrote, which says where, with what and how it was measured."""
    assert (picture or path.with_suffix(".png")).read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["packages"]["torch"]
    assert report["options"]
    return report


@pytest.mark.soak
def test_generation_samples_the_same_tokens_on_every_side(tmp_path):
    path = tmp_path / "generation.json"
    bench(
        "generation",
        *("--rollouts", "16", "--turns", "2", "--max-running", "4", "--repeats", "1"),
        *("--distributions", "lognormal", "--output", str(path)),
    )
    workloads = report_of(path)["workloads"]
    assert set(workloads) == {
        "lognormal, 2 turns",
        "lognormal, 2 turns, no delays",
        "lognormal, 1 turn",
    }
    for name, workload in workloads.items():
        sides = workload["sides"]
        engines = {"one", "rounds", "loop", "router", "AsyncLLM"}
        assert set(sides) == engines | ({"offline"} if "1 turn" in name else set())
        tokens = {side: row["sampled_tokens"] for side, row in sides.items()}
        assert 0 < tokens.pop("one") < workload["sampled_tokens"]  # a sixteenth of the rollouts
        assert set(tokens.values()) == {workload["sampled_tokens"]}
        assert all(len(row["seconds"]) == 1 for row in sides.values())
        assert set(workload["ratios"]) == {
            *(f"loop / {side}" for side in sides),
            *(f"{side} / bound" for side in sides),
        }


@pytest.mark.soak
def test_training_compares_shared_prefixes_with_unshared_rows_and_the_ideal(tmp_path):
    path = tmp_path / "training.json"
    siblings = "8 x 8 answers of 48 to prompts of 205"
    bench(
        "training",
        *("--workloads", siblings, "--row-lens", "128", "512", "--repeats", "2"),
        *("--threads", "1", "--output", str(path)),
    )
    assert list(report_of(path)["workloads"]) == [siblings]
    result = report_of(path)["workloads"][siblings]
    assert (result["tokens"], result["trained_tokens"]) == (64 * 253, 64 * 48)
    assert result["computed_tokens"] < 0.3 * result["unshared_tokens"]
    sides = {"shared, rows of 512", "unshared", "ideal", "bare"}  # no episode fits rows of 128
    assert set(result["seconds"]) == set(result["ratios"]) == sides
    assert all(len(seconds) == 2 for seconds in result["seconds"].values())


def test_router_gives_every_strategy_the_same_sessions(tmp_path):
    path = tmp_path / "router.json"
    bench(
        "router",
        *("--sessions", "100", "--decisions", "50", "--repeats", "1"),
        *("--replicas", "4", "--simulated-sessions", "40", "--output", str(path)),
    )
    report = report_of(path)
    strategies = {"sticky", "least loaded", "round-robin"}
    balance = report["balance"]["4"]
    assert set(balance) == set(report["ratios"]["cost_growth"]) == strategies
    assert len({(row["requests"], row["sampled_tokens"]) for row in balance.values()}) == 1
    assert balance["sticky"]["requests"] == 3 * 40
    for row in report["decisions"].values():
        assert {size: len(repeats) for size, repeats in row.items()} == dict.fromkeys(
            ("1", "16", "64", "256", "1024", "4096"), 1
        )


def copy_of_run(run_dir: Path, *, of: Path) -> None:
    """What benchmarks read of a run that was made before."""
    run_dir.mkdir(parents=True)
    (run_dir.parent / "options.json").write_text("{}")  # made with whatever is asked for
    shutil.copy(of / "metrics.jsonl", run_dir)
    (run_dir / "benchmark.json").write_text('{"seconds": 60.0}')


def require_end_to_end(root: Path, steps: int, *options: str) -> None:
    """It prints one line, which its report has, too."""
    printed = bench(
        "end_to_end",
        *("--groups", "2", "--group-size", "2", "--steps", str(steps), "--repeats", "1"),
        *("--output-dir", str(root), "--output", str(root / "end_to_end.json"), *options),
    )
    line = json.loads(printed)
    assert printed.count("\n") == 1
    assert (line["groups"], line["group_size"], line["steps"]) == (2, 2, steps - 1)
    assert line["generated_tokens_per_s"] > 0
    report = report_of(root / "end_to_end.json")
    assert report["line"] == line
    (columns,) = report["repeats"]
    assert {len(column) for column in columns.values()} == {steps - 1}
    assert line["generated_tokens"] == sum(columns["tokens/generated"])
    assert len(report["run_s"]) == 1


@pytest.mark.soak
def test_end_to_end_prints_one_json_line(whole, tmp_path):
    copy_of_run(tmp_path / "run0", of=whole)
    require_end_to_end(tmp_path, NUM_STEPS)


@pytest.mark.soak
def test_end_to_end_makes_its_own_runs(tmp_path):
    more = "--evaluation.num-problems 2 --generator.replicas 1"
    require_end_to_end(tmp_path, 3, "--max-tokens", "24", "--max-length", "128", "--options", more)


@pytest.mark.soak
def test_async_training_compares_the_runs_that_are_there(whole, tmp_path):
    arms = ("both-S=0", "both-S=1", *(f"split-S={staleness}" for staleness in (0, 1, 2, 4)))
    for arm in arms:
        copy_of_run(tmp_path / f"{arm}-0", of=whole)
    path = tmp_path / "async_training.json"
    bench(
        "async_training",
        *("--steps", str(NUM_STEPS), "--repeats", "1"),
        *("--output-dir", str(tmp_path), "--json", str(path)),
    )
    report = report_of(path)
    assert set(report["repeats"]) == {arm.replace("-", " ") for arm in arms}
    assert all(len(steps) == NUM_STEPS for (steps,) in report["repeats"].values())
    # The same run under all names.
    assert set(report["best_synchronous_over_arm"].values()) == {1.0}
    assert len(set(report["seconds_per_step"].values())) == 1


def peers(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The comparison with TRL at its smallest."""
    path = tmp_path / "peers.json"
    bench(
        "peers",
        *("--repeats", "1", "--steps", str(PEERS_STEPS), "--groups", "2", "--group-size", "4"),
        *("--output-dir", str(tmp_path), "--output", str(path), *options),
    )
    return report_of(path)


@pytest.mark.soak
def test_peers_generates_the_fixed_lengths_on_our_side(tmp_path):
    """Our asynchronous side runs; the other two are runs that are there."""
    workload = replace(WORKLOADS["heavy tail"], groups=2, group_size=4, median=4)
    generated = [sum(workload.step_lengths(step)) for step in range(PEERS_STEPS)]
    (tmp_path / "options.json").write_text("{}")
    place = tmp_path / "heavy-tail" / "0"
    (place / "ours-s0").mkdir(parents=True)
    (place / "ours-s0" / "benchmark.json").write_text('{"seconds": 9.0}')
    with (place / "ours-s0" / "metrics.jsonl").open("w") as metrics:
        for step, tokens in enumerate(generated, start=1):
            row = {"kind": "step", "step": step, "time/step_s": 2.0, "time/rollout_s": 1.0}
            row |= {"tokens/generated": tokens, "train/reward_mean": 0.5}
            metrics.write(json.dumps(row) + "\n")
    recorded = {"seconds": [4.0] * PEERS_STEPS, "rollout_s": [2.0] * PEERS_STEPS}
    (place / "trl.json").write_text(
        json.dumps({**recorded, "generated": generated, "command_s": 60.0, "packages": {}})
    )
    report = peers(tmp_path, "--workloads", "heavy tail", "--median", "4")
    result = report["workloads"]["heavy tail"]
    assert set(result["sides"]) == {"TRL", "ours, S=0", "ours, S=1"}
    (run,) = result["repeats"]["ours, S=1"]
    assert run["generated"] == generated
    assert result["ratios"]["ours, S=0"] == {"steps": 2.0, "processed": 2.0, "generated": 2.0}


@pytest.mark.soak
def test_peers_compares_trl_with_us_on_the_same_work(tmp_path):
    """Installs TRL into an environment of its own, where it is not there yet."""
    environment = ROOT / "outputs" / "peers-venv"
    try:
        peers_python(environment, requirements())
    except SystemExit as error:
        pytest.skip(f"TRL cannot be installed: {error}")
    report = peers(
        tmp_path,
        *("--workloads", "short prompt", "heavy tail", "--max-tokens", "8", "--median", "4"),
        *("--environment", str(environment)),
    )
    assert report["TRL_packages"]["trl"] == "1.16.0"
    assert set(report["workloads"]) == {"short prompt", "heavy tail"}
    for result in report["workloads"].values():
        assert set(result["ratios"]) == {"ours, S=0", "ours, S=1"}
        assert {len(runs[0]["seconds"]) for runs in result["repeats"].values()} == {PEERS_STEPS}
    assert report["workloads"]["heavy tail"]["is_same_work"]


def test_learning_curves_are_those_of_the_runs_that_are_there(whole, tmp_path):
    for seed in (0, 1):
        copy_of_run(tmp_path / f"s0-seed{seed}", of=whole)
    bench(
        "learning_curves",
        *("--staleness", "0", "--seeds", "0", "1"),
        *("--output-dir", str(tmp_path), "--results", str(tmp_path)),
    )
    report = report_of(tmp_path / "async_learning.json")
    assert set(report["curves"]) == {"S=0 seed 0", "S=0 seed 1"}
    for curve in report["curves"].values():
        assert [step for step, _, _ in curve] == [0, NUM_STEPS]


def test_credits_are_compared_by_the_runs_that_are_there(whole, tmp_path):
    for side in ("outcome", "turn"):
        copy_of_run(tmp_path / f"{side}-seed0", of=whole)
    bench(
        "turn_credit",
        *("--seeds", "0", "--steps", str(NUM_STEPS)),
        *("--output-dir", str(tmp_path), "--results", str(tmp_path)),
    )
    report = json.loads((tmp_path / "turn_credit.json").read_text())
    assert list(report["medians"]["turn"]) == ["0", str(NUM_STEPS)]
    assert report["medians"]["turn"] == report["medians"]["outcome"]


@pytest.mark.soak
def test_serving_answers_the_same_tokens_from_both_servers(tmp_path):
    path, plot = tmp_path / "serving.json", tmp_path / "serving.png"
    bench(
        "serving",
        *("--repeats", "2", "--requests", "4", "--concurrency", "2", "--max-tokens", "16"),
        *("--json", str(path), "--plot", str(plot)),
    )
    report = report_of(path, plot)
    assert set(report["repeats"]) == {
        f"{api}{how}" for api in ("", "responses, ", "messages, ") for how in ("whole", "streaming")
    }
    for mode, sides in report["repeats"].items():
        ours, own = sides.values()
        assert [run["tokens"] for run in ours] == [run["tokens"] for run in own]
        assert len(ours) == 2
        assert report["medians"][mode].keys() == sides.keys()
        assert report["ratios"][f"{mode}, over vLLM's own server"]["tokens_per_second"] > 0


@pytest.mark.soak
def test_long_tail_trains_the_same_answers_in_all_modes_and_only_restarts_throw_tokens_away(
    tmp_path,
):
    path = tmp_path / "long_tail.json"
    bench(
        "long_tail",
        *("--groups", "4", "--group-size", "2", "--median", "6", "--long-share", "0.12"),
        *("--steps", "4", "--repeats", "1", "--replicas", "1", "--train-s", "0.0"),
        *("--modes", *MODES, "--output", str(path)),
    )
    report = report_of(path)
    assert report["answers"]["long_per_step"] == 1
    assert tuple(report["modes"]) == tuple(report["ratios"]) == MODES
    assert report["ratios"]["synchronous"] == {"rollout_phase": 1.0, "groups_per_second": 1.0}
    modes = report["modes"]
    # Each answer has the length that was drawn for it: the benchmark itself fails otherwise.
    for name in ("synchronous", "async S=1"):  # no group overtakes another: the same, in order
        assert modes[name]["tokens_trained"] == modes["synchronous"]["tokens_trained"]
        assert modes[name]["long_per_step"] == 1
    assert [modes[name]["age_max"] for name in MODES] == [0, 0, 1, 1]
    thrown_away = {name for name, row in modes.items() if row["tokens_thrown_away"]}
    assert thrown_away == {"over-admit restart"}
    assert set(modes["over-admit restart"]["causes"]) <= {"restarted", "cut"}
    [repeat] = report["repeats"]["async S=1"]
    assert len(repeat["rollout_s_of_steps"]) == 2 + 4 + 1
    assert repeat["groups_per_second"] == pytest.approx(modes["async S=1"]["groups_per_second"])


@pytest.mark.soak
def test_weight_sync_brings_the_same_weights_to_a_decoding_replica(tmp_path):
    """Two FSDP ranks, one replica; by both transports, the weights are the same."""
    path, transports = tmp_path / "weight_sync.json", ("shared_memory", "rdma")
    bench(
        "weight_sync",
        *("--policies", "tiny", "--ranks", "2x1", "--repeats", "1", "--running", "2"),
        *("--transports", *transports, "--output", str(path)),
    )
    results = report_of(path)["results"]
    assert [result["setting"]["transport"] for result in results] == [*transports]
    for result in results:
        assert result["last_version"] == 4  # two steps a repeat, and an unmeasured repeat first
        assert result["running_at_pulls"] == [2, 2]
        assert result["num_bytes"] == results[0]["num_bytes"] > 4_000_000
        (repeat,) = result["repeats"]
        zero = [name for name, seconds in repeat.items() if seconds <= 0]
        assert zero == ["gather_s"]  # each rank writes, or offers, its shards
        assert repeat["standstill_s"] >= repeat["stall_s"]
        assert set(result["medians"]) == set(repeat)
        assert len(result["ratios"]) == 3
        assert len(result["probe_token_ids"]) == 8
        assert result["probe_token_ids"] == results[0]["probe_token_ids"]


@pytest.mark.soak
def test_weights_reach_each_host_in_one_copy(tmp_path):
    path = tmp_path / "weight_sync_hosts.json"
    bench(
        "weight_sync_hosts",
        *("--policy", "tiny", "--hosts", "1", "2", "--repeats", "1", "--output", str(path)),
    )
    report = report_of(path)
    for number, result in zip((1, 2), report["hosts"], strict=True):
        (repeat,) = result["repeats"]
        for name in ("star", "tree"):
            copies = repeat[f"{name}_bytes"]
            assert len(copies) == number
            assert all(0.99 * result["num_bytes"] < copy <= result["num_bytes"] for copy in copies)
    assert len(report["publish"]["ratios"]) == 3


@pytest.mark.soak
def test_gpu_check_measures_every_stage_that_a_cpu_has(tmp_path):
    path = tmp_path / "gpu_check.json"
    bench(
        "gpu_check",
        *("--shape", "micro", "--episode-tokens", "64", "--tokens", "256", "--repeats", "1"),
        *("--output", str(path)),
    )
    stages = json.loads(path.read_text())["stages"]
    only_cuda = {name for name, result in stages.items() if "left out" in result}
    assert only_cuda == {"small_card", "offload"}
    assert set(stages["steps"]) == {"none", "selective", "full"}
    assert stages["publish"]["num_bytes"] > 500_000
    assert 0 < stages["mismatch"]["mean"] < 0.1  # bfloat16 on both sides
