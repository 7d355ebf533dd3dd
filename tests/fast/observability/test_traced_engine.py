import json
from pathlib import Path
from typing import Any

from torchtitan_rl.generation.engine import Admission
from torchtitan_rl.generation.scripted import ScriptedEngine
from torchtitan_rl.observability.trace import Tracer, merge_traces
from torchtitan_rl.observability.traced_engine import TracedEngine
from torchtitan_rl.types import GenerationRequest, SamplingParams


def admission(max_tokens: int) -> Admission:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return Admission(request=request, arrival_s=0.0)


def test_decoding_shows_as_few_stretches_cut_by_weight_swaps(tmp_path: Path) -> None:
    engine = TracedEngine(ScriptedEngine(), Tracer(tmp_path / "traces", "replica-0"))
    engine.add_request(admission(max_tokens=9))
    for _ in range(4):
        engine.step()
    engine.swap_weights(1)
    while engine.num_unfinished():
        outputs = engine.step()
    assert len(outputs[0].token_ids) == 9
    events: list[dict[str, Any]] = json.loads(merge_traces(tmp_path / "traces").read_text())[
        "traceEvents"
    ]
    found = [(e["name"], e["args"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("decode", {"steps": 4}),
        ("swap weights", {"version": 1}),
        ("decode", {"steps": 5}),
    ]
