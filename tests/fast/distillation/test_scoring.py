"""The scores that a teacher gives to rollouts, and the advantages that follow."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import msgspec
import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.rollouts import PROBLEM
from tests.support.turns import group, rollout, turn, with_kept
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.distillation.scoring import Teachers
from torchtitan_rl.errors import TeacherError
from torchtitan_rl.observability.metrics import teacher_metrics
from torchtitan_rl.observability.rollouts import rollout_from_json, rollout_to_json
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import has_signal, turn_advantages
from torchtitan_rl.rollout.records import short_group, to_bytes, whole_group
from torchtitan_rl.types import Rollout, RolloutGroup, TokenScores


class Scripted:
    """Logprob -t/100 for token t; the K most likely tokens of position i are i, i + 1, ..."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.wrong: TokenScores | None = None

    async def score(self, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        self.asked.append(token_ids)
        if self.wrong is not None:
            return self.wrong
        return TokenScores(logprobs=tuple(-token / 100 for token in token_ids[1:]))

    def num_failures(self) -> int:
        return 3 * len(self.asked)


def taught(*rollouts: Rollout, teacher: Scripted | None = None) -> list[Rollout]:
    found: list[Rollout] = []

    @on_virtual_clock
    async def work() -> None:
        teachers = Teachers({"t": teacher or Scripted()}, lambda _: "t", vocab_size=100)
        for one in rollouts:
            found.append(await teachers.score(one, PROBLEM))

    work()
    return found


GROUP = msgspec.msgpack.Decoder(RolloutGroup)
TWO_TURNS = rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]))


def test_an_episode_of_several_turns_is_scored_once_and_only_at_its_sampled_tokens() -> None:
    teacher = Scripted()
    (scored,) = taught(TWO_TURNS, teacher=teacher)
    assert teacher.asked == [(1, 2, 3, 4, 5, 6)]
    assert [one.teacher for one in scored.turns] == [
        TokenScores(logprobs=(-0.03, -0.04)),
        TokenScores(logprobs=(-0.06,)),
    ]
    assert replace(scored, turns=TWO_TURNS.turns) == TWO_TURNS


def test_each_episode_of_an_edited_history_is_scored_and_unseen_turns_are_not() -> None:
    edited = rollout(turn([1, 2], [3]), turn([1, 9], [4]), turn([8], [5], is_seen=False))
    teacher = Scripted()
    (scored,) = taught(edited, teacher=teacher)
    assert sorted(teacher.asked) == [(1, 2, 3), (1, 9, 4)]
    assert [one.teacher and one.teacher.logprobs for one in scored.turns] == [
        (-0.03,),
        (-0.04,),
        None,
    ]


@pytest.mark.parametrize("logprobs", [(-1.0, math.nan), (-1.0, -math.inf), (-1.0,)])
def test_scores_that_cannot_be_trained_on_are_an_error(logprobs: tuple[float, ...]) -> None:
    teacher = Scripted()
    teacher.wrong = TokenScores(logprobs=logprobs)
    with pytest.raises(ExceptionGroup) as raised:
        taught(rollout(turn([1], [3, 4])), teacher=teacher)
    assert isinstance(raised.value.exceptions[0], TeacherError)
    assert "2 logprobs of 3" in str(raised.value.exceptions[0]) or len(logprobs) == 1


def test_a_part_of_scores_has_its_own_most_likely_tokens() -> None:
    scores = TokenScores(logprobs=(-1.0, -2.0, -3.0), top_ids=b"aabbcc", top_logprobs=b"xxyyzz")
    assert scores.part(1, 3) == TokenScores(
        logprobs=(-2.0, -3.0), top_ids=b"bbcc", top_logprobs=b"yyzz"
    )


def test_the_teachers_part_is_added_to_the_advantage_of_each_token() -> None:
    scored = taught(
        rollout(turn([1], [3, 4], logprobs=[-0.5, -0.25]), reward=1.0),
        rollout(turn([1], [5], logprobs=[-0.1]), rollout_id="g/r1", reward=0.0),
    )
    config = RolloutConfig(group_size=2)
    batcher = EpisodeBatcher(
        config=config, row_len=8, teacher=TeacherConfig(url="t", coefficient=2.0)
    )
    batch = batcher([group(*scored)]).batch
    assert batch is not None
    expected = [0.0, 0.5 + 2 * (-0.03 + 0.5), 0.5 + 2 * (-0.04 + 0.25), 0.0, -0.5 + 2 * 0.05]
    assert batch.advantages.tolist() == pytest.approx(expected)
    alone = replace(batcher, config=replace(config, advantage="none"))([group(*scored)]).batch
    assert alone is not None
    assert alone.advantages.tolist() == pytest.approx([0, 0.94, 0.42, 0, 0.1])


