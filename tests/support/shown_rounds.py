"""Whether the rounds that are shown are those that were run."""

from tests.support.engine_jobs import JobResult
from vllm_mtp.page.rounds import RequestRounds, Round


def check_rounds(result: JobResult) -> list[RequestRounds]:
    """Every request's rounds tell its text, each draft token is what it is said to be.

    Args:
        result: Of greedy requests with ``show_rounds``.

    Returns:
        The requests, of which there are some.
    """
    requests = [_request(**fields) for fields in result.shown]
    assert requests
    for request in requests:
        assert request.has_ended
        assert committed_tokens(request) in result.continuations
        for each in request.rounds:
            assert 0 <= each.num_accepted <= len(each.draft)
            assert min(each.draft, default=0) >= 0, "its ids are known"
            is_whole = each.num_committed == each.num_accepted + 1
            if is_whole and each.num_accepted < len(each.draft):
                # The target's choice, which the draft token was not.
                assert each.draft[each.num_accepted] != each.next_token
    assert any(0 < e.num_accepted < len(e.draft) for r in requests for e in r.rounds)
    return requests


def committed_tokens(request: RequestRounds) -> list[int]:
    """The text that its rounds tell."""
    tokens: list[int] = []
    for each in request.rounds:
        kept = [*each.draft[: each.num_accepted], each.next_token]
        tokens += kept[: each.num_committed]
    return tokens


def _request(rounds: list[list[object]], **fields: object) -> RequestRounds:
    return RequestRounds(**fields, rounds=[Round(*each) for each in rounds])
