"""``run``: run a script, and start it again after each failure, until it ends.

torch's elastic agent starts the processes of a run and restarts them, with our decision before each restart.
`_monitor_workers` is one of the methods that torch documents for your own agents. All else is torch's: rendezvous,
ranks, signals, outputs, error files. The processes get their own environment.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, final
from uuid import uuid4

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, api as processes
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, get_args_parser

from lightning_faulttolerant.cli.supervisor import (
    FINISHED,
    GAVE_UP,
    WRONG_USAGE,
    RestartPolicy,
    SupervisionEnded,
    Supervisor,
    say,
    stop_code,
)
from lightning_faulttolerant.cli.text import (
    add_command_words,
    at_least_1,
    batch_to_skip,
    command_words,
    fault_of_command,
)
from lightning_faulttolerant.records.requests import ACCEPT_VARIABLE, SKIP_VARIABLE, text_of_skips
from lightning_faulttolerant.records.runs import RESUME_FROM_VARIABLE
from lightning_faulttolerant.supervision.heartbeats import DIRECTORY_VARIABLE

TRAINING_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"


@final
class SupervisedLogs(LogsSpecs):
    """Sets the environment where torch prepares the outputs of its processes: it has no other place for that.

    Args:
        outputs: The outputs that the command line asks for.
        directory: The directory for heartbeats and failures.
        is_alone: Whether it is for the only process. That is started as by hand, so that Lightning may start ranks.
    """

    def __init__(self, outputs: LogsSpecs, *, directory: str, is_alone: bool) -> None:
        super().__init__()
        self._outputs = outputs
        self._directory = directory
        self._is_alone = is_alone

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the outputs, and put our variables into the environments."""
        of_ranks = {rank: [*variables] for rank, variables in envs.items()}
        found = self._outputs.reify(envs)
        for rank, variables in envs.items():
            for name in of_ranks[rank] if self._is_alone else ():
                del variables[name]
            variables[TRAINING_VARIABLE] = os.environ.get(TRAINING_VARIABLE, "1")  # "manual" stays as it is
            variables[DIRECTORY_VARIABLE] = self._directory
        return found

    @property
    def root_log_dir(self) -> str:
        """The directory of the outputs."""
        return self._outputs.root_log_dir


_STATIC = "static"
_AGENT, _HANDLER = "LocalElasticAgent", "_terminate_process_handler"
OTHERS_ENDED = (
    "The other machines have ended the run, or can't be reached. The output of the one that ended first says why."
)
_UNLIMITED = 1_000_000
"""How often torch may restart: our policy ends the run long before."""


@final
class StopRequest:
    """The first signal that asks the run to stop. Later ones change nothing: the run is being stopped.

    torch's own handler raises an exception wherever the signal arrives, and again for each further one. This one raises
    it once, and only in `raised`: nothing of ours runs there, no process is being started, and none is being ended.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._is_raised = self._may_raise = False
        for signum in (signal.SIGTERM, signal.SIGINT):  # torch begins with its first start
            signal.signal(signum, self.note)

    def note(self, signum: int, _: FrameType | None = None) -> None:
        """Handle a signal."""
        self._signum = self._signum or signum
        self._raise()

    def raised(self) -> contextlib.AbstractContextManager[None]:
        """Let the signal raise torch's exception in this block."""
        return self._block(may_raise=True)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Raise it after this block instead of in it."""
        return self._block(may_raise=False)

    @contextlib.contextmanager
    def _block(self, *, may_raise: bool) -> Iterator[None]:
        before, self._may_raise = self._may_raise, may_raise
        try:
            self._raise()
            yield
        finally:
            self._may_raise = before
        self._raise()

    def _raise(self) -> None:
        if self._signum and self._may_raise and not self._is_raised:
            self._is_raised = True
            raise SignalException("stopped by a signal", signal.Signals(self._signum))


@final
class SupervisedAgent(LocalElasticAgent):
    """An agent that asks the supervisor before it restarts its processes.

    Args:
        supervisor: Decides.
        stop: What asks the run to stop.
    """

    def __init__(self, *args: Any, supervisor: Supervisor, stop: StopRequest, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._supervisor = supervisor
        self._stop = stop

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        with self._stop.held():
            # All earlier ones are stopped, after a failure and for a machine that joins.
            self._supervisor.begin_start()
            started: dict[int, Any] = super()._start_workers(worker_group)
            self._supervisor.note_started(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        wait_seconds = 0.0
        with self._stop.held():
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state == WorkerState.SUCCEEDED and self._supervisor.is_cut():
                result = RunResult(state=WorkerState.FAILED)
                wait_seconds = self._supervisor.after_failure([0])
            elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                codes = [failure.exitcode for failure in result.failures.values()]
                wait_seconds = self._supervisor.after_failure(codes)
            elif result.state == WorkerState.HEALTHY:
                self._supervisor.look()
        time.sleep(wait_seconds)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        with self._stop.held():
            super()._shutdown(*args, **kwargs)
            handlers = getattr(self._pcontext, "subprocess_handlers", {})
            self._supervisor.exit_codes = tuple(handler.proc.returncode for handler in handlers.values())


def run_supervised(arguments: argparse.Namespace, supervisor: Supervisor, stop: StopRequest) -> int:
    """Run torchrun with our agent; return the exit code.

    Args:
        arguments: torchrun's arguments.
        supervisor: Decides whether a run that has failed is started again.
        stop: What asks the run to stop.
    """
    is_on_one_machine = arguments.nnodes in ("1", "1:1")
    if arguments.standalone or (is_on_one_machine and arguments.rdzv_backend == _STATIC):
        # torchrun's default is a fixed port, so that a second run on the machine would fail.
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", "localhost:0", str(uuid4())
    elif arguments.rdzv_backend == _STATIC:
        say(
            f"--nnodes {arguments.nnodes} needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, the same on each"
            " machine: torch's static rendezvous can't connect restarted ranks."
        )
        return WRONG_USAGE
    # With a shared store, restarted ranks may look for each other at the addresses of the dead: pytorch#135712.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    arguments.max_restarts = _UNLIMITED
    config, command, words = config_from_args(arguments)
    is_alone = is_on_one_machine and config.nproc_per_node == 1
    assert config.logs_specs is not None
    config.logs_specs = SupervisedLogs(config.logs_specs, directory=str(supervisor.directory), is_alone=is_alone)
    try:
        agent = functools.partial(SupervisedAgent, supervisor=supervisor, stop=stop)
        with _replaced(api, _AGENT, agent), _replaced(processes, _HANDLER, stop.note), stop.raised():
            api.launch_agent(config, command, words)
    except SupervisionEnded as end:
        return end.exit_code
    except SignalException as stop:
        return stop_code(supervisor.exit_codes, signum=int(stop.sigval))
    except (RendezvousError, DistError) as error:
        say(f"{OTHERS_ENDED} torch says: {error}")
        return GAVE_UP
    return FINISHED


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Replace what torch's launcher uses: it has no argument for that."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


DESCRIPTION = """\
Run a training script, and start it again after each failure: it continues exactly where it was. The script needs no
change: if it has no FaultTolerance callback, PL_FAULT_TOLERANT_TRAINING=1 adds one.

  lightning-faulttolerant run -- python train.py
  lightning-faulttolerant run --nproc-per-node 2 -- python train.py --lr 0.1
  lightning-faulttolerant run --nnodes 2 --rdzv-endpoint node0:29400 --rdzv-backend c10d -- python train.py

