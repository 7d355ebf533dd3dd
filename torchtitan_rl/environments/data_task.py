"""Questions and answers from data files as a `Task`. Columns become prompts, and the policy's
answers become rewards. The policy answers at once (`DataTask`) or with tools. The tool of this
module is ``python`` (`PythonTask`), which runs the policy's programs in the sandbox and returns
what they print.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.bounds import CallSeconds, ShareBelowOne
from torchtitan_rl.data.columns import Condition, column, fill, pattern_errors, template_errors
from torchtitan_rl.data.curriculum import RestConfig, RestingDataset
from torchtitan_rl.data.row_dataset import RowDataset, in_split
from torchtitan_rl.data.rows import DataError, Row, contents_of, open_sources
from torchtitan_rl.environments.question import QuestionEnv, ToolAnswer, ToolEnv, Tools, as_messages
from torchtitan_rl.environments.scoring import (
    MATH_SCORE,
    Comparison,
    checked_score,
    checker_sandbox,
    extract,
    last_match,
    run_checker,
    score_text,
)
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.chatml import ChatMLRenderer
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import RendererKind, Thinking, make_renderer
from torchtitan_rl.rollout.task import Dataset, Split, Task
from torchtitan_rl.sandbox.sandbox import (
    SandboxConfig,
    SandboxLimits,
    SandboxResult,
    SandboxStatus,
    shared_sandbox,
)
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class DataTask(Task):
    """Questions with one answer each, from data files::

        task = DataTask(
            train=("data/train.jsonl",),  # lines like {"question": "1 + 1?", "solution": "2"}
            prompt="{question}\\nWrite the answer after ####.",
            answer="{solution}",
            answer_pattern=r"#### (.+)",
            compare="number",
        )

    For other rewards override `score`; for several turns override `environment`.
    """

    train: tuple[str, ...]
    """Files of the training problems: ``.jsonl`` and ``.parquet`` files, patterns
    (``data/*.jsonl``), Hugging Face datasets (``hf:NAME:CONFIG:SPLIT``; the name may be a local
    folder)."""
    validation: tuple[str, ...] = ()
    """Files of the validation problems. Without files, ``validation_share`` of the training
    problems are used."""
    validation_share: ShareBelowOne = 0.1
    """Share of the problems that are kept for validation if ``validation`` has no files. The text
    of the prompt decides, so that equal prompts are in one split."""
    prompt: str = "{question}"
    """The user's message; ``{NAME}`` stands for a column, ``{NAME[KEY]}`` for an item of a nested
    column."""
    system: str = ""
    """The system message, a template like ``prompt``. Empty: there is none."""
    messages: str = ""
    """Column with the whole conversation (a list of ``role`` and ``content``), instead of
    ``prompt`` and ``system``."""
    answer: str = "{answer}"
    """The right answer; a template like ``prompt``."""
    right_answer_pattern: str = ""
    """Regular expression whose last match in ``answer`` is the right answer. If the expression has
    groups, the first group of the match is the right answer. Empty: the whole text."""
    answer_pattern: str = ""
    """Regular expression whose last match in a completion is its answer, like
    ``right_answer_pattern``. A completion without a match scores 0."""
    compare: Comparison = "exact"
    """How answers are compared: ``exact`` as texts, ``number`` by their last number, ``math`` with
    `math-verify`, in ``sandbox``."""
    check_timeout_s: CallSeconds = 5.0
    """Seconds for one comparison by ``math``; an answer that takes longer scores 0."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where ``math`` compares answers."""
    where: tuple[str, ...] = ()
    """Conditions that rows must meet, such as ``level <= 3``, ``subject == "algebra"`` or
    ``answer != null``. A value of another type than the column's is an error."""
    keep: tuple[str, ...] = ()
    """Columns that `score` needs in ``problem.data``, besides ``messages`` and ``answer``."""
    shuffle: bool = True
    """Whether training problems come in a different order in each epoch. If False, they come in the
    order of the files."""
    rest: RestConfig = field(default_factory=RestConfig)
    """Leave out, for some epochs, training problems that are always or never solved."""
    renderer: RendererKind = "auto"
    """How messages become tokens; ``auto`` chooses the renderer that fits the model."""
    thinking: Thinking = "off"
    """How Qwen3 thinks: ``off`` prefills an empty thought, ``keep`` and ``strip`` let it think."""

    async def score(self, answer: str, problem: Problem) -> float:
        """The reward of a completion; ``answer`` is its text without the reasoning."""
        found = await extract(self.answer_pattern, answer)
        right: str = problem.data["answer"]
        if found is None:
            return 0.0
        if self.compare == "math":
            score = await run_checker(
                MATH_SCORE, right, found, timeout_s=self.check_timeout_s, sandbox=self.sandbox
            )
            return checked_score(score)
        return score_text(self.compare, right, found)

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        own = split == "validation" and self.validation
        files = open_sources(self.validation if own else self.train)
        conditions = [Condition(text) for text in self.where]
        rows = RowDataset(
            files,
            partial(self._problem, split, conditions),
            seed=seed,
            shuffle=self.shuffle and split == "train",
            chosen_by="task.where, task.prompt and task.validation_share",
        )
        return RestingDataset(rows, self.rest) if split == "train" and self.rest.epochs else rows

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        score = partial(self.score, problem=problem)
        return MessageTokenEnv(QuestionEnv(problem.data["messages"], score), renderer)

    def resume_identity(self) -> Mapping[str, Any]:
        """A resumed run must have files with the same names and contents."""
        return contents_of(self, "train", "validation")

    def errors(self) -> list[str]:
        found = [] if self.train else ["task.train is empty: give a file"]
        for name in ("train", "validation"):
            try:
                open_sources(getattr(self, name))
            except ConfigError as error:
                found.append(f"task.{name}: {error}")
        found += template_errors(self, "task", "prompt", "system", "answer")
        found += pattern_errors(self, "task", "answer_pattern", "right_answer_pattern")
        for condition in self.where:
            try:
                Condition(condition)
            except ValueError as error:
                found.append(f"task.where: {error}")
        if not self.validation and not self.validation_share:
            found.append("task.validation_share is 0: give more, or give files by task.validation")
        if not self.rest.hard_at < self.rest.easy_at:
            hard, easy = self.rest.hard_at, self.rest.easy_at
            found.append(f"task.rest.hard_at={hard}: must be below task.rest.easy_at ({easy})")
        if self.compare == "math":
            found += checker_sandbox(MATH_SCORE, self.sandbox).errors("task.sandbox")
        return found

    def _problem(
        self, split: Split, conditions: list[Condition], row_id: str, place: str, row: Row
    ) -> Problem | None:
        if not all(one.holds(row, f"{place}, task.where") for one in conditions):
            return None
        messages = self._messages(row, place)
        if not self.validation:
            text = json.dumps(messages, sort_keys=True)
            if not in_split(split, text, self.validation_share):
                return None
        solution = fill(self.answer, row, f"{place}, task.answer")
        right = last_match(self.right_answer_pattern, solution)
        if right is None:
            raise DataError(f"{place}: no match of task.right_answer_pattern in task.answer")
        kept = {name: _jsonable(column(name, row, f"{place}, task.keep")) for name in self.keep}
        return Problem(problem_id=row_id, data={"messages": messages, "answer": right, **kept})

    def _messages(self, row: Row, place: str) -> list[Mapping[str, Any]]:
        if not self.messages:
            return as_messages(
                fill(self.system, row, f"{place}, task.system"),
                fill(self.prompt, row, f"{place}, task.prompt"),
            )
        found = column(self.messages, row, f"{place}, task.messages")
        if not found or not isinstance(found, list) or not all(map(_is_message, found)):
            what = f"column {self.messages!r} is not a list of messages with role and content"
            raise DataError(f"{place}, task.messages: {what}")
        return [_jsonable(one) for one in found]


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and {"role", "content"} <= one.keys()


def _jsonable(value: Any) -> Any:
    """Convert to JSON types; dates and other types become text."""
    return json.loads(json.dumps(value, default=str))


def tool_environment(
    task: DataTask,
    tools: Tools,
    problem: Problem,
    tokenizer: Any,
    *,
    replays: bool,
    shows_tools: bool,
) -> TokenEnv:
    """Make the `ToolEnv` of one rollout. `DataTask.score` scores the rollout's answer. Raises
    ConfigError: the policy's chat format has no tools."""
    renderer = make_renderer(tokenizer, kind=task.renderer, thinking=task.thinking)
    if isinstance(renderer, ChatMLRenderer):
        fix = "give a model that has (such as Qwen3), or task.renderer qwen3"
        raise ConfigError(f"task: the policy's chat format has no tools; {fix}")
    score, messages = partial(task.score, problem=problem), problem.data["messages"]
    env = ToolEnv(messages, tools, score, replays=replays, shows_tools=shows_tools)
    return MessageTokenEnv(env, renderer)


@dataclass(frozen=True, kw_only=True)
class PythonTask(DataTask):
    """Questions of a `DataTask` that are answered with the tool ``python``::

        PythonTask(train=("data/train.jsonl",), compare="number")

    A completion without a call is the answer. The programs run in ``sandbox``. The model's chat
    format must have tools (Qwen3 and others), and ``rollout.max_turns`` must allow for the calls.
    """

    shows_tools: bool = True
    """Whether the chat format puts the tool's schema into the prompt. Turn this off if ``system``
    describes the tool in fewer tokens, or if the policy knows the tool."""

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        tools = PythonTools(self.sandbox)
        # A replay notices if a program prints something else.
        shown = {"replays": True, "shows_tools": self.shows_tools}
        return tool_environment(self, tools, problem, tokenizer, **shown)

    def errors(self) -> list[str]:
        return list(dict.fromkeys(super().errors() + self.sandbox.errors("task.sandbox")))


PYTHON: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints, and the value of its "
        "last line. Each call starts afresh.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


class PythonTools:
    """The tool ``python`` for a rollout or an agent; each call runs in a new process of the shared
    sandbox (see `shared_sandbox`)::

        ToolEnv(messages, PythonTools(), score, replays=True)
        answer = await PythonTools().call("python", {"code": "print(6 * 7)"})  # by an agent

    With ``traceback`` the policy also sees where an exception was raised.
    """

    def __init__(self, config: SandboxConfig | None = None, *, traceback: bool = True) -> None:
        self._config = config or SandboxConfig()
        self._traceback = traceback

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [PYTHON]

    async def call(self, name: str, arguments: Mapping[str, Any], /) -> ToolAnswer:
        """Run a program, and return its output. Raises SandboxError: the sandbox has failed; or
        ConfigError: this machine does not allow the sandbox's isolation."""
        if name != "python":
            return ToolAnswer(text=f"error: no tool {name!r}; there is python", failed=True)
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolAnswer(text="error: python needs the argument code, a text", failed=True)
        result = await shared_sandbox(self._config).run(code, print_last=True)
        if not self._traceback:
            result = replace(result, stderr=result.stderr.strip().rpartition("\n")[2])
        is_ok = result.status is SandboxStatus.OK
        return ToolAnswer(text=_shown(result, self._config.limits), failed=not is_ok)

    async def close(self) -> None:
        """Does nothing: the sandbox is shared."""


def _shown(result: SandboxResult, limits: SandboxLimits) -> str:
    """Convert a result to the text that the policy reads."""
    stopped = {
        SandboxStatus.TIMEOUT: f"stopped after {limits.wall_s:g} s",
        SandboxStatus.CPU: f"stopped after {limits.cpu_s:g} s of CPU time",
        SandboxStatus.MEMORY: f"stopped at {limits.memory_mb} MB of memory",
        SandboxStatus.LIMIT: f"stopped at {limits.processes} threads or {limits.file_mb} MB in "
        f"{limits.files} files",
        SandboxStatus.KILLED: f"killed by signal {-result.exit_code}",
    }
    notes = [f"error: {stopped[result.status]}"] if result.status in stopped else []
    if result.is_truncated:
        notes.append(f"(only the first {limits.output_bytes} bytes of the output)")
    parts = [result.stdout, result.stderr, *notes]
    return "\n".join(part.strip("\n") for part in parts if part) or "(no output)"
