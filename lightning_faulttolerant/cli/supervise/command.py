"""``run``: run a script, and start it again after each failure, until it ends."""

from __future__ import annotations

import argparse
import shlex
import sys

from torch.distributed.run import get_args_parser

from lightning_faulttolerant.cli.supervise.agent import run_supervised
from lightning_faulttolerant.cli.supervise.supervisor import WRONG_USAGE, RestartPolicy, Supervisor, say
from lightning_faulttolerant.cli.text import add_command_words, at_least_1, command_words, fault_of_command

DESCRIPTION = """\
Run a training script that needs nobody. COMMAND is started again after each failure, and continues exactly where it
was. The script needs no change: where it has no FaultTolerance callback, PL_FAULT_TOLERANT_TRAINING=1 adds it.

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
    policy = RestartPolicy(arguments.max_restarts, command=shlex.join(["lightning-faulttolerant", *sys.argv[1:]]))
    supervisor = Supervisor(policy, look_every_seconds=arguments.monitor_interval)
    try:
        return run_supervised(arguments, supervisor)
    finally:
        supervisor.close()
