"""The vLLM adapter under the engine loop, judged by `transformers` and by fresh engines."""

from __future__ import annotations

import gzip
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.models import VOCAB_SIZE, hf_logprob_rows, hf_logprobs, tiny_tokenizer
from tests.real.pause_scenarios import FREEZE_STEP
from tests.real.resume_scenarios import LETTERS, REFUSED, TEMPERATURE
from tests.real.runs import run_module
from tests.real.trainer_helpers import trainer
from tests.support import turns
from torchtitan_rl.config.checks import CPU_BLOCK_TOKENS
from torchtitan_rl.orchestration.batching import GrammarReplay
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.token_sets import kept_to_json
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Completion, FinishReason, Grammar, Turn, VersionRun, spans

TOLERANCE = 1e-5  # float32 on both sides
PROMPT = tuple(range(40, 70))
LONG_PROMPT = tuple(40 + index % 97 for index in range(300))
REPEATED_PROMPT = tuple(40 + index % 7 for index in range(100))
PULL_STEP, ABORT_STEP, SPECULATIVE_PULL_STEP, CUT_STRIDE = 20, 30, 8, 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def solo(root: Path) -> dict[str, Any]:
    return run("solo", root)


@pytest.fixture(scope="module")
def tp(root: Path, solo: dict[str, Any]) -> dict[str, Any]:
    return run("tp", root, ranks=2)


@pytest.fixture(scope="module")
def speculative(solo: dict[str, Any]) -> dict[str, Any]:
    seen = dict(solo["speculative"])
    replayed = ("nothing", "regex", "json", "choice", "grammar")
    seen["truncated"] = {name: seen["truncated"][name] for name in replayed}
    return seen


def run(mode: str, root: Path, *, ranks: int = 1) -> dict[str, Any]:
    run_module("tests.real.vllm_scenarios", mode, str(root), ranks=ranks, OMP_NUM_THREADS="1")
    return pickle.loads((root / f"{mode}.pickle").read_bytes())


def untimed(completion: Completion, request_id: str) -> Completion:
    return replace(completion, request_id=request_id, metrics=None)


def logprob_error(
    path: Path,
    completion: Completion,
    prompt: tuple[int, ...] = PROMPT,
    *,
    start: int = 0,
    end: int | None = None,
    temperature: float = 1.0,
) -> float:
    """Largest difference to `transformers` over tokens ``start`` to ``end`` of a completion."""
    expected = hf_logprobs(
        path, prompt + completion.token_ids, num_prompt=len(prompt), temperature=temperature
    )
    pairs = list(zip(expected, completion.logprobs, strict=True))[start:end]
    assert pairs
    return max(abs(mine - theirs) for mine, theirs in pairs)


def test_an_engine_whose_cache_is_too_small_names_the_options_to_change(
    solo: dict[str, Any],
) -> None:
    assert solo["no memory"].startswith(
        "replica has too little memory; of the generator's options, raise kv_cache_bytes (it is "
        "65536), or lower max_model_len (it is 512): To serve at least one request"
    )


def test_the_steps_after_the_pull_of_a_chosen_version_are_profiled(
    solo: dict[str, Any], root: Path
) -> None:
    files = sorted((root / "profile").glob("step2-replica_rank0*.json.gz"))
    assert files
    for file in files:
        with gzip.open(file) as trace:
            names = {event.get("name") for event in json.load(trace)["traceEvents"]}
        # vLLM chooses the kernels of its linear layers by the processor, not that of attention.
        assert any("attention" in str(name) for name in names)


def test_a_short_request_submitted_after_a_long_one_ends_first(solo: dict[str, Any]) -> None:
    assert solo["order"] == ["short", "long"]


