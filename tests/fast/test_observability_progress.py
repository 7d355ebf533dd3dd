import io

import pytest

from torchtitan_rl.observability.progress import (
    NoProgress,
    PlainProgress,
    ProgressState,
    RichProgress,
    describe_step,
    format_seconds,
    make_progress,
)


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


def test_plain_progress_is_one_line_a_step_a_validation_and_a_message() -> None:
    clock, stream = Clock(), io.StringIO()
    state = ProgressState(50, clock=clock)
    progress = PlainProgress(state, stream)
    state.start_steps()
    state.end_validation(0.25)
    progress.validation_ended()
    state.phase = "train"
    progress.phase_changed()
    run_steps(state, clock, [65])
    progress.step_ended()
    progress.say("replica 1 is lost")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "[0:00] validation after step 0: reward 0.250",
        "[1:05] step 1/50  reward 0.500  validation 0.250  1,840 tok/s  ETA 53:05",
        "[1:05] replica 1 is lost",
    ]


def test_rich_progress_shows_phase_step_and_messages() -> None:
    clock, stream = Clock(), io.StringIO()
    state = ProgressState(50, clock=clock)
    progress = RichProgress(state, stream)
    state.phase = "rollout"
    progress.phase_changed()
    run_steps(state, clock, [65])
    progress.step_ended()
    progress.say("[not markup] is kept")
    progress.close()
    text = stream.getvalue()
    assert "rollout" in text
    assert "step 1/50  reward 0.500" in text
    assert "[not markup] is kept" in text


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    state, stream = ProgressState(1), io.StringIO()
    assert isinstance(make_progress("auto", state, stream), PlainProgress)
    assert isinstance(make_progress("plain", state, stream), PlainProgress)
    assert isinstance(make_progress("none", state, stream), NoProgress)
    rich = make_progress("rich", state, stream)
    assert isinstance(rich, RichProgress)
    rich.close()


def test_auto_is_rich_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    progress = make_progress("auto", ProgressState(1), Terminal())
    assert isinstance(progress, RichProgress)
    progress.close()


def test_without_a_display_messages_still_reach_the_user(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_progress("none", ProgressState(1)).say("replica 1 is lost")
    assert capsys.readouterr().err == "replica 1 is lost\n"


def test_what_is_not_known_is_not_shown() -> None:
    assert describe_step(ProgressState(3)) == "step 0/3"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3725, "1:02:05"), (59.6, "1:00")]
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
