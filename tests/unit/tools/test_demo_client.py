"""The counters of a server's /metrics page, and what follows from them."""

import pytest

from vllm_mtp.tools.demo_client import SpecCounters, parse_counters

PAGE = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 100.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="demo"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 300.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 180.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 60.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="demo"} 290.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 110.0
vllm:iteration_tokens_total_count{engine="0",model_name="demo"} 110.0
vllm:iteration_tokens_total_sum{engine="0",model_name="demo"} 999.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 10.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="demo"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="demo"} 1.0
"""


def test_counters_are_read_by_name_and_positions_in_order() -> None:
    assert parse_counters(PAGE) == SpecCounters(
        num_drafts=100,
        num_draft_tokens=300,
        num_accepted_tokens=180,
        accepted_per_position=(90, 60, 30),
        num_steps=110,
        num_generated_tokens=290,
        num_prompts=10,
    )


def test_counters_of_several_engines_are_added() -> None:
    second = PAGE.replace('engine="0"', 'engine="1"')
    lines = [line for line in second.splitlines() if not line.startswith("#")]
    both = parse_counters(PAGE + "\n".join(lines) + "\n")
    assert both.num_drafts == 200
    assert both.accepted_per_position == (180, 120, 60)


def test_survival_is_the_share_of_drafts_accepted_up_to_a_position() -> None:
    assert parse_counters(PAGE).survival == (0.9, 0.6, 0.3)


def test_tokens_per_step_counts_decoding_steps_only() -> None:
    # 110 steps, 10 of them prefills that gave one token each: 280 tokens in 100.
    assert parse_counters(PAGE).tokens_per_step == pytest.approx(2.8)


def test_a_server_without_speculation_has_zeros() -> None:
    counters = parse_counters("")
    assert counters.num_drafts == 0
    assert counters.survival == ()
    assert counters.tokens_per_step is None


def test_the_difference_of_two_readings_covers_positions_that_are_new() -> None:
    early = SpecCounters(10, 20, 5, (5,), 20, 30, 2)
    late = SpecCounters(30, 60, 25, (15, 10), 50, 90, 4)
    assert late.since(early) == SpecCounters(20, 40, 20, (10, 10), 30, 60, 2)
