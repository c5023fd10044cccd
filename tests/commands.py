"""Runs tpshard's command line, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tpshard.cli import run

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = (sys.executable, "-c", "from tpshard.cli import main; main()")


def environment(**more: str) -> dict[str, str]:
    """The environment of a subprocess that finds tpshard wherever it runs."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


# From elsewhere than the clone: `-c` puts the current folder on the path, and there tpshard lacks its converters.
ELSEWHERE: dict[str, Any] = {"cwd": sys.prefix, "text": True, "env": environment()}


class Done(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def tpshard(*arguments: object) -> Done:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([str(argument) for argument in arguments])
    return Done(status, out.getvalue(), err.getvalue())


def ok(*arguments: object) -> Done:
    """Run a command that must succeed."""
    done = tpshard(*arguments)
    assert done.status == 0, done.err
    return done


def refused(status: int, *arguments: object, says: tuple[object, ...] = ()) -> str:
    """Run a command that must fail with this exit status and one plain reason; returns the reason."""
    done = tpshard(*arguments)
    assert done.status == status, done
    reason = done.err.splitlines()[-1]
    assert reason.startswith("error: "), done.err
    assert "Traceback" not in done.err
    for words in says:
        assert str(words) in reason, (words, reason)
    return reason


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    settings = {**ELSEWHERE, "capture_output": True, "timeout": 60, **options}
    return subprocess.run([*PROGRAM, *map(str, arguments)], **settings)


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], **{**ELSEWHERE, **options})
