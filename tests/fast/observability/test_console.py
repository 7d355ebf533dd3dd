from __future__ import annotations

import io
import re
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path

import pytest

from tests.fast.observability.test_metrics import make_rollout, make_turn
from torchtitan_rl.observability.console import (
    STEP_WORDS,
    Console,
    EvaluationState,
    ProgressState,
    usual_step_s,
)
from torchtitan_rl.observability.engine import Overlap
from torchtitan_rl.orchestration.records import BufferStates

METRICS = {
    "train/reward_mean": 0.61,
    "tokens/generated_per_second": 1840.4,
    "policy/staleness_mean": 1.24,
}
BUFFER = BufferStates(waiting=0, running=20, finished=7, batched=4, capacity=31)
OVERLAP = Overlap(trainer_idle_share=0.124, generator_idle_share=0.031)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_steps(state: ProgressState, clock: Clock, durations: list[float]) -> None:
    for duration in durations:
        clock.now += duration
        state.end_step(state.step + 1, METRICS)


def test_the_time_left_is_the_median_step_times_what_is_left_without_the_start_up() -> None:
    clock = Clock()
    state = ProgressState(12, step=2, clock=clock)
    clock.now += 100  # start-up
    state.start_steps()
    assert state.eta_s is None
    run_steps(state, clock, [4, 50, 6])  # one step was held up
    assert state.eta_s == 7 * 6
    clock.now += 2
    assert state.eta_s == 7 * 6 - 2
    clock.now += 1000
    assert state.eta_s == 0


def test_a_step_shows_what_is_known_and_of_an_asynchronous_run_age_buffer_and_idle_shares() -> None:
    state = ProgressState(3, clock=Clock())
    assert state.describe() == "step 0/3"
    state.end_step(1, METRICS, buffer=BUFFER, overlap=OVERLAP)
    text = "reward 0.610  1,840 tok/s  age 1.2  ready 7/31  idle 12%+3%"
    assert state.describe() == f"step 1/3  {text}  ETA 0:00"
    state.end_step(2, METRICS)
    assert state.describe() == "step 2/3  reward 0.610  1,840 tok/s  ETA 0:00"


def test_the_words_of_a_step_are_explained_alike_by_help_and_docs() -> None:
    clock = Clock()
    state = ProgressState(50, step=8, clock=clock)
    state.evaluation = 0.58
    clock.now += 1
    state.end_step(9, METRICS, num_failed=2, buffer=BUFFER, overlap=OVERLAP)
    _, *explained, _ = STEP_WORDS.splitlines()
    pairs = [line.strip().split("  ", 1) for line in explained]
    words = [example.split()[-1 if example[0].isdigit() else 0] for example, _ in pairs]
    assert set(words) - {"[1:20]"} == set(re.findall(r"[a-zA-Z]\S+", state.describe()))
    docs = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    for example, meaning in pairs:
        assert f"| `{example}` | {meaning.strip()} |" in docs


def test_a_terminal_of_110_columns_has_room_for_an_asynchronous_run_and_messages_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, terminal = Clock(), Terminal()
    state = ProgressState(500, step=399, clock=clock)
    state.evaluation = 0.512
    clock.now += 100
    state.end_step(400, METRICS, buffer=BUFFER, overlap=OVERLAP)
    assert len(f"[99:59:59] {state.describe()}") <= 110
    monkeypatch.setenv("COLUMNS", "110")
    console = Console("auto", total=500, stream=terminal)
    state.phase = "checkpoint"
    state.show_on(console)
    console.line("not shown twice")
    console.say("[not markup] is kept")
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"checkpoint +step 400/500 .* ETA 2:46:40", text)  # cut where it is too long
    assert "[not markup] is kept" in text
    assert "not shown twice" not in text


def test_a_line_that_a_full_disk_refuses_does_not_end_the_run() -> None:
    full = TextIOWrapper(BufferedWriter(FileIO("/dev/full", "w")))
    Console("plain", total=3, stream=full).say("step 1")
    with pytest.raises(OSError, match="No space left"):
        full.close()


@pytest.mark.parametrize(
    "row",
    [
        '{"kind":"step","step":2,"time/step_s":"x"}',
        '{"kind":"step","step":2,"time/step_s":NaN}',
        '{"kind":"step","step":null,"time/step_s":2}',
        '{"kind":"resumed"}',
        200_000 * "[",
    ],
)
def test_damaged_rows_have_no_usual_time(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
    assert usual_step_s(tmp_path) is None


def test_an_evaluation_estimates_from_new_rollouts_and_prints_each_tenth() -> None:
    now, stream = 0.0, io.StringIO()
    state = EvaluationState(20, kept=10, clock=lambda: now)
    console = Console("plain", total=20, done=10, stream=stream)
    now = 100.0  # engines start
    state.begin("base, temperature 1")
    for _ in range(5):
        now += 2.0
        state.end_rollout(make_rollout(0.5, make_turn((1,), (2, 3))))
        state.show_on(console)
    assert state.eta_s == pytest.approx(10.0)
    state.pause("loads another")
    now += 50.0
    assert state.eta_s == pytest.approx(10.0)
    assert stream.getvalue().splitlines() == [
        "base, temperature 1: rollouts 12/20  reward 0.500  1 tok/s  ETA 0:16",
        "base, temperature 1: rollouts 14/20  reward 0.500  1 tok/s  ETA 0:12",
    ]