def test_a_hot_swap_with_recomputed_kv_is_exact_on_both_sides_of_the_boundary(
    solo: dict[str, Any], root: Path
) -> None:
    old, new = root / "tied-old", root / "tied-new"
    assert solo["mixed"]["report"].version == 1
    assert solo["mixed"]["report"].recomputed
    for name, prompt in (("greedy", PROMPT), ("greedy-long", LONG_PROMPT), ("unseeded", PROMPT)):
        done = solo["mixed"][name]
        assert done.version_runs == (VersionRun(0, 0), VersionRun(PULL_STEP, 1))
        assert logprob_error(old, done, prompt, end=PULL_STEP) < TOLERANCE
        assert logprob_error(new, done, prompt, start=PULL_STEP) < TOLERANCE
        # The two models are far apart, or the lines above would prove nothing.
        assert logprob_error(old, done, prompt, start=PULL_STEP) > 0.1


def test_trap_25_logprobs_are_of_the_distribution_that_was_sampled_from(
    solo: dict[str, Any], root: Path
) -> None:
    done = solo["mixed"]["seeded-warm"]
    path = root / "tied-old"
    assert logprob_error(path, done, end=PULL_STEP, temperature=0.7) < TOLERANCE
    assert logprob_error(path, done, end=PULL_STEP, temperature=1.0) > 0.1


def test_the_scores_of_a_prompt_are_those_of_transformers(solo: dict[str, Any], root: Path) -> None:
    done = solo["scored"]
    for name, prompt in (("scored", LONG_PROMPT), ("own only", PROMPT)):
        expected = hf_logprobs(root / "tied-old", prompt, num_prompt=1)
        assert done[name].prompt_scores.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert done["scored"].prompt_scores == done["scored again"].prompt_scores
    assert done["own only"].prompt_scores.top_ids == b""
    assert done["sampled"].prompt_scores is None
    top_LV = hf_logprob_rows(root / "tied-old", LONG_PROMPT)[:-1]
    scores = done["scored"].prompt_scores
    ids_LK = np.frombuffer(scores.top_ids, dtype="<i4").reshape(-1, 8)
    logprobs_LK = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(-1, 8)
    assert ids_LK.tolist() == np.argsort(-top_LV, axis=1)[:, :8].tolist()
    assert logprobs_LK == pytest.approx(np.take_along_axis(top_LV, ids_LK, 1), abs=TOLERANCE)


def test_an_abort_keeps_the_tokens_so_far(solo: dict[str, Any], root: Path) -> None:
    done = solo["mixed"]["aborted"]
    assert done.finish_reason is FinishReason.ABORT
    assert len(done.token_ids) == ABORT_STEP
    assert logprob_error(root / "tied-old", done, end=PULL_STEP) < TOLERANCE
    assert logprob_error(root / "tied-new", done, start=PULL_STEP) < TOLERANCE


def test_trap_3_kept_kv_is_never_read_by_a_later_request(solo: dict[str, Any], root: Path) -> None:
    kept = solo["kept"]
    cached = len(LONG_PROMPT) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
    assert kept["second"].metrics.cached_tokens == cached  # it does work within one version
    assert kept["third"].metrics.cached_tokens == 0
    assert kept["report"].running_requests == 1
    assert not kept["report"].recomputed
    assert logprob_error(root / "tied-new", kept["third"], LONG_PROMPT) < TOLERANCE
    # The running request did keep its KV: neither model alone explains its later tokens.
    assert logprob_error(root / "tied-old", kept["first"], LONG_PROMPT, end=20) < TOLERANCE
    assert logprob_error(root / "tied-new", kept["first"], LONG_PROMPT, start=21) > 1e-3


def test_an_idle_engine_resets_its_cache_at_a_pull(solo: dict[str, Any]) -> None:
    assert (solo["idle-report"].version, solo["idle-report"].running_requests) == (0, 0)
    assert solo["mixed"]["greedy-long"].metrics.cached_tokens == 0


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_updated_weights_equal_a_fresh_engine_built_from_them(
    solo: dict[str, Any], head: str
) -> None:
    for name, fresh in solo[f"fresh-{head}"].items():
        updated = solo[f"updated-{head}"][name]
        assert updated.token_ids == fresh.token_ids
        assert updated.logprobs == fresh.logprobs
    assert solo["untied-before"]["greedy"].logprobs != solo["fresh-untied"]["greedy"].logprobs


