"""The tokenizer of the embedded policy: that of `calculator_agent`, with the words added here.

The chat template is the same one: it shows a tool as its name, its parameters and its description,
so that agents of different libraries look alike to the policy.
"""

from __future__ import annotations

from typing import Any

from torchtitan_rl.experiments.agent_libraries.demonstrations import QUESTION
from torchtitan_rl.experiments.agent_libraries.exercise import reply_text
from torchtitan_rl.experiments.calculator_agent import tokenizer as calculator_agent

_WORDS = f"""
Some some
{QUESTION}
{reply_text(0)}
final_result(number): the answer
"final_result", "arguments": {{"number": 42}}}}
final_answer(answer): Provides a final answer to the given problem.
"final_answer", "arguments": {{"answer": "The answer is 42."}}}}
New task:
Calling tools:
[{{'id': 'call_0', 'type': 'function', 'function': {{'name': 'calculator', 'arguments':
{{'expression': '1+1'}}}}}}]
Observation:
"""


def build_tokenizer() -> Any:
    """The `transformers` tokenizer that ships with the policy; the same one each time."""
    return calculator_agent.build_tokenizer(_WORDS)
