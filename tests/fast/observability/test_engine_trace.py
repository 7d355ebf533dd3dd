import json
from pathlib import Path
from typing import Any

from tests.fast.generation.test_loop import WAIT_S, request
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.generation.lockstep import SoloChannel
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.observability.engine_trace import EngineTrace
from torchtitan_rl.observability.trace import Tracer, merge_traces


def spans(folder: Path) -> list[tuple[str, Any]]:
    events = json.loads(merge_traces(folder).read_text())["traceEvents"]
    return [(event["name"], event.get("args")) for event in events if event["ph"] == "X"]


def test_decoding_shows_as_few_stretches_cut_by_weight_swaps(tmp_path: Path) -> None:
    trace = EngineTrace(Tracer(tmp_path / "traces", "replica-0"))
    for index in range(4):
        trace("step", 1000 * index, 1000 * index + 900)
    trace("swap weights", 4000, 5000, version=1)
    for index in range(5, 10):
        trace("step", 1000 * index, 1000 * index + 900)
    trace.flush()
    assert spans(tmp_path / "traces") == [
        ("decode", {"steps": 4}),
        ("swap weights", {"version": 1}),
        ("decode", {"steps": 5}),
    ]


def test_a_loop_tells_of_its_work(tmp_path: Path) -> None:
    trace = EngineTrace(Tracer(tmp_path / "traces", "replica-0"))
    loop = EngineLoop(
        ScriptedEngine(),
        SoloChannel(),
        is_leader=True,
        on_work=trace,
        on_end=lambda failure: trace.flush(),
    )
    loop.start()
    completion = loop.submit(request("a", 5)).result(WAIT_S)
    loop.execute(Pull(1)).result(WAIT_S)
    loop.close()
    found = spans(tmp_path / "traces")
    assert [name for name, _ in found if name != "decode"] == ["swap weights", "reset prefix cache"]
    steps = sum(details["steps"] for name, details in found if name == "decode")
    assert steps == len(completion.token_ids)
