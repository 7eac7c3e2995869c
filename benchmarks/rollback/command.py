"""``python -m benchmarks rollback``."""

from rich.console import Console

from benchmarks.rollback.options import RollbackBenchOptions
from vllm_mtp.tools.server_process import ServerError


def run_rollback(options: RollbackBenchOptions, console: Console) -> None:
    """Measure; kernels that contradict each other are an error, not a bug."""
    # vLLM takes seconds to import: bad options are refused before.
    from benchmarks.rollback.bench import run_rollback_bench
    from benchmarks.rollback.timing import ContendersDifferError

    try:
        run_rollback_bench(options, console)
    except ContendersDifferError as error:
        raise ServerError(str(error)) from None
