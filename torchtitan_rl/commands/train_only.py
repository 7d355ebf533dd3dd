"""A run with ``--mode train``: takes its steps on the recorded rollouts of another run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from torchtitan_rl.commands.console import StopSignals
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.observability.recorded import RecordedRun, read_recorded, require_policy
from torchtitan_rl.orchestration.batching import EpisodeBatcher, GrammarReplay
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.records import Recorder, StepRecord
from torchtitan_rl.orchestration.run_state import Trainer
from torchtitan_rl.rollout.episodes import has_signal
from torchtitan_rl.rollout.rendering import load_tokenizer


def recorded_rollouts(prepared: PreparedRun) -> RecordedRun | None:
    """The checked run whose rollouts a run with ``mode`` ``train`` trains on; None for other runs.
    Raises ConfigError if they are missing or damaged, or were not sampled as they are trained."""
    config = prepared.config
    if config.rollouts is None:
        return None
    recorded = read_recorded(config.rollouts, option="rollouts")
    if config.num_steps > recorded.num_steps:
        raise ConfigError(
            f"num_steps is {config.num_steps}: the run in {config.rollouts} has taken "
            f"{recorded.num_steps} steps; give at most that"
        )
    require_policy(recorded, prepared.policy_dir, config.policy.checkpoint)
    name, temperature = "rollout.sampling.temperature", config.rollout.sampling.temperature
    if recorded.identity.get(name) != temperature:
        raise ConfigError(
            f"{name} is {temperature:g}: the rollouts in {config.rollouts} were sampled at "
            f"{recorded.identity.get(name)}; give that"
        )
    recorded.check(1, config.num_steps)
    _, groups = next(recorded.steps(1, 1))
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    needs_scores = config.teacher.is_on and not config.teacher.is_in_trainer
    if needs_scores and turns and all(turn.teacher is None for turn in turns):
        raise ConfigError(
            f"teacher is given: the rollouts in {config.rollouts} have no scores of a teacher; "
            "give a run with a teacher, or none"
        )
    return recorded


async def train_on_recorded(
    recorded: RecordedRun,
    prepared: PreparedRun,
    trainer: Trainer,
    recorder: Recorder,
    signals: StopSignals,
) -> None:
    """Take all steps. Raises StopRequested after the current one if a signal was received."""
    config, version, output = prepared.config, 0, None
    batcher = batcher_of(prepared, load_tokenizer(prepared.policy_dir))
    is_stopping = asyncio.Event()
    signals.stop_cleanly = is_stopping.set
    ended_s = time.monotonic()
    for step, groups in recorded.steps(1, config.num_steps):
        if is_stopping.is_set():
            raise StopRequested(step - 1)
        started_s = time.monotonic()
        with recorder.phase("train"):
            batched = await asyncio.to_thread(batcher, groups)
            output = None if batched.batch is None else await trainer.train_step(batched.batch)
        version = version if output is None else output.version
        terms = None if output is None else output.tokens
        flat = {one.group_id for one in groups if not has_signal(one.rollouts, config.rollout)}
        read_s, train_s = started_s - ended_s, time.monotonic() - started_s
        ended_s = time.monotonic()
        recorder.record_step(
            StepRecord(
                step=step,
                version=version,
                groups=groups,
                tokens=batched.tokens,
                episodes=batched.episodes,
                trainer_logprobs=() if terms is None else batched.by_episode(terms.logprobs),
                trainer={} if output is None else output.metrics,
                publish_s=0.0,
                rollout_s=read_s,
                train_s=train_s,
                wall_s=read_s + train_s,
                flat=frozenset(flat),
            )
        )
    expected = recorded.digest(config.num_steps)
    if output is not None and expected is not None:
        is_equal = output.metrics["weights_digest"] == expected
        recorder.say(
            f"the weights after step {config.num_steps} {'equal' if is_equal else 'differ from'} "
            f"those of {recorded.run_dir}"
        )


def batcher_of(prepared: PreparedRun, tokenizer: Any) -> EpisodeBatcher:
    config, vocab_size = prepared.config, read_architecture(prepared.policy_dir).vocab_size
    return EpisodeBatcher(
        config=config.rollout,
        row_len=config.trainer.max_episode_tokens,
        teacher=config.teacher,
        replay_grammars=GrammarReplay(tokenizer, vocab_size),
    )