def test_a_bfloat16_checkpoint_is_computed_in_float32(solo: dict[str, Any], root: Path) -> None:
    done = solo["untied-before"]["greedy"]
    assert logprob_error(root / "untied-old", done) < TOLERANCE


def test_a_seeded_request_does_not_depend_on_its_company_or_on_being_recomputed(
    solo: dict[str, Any],
) -> None:
    alone = solo["seeded-alone"]
    assert len(alone.token_ids) == 48
    for other in ("seeded-in-company", "seeded-same-weights"):
        assert solo[other].token_ids == alone.token_ids
        assert solo[other].logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_a_stop_token_ends_a_completion_and_is_part_of_it(solo: dict[str, Any]) -> None:
    whole, stopped = solo["stops"]["whole"], solo["stops"]["stop"]
    first = whole.token_ids.index(whole.token_ids[9])
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(solo["stops"]["min"].token_ids) > 20
    endings = [solo["stops"][f"eos-{seed}"] for seed in range(6)]
    assert FinishReason.STOP in [ending.finish_reason for ending in endings]
    for ending in endings:
        has_stopped = ending.finish_reason is FinishReason.STOP
        assert (258 in ending.token_ids) == has_stopped  # <|im_end|>
        assert 258 not in ending.token_ids[:-1]


def test_a_frozen_engine_keeps_its_requests_and_goes_on_bit_for_bit(solo: dict[str, Any]) -> None:
    seen, undisturbed = solo["paused"]["frozen"], solo["paused"]["undisturbed"]
    assert seen["steps-while-paused"] == FREEZE_STEP
    for name, partial in seen["partials"].items():
        assert len(partial.token_ids) == FREEZE_STEP
        assert partial.token_ids == undisturbed[name].token_ids[:FREEZE_STEP]
        assert partial.logprobs == undisturbed[name].logprobs[:FREEZE_STEP]
        assert partial.versions == (0,) * FREEZE_STEP
        assert seen["done"][name].token_ids == undisturbed[name].token_ids
        assert seen["done"][name].logprobs == undisturbed[name].logprobs
    assert (seen["cut"].finish_reason, len(seen["cut"].token_ids)) == ("abort", FREEZE_STEP)
    assert seen["unfinished"] == 0


def test_trap_6_greedy_requests_cut_ten_times_equal_the_undisturbed_ones(
    solo: dict[str, Any],
) -> None:
    seen, undisturbed = solo["paused"]["cut"], solo["paused"]["undisturbed"]
    num_cuts = 0
    for done in seen["done"]:
        whole = undisturbed[done.request_id]
        assert done.token_ids == whole.token_ids
        assert done.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
        assert done.finish_reason is whole.finish_reason
        assert set(done.versions) <= set(seen["versions"])
        assert list(done.versions) == sorted(done.versions)
        num_cuts += len(done.version_runs) - 1
        for partials in seen["partials"]:
            if partial := partials.get(done.request_id):
                size = len(partial.token_ids)
                assert partial.token_ids == done.token_ids[:size]
                assert partial.versions == done.versions[:size]
    assert num_cuts > 10
    first = seen["resumed"]
    assert first.token_ids == undisturbed[first.request_id].token_ids


def test_trap_8_a_greedy_request_cut_at_every_third_token_goes_on_as_if_never_cut(
    solo: dict[str, Any],
) -> None:
    seen = solo["cut"]
    assert len(seen) == 12
    for name, (undisturbed, *cut) in seen.items():
        assert len(cut) == len(undisturbed.token_ids[::CUT_STRIDE]) > 1
        whole = untimed(undisturbed, name)
        changed = [done.request_id for done in cut if untimed(done, name) != whole]
        assert changed == []
    ends = {name: done[0] for name, done in seen.items()}
    endings = {name: (end.finish_reason, end.stop_reason) for name, end in ends.items()}
    assert endings["plain"] == ("length", None)
    assert endings["regex"] == endings["json"] == ("stop", None)
    assert endings["repetition"] == ("stop", "repetition_detected")
    assert endings["minimum"][1] == ends["minimum"].token_ids[-1]
    for name in ("stop string", "early stop string"):
        reason, string = endings[name]
        assert (reason, len(string)) == ("stop", 4 if name == "stop string" else 1)
        letters = "".join(chr(ord("a") + token - LETTERS[0]) for token in ends[name].token_ids)
        assert letters.endswith(string)
    assert endings["early stop string"][1] in letters[:8]


