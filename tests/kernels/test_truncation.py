"""Proposals are cut about where vLLM cuts the target's distribution."""

import pytest
import torch

from tests.kernels.conftest import EVERYWHERE
from vllm_mtp.kernels.truncation import MAX_COLUMNS, truncate

INFINITE = torch.iinfo(torch.int32).max
CASES = [
    # temperature, top-k, top-p, min-p
    (1.0, 5, 1.0, 0.0),
    (1.0, INFINITE, 0.8, 0.0),
    (0.5, INFINITE, 0.8, 0.0),
    (1.0, INFINITE, 1.0, 0.1),
    (2.0, 20, 0.9, 0.01),
    (1.5, 1, 1.0, 0.0),
]
UNTOUCHED = [
    (1.0, INFINITE, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
]
SLACK = 1e-3
"""Of scaled logits: as near as a threshold is found."""


def logits_of(num_rows: int, num_columns: int = 300) -> torch.Tensor:
    return 3.0 * torch.randn(
        num_rows, num_columns, generator=torch.Generator().manual_seed(1)
    )


def cut(
    logits: torch.Tensor,
    cases: list[tuple[float, int, float, float]],
    idx_mapping: torch.Tensor,
) -> torch.Tensor:
    """A copy, cut by requests' parameters."""
    columns = zip(*cases, strict=True)
    heat, most, share, least = (
        torch.tensor(column, device=logits.device) for column in columns
    )
    result = logits.clone()
    truncate(result, idx_mapping, heat, most.int(), share, least)
    return result


def threshold(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The least scaled logit that stays as vLLM cuts: min-p, top-k, then top-p."""
    ordered = scaled.sort(descending=True).values
    ordered = ordered[ordered >= ordered[0] + torch.log(torch.tensor(min_p))]
    ordered = ordered[:top_k]
    before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
    return float(ordered[before < top_p][-1])


@pytest.fixture(params=[p for p in EVERYWHERE if p.id.startswith("triton")])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernel is Triton's alone."""
    return torch.device(request.param[1])


def test_rows_are_cut_where_vllm_cuts(device: torch.device) -> None:
    logits = logits_of(len(CASES)).to(device)
    found = cut(logits, CASES, torch.arange(len(CASES), device=device))
    for row, before, (heat, *bounds) in zip(found, logits, CASES, strict=True):
        scaled = before / heat
        edge = threshold(scaled, *bounds)
        assert (row[scaled >= edge + SLACK] == before[scaled >= edge + SLACK]).all()
        assert (row[scaled < edge - SLACK] == -torch.inf).all()
        assert row.isfinite().sum() <= (scaled >= edge - SLACK).sum()
        assert row.isinf().any()


def test_what_needs_no_cut_stays(device: torch.device) -> None:
    logits = logits_of(3).to(device)
    requests = torch.tensor([0, 1, -1], device=device)
    assert torch.equal(cut(logits, UNTOUCHED, requests), logits)


def test_each_row_has_its_requests_parameters(device: torch.device) -> None:
    logits = logits_of(2).to(device)
    found = cut(logits, CASES, torch.tensor([5, 0], device=device))
    assert found.isfinite().sum(dim=1).tolist() == [1, 5]


def test_rows_of_nothing_and_of_equals_stay(device: torch.device) -> None:
    nothing = torch.full((1, 40), -torch.inf, device=device)
    equals = torch.zeros(1, 40, device=device)
    logits = torch.cat([nothing, equals])
    requests = torch.zeros(2, dtype=torch.int64, device=device)
    assert torch.equal(cut(logits, CASES, requests), logits)


def test_rows_too_long_stay(device: torch.device) -> None:
    logits = logits_of(1, MAX_COLUMNS + 1).to(device)
    requests = torch.zeros(1, dtype=torch.int64, device=device)
    assert torch.equal(cut(logits, CASES, requests), logits)
