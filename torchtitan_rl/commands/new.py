"""``torchtitan-rl new task NAME [--folder DIR]``: writes a small task that can be trained at once,
with its configuration and a test, as a template for a user's own task.

Exit codes: 0 the task was written; 2 it cannot be written.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError

_TASK = '''\
"""{title}: questions with one answer each."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torchtitan_rl as rl


def make_problem(split: rl.Split, index: int) -> rl.Problem:
    """No problem of one split is in the other, and no id comes twice in one."""
    b, a = divmod(2 * index + (split == "validation"), 10)
    question = f"State the final answer to the following arithmetic problem: {{a}} + {{b}} ="
    data = {{"question": question, "answer": str(a + b)}}
    return rl.Problem(problem_id=f"{{split}}/{{index}}", data=data)


async def score(answer: str, *, right: str) -> float:
    """The reward of an answer."""
    return float(answer.strip() == right)


@dataclass(frozen=True, kw_only=True)
class {title}Task(rl.Task):
    """Its fields are options of the command line: ``--task.num-problems 20``."""

    num_problems: int = 64
    """Problems of each split."""

    def dataset(self, split: rl.Split, *, seed: int) -> rl.Dataset:
        problems = [make_problem(split, index) for index in range(self.num_problems)]
        return rl.ListDataset(problems, seed=seed, shuffle=split == "train")

    def environment(self, problem: rl.Problem, *, tokenizer: Any, limits: Any) -> rl.TokenEnv:
        messages = [{{"role": "user", "content": problem.data["question"]}}]
        env = rl.QuestionEnv(messages, partial(score, right=problem.data["answer"]))
        return rl.MessageTokenEnv(env, rl.make_renderer(tokenizer))
'''

_CONFIG = """\
import torchtitan_rl as rl
from {name}_task import {title}Task

sampling = rl.SamplingConfig(max_tokens_per_turn=8)
optimizer = rl.OptimizerConfig(learning_rate=1e-3)  # 1e-6, the default, is for large models
config = rl.RunConfig(
    name="{name}",
    policy=rl.PolicyConfig(checkpoint="package:reasoning_gym"),  # or a model of your own
    task={title}Task(),
    rollout=rl.RolloutConfig(max_turns=1, max_total_tokens=64, sampling=sampling),
    generator=rl.GeneratorConfig(replicas=1, max_model_len=64),
    trainer=rl.TrainerConfig(optimizer=optimizer),
)
"""

_TEST = """\
from pathlib import Path

from torchtitan_rl.commands.cli import main


def test_the_environment_makes_no_usual_mistake():
    assert main(["env", "check", str(Path(__file__).with_name("{name}.py"))]) == 0
"""


@dataclass(frozen=True, kw_only=True)
class NewTaskConfig:
    """Write a task that trains at once, with its configuration and a test, as a start for one's
    own."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the task: lower-case letters, digits and underscores."""
    folder: Path | None = None
    """The folder to write, which must not exist. None: a folder with the name of the task."""


def main(words: Sequence[str]) -> int:
    options = parse_options(NewTaskConfig, words, prog="torchtitan-rl new task")
    _write(options.name, options.folder or Path(options.name))
    return 0


def _write(name: str, folder: Path) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            f"NAME is {name!r}: give lower-case letters, digits and underscores, a letter first"
        )
    if name in sys.stdlib_module_names:
        # The folder of a configuration comes first in Python's module search path, so its modules
        # would hide Python's own module.
        raise ConfigError(f"NAME is {name!r}: a module of Python has this name; give another")
    names = {"name": name, "title": "".join(part.capitalize() for part in name.split("_"))}
    files = {f"{name}_task.py": _TASK, f"{name}.py": _CONFIG, f"test_{name}.py": _TEST}
    try:
        folder.mkdir(parents=True)
        for file, template in files.items():
            (folder / file).write_text(template.format(**names))
    except FileExistsError as error:
        raise ConfigError(f"--folder is {folder}: it exists; give another") from error
    except OSError as error:
        raise ConfigError(f"--folder is {folder}: it cannot be written ({error})") from error
    config = folder / f"{name}.py"
    print(f"{', '.join(files)} are in {folder}; next:")
    print(f"  torchtitan-rl env check {config}    what the policy sees, and what is wrong")
    print(f"  python -m pytest {folder}")
    print(f"  torchtitan-rl train {config}")
