"""Model Runner V2 with drafting disabled: the step of an engine without speculation.

Operations and launches are counted under Triton's interpreter, so that this is seen
where there is no GPU.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_jobs import V2

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}


def usual_steps(sampling: dict[str, Any], folder: Path) -> list[Counter[str]]:
    """Of an engine without speculation, and of ours.

    Not all are: where a block of KV begins its table is written.
    """
    result = folder / "result.json"
    order = {
        "engines": [{}, {"speculative_config": SPECULATION}],
        "sampling": sampling,
        "num_reqs": 2,
        "result": str(result),
    }
    V2.run("tests.support.step_operations:count", order, folder / "log", 300)
    found = json.loads(result.read_text())
    if sampling["extra_args"] == {"mtp_plus_k": 0}:
        assert min(share for _, share in found) > 0.8
    return [Counter(each) for each, _ in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_at_k_0_a_step_launches_one_copy_more_at_most(
    temperature: float, tmp_path: Path
) -> None:
    sampling = {"temperature": temperature, "extra_args": {"mtp_plus_k": 0}}
    plain, ours = usual_steps(sampling, tmp_path)
    more = ours - plain
    # Greedy steps are verified in our way, with fewer launches than vLLM's.
    assert more.keys() <= {"keep_rows", "vllm_mtp::accept_greedily"}
    assert more["keep_rows"] == 1
    assert ours.total() <= plain.total() + 1


def test_where_it_drafts_there_is_more(tmp_path: Path) -> None:
    """The comparison can fail."""
    plain, ours = usual_steps({"extra_args": {"mtp_plus_k": 1}}, tmp_path)
    assert ours.total() > plain.total() + 10
