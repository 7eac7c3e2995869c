"""Acceptance by chance on a CPU beside vLLM's kernels under Triton's interpreter."""

import json
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 64
LENGTHS = [3, 0, 1, 3, 2, 0, 3]
RATES = [0.9, 0.7, 0.5]
"""Of each draft token, if those before it are accepted."""
TEMPERATURES = {
    "greedy": [0.0] * len(LENGTHS),
    "sampled": [1.0] * len(LENGTHS),
    "mixed": [0.0, 1.0] * 3 + [1.0],
}


def compare(order: dict[str, Any]) -> None:
    """Write what both say of the same random batches."""
    found = [
        {"kind": kind, "ours": ours, "theirs": theirs}
        for seed in range(8)
        for kind in TEMPERATURES
        for ours, theirs in [_both(seed, kind)]
    ]
    Path(order["result"]).write_text(json.dumps(found))


def _both(seed: int, kind: str) -> list[list[list[int]]]:
    from vllm.v1.sample.rejection_sampler import rejection_sample

    from vllm_mtp.integration.v1.synthetic_acceptance import accept_by_chance

    return [_accepted(f, seed, kind) for f in (accept_by_chance, rejection_sample)]


def _accepted(function: Any, seed: int, kind: str) -> list[list[int]]:
    torch.manual_seed(seed)
    num_drafts = sum(LENGTHS)
    drafts = torch.randint(VOCAB_SIZE, (num_drafts,), dtype=torch.int32)
    drafts[seed] = -1
    probs = torch.rand(num_drafts, VOCAB_SIZE).softmax(dim=-1)
    output = function(
        drafts,
        LENGTHS,
        max(LENGTHS),
        torch.tensor(LENGTHS, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        probs if seed % 2 and kind != "greedy" else None,
        torch.randn(num_drafts, VOCAB_SIZE),
        torch.randint(VOCAB_SIZE, (len(LENGTHS), 1), dtype=torch.int32),
        _metadata(TEMPERATURES[kind]),
        synthetic_mode=True,
        synthetic_conditional_rates=torch.tensor(RATES),
        use_fp64_gumbel=False,
    )
    tokens: list[list[int]] = output.tolist()
    return tokens


def _metadata(temperatures: list[float]) -> Any:
    """One of the requests has a seed."""
    from tests.support.sampling_metadata import sampling_metadata

    return sampling_metadata(
        len(temperatures),
        temperature=torch.tensor(temperatures),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        generators={3: torch.Generator().manual_seed(5)},
    )
