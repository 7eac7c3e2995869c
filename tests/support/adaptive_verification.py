"""Adaptive verification on a CPU, under Triton's interpreter.

There are no CUDA graphs there, for which vLLM wants it, and nothing to time: what rows
cost is made up, so that about half of the draft tokens are worth theirs.
"""

import json
from pathlib import Path
from typing import Any

VARIABLE = "MTP_PLUS_TESTS_VERIFY_ADAPTIVELY"
"""Of the environment: `tests.support.interpreted` reads it."""
DRAFT_COST, ROW_COST = 2.0, 1.0


def allow() -> None:
    """In this process, for all engines to come."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as theirs

    from vllm_mtp.integration.v2 import adaptive_verification as ours
    from vllm_mtp.integration.v2 import runner

    ours.goes_with = lambda config: True
    ours.is_supported = lambda runner: True
    runner.announce = lambda runner: None
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    theirs.get_varlen_cudagraph_unsupported_backend = lambda *_, **__: None
    theirs._assign_draft_token_budget_compiled = theirs._assign_draft_token_budget
    runner.MTPPlusRunner.initialize_kv_cache = _priced(
        runner.MTPPlusRunner.initialize_kv_cache
    )


def _priced(initialize_kv_cache: Any) -> Any:
    def priced(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize_kv_cache(self, *args, **kwargs)
        self.adaptive_verification.set_cost_curves(
            [(1, DRAFT_COST)], [(1, ROW_COST), (2, 2 * ROW_COST)]
        )

    return priced


def play(order: dict[str, Any]) -> None:
    """Greedy texts of an engine, and what its steps left out; in a fork of V2's.

    Args:
        order: ``model``, ``prompts``, ``max_tokens``, arguments of the engine, ``spec``
            (None for none) and where the ``result`` goes.
    """
    from tests.support.engine_jobs import let_the_cpu_schedule_async
    from tests.support.engines import engine, greedy
    from tests.support.watch import record_outcomes

    allow()
    let_the_cpu_schedule_async()
    found: dict[str, Any] = {"texts": [], "steps": []}
    for spec in (None, order["spec"]):
        options = order["engine"] | ({"speculative_config": spec} if spec else {})
        with engine(Path(order["model"]), **options) as llm:
            seen = record_outcomes(llm) if spec else None
            found["texts"].append(greedy(llm, order["prompts"], order["max_tokens"]))
        if seen is not None:
            found["steps"] = [_noted(outcome) for outcome in seen.outcomes]
    Path(order["result"]).write_text(json.dumps(found))


def _noted(outcome: Any) -> dict[str, Any]:
    return {
        "requests": [
            [r.num_draft_tokens, r.num_accepted_tokens, r.num_left_out]
            for r in outcome.requests
        ],
        "num_would_be_accepted": sum(r.num_would_be_accepted for r in outcome.requests),
        "num_requests": outcome.num_requests,
        "num_rows": outcome.num_scheduled_tokens,
        "num_prefill_tokens": outcome.num_prefill_tokens,
    }
