import json
from pathlib import Path
from typing import Any

from tests.fast.generation.test_loop import WAIT_S, request
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.observability.trace import EngineTrace, Tracer, merge_traces


def spans(folder: Path) -> list[dict[str, Any]]:
    events = json.loads(merge_traces(folder).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_engine_steps_join_into_stretches_and_idle_gaps_stay_visible(tmp_path: Path) -> None:
    trace = EngineTrace(Tracer(tmp_path / "traces", "replica"), max_gap_s=0.02, max_stretch_s=1.0)
    ms = 1_000_000
    for start in (0, 10, 20):  # one stretch of three steps
        trace("step", start * ms, (start + 9) * ms)
    trace("step", 500 * ms, 509 * ms)  # after an idle gap
    trace("step", 510 * ms, 1600 * ms)  # too long to be joined
    trace.flush()
    trace.flush()
    found = spans(tmp_path / "traces")
    assert [event["args"]["steps"] for event in found] == [3, 1, 1]
    assert [round(event["dur"]) for event in found] == [29_000, 9_000, 1_090_000]
    assert round(found[1]["ts"] - found[0]["ts"]) == 500_000


def test_a_loop_tells_of_its_work(tmp_path: Path) -> None:
    trace = EngineTrace(Tracer(tmp_path / "traces", "replica-0"))
    loop = EngineLoop(
        ScriptedEngine(),
        None,
        is_leader=True,
        on_work=trace,
        on_end=lambda failure: trace.flush(),
    )
    loop.start()
    completion = loop.submit(request("a", 5)).result(WAIT_S)
    loop.execute(Pull(1)).result(WAIT_S)
    loop.close()
    found = spans(tmp_path / "traces")
    others = [span["name"] for span in found if span["name"] != "decode"]
    assert others == ["swap weights", "reset prefix cache"]
    steps = sum(span["args"]["steps"] for span in found if span["name"] == "decode")
    assert steps == len(completion.token_ids)
