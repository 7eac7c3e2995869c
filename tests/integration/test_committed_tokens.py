"""What steps have committed, gathered for the draft vocabulary."""

import torch

from vllm_mtp.integration.draft_vocab.policy import committed_tokens


def gathered(*steps: tuple[list[list[int]], list[int] | None]) -> list[int]:
    """All of it but the -1."""
    tensors = [
        (torch.tensor(ids), None if counts is None else torch.tensor(counts))
        for ids, counts in steps
    ]
    return sorted(i for i in committed_tokens(tensors).tolist() if i != -1)


def test_model_runner_v1_marks_what_was_not_sampled() -> None:
    assert gathered(([[5, 6, -1], [7, -1, -1]], None), ([[8]], None)) == [5, 6, 7, 8]


def test_model_runner_v2_says_how_many_were_sampled() -> None:
    """What stands behind them is what the memory held before."""
    steps = (
        ([[5, 6, 91], [92, 93, 94]], [2, 0]),
        ([[7]], [1]),
        ([[1, 2, 3], [4, 95, 96]], [3, 1]),
        ([[8], [97]], [1, 0]),
    )
    assert gathered(*steps) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_counts_may_be_padded_to_the_size_of_a_cuda_graph() -> None:
    assert gathered(([[5, 6], [7, 91]], [2, 1, 44, 44])) == [5, 6, 7]
