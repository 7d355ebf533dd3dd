"""Records of the controller in, metrics of `metric_table` out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.observability.rollout_metrics import rollout_metrics, staleness_metrics
from torchtitan_rl.orchestration.records import StepRecord, TokenCounts, ValidationRecord
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import EngineStats


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Everything that is known of one step."""
    metrics = rollout_metrics(record.groups, Split.TRAIN)
    metrics |= {f"trainer/{name}": value for name, value in record.trainer.items()}
    metrics |= _token_metrics(record.tokens, record.rollout_s)
    if record.trainer:
        metrics |= staleness_metrics(record.groups, trained_version=record.version - 1)
    if record.sync is not None:
        metrics |= _sync_metrics(record.sync, record.publish_s)
    metrics |= _engine_metrics(record.engines)
    return metrics | {
        "policy/version": float(record.version),
        "time/rollout_s": record.rollout_s,
        "time/train_s": record.train_s,
        "time/sync_s": record.sync_s,
        "time/step_s": record.rollout_s + record.train_s + record.sync_s,
    }


def validation_metrics(record: ValidationRecord) -> dict[str, float]:
    return rollout_metrics(record.groups, Split.VALIDATION) | {
        "time/validation_s": record.seconds,
        "policy/version": float(record.version),
    }


def _token_metrics(tokens: TokenCounts, rollout_s: float) -> dict[str, float]:
    metrics = {
        "tokens/generated": float(tokens.generated),
        "tokens/trained": float(tokens.trained),
        "tokens/discarded": float(sum(tokens.discarded.values())),
        "tokens/generated_per_second": tokens.generated / rollout_s if rollout_s > 0 else 0.0,
    }
    return metrics | {f"tokens/discarded/{c}": float(n) for c, n in tokens.discarded.items()}


def _sync_metrics(sync: SyncReport, publish_s: float) -> dict[str, float]:
    stalls_ms = [1000 * pull.stall_s for pull in sync.pulls]
    return {
        "sync/publish_s": publish_s,
        "sync/stage_s": sync.stage_s,
        "sync/pull_s": sync.pull_s,
        "sync/pull_stall_ms_mean": fmean(stalls_ms),
        "sync/pull_stall_ms_max": max(stalls_ms),
        "sync/running_requests": float(sum(pull.running_requests for pull in sync.pulls)),
        "sync/lost_replicas": float(len(sync.lost)),
    }


def _engine_metrics(engines: Mapping[str, EngineStats]) -> dict[str, float]:
    stats = list(engines.values())
    if not stats:
        return {"engine/replicas": 0.0}
    return {
        "engine/replicas": float(len(stats)),
        "engine/kv_use_mean": fmean(stat.kv_use for stat in stats),
        "engine/kv_use_max": max(stat.kv_use for stat in stats),
        "engine/running": float(sum(stat.running for stat in stats)),
        "engine/waiting": float(sum(stat.waiting for stat in stats)),
        "engine/preemptions": float(sum(stat.preemptions for stat in stats)),
        "engine/tokens_per_second": sum(stat.tokens_per_second for stat in stats),
    }
