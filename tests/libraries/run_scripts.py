"""Runs starts of one script, each forked from this process, which has imported the script's imports.

``python run_scripts.py SCRIPT`` reads one start from each line of its input: JSON with the directory, the variables,
and the file for the output. It answers with the exit code. It runs in the environment of the libraries.
"""

import ast
import atexit
import contextlib
import importlib
import json
import os
import secrets
import sys
import threading
import types
from pathlib import Path

from lightning_faulttolerant.testing.processes import fork_and_run


def _import_what(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _run(script: Path, start: dict) -> None:
    os.chdir(start["directory"])
    os.environ.update(start["variables"])
    sys.argv[:] = sys.orig_argv[1:] = [script.name]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    path = Path(start["directory"]) / script.name
    main.__file__ = str(path)
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(main))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # W&B ends its run there


def main() -> None:
    """Run the requested starts."""
    script = Path(sys.argv[1])
    _import_what(script)
    for line in sys.stdin:
        start = json.loads(line)
        process_id = fork_and_run(
            lambda start=start: _run(script, start), output=Path(start["output"]), seed=secrets.randbits(31)
        )
        _, status = os.waitpid(process_id, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
