"""A mistake on vLLM's command line ends in one sentence, not in a traceback.

Only where the process *is* vLLM's command: from Python (``vllm.LLM``) the exception
stays an exception, because there the caller decides what to do with it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.compat import CompatibilityError

USAGE_EXIT_CODE = 2
"""What argparse uses for a bad command line, too."""


@contextmanager
def clear_exit() -> Iterator[None]:
    """Turn our own errors into ``vllm: error: ...`` and exit code 2 on the CLI."""
    try:
        yield
    except (ConfigError, CompatibilityError) as error:
        if not is_vllm_command():
            raise
        print(f"vllm: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_EXIT_CODE) from None


def is_vllm_command() -> bool:
    """Whether this process was started as ``vllm ...`` or ``python -m vllm...``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    started_as_module = spec is not None and spec.name.split(".")[0] == "vllm"
    return started_as_module or Path(sys.argv[0]).name == "vllm"
