"""Engines that accept draft tokens by chance, and one that does not, in one process."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

K_MAX = 3
NUM_REQUESTS = 8
ARGUMENTS = {
    "max_num_seqs": NUM_REQUESTS,
    "per_request_spec_decode_metrics": "detailed",
}


def run(order: dict[str, Any]) -> None:
    """Write what became of the drafts of each engine of ``order["engines"]``."""
    found = [_run(spec, order["max_tokens"]) for spec in order["engines"]]
    Path(order["result"]).write_text(json.dumps(found))


def _run(spec: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    from prometheus_client import REGISTRY

    from tests.support.engines import engine
    from tests.support.watch import record_outcomes, scheduler_of

    spec = {"method": "mtp_plus", "num_speculative_tokens": K_MAX} | spec
    with (
        _logged() as lines,
        engine(BUNDLED_CHECKPOINT, speculative_config=spec, **ARGUMENTS) as llm,
    ):
        recorder = record_outcomes(llm)
        found = {
            name: _drafts(llm, temperature, max_tokens)
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        }
        llm.llm_engine.do_log_stats()
        labels = {"model_name": str(BUNDLED_CHECKPOINT), "engine": "0"}
        gauge = REGISTRY.get_sample_value("vllm_mtp:synthetic_acceptance", labels)
        judges = {
            "stops_early": scheduler_of(llm)._stops_early,
            "num_shadow_drafts": sum(len(o.shadow_drafts) for o in recorder.outcomes),
        }
    return found | judges | {"gauge": gauge, "log": lines}


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Our lines. No handler: vLLM removes all of them when an engine starts."""
    lines: list[str] = []

    def keep(level: str, text: str, *arguments: Any) -> None:
        lines.append(f"{level} {text % arguments}")

    kept = {level: partial(keep, level) for level in ("info", "warning")}
    with mock.patch.multiple(logging.getLogger("vllm.mtp_plus"), **kept):
        yield lines


def _drafts(llm: Any, temperature: float, max_tokens: int) -> dict[str, Any]:
    """Of a batch of requests: vLLM's counters, and what responses say."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from tests.support.engines import counters

    before = counters(llm)
    outputs = llm.generate(
        [
            TokensPrompt(prompt_token_ids=list(p))
            for p in heldout_prompts(NUM_REQUESTS, 32)
        ],
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    after = counters(llm)
    by_position = [counts["accepted_tokens_per_pos"] for counts in (before, after)]
    return {
        "num_drafts": after["drafts"] - before["drafts"],
        "accepted": [new - old for old, new in zip(*by_position, strict=True)],
        "responses": [o.outputs[0].spec_decode_metrics.to_dict() for o in outputs],
    }
