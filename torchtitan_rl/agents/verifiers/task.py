"""Environments of verifiers (PyPI) as a `Task`: any installed environment, by its name.

The environment runs in its own process, in an interpreter that has verifiers, because its
dependencies may conflict with ours and its code may block. Its episodes send their model calls to
the run's endpoint, as agents do, so training uses exactly the tokens that the engine sampled.

Invariant: each rollout that was sent to a process ends once, with its result, or with an error if
the process has ended.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from asyncio import CancelledError, shield, wrap_future
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

from torchtitan_rl.agents.agent import Agent, AgentCall, AgentError, AgentResult
from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.bounds import Positive
from torchtitan_rl.data.row_dataset import split_of_rows
from torchtitan_rl.data.rows import Rows
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.task import Dataset, Split
from torchtitan_rl.types import Problem


@dataclass(frozen=True, kw_only=True)
class VerifiersTask(AgentTask):
    """An environment of verifiers 0.4::

        VerifiersTask(env="gsm8k-v1", args={"taskset.split": "train", "agent.max_turns": 4})

    The reward of a rollout is the reward of its trace in verifiers. The named rewards and metrics
    of verifiers become task metrics.
    """

    env: str
    """Name of the installed environment, as ``vf-eval`` takes it: a taskset (``gsm8k-v1``), or an
    environment and a taskset (``user-sim+gsm8k-v1``)."""
    args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options, named as ``vf-eval`` does after ``--env.``: ``{"taskset.split": "train"}``."""
    validation_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the validation set, in addition to ``args``. Empty: ``validation_share`` of the
    tasks."""
    validation_share: float = 0.1
    """Share of the tasks that are kept for validation where ``validation_args`` is empty. A task's
    data decides, so that equal tasks are in one split."""
    num_problems: Positive | None = None
    """Use only the first ``num_problems`` tasks. Needed if the environment has infinitely many."""
    shuffle: bool = True
    """Whether training problems come in another order in each epoch; otherwise as in the
    environment."""
    python: str = ""
    """Interpreter in which verifiers and the environment are installed. Empty:
    ``verifiers/bin/python`` in this virtual environment, which ``make setup`` makes, or else this
    interpreter."""
    folders: tuple[str, ...] = ()
    """Folders of environments that are not installed."""
    variables: tuple[str, ...] = ()
    """Environment variables that are passed to the environment's process, such as
    ``OPENAI_API_KEY`` for a judge. Besides these, only variables that every program needs, such as
    PATH and HOME, are passed."""
    num_processes: Positive = 1
    """Number of processes that run the environment. Give more than one if its code needs much CPU
    time."""

    def dataset(self, split: Split, *, seed: int) -> Dataset:
        tasks = environment_tasks(self._spec(split))
        rows = Rows(
            name=self.env,
            size=f"{self.env}: {len(tasks)} tasks",
            blocks=(len(tasks),),
            read=lambda index: {"split": split, "task": tasks[index]},
            place=f"{self.env}, task",
            first=0,
        )
        return split_of_rows(
            rows,
            split,
            None if self.validation_args else self.validation_share,
            text=lambda row: json.dumps({**row["task"], "idx": None}, sort_keys=True),
            seed=seed,
            shuffle=self.shuffle,
            chosen_by="task.args, task.num_problems and task.validation_share",
        )

    def agent(self, problem: Problem) -> Agent:
        return self.run

    async def prepare(self, problem: Problem) -> None:
        """Wait until a process can run rollouts. VerifiersError: it does not start."""
        await shield(wrap_future(self._process(problem).started))

    async def run(self, call: AgentCall) -> AgentResult:
        """Run one episode of the environment. VerifiersError: it failed, or its process ended."""
        request = {
            "task": call.problem.data["task"],
            "base_url": call.base_url,
            "api_key": call.api_key,
            "model": call.model,
        }
        answer = await self._process(call.problem).run(request)
        return AgentResult(
            reward=answer["reward"],
            part_rewards=answer["part_rewards"],
            metrics=answer["metrics"],
            messages=tuple(answer["messages"]),
        )

    def errors(self) -> list[str]:
        found = []
        if not self.validation_args and not 0 < self.validation_share < 1:
            why = "must be between 0 and 1; or give task.validation_args"
            found.append(f"task.validation_share={self.validation_share}: {why}")
        if missing := [name for name in self.variables if name not in os.environ]:
            found.append(f"task.variables has {', '.join(missing)}, not set here; export it")
        if self.python and shutil.which(self.python) is None:
            found.append(f"task.python={self.python!r:.200}: there is no such program")
        if found:
            return found
        splits: dict[Split, str] = {"train": "args"}
        if self.validation_args:
            splits["validation"] = "validation_args"
        for split, name in splits.items():
            try:
                environment_tasks(self._spec(split))
            except ConfigError as error:
                found.append(f"task.env is {self.env!r:.100} with task.{name}: {error!s:.1000}")
        return found

    def _process(self, problem: Problem) -> _Process:
        return _pool(self._spec(problem.data["split"]), self.num_processes).pick()

    def _spec(self, split: Split) -> EnvironmentSpec:
        more = self.validation_args if split == "validation" else {}
        return EnvironmentSpec(
            env=self.env,
            args=json.dumps({**self.args, **more}, sort_keys=True),
            num_problems=self.num_problems,
            python=self.python,
            folders=tuple(self.folders),
            variables=tuple(self.variables),
        )


_WORKER = Path(__file__).parent / "worker" / "torchtitan_rl_worker.py"
_BESIDE = Path(sys.prefix) / "verifiers" / "bin" / "python"  # `make setup` makes this interpreter
_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("PYTHONPATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "SSL_CERT_FILE", "DOCKER_HOST"),
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
)
_LINES = 30  # last lines of stderr that are searched for the cause of an error
_NOISE_S = 5.0
_DESCRIBE_S = 600.0  # an environment may fetch its data first


class VerifiersError(AgentError):
    """A verifiers environment failed. Only its own rollout fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The arguments of a process that runs an environment."""

    env: str
    args: str = "{}"  # JSON
    num_problems: int | None = None
    python: str = ""
    folders: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def interpreter(self) -> str:
        return self.python or str(_BESIDE if _BESIDE.exists() else sys.executable)

    def command(self, name: str) -> list[str]:
        fields = asdict(self) | {"args": json.loads(self.args)}
        return [self.interpreter, str(_WORKER), name, json.dumps(fields)]

    def environment(self) -> dict[str, str]:
        """The process's environment variables, with ``folders`` in PYTHONPATH."""
        names = (*_VARIABLES, *self.variables)
        environment = {name: os.environ[name] for name in names if name in os.environ}
        paths = [str(Path(folder).resolve()) for folder in self.folders]
        if already := environment.get("PYTHONPATH"):
            paths.append(already)
        return environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@functools.lru_cache(maxsize=8)
