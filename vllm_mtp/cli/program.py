"""The ``vllm-mtp`` program: the commands, or one sentence about what they lack.

Serving needs none of `TOOLS`, so an installation may be without them.
"""

import sys
from importlib.util import find_spec

TOOLS = ("typer", "rich", "scipy")
"""Of the extra ``tools`` in pyproject.toml."""
MISSING_EXIT_CODE = 2


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: Always; with `MISSING_EXIT_CODE` if a package is missing.
    """
    missing = next((name for name in TOOLS if find_spec(name) is None), None)
    if missing is not None:
        sentence = f"vllm-mtp: needs {missing}; install vllm-mtp[tools]"
        print(sentence, file=sys.stderr)
        raise SystemExit(MISSING_EXIT_CODE)
    from vllm_mtp.cli.main import app

    app()
