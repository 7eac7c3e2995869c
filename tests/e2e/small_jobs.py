"""Jobs of the bundled checkpoint in a fresh process (`engine_jobs`)."""

from typing import Any

from tests.support.engine_jobs import Jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

_SMALL = {"max_num_seqs": 8, "max_model_len": 192}


def small_jobs(
    engines: list[dict[str, Any]], num_prompts: int = 8, **settings: Any
) -> Jobs:
    """One engine for each of ``engines``, which say how it differs from a small one."""
    return Jobs(
        model=str(BUNDLED_CHECKPOINT),
        prompts=[list(p) for p in heldout_prompts(8, max_tokens=48)][:num_prompts],
        engines=[_SMALL | arguments for arguments in engines],
        **settings,
    )
