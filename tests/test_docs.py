"""The documentation is true: its code and that in docstrings runs, and its commands exist. `make docs` checks links."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_faulttolerant import errors
from tests.docs import sources
from tests.docs.commands import fault_of
from tests.docs.pages import PAGES, PRELUDES, ROOT, Block, blocks, prelude, prose, read
from tests.docs.small import ENVIRONMENT
from tests.processes import run

UNCHECKED = {"dockerfile", "text", "toml"}  # `text` for output and for anything that is not code


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in blocks(page))])
def test_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """All blocks of a page run unchanged, one after the other, in an empty directory and a separate process."""

    def main() -> None:
        os.chdir(tmp_path)
        os.environ.update(ENVIRONMENT)
        torch.set_num_threads(1)
        names: dict[str, Any] = {"__name__": "page"}
        if prelude(page).exists():
            exec(compile(prelude(page).read_text(encoding="utf-8"), prelude(page), "exec"), names)
        for block in blocks(page):
            if block.runs:
                exec(_compiled(block, page), names)

    ended = run(main)
    assert ended.exit_code == 0, ended.output


def _compiled(block: Block, page: str) -> Any:
    """Compile a block on its line of the page, so that an error shows its place."""
    return compile("\n" * block.line + block.code, page, "exec")


def test_each_prelude_belongs_to_a_page() -> None:
    """A deleted or renamed page leaves no prelude behind."""
    for path in PRELUDES.rglob("*.py"):
        page = str(path.relative_to(PRELUDES).with_suffix(".md"))
        assert any(block.runs for block in blocks(page)), page


@pytest.mark.parametrize(
    "line",
    [
        "lightning-faulttolerant list . --no-such-option",
        "lightning-faulttolerant no-such-command",
        "make no-such-target",
        'pip install ".[no-such-extra]"',
        "python examples/no_such_script.py",
        "torchrun --no-such-option=1 train.py",
        "srun --requeue python no_such_script.py",
        "no-such-program",
        "if true; then",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    """The check of commands can fail."""
    assert fault_of(Block(language="bash", why_not_run="", code=line, line=0))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_what_they_say(page: str) -> None:
    """Python compiles, YAML parses, commands and their options exist; no other language or open fence is left."""
    assert re.search(r"^(<{7}|>{7}) ", read(page), re.MULTILINE) is None
    assert "```" not in prose(page)
    for block in blocks(page):
        if block.language == "python":
            _compiled(block, page)
        elif block.language == "yaml":
            assert all(list(yaml.safe_load_all(block.code)))
        elif block.language in {"bash", "console"}:
            assert not fault_of(block), f"{page}, line {block.line}"
        else:
            assert block.language in UNCHECKED


def test_each_message_that_is_quoted_is_one_of_ours() -> None:
    """Each message that the troubleshooting page quotes is in the sources, except for parts that vary between runs."""
    messages = sources.messages()
    for quoted in re.findall(r"^> (.*)$", read("docs/troubleshooting.md"), re.MULTILINE):
        fixed = [part.strip() for part in quoted.split("…")]
        assert max(map(len, fixed)) > 8, quoted
        pattern = re.compile(".*".join(map(re.escape, fixed)), re.DOTALL)
        assert any(pattern.search(message) for message in messages), quoted


def test_each_error_is_explained() -> None:
    """The page of errors shows the tree of the sources and explains each; the page of messages names each of them."""
    page, messages = read("docs/reference/errors.md"), read("docs/troubleshooting.md")
    tree = textwrap.dedent(str(errors.__doc__).partition("::\n\n")[2].partition("\n``")[0]).strip()
    assert tree in page
    named = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert len(named) > 15
    assert re.findall(r"^::: lightning_faulttolerant\.errors\.(\w+)$", page, re.MULTILINE) == named
    assert [name for name in named if f"`{name}`" not in messages and f"`{name}s`" not in messages] == []


@pytest.mark.parametrize("module", ["lightning_faulttolerant", "lightning_faulttolerant.testing"])
def test_each_public_name_is_in_the_reference(module: str) -> None:
    """Each public name is documented; an alias of a name counts as that name."""
    shown = {name.rpartition(".")[2] for page in PAGES for name in re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)}
    public = [name.replace("Interruptable", "Interruptible") for name in importlib.import_module(module).__all__]
    assert [name for name in public if name not in shown] == []


def test_the_figures_in_short_are_those_of_the_tables() -> None:
    """The summary of the performance page contains only numbers that are measured below it."""
    head, _, tables = read("docs/performance.md").partition("`make bench`")
    figures = re.findall(r"\*\*(.+?)\*\*", head)
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in tables] == []


def test_each_environment_variable_is_in_the_reference() -> None:
    """Each environment variable that the package reads is in the reference."""
    read_there = {name for text in sources.messages() for name in re.findall(r"PL_FAULT_TOLERANT_[A-Z_]+", text)}
    assert len(read_there) > 2
    assert [name for name in sorted(read_there) if f"`{name}`" not in read("docs/reference/index.md")] == []


DOCTESTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "lightning_faulttolerant").rglob("*.py"))
    if re.search("^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example prints what its docstring shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # others can't enter the one of a suite, so it is always trusted
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
