"""Runs starts of one script, each forked from this process, which has imported the script's imports.

``python run_scripts.py SCRIPT`` reads one start from each line of its input: JSON with the directory, the variables,
and the file for the output. It answers with the exit code. It runs in the environment of the libraries.
"""

import ast
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

from tests.harness import python


def _import_what(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    """Run the requested starts."""
    script = Path(sys.argv[1])
    _import_what(script)
    for line in sys.stdin:
        start = json.loads(line)
        output, environment = Path(start["output"]), {**os.environ, **start["variables"]}
        command = python.Command(
            words=[sys.executable, script.name], directory=start["directory"], environment=environment
        )
        print(python.Popen(command, output=output, mark=output.with_suffix(".mark")).wait(), flush=True)


if __name__ == "__main__":
    main()
