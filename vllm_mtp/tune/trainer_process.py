"""The process that adapts a head beside a server: ``python -m ... PLAN.json``.

It lives as long as the other end of its standard input is open, so it cannot outlive
the server, however that ends; then it removes the folder that they shared. It takes
cores that the server leaves, behind everything else that wants them.
"""

import os
import shutil
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import torch

from vllm_mtp.config import ConfigError
from vllm_mtp.tune.adapting import Adapting, AdaptingPlan

CANNOT_ADAPT = 3
"""Exit code: another start would end alike."""
_CORES_SHARE = 8
"""An eighth of the machine's cores, one at least."""
_LOWEST_PRIORITY = 19


def main() -> None:
    plan = AdaptingPlan.model_validate_json(Path(sys.argv[1]).read_text())
    threading.Thread(target=_end_with_server, args=(plan.folder,), daemon=True).start()
    os.nice(_LOWEST_PRIORITY)
    torch.set_num_threads(take_cores(plan.busy_cores))
    try:
        adapting = Adapting(plan)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_ADAPT)
    adapting.run()


def take_cores(busy: Collection[int]) -> int:
    """Run on cores that are not busy, if there are any.

    Args:
        busy: Cores that the server's threads are bound to.

    Returns:
        The number of threads to have.
    """
    # Not those that were inherited from a thread of the server; the kernel leaves out
    # what this container may not use.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed - set(busy) or allowed)
    return max(1, len(allowed) // _CORES_SHARE)


def _end_with_server(folder: Path) -> None:
    # Past Python's own buffer, whose lock an interpreter that ends would miss.
    while os.read(0, 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
