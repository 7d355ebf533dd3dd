"""What the page shows of a run that was recorded: engines, trainer and processes were real."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.page.pages import Asked, asked
from tests.fast.page.test_views import rows_of
from tests.support.made_run import POLICY

RUN = Path(__file__).parents[2] / "support" / "recorded_run"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run_dir.mkdir()
    for file in RUN.iterdir():
        (run_dir / file.name).symlink_to(file)
    launch = json.loads((RUN / "launch.json").read_text()) | {"policy_dir": str(POLICY)}
    (run_dir / "launch.json").unlink()
    (run_dir / "launch.json").write_text(json.dumps(launch))
    with asked(run_dir) as one:
        yield one


def test_every_rollout_is_shown_with_the_text_and_the_age_of_its_tokens(page: Asked) -> None:
    rows = rows_of(RUN / "rollouts.jsonl")
    briefs = page.get("rollouts", limit=1000, sort="step")["rows"]
    assert {one["rollout_id"] for one in briefs} == {row["rollout_id"] for row in rows}
    ages = set()
    for row, n in zip(rows, sorted(one["n"] for one in briefs), strict=True):
        shown = page.get(f"rollouts/{n}")
        assert shown["brief"]["rollout_id"] == row["rollout_id"]
        assert shown["messages"] == row["messages"]
        for turn, was in zip(shown["turns"], row["turns"], strict=True):
            assert "".join(one["text"] for one in turn["tokens"]) == was["text"]
            ages |= {one["age"] for one in turn["tokens"] if one["mask"]}
    assert ages == {0, 1}


def test_ratios_are_those_of_the_recorded_logprobs(page: Asked) -> None:
    (brief,) = page.get("rollouts", split="train", sort="-step", limit=1)["rows"]
    tokens = page.get(f"rollouts/{brief['n']}")["turns"][0]["tokens"]
    trained = [one for one in tokens if one["mask"]]
    assert trained
    for one in trained:
        expected = math.exp(one["trainer_logprob"] - one["logprob"])
        assert one["ratio"] == pytest.approx(expected)


def test_the_processes_of_the_run_are_on_its_timeline(page: Asked) -> None:
    shown = page.get("timeline")
    names = {one["name"]: one for one in shown["processes"]}
    assert set(names) == {"controller", "replica0 rank 0", "replica1 rank 0", "trainer rank 0"}
    for name, one in names.items():
        covered: dict[str, Any] = one["idle_s"]
        share = one["busy_share"] + sum(covered.values()) / (shown["total_ms"] / 1e3)
        assert name == "controller" or share == pytest.approx(1.0, abs=1e-3)
    assert "the run is starting" in names["trainer rank 0"]["idle_s"]


def test_the_overview_and_the_configuration_are_those_of_the_run(page: Asked) -> None:
    shown = page.get("overview")
    assert (shown["step"], shown["num_steps"], shown["staleness"]["cap"]) == (6, 6, 1)
    assert [one["step"] for one in shown["evaluations"]] == [0, 3, 6]
    tokens = shown["tokens"]
    of_fate = ("trained", "masked", "discarded", "buffered")
    assert tokens["generated"] == sum(tokens[name] or 0 for name in of_fate)
    assert page.get("config")["resume_command"].endswith("--checkpoint.resume")
    assert page.get("config")["resume_note"].startswith("All ")