def environment_tasks(spec: EnvironmentSpec) -> list[dict[str, Any]]:
    """The data of an environment's tasks. Starts a process, once for each spec. ConfigError: the
    environment cannot be loaded."""
    try:
        ended = subprocess.run(
            spec.command("describe"),
            env=spec.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_DESCRIBE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"its tasks were not loaded within {_DESCRIBE_S:g} s") from error
    except OSError as error:
        raise ConfigError(f"task.python is {spec.interpreter!r:.200}: {error.strerror}") from error
    answer: dict[str, Any] = {"error": _last_line(ended.stderr.splitlines())}
    if ended.stdout:
        answer = json.loads(ended.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"] + _remedy(answer["error"], spec.interpreter))
    found: list[dict[str, Any]] = answer["tasks"]
    return found


def _remedy(error: str, interpreter: str) -> str:
    if "No module named 'verifiers'" in error:
        return f" in {interpreter}: give an interpreter that has it by task.python"
    if "must already be installed" in error:
        return f" Install it for {interpreter}, or give its folder by task.folders."
    return ""


class _Pool:
    """Starts processes when they are needed, and replaces those that have ended."""

    def __init__(self, spec: EnvironmentSpec, size: int) -> None:
        self._spec = spec
        self._size = size
        self._processes: list[_Process] = []
        self._lock = threading.Lock()

    def pick(self) -> _Process:
        """The process with the fewest rollouts; a process that has started is preferred."""
        with self._lock:
            self._processes = [process for process in self._processes if process.is_alive]
            if len(self._processes) < self._size:
                self._processes.append(_Process(self._spec))
            return min(self._processes, key=lambda one: (not one.started.done(), one.num_running))


_pool = functools.cache(_Pool)


class _Process:
    """A running worker process. Two threads read its stdout and stderr."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._env = spec.env
        self._numbers = count()
        self._running: dict[int, Future[Mapping[str, Any]]] = {}
        self._lock = threading.Lock()  # protects `_running` and `is_alive`
        self.is_alive = True
        self.started: Future[None] = Future()
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            spec.command("serve"),
            env=spec.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            start_new_session=True,  # Ctrl-C goes only to the controller
        )
        lines = cast("IO[str]", self._process.stderr)
        self._noise = threading.Thread(target=self._errors.extend, args=(lines,), daemon=True)
        self._noise.start()
        threading.Thread(target=self._read_answers, daemon=True).start()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        number = next(self._numbers)
        answer: Future[Mapping[str, Any]] = Future()
        with self._lock:
            if not self.is_alive:
                raise VerifiersError(f"{self._env}: its process has ended")
            self._running[number] = answer
        self._send({**request, "id": number})
        waiting = wrap_future(answer)
        try:
            found = await shield(waiting)
        except CancelledError:
            self._send({"id": number})
            await waiting
            raise
        if "error" in found:
            raise VerifiersError(f"{self._env}: {found['error']}")
        return found

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            cast("IO[str]", self._process.stdin).write(json.dumps(message) + "\n")
        except OSError:  # the process has ended, which `_read_answers` notices
            return

    def _read_answers(self) -> None:
        cause = ""
        for line in cast("IO[str]", self._process.stdout):
            answer = json.loads(line)
            if not answer:
                self.started.set_result(None)
            elif "id" not in answer:
                cause = answer["error"]
            else:
                with self._lock:
                    waiting = self._running.pop(answer["id"])
                waiting.set_result(answer)
        # Processes that the environment started may keep its stderr open.
        self._noise.join(_NOISE_S)
        code = self._process.wait()
        cause = cause or f"its process ended ({code}): {_last_line(self._errors)}"
        with self._lock:
            self.is_alive = False
            for waiting in self._running.values():
                waiting.set_result({"error": cause})
        if not self.started.done():
            self.started.set_exception(VerifiersError(f"{self._env}: {cause}"))


def _last_line(lines: Any) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