def test_a_prompt_that_is_computed_in_chunks_gives_the_same_tokens(
    solo: dict[str, Any], root: Path
) -> None:
    seen = solo["chunked"]
    for name, (undisturbed, *_) in solo["cut"].items():
        for done in seen["cut"][name]:
            assert done.token_ids == undisturbed.token_ids
            assert done.finish_reason is undisturbed.finish_reason
            assert done.logprobs == pytest.approx(undisturbed.logprobs, abs=TOLERANCE)
    assert seen["short"].token_ids == solo["cut"]["plain"][0].token_ids
    assert logprob_error(root / "tied-old", seen["long"], LONG_PROMPT) < TOLERANCE
    done = seen["kept"]
    for start, end, kept in spans(done.kept_tokens, len(done.token_ids)):
        assert set(done.token_ids[start:end]) <= set(kept_to_json(kept))
        assert len(kept_to_json(kept)) == 5


def test_a_request_has_no_token_before_its_last_chunk_and_none_of_older_weights_after_a_pull(
    solo: dict[str, Any], root: Path
) -> None:
    seen = solo["chunked"]
    assert seen["lengths"] == {"aborted": 0, "pulled": 0}
    assert seen["aborted"].token_ids == ()
    assert logprob_error(root / "tied-new", seen["pulled"], LONG_PROMPT[2:]) < TOLERANCE


def test_trap_8_what_was_sampled_before_a_cut_matters_in_each_of_these_requests(
    solo: dict[str, Any],
) -> None:
    """Otherwise the test above would prove nothing."""
    plain = solo["cut"]["plain"][0].token_ids
    for name, (undisturbed, *_) in solo["cut"].items():
        if name not in ("plain", "cached prompt"):
            assert undisturbed.token_ids != plain


def test_trap_8_tensor_parallel_ranks_go_on_as_if_never_cut(
    solo: dict[str, Any], tp: dict[str, Any]
) -> None:
    for name, (undisturbed, *cut) in tp["cut"].items():
        assert undisturbed.token_ids == solo["cut"][name][0].token_ids
        assert len(cut) > 0
        for done in cut:
            assert done.token_ids == undisturbed.token_ids
            assert done.finish_reason is undisturbed.finish_reason
            assert done.stop_reason == undisturbed.stop_reason
            assert done.logprobs == pytest.approx(undisturbed.logprobs, abs=TOLERANCE)


def test_without_logprobs_the_tokens_are_the_same_and_each_logprob_is_nan(solo):
    wanted, without = solo["without-logprobs"]["with"], solo["without-logprobs"]["without"]
    assert without.token_ids == wanted.token_ids
    assert [math.isnan(value) for value in without.logprobs] == [True] * len(without.token_ids)
    assert all(math.isfinite(value) for value in wanted.logprobs)


def test_what_is_read_of_a_running_request_piece_by_piece_is_its_completion(
    solo: dict[str, Any],
) -> None:
    done, read = solo["progress"]["done"], solo["progress"]["read"]
    assert len(read) > 4
    for field in ("token_ids", "logprobs", "top_logprobs"):
        whole = getattr(done, field)
        known = tuple(item for output in read for item in getattr(output, field))
        assert known == whole[: len(known)]
        assert len(whole) - len(known) <= 5


