import io
import re
from pathlib import Path

import pytest

from torchtitan_rl.observability.asynchrony import Overlap
from torchtitan_rl.observability.progress import (
    STEP_WORDS,
    LineProgress,
    ProgressState,
    RichProgress,
    describe_evaluation,
    describe_step,
    format_seconds,
    make_progress,
)
from torchtitan_rl.orchestration.records import BufferStates


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
        state.end_step(state.step + 1, reward=0.5, tokens_per_second=1840.4)


def test_the_time_left_is_the_median_step_times_what_is_left_without_the_start_up() -> None:
    clock = Clock()
    state = ProgressState(10, clock=clock)
    clock.now += 100  # start-up
    state.start_steps()
    assert state.eta_s is None
    run_steps(state, clock, [4, 50, 6])  # one step was held up
    assert state.eta_s == 7 * 6
    clock.now += 2
    assert state.eta_s == 7 * 6 - 2
    clock.now += 1000
    assert state.eta_s == 0


def test_a_resumed_run_counts_only_the_steps_that_are_left() -> None:
    clock = Clock()
    state = ProgressState(10, step=8, clock=clock)
    state.start_steps()
    run_steps(state, clock, [3])
    assert (state.step, state.eta_s) == (9, 3)


def test_plain_progress_is_one_line_a_step_a_evaluation_and_a_message() -> None:
    clock, stream = Clock(), io.StringIO()
    state = ProgressState(50, clock=clock)
    progress = LineProgress(stream, state)
    state.start_steps()
    state.end_evaluation(0, 0.25)
    progress.say(describe_evaluation(state))
    state.phase = "train"
    progress.update()
    run_steps(state, clock, [65])
    progress.update(describe_step(state))
    progress.say("replica 1 is lost")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "[0:00] evaluation after step 0: reward 0.250",
        "[1:05] step 1/50  reward 0.500  val 0.250  1,840 tok/s  ETA 53:05",
        "[1:05] replica 1 is lost",
    ]


def test_rich_progress_shows_phase_step_and_messages() -> None:
    clock, stream = Clock(), io.StringIO()
    state = ProgressState(50, clock=clock)
    progress = RichProgress(state, stream)
    state.phase = "rollout"
    progress.update()
    run_steps(state, clock, [65])
    progress.update(describe_step(state))
    progress.say("[not markup] is kept")
    progress.close()
    text = stream.getvalue()
    assert "rollout" in text
    assert "step 1/50  reward 0.500" in text
    assert "[not markup] is kept" in text


ASYNCHRONOUS = {
    "staleness": 1.24,
    "buffer": BufferStates(waiting=0, running=20, finished=7, batched=4, capacity=31),
    "overlap": Overlap(trainer_idle_share=0.124, generator_idle_share=0.031),
}


def test_an_asynchronous_run_shows_age_buffer_and_idle_shares() -> None:
    clock = Clock()
    state = ProgressState(3, clock=clock)
    state.end_step(1, reward=0.5, tokens_per_second=None, **ASYNCHRONOUS)
    text = describe_step(state)
    assert text == "step 1/3  reward 0.500  age 1.2  ready 7/31  idle 12%+3%  ETA 0:00"
    state.end_step(2, reward=0.5, tokens_per_second=None)
    assert "age" not in describe_step(state)


def test_the_words_of_a_step_are_explained_alike_by_help_and_docs() -> None:
    clock = Clock()
    state = ProgressState(50, step=8, clock=clock)
    state.end_evaluation(3, 0.58)
    clock.now += 1
    state.end_step(9, reward=0.61, tokens_per_second=1840.0, num_failed=2, **ASYNCHRONOUS)
    _, *explained, _ = STEP_WORDS.splitlines()
    pairs = [line.strip().split("  ", 1) for line in explained]
    words = [example.split()[-1 if example[0].isdigit() else 0] for example, _ in pairs]
    assert set(words) - {"[1:20]"} == set(re.findall(r"[a-zA-Z]\S+", describe_step(state)))
    docs = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    for example, meaning in pairs:
        assert f"| `{example}` | {meaning.strip()} |" in docs


def test_an_asynchronous_runs_line_fits_a_terminal_of_110_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    state = ProgressState(500, step=399, clock=clock)
    state.end_evaluation(3, 0.512)
    clock.now += 100
    state.end_step(400, reward=0.512, tokens_per_second=1234.5, **ASYNCHRONOUS)
    plain, rich = io.StringIO(), Terminal()
    LineProgress(plain, state).update(describe_step(state))
    assert len(plain.getvalue().rstrip()) <= 110
    monkeypatch.setenv("COLUMNS", "110")
    progress = RichProgress(state, rich)
    state.phase = "checkpoint"
    progress.update(describe_step(state))
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rich.getvalue())
    assert re.search(r"checkpoint +step 400/500 .* ETA 2:46:40", text)  # cut where it is too long


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    state, stream = ProgressState(1), io.StringIO()
    assert isinstance(make_progress("auto", state, stream), LineProgress)
    assert isinstance(make_progress("plain", state, stream), LineProgress)
    rich = make_progress("rich", state, stream)
    assert isinstance(rich, RichProgress)
    rich.close()


def test_auto_is_rich_on_a_terminal() -> None:
    progress = make_progress("auto", ProgressState(1), Terminal())
    assert isinstance(progress, RichProgress)
    progress.close()


def test_without_a_display_messages_still_reach_the_user(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = make_progress("none", ProgressState(1))
    progress.update("step 1/1")
    progress.say("replica 1 is lost")
    assert capsys.readouterr() == ("", "replica 1 is lost\n")


def test_what_is_not_known_is_not_shown() -> None:
    assert describe_step(ProgressState(3)) == "step 0/3"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3725, "1:02:05"), (59.6, "1:00")]
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
