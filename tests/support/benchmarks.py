"""``python -m benchmarks`` as somebody with a clone runs it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = (sys.executable, "-m", "benchmarks")
"""To be run in `REPOSITORY`."""


def run_benchmarks(
    *arguments: str, timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run to the end, output as text.

    Args:
        *arguments: Of the command line.
        timeout_s: Time limit.
        **options: Of `subprocess.run`.
    """
    return subprocess.run(
        [*BENCHMARKS, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        **options,
    )


def refused(*arguments: str) -> Result:
    """Of a command line that is refused, which needs no process of its own.

    Args:
        *arguments: Of the command line.
    """
    from benchmarks.__main__ import app

    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.stderr
    return result
