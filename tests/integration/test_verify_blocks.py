"""Block verification of a batch on Model Runner V1, of which only some have drafts."""

from types import SimpleNamespace

import torch

from vllm_mtp.integration.v1.block_verification import verify_blocks

VOCAB_SIZE = 50
LENGTHS = [0, 2, 0, 1]
BONUS = [7, 8, 9, 10]


def verify(lengths: list[int], places: list[int], first_row: int) -> torch.Tensor:
    """Those requests of the batch alone, each with a seed of its own."""
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(sum(LENGTHS), VOCAB_SIZE, generator=rng)
    drafts = torch.randint(VOCAB_SIZE, (sum(LENGTHS),), generator=rng)
    probs = torch.randn(sum(LENGTHS), VOCAB_SIZE, generator=rng).softmax(dim=-1)
    rows = slice(first_row, first_row + sum(lengths))
    sampling = SimpleNamespace(
        generators={i: torch.Generator().manual_seed(p) for i, p in enumerate(places)},
        all_random=True,
    )
    return verify_blocks(
        drafts[rows],
        lengths,
        max(lengths),
        torch.tensor(lengths).cumsum(0),
        probs[rows],
        logits[rows],
        torch.tensor([[BONUS[p]] for p in places]),
        sampling,
    )


def test_a_request_gets_what_it_would_get_alone() -> None:
    output = verify(LENGTHS, [0, 1, 2, 3], 0)
    assert output.dtype == torch.int32
    assert output[0].tolist() == [BONUS[0], -1, -1]
    assert output[2].tolist() == [BONUS[2], -1, -1]
    assert output[1].tolist() == verify([2], [1], 0)[0].tolist()
    assert output[3, :2].tolist() == verify([1], [3], 2)[0].tolist()
    assert output[3, 2] == -1