def test_a_token_without_a_known_distribution_or_logprob_gets_nothing_from_the_teacher() -> None:
    one = turn([1], [3, 4, 5], logprobs=[-0.5, math.nan, -0.5])
    (scored,) = taught(rollout(with_kept(one, (b"", b"", None))))
    teacher = TeacherConfig(url="t")
    batched = EpisodeBatcher(config=RolloutConfig(), row_len=8, teacher=teacher)([group(scored)])
    assert batched.batch is not None
    assert batched.batch.advantages.tolist() == pytest.approx([0.0, 0.47, 0.0, 0.0])
    assert batched.tokens.trained == 1


def test_recorded_scores_have_no_part_without_a_teacher() -> None:
    (scored,) = taught(TWO_TURNS)
    batch = EpisodeBatcher(config=RolloutConfig(), row_len=8)([group(scored)]).batch
    assert batch is not None
    assert not batch.advantages.any()


def test_advantage_none_is_no_signal_by_itself() -> None:
    rollouts = [rollout(turn([1], [2]), reward=reward) for reward in (0.0, 1.0)]
    for credit in ("outcome", "turn"):
        config = RolloutConfig(advantage="none", credit=credit)  # type: ignore[arg-type]
        assert turn_advantages(rollouts, config) == [[0.0], [0.0]]
        assert not has_signal(rollouts, config)


def test_scores_survive_the_files_of_a_run() -> None:
    (scored,) = taught(TWO_TURNS)
    row = json.loads(json.dumps(rollout_to_json(group(scored), scored)))
    assert [one.teacher for one in rollout_from_json(row).turns] == [
        one.teacher for one in scored.turns
    ]
    saved = GROUP.decode(to_bytes(short_group(group(scored))))
    assert whole_group(saved).rollouts[0].turns == scored.turns


def test_the_kl_is_the_mean_over_scored_tokens() -> None:
    (scored,) = taught(rollout(turn([1], [30, 60, 90], logprobs=[-0.1, -0.4, math.nan])))
    unscored = rollout(turn([1], [2]))
    found = teacher_metrics([group(scored, unscored)])
    k3 = (math.exp(-0.2) - 1 + 0.2 + math.exp(-0.2) - 1 + 0.2) / 2
    assert found == pytest.approx(
        {"teacher/kl_k1": 0.2, "teacher/kl_k3": k3, "teacher/scored_tokens": 2.0}
    )
    assert teacher_metrics([group(unscored)]) == {}


def test_failures_are_counted_since_the_last_row() -> None:
    teacher = Scripted()
    teachers = Teachers({"t": teacher}, lambda _: "t", vocab_size=100)
    teacher.asked = [(1,)]
    assert teachers.take() == {"teacher/failures": 3.0}
    assert teachers.take() == {"teacher/failures": 0.0}


@on_virtual_clock
async def test_positions_with_tokens_that_the_policy_lacks_are_left_out() -> None:
    teacher = Scripted()
    teacher.wrong = TokenScores(
        logprobs=(-1.0, -2.0),
        top_ids=struct.pack("<4i", 3, 99, 100, 4),
        top_logprobs=struct.pack("<4f", -1.0, -1.5, -0.5, -2.0),
    )
    teachers = Teachers({"t": teacher}, lambda _: "t", num_top=2, vocab_size=100)
    (scored,) = (await teachers.score(rollout(turn([1], [3, 4])), PROBLEM)).turns
    assert scored.teacher is not None
    assert scored.teacher.logprobs == (-1.0, -2.0)
    assert struct.unpack("<4i", scored.teacher.top_ids) == (3, 99, 0, 0)
    top_logprobs = struct.unpack("<4f", scored.teacher.top_logprobs)
    assert top_logprobs[:2] == (-1.0, -1.5)
    assert all(map(math.isnan, top_logprobs[2:]))