def test_alternatives_are_those_of_vllms_own_generate(solo: dict[str, Any]) -> None:
    seen = solo["alternatives"]
    mine = seen["mine"]
    assert mine.token_ids == seen["their token_ids"]
    for token, logprob, top, theirs in zip(
        mine.token_ids, mine.logprobs, mine.top_logprobs, seen["theirs"], strict=True
    ):
        assert top[0] == (token, logprob)
        ranked = [value for _, value in top[1:]]
        assert len(ranked) == 4
        assert ranked == sorted(ranked, reverse=True)
        assert dict(top) == theirs


@pytest.mark.parametrize("what", [*REFUSED])
def test_engine_options_that_cannot_be_served_are_refused_one_by_one(
    solo: dict[str, Any], what: str
) -> None:
    assert f"{what!r} refused" in solo["refused"]["told"][what]


@pytest.mark.parametrize("replica", ["solo", "tp", "speculative"])
def test_trap_25_the_ratio_is_1_at_age_0_whatever_was_cut(
    replica: str, root: Path, request: pytest.FixtureRequest
) -> None:
    """The trainer's logprobs of the engine's tokens, for every sampler that the loss knows."""
    seen = request.getfixturevalue(replica)["truncated"]
    replay = GrammarReplay(tiny_tokenizer(), VOCAB_SIZE)
    episodes = {}
    for name, done in seen.items():
        assert bool(done.kept_tokens) is (name != "nothing")
        is_grammar = len(done.kept_tokens) == 1 and isinstance(done.kept_tokens[0].kept, Grammar)
        assert is_grammar is (name in ("regex", "json", "choice", "grammar"))
        rollout = turns.rollout(Turn(prompt_token_ids=PROMPT, completion=done))
        (episode,) = rollout_to_episodes(rollout, 1.0)
        episodes[name] = replay(episode)
        assert episodes[name].num_trained_tokens == len(done.token_ids)
    batch = pack_episodes(list(episodes.values()), row_len=64, temperature=TEMPERATURE).batch
    with trainer(root / "tied-old", max_episode_tokens=64) as policy_trainer:
        for name, episode in episodes.items():
            alone = pack_episodes([episode], row_len=64, temperature=TEMPERATURE).batch
            assert alone is not None
            found = policy_trainer.logprobs(alone)[alone.loss_mask]
            np.testing.assert_allclose(found, alone.logprobs[alone.loss_mask], atol=1e-5)
            if name != "nothing":  # or the line above would prove nothing
                whole = replace(alone, kept=None)
                assert np.abs(policy_trainer.logprobs(whole)[alone.loss_mask] - found).max() > 1e-3
        assert batch is not None
        metrics = policy_trainer.train_step(batch).metrics
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logprob_diff_max"] < TOLERANCE
    assert 0.7 < metrics["cut_share"] < 1.0


def test_tensor_parallel_ranks_report_the_tokens_that_one_rank_keeps(
    solo: dict[str, Any], tp: dict[str, Any]
) -> None:
    for name, one in solo["truncated"].items():
        two = tp["truncated"][name]
        assert (two.token_ids, two.kept_tokens) == (one.token_ids, one.kept_tokens), name
    assert solo["left over"] == {}


def test_greedy_tokens_are_the_same_with_drafts_wherever_a_request_is_cut(
    solo: dict[str, Any], speculative: dict[str, Any]
) -> None:
    assert {"stop string", "regex", "penalties", "minimum"} < set(speculative["cut"])
    for name, completions in speculative["cut"].items():
        plain = solo["cut"][name][0]
        for done in completions:
            assert done.token_ids == plain.token_ids
            assert done.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)
            assert (done.finish_reason, done.stop_reason) == (
                plain.finish_reason,
                plain.stop_reason,
            )


def test_tokens_that_a_step_drafts_past_a_stop_string_are_neither_returned_nor_counted(
    speculative: dict[str, Any],
) -> None:
    lengths = [len(done.token_ids) for done in speculative["stopped"].values()]
    assert lengths == [21, 22, 23, 24, 25]
    assert {done.stop_reason for done in speculative["stopped"].values()} <= {"b", "c"}
    assert speculative["stopped steps"] < 25  # a step for each token, without drafts
    assert speculative["stopped tokens"] == sum(lengths)


