"""What a benchmark's engine makes of a request."""

from vllm_mtp.integration.bench_engine import _allowed_token_ids


def test_model_runner_v2_is_given_as_many_allowed_tokens_as_it_takes():
    half = list(range(8192, 16384))
    assert _allowed_token_ids(8192, 16383, is_v2=False) == half
    assert _allowed_token_ids(8192, 16383, is_v2=True) == half[:1024]
    assert _allowed_token_ids(50, 99, is_v2=True) == list(range(50, 100))
