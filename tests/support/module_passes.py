"""Which MTP modules run in each step of a model that has several."""

import json
from pathlib import Path
from typing import Any

NUM_TOKENS = 28


def run_in_fork(order: dict[str, Any]) -> None:
    """Play a script of draft depths.

    Args:
        order: ``model``; ``speculation`` of the engine; ``script``; ``prompts``;
            ``result``, a file for texts, passes and outcomes.
    """
    from tests.support.drafter_passes import drafter_of
    from tests.support.engine_jobs import accepted_by_step
    from tests.support.engines import engine, greedy
    from tests.support.watch import play_script

    speculation = order["speculation"]
    found: dict[str, Any] = {}
    with engine(Path(order["model"]), speculative_config=speculation) as llm:
        if speculation is not None:
            played = play_script(llm, order["script"])
            drafter = drafter_of(llm)
            found["drafter"] = type(drafter).__name__
            found["modules"] = _watch(drafter)
        found["texts"] = greedy(llm, order["prompts"], NUM_TOKENS)
        if speculation is not None:
            found["depths"] = [each.draft_depth for each in played.outcomes]
            found["accepted"] = accepted_by_step(played.outcomes)
    Path(order["result"]).write_text(json.dumps(found))


def _watch(drafter: Any) -> list[list[int]]:
    """Modules of each call of ``propose``, from here on."""
    steps: list[list[int]] = []
    propose, forward = drafter.propose, drafter.model.forward

    def watched_propose(*args: Any, **kwargs: Any) -> Any:
        steps.append([])
        return propose(*args, **kwargs)

    def watched_forward(*args: Any, **kwargs: Any) -> Any:
        steps[-1].append(kwargs.get("spec_step_idx", 0))
        return forward(*args, **kwargs)

    drafter.propose, drafter.model.forward = watched_propose, watched_forward
    return steps