All of torchrun's options for processes, machines, and outputs can be given before COMMAND: see torchrun --help.
SIGTERM and SIGINT are passed on: the run saves its state, and ends.
"""
EPILOG = """\
Exit status: 0 finished; 2 wrong usage; 3 the same exception at the same batch came three starts in a row; 4 given up,
after starts without a new autosave, or because the other machines have ended the run. Stopped on request: 143 by
SIGTERM, 130 by SIGINT, 75 by a deadline, 76 with its SLURM job queued again, 74 if its state could not be saved.
"""
# Our own, or of no use for a command that begins with its interpreter.
_NOT_TORCHRUNS = {"help", "max_restarts", "module", "no_python", "run_path", "training_script", "training_script_args"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``run``.

    Args:
        parser: The parser of this command.
    """
    add_command_words(parser)
    parser.add_argument(
        "--from",
        metavar="STEP",
        help="begin a new run, a branch, from a kept autosave of this run. STEP is a number of optimizer steps,"
        " EPOCH:BATCH, or a path. The same command continues the branch",
    )
    parser.add_argument(
        "--skip",
        metavar="EPOCH:BATCH",
        action="append",
        type=batch_to_skip,
        default=[],
        help="leave this training batch out, both numbers from 0; may be repeated; later starts leave it out, too",
    )
    parser.add_argument(
        "--accept",
        metavar="NAME",
        action="append",
        default=[],
        help="accept a difference that a resume has refused, such as hyperparameters.lr; may be repeated; later starts "
        "accept it, too, and their reports say so",
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=at_least_1,
        default=5,
        help="give up after this many starts in a row without a new autosave (default: 5)",
    )
    for action in get_args_parser()._actions:
        if action.dest not in _NOT_TORCHRUNS:
            action.help = argparse.SUPPRESS  # torchrun's own help describes them
            parser._add_action(action)


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it ends; return the exit status."""
    words = command_words(arguments.words)
    fault = fault_of_command(words[0])
    if fault is not None:
        say(fault)
        return WRONG_USAGE
    arguments.training_script, *arguments.training_script_args = words
    arguments.no_python, arguments.module, arguments.run_path = True, False, False
    requested = {
        RESUME_FROM_VARIABLE: getattr(arguments, "from"),
        SKIP_VARIABLE: text_of_skips(arguments.skip),
        ACCEPT_VARIABLE: ",".join(arguments.accept),
    }
    os.environ.update({name: value for name, value in requested.items() if value})
    policy = RestartPolicy(arguments.max_restarts, command=shlex.join(["lightning-faulttolerant", *sys.argv[1:]]))
    stop = StopRequest()
    supervisor = Supervisor(policy, look_every_seconds=arguments.monitor_interval)
    exit_code = run_supervised(arguments, supervisor, stop)
    supervisor.close()  # after an exception, the guard ends what is left
    return exit_code