def test_versions_and_logprobs_of_drafted_tokens_are_exact_on_both_sides_of_a_pull(
    speculative: dict[str, Any], root: Path
) -> None:
    old, new = root / "tied-old", root / "tied-new"
    for name, done in speculative["mixed"].items():
        first, second = done.version_runs
        assert (first, second.version) == (VersionRun(0, 0), 1)
        prompt = REPEATED_PROMPT if name == "repeated" else PROMPT
        how: dict[str, Any] = {"temperature": 0.7 if name == "seeded-warm" else 1.0}
        assert logprob_error(old, done, prompt, end=second.start, **how) < TOLERANCE
        assert logprob_error(new, done, prompt, start=second.start, **how) < TOLERANCE
        # The two models are far apart, or the lines above would prove nothing.
        assert logprob_error(old, done, prompt, start=second.start, **how) > 0.1
    assert speculative["mixed"]["repeated"].version_runs[1].start > 2 * SPECULATIVE_PULL_STEP
    warm = speculative["mixed"]["seeded-warm"]
    assert [top[0] for top in warm.top_logprobs] == list(
        zip(warm.token_ids, warm.logprobs, strict=True)
    )


def test_a_seeded_request_with_drafts_does_not_depend_on_its_company(
    speculative: dict[str, Any],
) -> None:
    alone, together = speculative["seeded"], speculative["mixed"]["seeded"]
    same = together.version_runs[1].start
    assert together.token_ids[:same] == alone.token_ids[:same]


def test_with_drafts_tokens_are_as_frequent_as_they_are_likely(
    speculative: dict[str, Any],
) -> None:
    """Whether a token is the most likely one is a draw with that token's probability."""
    hits, likely, variance, tokens = 0, 0.0, 0.0, 0
    for done in speculative["many"].values():
        tokens += len(done.token_ids)
        for token, alternatives in zip(done.token_ids, done.top_logprobs, strict=True):
            best, logprob = max(alternatives, key=lambda one: one[1])
            hits += token == best
            likely += math.exp(logprob)
            variance += math.exp(logprob) * (1 - math.exp(logprob))
    assert speculative["many steps"] < tokens / 16  # 16 requests at once: drafts were accepted
    assert abs(hits - likely) < 3 * math.sqrt(variance)
    assert math.sqrt(variance) < 0.02 * likely  # a bias of 6 % would be seen


def test_with_drafts_the_tokens_that_a_sampler_keeps_are_unknown(solo: dict[str, Any]) -> None:
    for name, done in solo["speculative"]["truncated"].items():
        if name in ("top_p", "top_k", "allowed tokens", "json and top_p", "regex and minimum"):
            assert [run.kept for run in done.kept_tokens] == [None]


def test_a_refused_request_disturbs_no_neighbour(solo: dict[str, Any]) -> None:
    undisturbed = untimed(solo["cut"]["plain"][0], "plain")
    assert untimed(solo["refused"]["neighbour"], "plain") == undisturbed


def test_an_engine_sleeps_only_when_empty_and_goes_on_when_awake(solo: dict[str, Any]) -> None:
    assert "1 requests unfinished" in solo["refused"]["told"]["sleep"]
    undisturbed = untimed(solo["cut"]["plain"][0], "plain")
    assert untimed(solo["refused"]["awake"], "plain") == undisturbed


def test_trap_1_tensor_parallel_ranks_are_paused_together(tp: dict[str, Any]) -> None:
    seen = tp["frozen"]
    for name, partial in seen["partials"].items():
        assert FREEZE_STEP <= len(partial.token_ids) < FREEZE_STEP + 3
        assert partial.token_ids == tp["updated"][name].token_ids[: len(partial.token_ids)]
        assert seen["done"][name].token_ids == tp["updated"][name].token_ids
        assert seen["done"][name].logprobs == tp["updated"][name].logprobs
    assert seen["cut"].finish_reason is FinishReason.ABORT
    assert seen["unfinished"] == 0


