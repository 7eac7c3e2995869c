"""Greedy verification on Model Runner V2 beside vLLM's own rejection sampler.

Under Triton's interpreter, in a process of its own.
"""

import json
from pathlib import Path

import pytest

from tests.support.engine_jobs import V2
from tests.support.greedy_comparison import MAX_DRAFTS, NUM_STEPS

OBEY = "tests.support.greedy_comparison:compare_steps"


@pytest.mark.parametrize("method", ["standard", "block"])
def test_tokens_and_counts_are_those_of_vllm(method: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    order = {"seed": 1, "method": method, "result": str(result)}
    V2.run(OBEY, order, tmp_path / "log", timeout_s=300)
    steps = json.loads(result.read_text())
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["ours"] == step["theirs"]
    counts = [count for step in steps for count in step["ours"][1]]
    assert {0, 1, 2, MAX_DRAFTS + 1} <= set(counts)
