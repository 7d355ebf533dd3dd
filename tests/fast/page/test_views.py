"""What the page shows of runs: made ones, as the run's own writers write them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fast.page.pages import Asked, asked
from tests.support.made_run import BEGIN_S, GROUP_SIZE, STALENESS, STEP_S, made_run
from torchtitan_rl.observability.explain import diagnose, summarize
from torchtitan_rl.observability.rollouts import RolloutLog
from torchtitan_rl.observability.sinks import MetricsLog, RowKind, is_known
from torchtitan_rl.page.details import MAX_TOKEN_TEXT, MAX_TOKENS
from torchtitan_rl.page.values import MAX_TEXT

STEPS, ROLLOUTS = 20, 10


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "run", steps=STEPS, rollouts=ROLLOUTS)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Iterator[Asked]:
    with asked(run_dir) as one:
        yield one


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to write into."""
    return shutil.copytree(run_dir, tmp_path / "run")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_overview_says_what_the_rows_say(page: Asked, run_dir: Path) -> None:
    shown = page.get("overview")
    rows = [row for row in rows_of(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert (shown["step"], shown["num_steps"], shown["is_live"]) == (STEPS, STEPS, False)
    assert shown["learns"] == "yes"
    last_third = [row["train/reward_mean"] for row in rows[-(STEPS // 3) :]]
    assert shown["reward"]["last"] == pytest.approx(sum(last_third) / len(last_third))
    assert shown["seconds_per_step"] == STEP_S
    assert shown["elapsed_s"] == STEPS * STEP_S
    assert shown["staleness"]["cap"] == STALENESS
    assert sum(shown["failures"].values()) == STEPS * ROLLOUTS
    assert shown["tokens"]["generated"] == rows[-1]["total/tokens_generated"]
    assert sum(one["seconds"] for one in shown["times"]) == pytest.approx(STEPS * STEP_S)
    assert len(shown["evaluations"]) == 11
    assert shown["warnings"] == []
    assert shown["is_read"]


def test_the_overview_explains_as_explain_does(page: Asked, run_dir: Path) -> None:
    from torchtitan_rl.commands.explain import read_facts

    shown, facts = page.get("overview"), read_facts(run_dir)
    assert shown["summary"] == summarize(facts)
    assert [one["what"] for one in shown["found"]] == [one.what for one in diagnose(facts)]


def test_each_metric_of_the_rows_is_a_series_over_steps_seconds_and_tokens(
    page: Asked, run_dir: Path
) -> None:
    names = page.get("metrics")["names"]
    found = page.get("metrics", names="train/reward_mean,evaluation/reward_mean,nothing")
    rows = [row for row in rows_of(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert set(found["series"]) == {"train/reward_mean", "evaluation/reward_mean"}
    series, axis = found["series"]["train/reward_mean"], found["axes"]["step"]
    assert series == {"axis": "step", "value": [row["train/reward_mean"] for row in rows]}
    assert axis["step"] == list(range(1, STEPS + 1))
    assert axis["seconds"] == [STEP_S * step for step in axis["step"]]
    assert axis["tokens"] == [row["total/tokens_generated"] for row in rows]
    assert found["axes"]["evaluation"]["tokens"][0] == 0.0
    own = {"step", "kind", "wall_time_s", "version"}
    assert set(names) == {name for row in rows_of(run_dir / "metrics.jsonl") for name in row} - own


def test_the_catalogue_explains_each_metric_that_can_be_recorded(page: Asked) -> None:
    catalogue = page.get("/api/catalogue")
    assert all(one["meaning"] and one["unit"] and one["section"] for one in catalogue)
    known = {one["name"] for one in catalogue}
    families = tuple(name.removesuffix("*") for name in known if name.endswith("/*"))
    for name in page.get("metrics")["names"]:
        assert is_known(name)
        assert name in known or name.startswith(families)


def test_rollouts_are_found_by_each_filter_and_in_each_order(page: Asked, run_dir: Path) -> None:
    rows = rows_of(run_dir / "rollouts.jsonl")
    everything = page.get("rollouts", limit=1000)
    assert everything["total"] == len(rows) == len(everything["rows"])
    by_number = {one["n"]: one for one in everything["rows"]}

    def numbers(**parameters: Any) -> list[int]:
        return [one["n"] for one in page.get("rollouts", limit=1000, **parameters)["rows"]]

    filters = {
        ("step", 3): lambda one: one["step"] == 3,
        ("step_min", 15): lambda one: one["step"] >= 15,
        ("step_max", 2): lambda one: one["step"] <= 2,
        ("split", "evaluation"): lambda one: one["split"] == "evaluation",
        ("status", "max_turns"): lambda one: one["status"] == "max_turns",
        ("reward_min", 0.6): lambda one: one["reward"] is not None and one["reward"] >= 0.6,
        ("reward_max", 0.3): lambda one: one["reward"] is not None and one["reward"] <= 0.3,
        ("age_min", 2): lambda one: one["age_max"] is not None and one["age_max"] >= 2,
        ("chosen", "best"): lambda one: one["chosen"] == "best",
        ("problem", rows[-1]["problem_id"]): lambda one: (
            one["problem_id"] == rows[-1]["problem_id"]
        ),
        ("group", rows[-1]["group_id"]): lambda one: one["group_id"] == rows[-1]["group_id"],
    }
    for (name, value), holds in filters.items():
        expected = {n for n, one in by_number.items() if holds(one)}
        assert set(numbers(**{name: value})) == expected != set(), name
    for name, key in {"reward": "reward", "tokens": "tokens", "age": "age_max"}.items():
        values = [by_number[n][key] for n in numbers(sort=f"-{name}")]
        known = [value for value in values if value is not None]
        assert values == sorted(known, reverse=True) + [None] * (len(values) - len(known))
    assert numbers(offset=5)[:3] == numbers()[5:8]


def test_a_search_finds_the_words_of_problems_and_answers(page: Asked, run_dir: Path) -> None:
    rows = rows_of(run_dir / "rollouts.jsonl")

    def texts(row: dict[str, Any]) -> str:
        return " ".join(message["content"] for message in row["messages"])

    expected = sum("Frida" in texts(row) and "Otto" in texts(row) for row in rows)
    assert page.get("rollouts", q="frida otto")["total"] == expected > 0
    assert (
        page.get("rollouts", q="ott", limit=1)["total"] == page.get("rollouts", q="otto")["total"]
    )
    assert page.get("rollouts", q='") OR (" \u0000 NEAR( *')["total"] == 0


def test_a_rollout_is_shown_token_by_token_with_its_siblings(page: Asked, run_dir: Path) -> None:
    row = rows_of(run_dir / "rollouts.jsonl")[-1]
    brief = page.get("rollouts", sort="-step", split="train", limit=1)["rows"][0]
    shown = page.get(f"rollouts/{brief['n']}")
    assert shown["brief"] == brief
    assert brief["rollout_id"] == row["rollout_id"]
    assert shown["messages"] == row["messages"]
    assert shown["problem"] == row["problem"]
    assert {one["group_id"] for one in shown["siblings"]} == {row["group_id"]}
    assert len(shown["siblings"]) == GROUP_SIZE - 1
    for turn, was in zip(shown["turns"], row["turns"], strict=True):
        assert [one["id"] for one in turn["tokens"]] == was["token_ids"]
        assert [one["logprob"] for one in turn["tokens"]] == was["logprobs"]
        assert [one["mask"] for one in turn["tokens"]] == was["loss_mask"]
        assert [one["age"] for one in turn["tokens"]] == [
            row["version"] - 1 - version for version in was["versions"]
        ]
        assert "".join(one["text"] for one in turn["tokens"]) == was["text"]


def test_turns_that_extend_another_turn_name_it(own_run: Path) -> None:
    row = rows_of(own_run / "rollouts.jsonl")[-1]
    first = {**row["turns"][0], "prompt_token_ids": [1, 2], "token_ids": [3]}
    after = {**first, "prompt_token_ids": [1, 2, 3, 4], "token_ids": [5]}
    other = {**first, "prompt_token_ids": [9], "token_ids": [3]}
    third = {**first, "prompt_token_ids": [1, 2, 3, 4, 5, 6], "token_ids": [7]}
    append(own_run / "rollouts.jsonl", row | {"turns": [first, after, other, third]})
    with asked(own_run) as page:
        total = page.get("rollouts")["total"]
        turns = page.get(f"rollouts/{total}")["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, None, 1]


def test_the_timeline_covers_all_processes_and_says_why_they_wait(page: Asked) -> None:
    shown = page.get("timeline", width=400)
    names = [one["name"] for one in shown["processes"]]
    assert names == ["controller", "replica0 rank 0", "replica1 rank 0", "trainer rank 0"]
    trainer = shown["processes"][-1]
    total_s = shown["total_ms"] / 1e3
    assert trainer["busy_share"] + sum(trainer["idle_s"].values()) / total_s == pytest.approx(1.0)
    assert max(trainer["idle_s"], key=trainer["idle_s"].get) == "waits for rollouts"
    assert shown["begin_unix_s"] == pytest.approx(BEGIN_S + 0.2, abs=1.0)
    assert [one["step"] for one in shown["steps"]] == list(range(1, STEPS + 1))
    assert sum(span[3] for span in trainer["tracks"][0]["spans"]) == 2 * STEPS


def test_a_part_of_the_timeline_has_about_as_many_spans_as_pixels(page: Asked) -> None:
    whole = page.get("timeline", width=20)
    assert all(
        len(track["spans"]) <= 2 * 20 + 2 for one in whole["processes"] for track in one["tracks"]
    )
    part = page.get("timeline", width=1000, **{"from": 50_000, "to": 60_000})
    assert (part["from"], part["to"]) == (50_000, 60_000)
    (decode,) = part["processes"][1]["tracks"]
    assert all(start < 60_000 and start + length > 50_000 for start, length, *_ in decode["spans"])
    assert 14 <= len(decode["spans"]) <= 16


def test_the_trace_can_be_downloaded_whole(page: Asked) -> None:
    events = page.get("trace.json")["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == STEPS * (3 + 2 + 15 + 15)


def test_rows_that_a_run_adds_are_shown(own_run: Path) -> None:
    with asked(own_run) as page:
        before = page.get("rollouts")["total"]
        row = rows_of(own_run / "metrics.jsonl")[-1] | {"kind": "step", "step": STEPS + 1}
        append(own_run / "metrics.jsonl", row)
        with (own_run / "rollouts.jsonl").open("a") as file:
            file.write('{"step":21,')  # a line that is not yet whole
        assert page.get("overview")["step"] == STEPS + 1
        assert page.get("rollouts")["total"] == before
        with (own_run / "rollouts.jsonl").open("a") as file:
            file.write('"split":"train"}\n')
        assert page.get("rollouts")["total"] == before + 1
        assert page.get("overview")["warnings"] == []


def test_rows_of_full_files_and_of_a_file_that_becomes_full_are_shown_once(own_run: Path) -> None:
    rows = rows_of(own_run / "rollouts.jsonl")
    with asked(own_run) as page:
        assert page.get("rollouts")["total"] == len(rows)
        (own_run / "rollouts.jsonl").rename(own_run / "rollouts.000001.jsonl")
        append(own_run / "rollouts.jsonl", rows[-1])
        assert page.get("rollouts")["total"] == len(rows) + 1
        assert page.get("rollouts/1")["brief"]["rollout_id"] == rows[0]["rollout_id"]
    with asked(own_run) as page:
        assert page.get("rollouts")["total"] == len(rows) + 1


def test_steps_that_a_resumed_run_takes_again_replace_the_first_ones(own_run: Path) -> None:
    with asked(own_run) as page:
        page.get("overview")
        log = MetricsLog(own_run, resume_step=10)
        RolloutLog(own_run / "rollouts.jsonl", per_step=1, seed=0, resume_step=10).close()
        assert page.get("overview")["step"] == 10
        assert page.get("rollouts")["steps"] == [0, 10]
        log.record(RowKind.STEP, 11, 11, {"train/reward_mean": 0.123})
        log.close()
        series = page.get("metrics", names="train/reward_mean")["series"]
        assert series["train/reward_mean"]["value"][-1] == 0.123
    with asked(own_run) as page:
        assert page.get("overview")["step"] == 11
        assert page.get("rollouts")["steps"] == [0, 10]


def test_a_run_that_another_one_replaces_or_that_is_removed_is_shown_as_it_is(
    own_run: Path, tmp_path: Path
) -> None:
    with asked(own_run) as page:
        assert page.get("overview")["step"] == STEPS
        shutil.rmtree(own_run)
        assert page.get("overview")["step"] == 0
        assert page.get("rollouts")["total"] == 0
        made_run(own_run, steps=3, rollouts=5, seed=1)
        assert page.get("overview")["step"] == 3
        assert page.get("rollouts", split="train")["total"] == 15
        assert page.get("rollouts/1")["messages"]


def test_a_rollout_whose_file_was_just_cut_is_not_there(own_run: Path) -> None:
    with asked(own_run) as page:
        assert page.get("rollouts/5")
        (own_run / "rollouts.jsonl").write_text("")
        assert page.send("/api/runs/0/rollouts/5").status_code == 404


def test_a_run_that_has_not_written_anything_has_all_views(tmp_path: Path) -> None:
    with asked(tmp_path) as page:
        assert page.get("overview")["summary"] == ["no step has ended yet"]
        assert page.get("metrics") == {"names": []}
        assert page.get("rollouts")["rows"] == []
        assert page.get("timeline")["processes"] == []
        assert page.get("now")["is_live"] is False
        assert page.get("config")["fields"] == {}


def test_what_a_live_run_says_is_shown_until_it_is_old(own_run: Path) -> None:
    now = {"at_unix_s": 1.0, "phase": "rollout", "step": 3, "waits": [{"name": "w", "seconds": 1}]}
    file = own_run / "now.json"
    file.write_text(json.dumps(now))
    with asked(own_run) as page:
        shown = page.get("now")
        assert (shown["is_live"], shown["phase"], shown["step"]) == (True, "rollout", 3)
        assert shown["waits"] == now["waits"]
        assert page.get("overview")["phase"] == "rollout"
        os.utime(file, (1.0, 1.0))
        assert page.get("now")["is_live"] is False


def test_several_runs_are_shown_by_number(run_dir: Path, own_run: Path) -> None:
    with asked(run_dir, own_run) as page:
        assert [one["run"] for one in page.get("/api/runs")] == [0, 1]
        assert page.get("/api/runs/1/overview")["dir"] == str(own_run)


def test_an_evaluations_folder_shows_the_last_of_each_rollout_by_model(
    run_dir: Path, tmp_path: Path
) -> None:
    rows = [r | {"chosen": "all"} for r in rows_of(run_dir / "rollouts.jsonl")[:6]]
    (tmp_path / "settings.json").write_text(json.dumps({"fields": {"seed": 3}}))
    for model in ("first", "second"):
        folder = tmp_path / model / "temperature-1"
        folder.mkdir(parents=True)
        for row in [*rows, rows[0] | {"reward": 0.987}]:
            append(folder / "rollouts.jsonl", row)
    result = {
        "model": "first",
        "temperature": 1.0,
        "reward": {"mean": 0.5, "ci95_low": 0.4, "ci95_high": 0.6},
    }
    (tmp_path / "results.json").write_text(json.dumps({"results": [result]}))
    with asked(tmp_path) as page:
        (shown,) = page.get("/api/runs")
        assert (shown["kind"], shown["step"]) == ("eval", 12)
        of_first = page.get("rollouts", source="first/temperature-1")
        assert of_first["total"] == 6
        assert 0.987 in [one["reward"] for one in of_first["rows"]]
        assert page.get(f"rollouts/{of_first['rows'][0]['n']}")["brief"] == of_first["rows"][0]
        assert page.get("config")["fields"] == {"seed": 3}
        assert page.get("overview")["summary"] == [
            "first, temperature 1.0: reward 0.500 (0.400 to 0.600)"
        ]


HOSTILE = "<script>alert(1)</script>\u202e\x00\x1b[31m\ud800 </script><!-- \u2028"


def test_lines_that_cannot_be_read_are_passed_over_and_counted(own_run: Path) -> None:
    broken = [
        b"[" * 100_000,
        b"{}",
        b'{"step": "3"}',
        b'{"step": -1}',
        b'{"step": 1' + b"0" * 400 + b"}",
        b"\xff\xfe\x00",
        b"7",
        b"",
    ]
    with asked(own_run) as page:
        before = page.get("rollouts")["total"]
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            with (own_run / name).open("ab") as file:
                file.writelines(line + b"\n" for line in broken)
        overview = page.get("overview")
        assert overview["step"] == STEPS
        assert overview["warnings"][0].startswith(f"{2 * len(broken)} lines cannot be read")
        assert page.get("rollouts")["total"] == before


def test_values_of_any_kind_count_as_missing(own_run: Path) -> None:
    odd: list[Any] = [None, 7, -1, 10**400, "x", [], {}, [None, {"a": [[]]}], True, 1e308, HOSTILE]
    row = rows_of(own_run / "rollouts.jsonl")[-1]
    turn = row["turns"][0]
    for value in odd:
        for name in (*row, "nothing"):
            if name not in ("step", "kind"):
                append(own_run / "rollouts.jsonl", row | {name: value})
        for name in turn:
            append(own_run / "rollouts.jsonl", row | {"turns": [value, turn | {name: value}]})
        append(own_run / "metrics.jsonl", {"kind": value, "step": 1})
        metrics = rows_of(own_run / "metrics.jsonl")[-2]
        append(
            own_run / "metrics.jsonl", dict.fromkeys(metrics, value) | {"kind": "step", "step": 30}
        )
        for name in ("identity.json", "launch.json", "now.json", "manifest.json"):
            (own_run / name).write_text(
                json.dumps({"num_steps": value, "schedule.staleness": value})
            )
        with asked(own_run) as page:
            for view in ("overview", "now", "config", "timeline", "metrics"):
                page.get(view)
            shown = page.get("rollouts", limit=1000, sort="-step")
            for one in shown["rows"][:60]:
                page.get(f"rollouts/{one['n']}")


def test_damaged_traces_are_shown_as_far_as_they_can_be_read(own_run: Path) -> None:
    odd: list[Any] = [None, 7, -1, 10**400, 1e300, "x", [], {}, [[["x"]]], HOSTILE]
    with (own_run / "traces" / "odd.1.jsonl").open("a") as file:
        for value in odd:
            named = {"name": "thread_name", "ph": "M", "tid": 1, "args": {"name": value}}
            span = {"name": "s", "ph": "X", "ts": 1.8e15, "dur": 5.0, "tid": 1}
            for event in (value, named, span, *(span | {name: value} for name in span)):
                file.write(json.dumps(event) + "\n")
        file.write("[" * 100_000 + "\n" + "x" * 3_000_000 + "\n" + json.dumps(span) + "\n")
    (own_run / "traces" / "clocks.json").write_text("[" * 100_000)
    with asked(own_run) as page:
        shown = page.get("timeline")
        assert {"controller", "odd"} <= {one["name"] for one in shown["processes"]}
        page.get("trace.json")


def test_no_temporary_file_has_a_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with asked(run_dir) as page:
        page.get("rollouts")
        for method in ("GET", "HEAD"):
            for parts in ("bytes=x", "bytes=999999999-", "bytes=0-1"):
                path, headers = "/api/runs/0/trace.json", {"range": parts}
                assert page.send(path, method=method, headers=headers).status_code == 200
        assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_too_long_for_the_memory_is_passed_over(
    own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_rl.page.index.MAX_LINE_BYTES", 100_000)
    row = rows_of(own_run / "rollouts.jsonl")[-1]
    with asked(own_run) as page:
        before = page.get("rollouts")["total"]
        append(own_run / "rollouts.jsonl", row | {"cause": "x" * 350_000})
        append(own_run / "rollouts.jsonl", row | {"cause": "found"})
        assert page.get("rollouts")["total"] == before + 1
        assert page.get("rollouts", q="found")["total"] == 1
        assert page.get("overview")["warnings"][0].startswith("1 lines cannot be read")


def test_hostile_text_is_text_and_bounded(own_run: Path) -> None:
    row = rows_of(own_run / "rollouts.jsonl")[-1]
    long = HOSTILE + "x" * 1_000_000
    messages = [{"role": HOSTILE, "content": long, "tool_calls": [{"name": HOSTILE}]}]
    turn = row["turns"][0] | {"text": long, "replica": HOSTILE}
    own = {"messages": messages, "turns": [turn], "problem": {HOSTILE: long}, "group_id": long}
    append(own_run / "rollouts.jsonl", row | own)
    with asked(own_run) as page:
        total = page.get("rollouts")["total"]
        shown = page.get(f"rollouts/{total}")
    (message,) = shown["messages"]
    assert message["role"] == HOSTILE.replace("\ud800", "?")
    assert message["content"].startswith(HOSTILE.replace("\ud800", "?"))
    assert f"[cut: {len(long):,} characters]" in message["content"]
    assert len(json.dumps(shown)) < 12 * MAX_TEXT
    assert all(len(one["text"]) <= MAX_TOKEN_TEXT for one in shown["turns"][0]["tokens"])


def test_tokens_that_never_become_a_character_are_not_decoded_again_and_again(
    own_run: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(own_run / "policy" / "tokenizer.json"))
    half = next(n for n in range(tokenizer.get_vocab_size()) if tokenizer.decode([n]) == "\ufffd")
    row = rows_of(own_run / "rollouts.jsonl")[-1]
    turn = row["turns"][0] | {"token_ids": [half] * MAX_TOKENS}  # half a minute, if they are
    append(own_run / "rollouts.jsonl", row | {"turns": [turn]})
    with asked(own_run) as page:
        tokens = page.get(f"rollouts/{page.get('rollouts')['total']}")["turns"][0]["tokens"]
    assert {one["text"] for one in tokens[:100]} == {"", "\ufffd" * 8}


def test_names_that_are_not_text_are_shown(own_run: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/run\xff"))
    shutil.copytree(own_run, folder)
    (folder / "launch.json").write_text(json.dumps({"resume_command": HOSTILE}))
    append(
        folder / "metrics.jsonl", {"kind": "step", "step": STEPS + 1, f"train/ended_{HOSTILE}": 3}
    )
    (folder / "traces" / os.fsdecode(b"odd\xff.1.jsonl")).write_text("")
    (folder / os.fsdecode(b"model\xff") / "temperature-1").mkdir(parents=True)
    append(folder / os.fsdecode(b"model\xff/temperature-1/rollouts.jsonl"), {"step": 1})
    with asked(folder) as page:
        assert page.get("/api/runs")[0]["name"] == "run?"
        assert page.get("rollouts", source="model?/temperature-1")["total"] == 1
        names = page.get("metrics")["names"]
        assert page.get("metrics", names=names[0])["series"]
        for view in ("overview", "config", "timeline"):
            page.get(view)


def test_rows_with_many_names_are_fewer(tmp_path: Path) -> None:
    names = {f"train/m{n}": 1.0 for n in range(2_500)}
    for step in range(1, 1_001):
        append(tmp_path / "metrics.jsonl", {"kind": "step", "step": step} | names)
    with asked(tmp_path) as page:
        page.get("overview")
        columns = page.page.runs[0].columns["step"]
        assert len(columns.rows(most=2_000)) * len(names) <= 1_000_000
        assert columns.rows(most=2_000)[-1]["step"] == 1_000


def test_a_run_without_a_tokenizer_shows_ids(own_run: Path) -> None:
    shutil.rmtree(own_run / "policy")
    with asked(own_run) as page:
        tokens = page.get("rollouts/1")["turns"][0]["tokens"]
    assert all(one["text"] is None and one["id"] is not None for one in tokens)


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