def test_incomplete_weights_fail_the_pull_and_the_loop(solo: dict[str, Any]) -> None:
    assert "lacks" in solo["incomplete-pull"]


def test_metrics_and_stats_add_up(solo: dict[str, Any]) -> None:
    metrics = solo["mixed"]["greedy"].metrics
    assert 0 <= metrics.queue_s <= metrics.time_to_first_token_s
    assert metrics.inter_token_latency_s == pytest.approx(metrics.decode_s / 47)
    assert metrics.requests_in_flight == 5  # the aborted one is gone
    stats = solo["stats"]
    assert (stats.version, stats.running, stats.waiting, stats.kv_use) == (1, 0, 0, 0.0)
    assert stats.generated_tokens > 5 * 48
    assert stats.kv_tokens > 5 * 48


def test_tensor_parallel_ranks_in_lockstep_generate_what_one_rank_does(
    solo: dict[str, Any], tp: dict[str, Any], root: Path
) -> None:
    for name in ("greedy", "greedy-long", "seeded", "seeded-warm", "aborted"):
        one, two = solo["mixed"][name], tp["mixed"][name]
        assert two.token_ids == one.token_ids
        assert two.version_runs == one.version_runs
        assert two.finish_reason == one.finish_reason
        assert two.logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)
    unseeded = tp["mixed"]["unseeded"]
    assert logprob_error(root / "tied-old", unseeded, end=PULL_STEP) < TOLERANCE
    assert logprob_error(root / "tied-new", unseeded, start=PULL_STEP) < TOLERANCE


def test_tensor_parallel_updates_equal_a_fresh_engine(
    solo: dict[str, Any], tp: dict[str, Any]
) -> None:
    for name, updated in tp["updated"].items():
        assert updated.token_ids == solo["fresh-tied"][name].token_ids
        assert updated.versions == (1,) * 48


def check_exact_pull(root: Path, family: str, done: Completion) -> None:
    old, new = root / f"{family}-old", root / f"{family}-new"
    assert logprob_error(old, done, end=PULL_STEP) < TOLERANCE
    assert logprob_error(new, done, start=PULL_STEP) < TOLERANCE
    assert logprob_error(old, done, start=PULL_STEP) > 0.1


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_other_families_are_exact_on_both_sides_of_a_pull(
    family: str, solo: dict[str, Any], root: Path
) -> None:
    check_exact_pull(root, family, solo["families"][family]["greedy"])


@pytest.mark.soak
def test_biases_are_exact_on_two_tensor_parallel_ranks(solo: dict[str, Any], root: Path) -> None:
    check_exact_pull(root, "qwen2", run("tp_qwen2", root, ranks=2)["greedy"])


def test_tensor_parallel_engines_leave_no_names_in_shared_memory(tp: dict[str, Any]) -> None:
    assert not [name for name in tp["shm"] if "cpushm" in name]


@pytest.mark.soak
def test_trap_1_every_token_under_many_pulls_was_sampled_under_the_version_it_names(
    root: Path,
) -> None:
    seen = run("soak", root)
    paths = [root / "tied-old", root / "tied-new"]
    num_boundaries = 0
    for request, done in seen["done"]:
        if not done.token_ids:
            assert done.finish_reason is FinishReason.ABORT
            continue
        prompt, temperature = request.prompt_token_ids, request.sampling.temperature or 1.0
        both = [
            hf_logprobs(
                path, prompt + done.token_ids, num_prompt=len(prompt), temperature=temperature
            )
            for path in paths
        ]
        expected = [both[version % 2][index] for index, version in enumerate(done.versions)]
        assert done.logprobs == pytest.approx(expected, abs=2 * TOLERANCE)
        num_boundaries += len(done.version_runs) - 1
    assert num_boundaries > 100
    assert len(seen["reports"]) > 20
    assert seen["stats"].preemptions > sum(
        report.running_requests > 0 for report in seen["reports"]
    )
