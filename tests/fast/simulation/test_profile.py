"""The profile of a recorded run, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from torchtitan_rl.commands.profile import main
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.simulation.profile import profile_run, read_profile

RUN = Path(__file__).parents[2] / "support" / "recorded_run"


def test_the_profile_of_a_recorded_run_has_its_times_and_is_read_as_it_was_written(
    tmp_path, capsys
):
    file = tmp_path / "profile.json"
    assert main([str(RUN), "--output", str(file)]) == 0
    profile = read_profile(file)
    assert profile == profile_run(RUN)
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    later = [row for row in rows if row["kind"] == "step" and row["step"] > 1]
    expected = [row["time/train_s"] / row["tokens/generated"] for row in later]
    assert list(profile.training.token_s) == expected
    assert list(profile.training.publish_s) == [row["sync/publish_s"] for row in later]
    assert profile.training.ranks == 1
    assert profile.decoding.max_running == 64
    assert 0.005 < profile.decoding.step_s + 32 * profile.decoding.request_s < 0.05
    # Only the rollouts that were chosen at random: the best and the worst have other lengths.
    rollouts = [json.loads(line) for line in (RUN / "rollouts.jsonl").read_text().splitlines()]
    drawn = [one for one in rollouts if one["split"] == "train" and one["chosen"] == "random"]
    lengths = [
        [len(turn["token_ids"]) for turn in one["turns"]] for one in drawn if one["step"] > 1
    ]
    assert [list(one.sampled_tokens) for (one,) in profile.groups] == lengths
    # No replica was lost, so the time of a restart is that of the first starts.
    assert profile.losses.lost_replicas == 0
    assert profile.losses.restart_s == pytest.approx(22.26, abs=0.01)
    assert "written to" in capsys.readouterr().out


def test_a_lost_replica_counts_with_the_time_until_another_one_served(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    failure = {"part": "replica", "name": "replica0", "silent_s": 0.5, "serve_s": 9.0}
    lines = [failure | {"step": 3}, {"part": "trainer", "serve_s": 1.0, "step": 4}]
    (run / "failures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    losses = profile_run(run).losses
    assert (losses.lost_replicas, losses.detect_s, losses.restart_s) == (1, 0.5, 9.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: whole.pop("syncs"), "missing required field `syncs`"),
        (lambda whole: whole["decoding"].pop("step_s"), "missing required field `step_s`"),
        (lambda whole: whole["training"].update(token_s=[]), r"length >= 1 - .*training.token_s"),
        (lambda whole: whole["training"].update(token_s=[1e300]), r"float` <= .*token_s\[0\]"),
        (lambda whole: whole["training"].update(ranks=10**30), r"int` <= .*training.ranks"),
        (lambda whole: whole["decoding"].update(kv_cache_tokens=0), r">= 1 - .*kv_cache_tokens"),
        (lambda whole: whole["decoding"].update(step_s=5e-324, request_s=0), "at least 1e-09"),
        (lambda whole: whole["losses"].update(restart_s=-5), r">= 0.0 - .*losses.restart_s"),
        (lambda whole: whole.update(groups=[]), r"length >= 1 - .*groups"),
        (lambda whole: whole["groups"].append([]), r"length >= 1 - .*groups\[50\]"),
        (
            lambda whole: whole["groups"][0][0].update(prompt_tokens=[10**15]),
            r"int` <= .*prompt_tokens\[0\]",
        ),
        (lambda whole: whole["groups"][0][0].update(environment_s=[1.0]), "numbers of turns"),
        (lambda whole: whole["decoding"].update(step_s="fast"), "Expected `float`"),
    ],
)
def test_a_profile_that_lacks_something_is_refused_by_the_name_of_the_field(
    tmp_path, change, said, capsys
):
    file = tmp_path / "profile.json"
    main([str(RUN), "--output", str(file)])
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=said):
        read_profile(file)


def test_a_run_without_weight_syncs_is_refused_with_the_missing_metrics(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    with pytest.raises(ConfigError, match="no sync/publish_s, sync/stage_s, sync/pull_stall_ms"):
        profile_run(run)


def test_damaged_records_and_turns_without_a_time_per_token_are_one_error(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    (run / "traces").mkdir(exist_ok=True)
    (run / "traces" / "replica0.jsonl").write_bytes(b"\xff not JSON\n")
    with pytest.raises(ConfigError, match=r"replica0\.jsonl: not JSON"):
        profile_run(run)
    (run / "traces" / "replica0.jsonl").unlink()
    text = (run / "rollouts.jsonl").read_text()
    (run / "rollouts.jsonl").write_text(
        re.sub(r'"inter_token_latency_s": ?[^,}]+', '"inter_token_latency_s": 0.0', text)
    )
    with pytest.raises(ConfigError, match="no timings"):
        profile_run(run)
