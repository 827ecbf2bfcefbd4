"""A real SLURM cluster on this machine: three nodes, three partitions, and daemons that belong to the current user.

    python -m tests.harness.slurm start .slurm
    python -m tests.harness.slurm stop .slurm

Nothing outside the directory is written, no service manager is needed, and another cluster is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
NODES = ("node1", "node2", "node3")
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_LONGEST_SOCKET = 100  # characters: the limit of a Unix socket's path is 108
_SECONDS = 30.0

# The delays are as short as SLURM allows. `cred_expire` is how long a requeued job waits before it starts again, by
# default 120 s. Notices and time limits are looked at every 30 s, which can't be set. There are more CPUs than the
# machine has, since jobs of the tests wait most of the time. Jobs in `urgent` preempt those in `spot`.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=16 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES PriorityTier=1 PreemptMode=OFF State=UP
PartitionName=spot Nodes=node3 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=node3 PriorityTier=2 PreemptMode=OFF State=UP
"""


def _found(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_PATH)))


def missing() -> str | None:
    """Return the names of what is not installed, or ``None``."""
    names = [name for name in PROGRAMS if _found(name) is None]
    return f"{', '.join(names)} not installed (make slurm)" if names else None


class Cluster:
    """A cluster whose files are all in one directory.

    Args:
        directory: The directory. Its path must be short, since a socket is created in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.configuration = self.directory / "slurm.conf"

    @property
    def variables(self) -> dict[str, str]:
        """The variables that a process needs to use the cluster, and that its jobs inherit."""
        # The names of the nodes are known to SLURM only, so the tasks of a job could not find the first one.
        return {"SLURM_CONF": str(self.configuration), "MASTER_ADDR": "127.0.0.1"}

    def start(self) -> None:
        """Start the daemons, and wait until the nodes are idle.

        Raises:
            RuntimeError: If something is missing, or a daemon does not start; with what it has logged.
        """
        lacking = missing()
        if lacking is not None:
            raise RuntimeError(lacking)
        if len(str(self.directory)) > _LONGEST_SOCKET - len("/munge.socket"):
            raise RuntimeError(f"{self.directory} is too long a path for a socket: choose a shorter one")
        if self._processes():
            raise RuntimeError(f"a cluster already runs in {self.directory} (make slurm-stop)")
        try:
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def _start_daemons(self) -> None:
        self._write()
        own = self.directory
        # --force: munge warns of a directory above that others can't enter, as a home directory
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={own / name}" for option, name in {**files, "seed-file": "munged.seed"}.items()]
        self._launch("munged", "--force", *options)
        self._launch("slurmctld")
        for node in NODES:
            self._launch("slurmd", "-N", node)
        deadline = time.monotonic() + _SECONDS
        while set(self.ask("sinfo", "--noheader", "--format=%t").split()) != {"idle"}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are not idle after {_SECONDS:g} s:\n{self.logged()}")
            time.sleep(0.1)

    def stop(self) -> None:
        if not self._processes():
            return
        with contextlib.suppress(RuntimeError):
            self.ask("scancel", "--signal=KILL", "--full", "--state=RUNNING")
            self.ask("scancel", f"--user={os.getuid()}")
            deadline = time.monotonic() + _SECONDS
            while self.ask("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.1)
        for process_id in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process_id in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def ask(self, program: str, *arguments: str, directory: Path | None = None, **variables: str) -> str:
        """Run one of SLURM's programs, and return its output.

        Raises:
            RuntimeError: If it fails.
        """
        environment = {**os.environ, **self.variables, **variables}
        command = [_found(program) or program, *arguments]
        done = subprocess.run(
            command, env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def logged(self) -> str:
        """Return the last lines of the daemons' logs."""
        return "\n".join(
            f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def _write(self) -> None:
        for name in ("state", *NODES):
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir(parents=True)
        key = self.directory / "munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128))
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        port, *ports = free_ports(1 + len(NODES))
        self.configuration.write_text(
            _CONFIGURATION.format(
                directory=self.directory,
                user=user,
                host=host,
                nodes=",".join(NODES),
                port=port,
                ports=",".join(map(str, ports)),
            )
        )

    def _launch(self, program: str, *arguments: str) -> None:
        try:
            self.ask(program, *arguments)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.logged()}") from None

    def _processes(self) -> list[int]:
        """Return the daemons that run. A number in an old file may be that of another process by now."""
        found = []
        for path in self.directory.glob("*.pid"):
            with contextlib.suppress(ValueError, OSError):
                process_id = int(path.read_text())
                if Path(f"/proc/{process_id}/comm").read_text().strip() in PROGRAMS:
                    found.append(process_id)
        return found


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def main(arguments: list[str]) -> int:
    """Start or stop the cluster in a directory; return the exit code."""
    verb, directory = arguments
    cluster = Cluster(Path(directory))
    if verb == "stop":
        cluster.stop()
        return 0
    try:
        cluster.start()
    except RuntimeError as error:
        print(f"No SLURM cluster: {error}", file=sys.stderr)
        return 1
    print(f"{len(NODES)} nodes are idle. To use them:\n")
    for name, value in cluster.variables.items():
        print(f"    export {name}={shlex.quote(value)}")
    print("\nmake slurm-stop ends the jobs and the daemons.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
