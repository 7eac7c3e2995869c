"""The options: what is accepted, what is refused, and in which words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_mtp.config import (
    MAX_DRAFT_LENGTH,
    OWN_KEYS,
    ConfigError,
    MTPPlusConfig,
    parse_own_options,
)
from vllm_mtp.draft_lengths import (
    graph_tiers,
    resolve_draft_length,
    tier_table,
)
from vllm_mtp.split_options import (
    REFUSED_KEYS,
    split_options,
)

VLLM_KEYS = frozenset({"model", "quantization", "max_model_len", "method", *OWN_KEYS})


def test_the_method_alone_is_a_whole_configuration() -> None:
    split = split_options({"method": "mtp_plus"}, VLLM_KEYS)
    assert split.passthrough == {}
    assert split.own == MTPPlusConfig()


def test_vllm_gets_its_own_method_and_its_own_options_untouched() -> None:
    split = split_options(
        {"method": "mtp_plus", "quantization": "fp8", "max-model-len": 7}, VLLM_KEYS
    )
    options = split.vllm_options(draft_length=4, num_mtp_layers=1)
    assert options.pop("num_speculative_tokens_per_batch_size")
    assert options == {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        "disable_eagle_block_drop": True,
        "quantization": "fp8",
        "max_model_len": 7,
    }


def test_vllm_gets_synthetic_acceptance_as_it_was_asked_for() -> None:
    asked = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    options = split_options(asked, VLLM_KEYS).vllm_options(4, num_mtp_layers=1)
    assert {key: options[key] for key in asked} == asked
    assert "synthetic_acceptance_rates" not in options


@pytest.mark.parametrize("value", [0, 17, -1, "3", 3.0, True, [3]])
def test_a_bad_draft_length_is_refused_with_its_range(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        split_options({"num_speculative_tokens": value}, VLLM_KEYS)
    message = str(caught.value)
    assert f"num_speculative_tokens={value!r}" in message
    assert "an integer from 1 to 16" in message
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_sample_method": "nucleus"}, "'greedy' or 'probabilistic'"),
        ({"rejection_sample_method": "lax"}, "'standard' or 'block' or 'synthetic'"),
        ({"synthetic_acceptance_rates": ["a"]}, "K_max numbers from 0 to 1"),
        ({"synthetic_acceptance_length": "3"}, r"a number from 1 to K_max \+ 1"),
        ({"controller": 3}, "'goodput' or 'threshold' or 'fixed' or 'random'"),
        ({"max_tpot_ms": 0}, r"a number above 0, at most 1e\+06 or unset"),
        ({"trace_path": ""}, "a text that is not empty or unset"),
        ({"controller_seed": -1}, "an integer >= 0"),
    ],
)
def test_a_bad_value_is_answered_with_what_is_allowed(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        split_options(options, VLLM_KEYS)


def test_an_unknown_option_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        split_options({"num_spec_tokens": 3}, VLLM_KEYS)
    message = str(caught.value)
    assert "speculative_config.num_spec_tokens" in message
    assert all(key in message for key in OWN_KEYS)
    assert "quantization" in message


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_an_option_that_contradicts_mtp_plus_is_refused_with_the_reason(
    key: str,
) -> None:
    with pytest.raises(ConfigError, match=key):
        split_options({key: 1}, VLLM_KEYS | {key})


def test_a_refused_option_that_is_switched_off_is_no_contradiction() -> None:
    split = split_options({"parallel_drafting": False}, VLLM_KEYS)
    assert split.passthrough == {}


def test_the_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        MTPPlusConfig().controller = "random"


@given(
    st.builds(
        MTPPlusConfig,
        num_speculative_tokens=st.none() | st.integers(1, MAX_DRAFT_LENGTH),
        controller=st.sampled_from(["goodput", "threshold", "fixed", "random"]),
        controller_seed=st.integers(0, 2**63 - 1),
    )
)
def test_options_survive_the_trip_to_another_process(config: MTPPlusConfig) -> None:
    travelled = json.loads(json.dumps(config.model_dump(mode="json")))
    assert parse_own_options(travelled) == config


@given(st.integers(1, MAX_DRAFT_LENGTH))
def test_the_default_draft_length_suits_any_number_of_mtp_layers(
    num_mtp_layers: int,
) -> None:
    length = resolve_draft_length(MTPPlusConfig(), num_mtp_layers)
    assert 1 <= length <= MAX_DRAFT_LENGTH
    assert num_mtp_layers == 1 or length <= num_mtp_layers


def test_the_default_bound_of_a_one_layer_model_leaves_room_to_choose() -> None:
    assert resolve_draft_length(MTPPlusConfig(), 1) == 8
    assert resolve_draft_length(MTPPlusConfig(controller="fixed"), 1) == 3


@pytest.mark.parametrize(
    ("given", "layers", "is_small", "is_common", "expected"),
    [
        ({}, 2, False, False, 2),
        ({}, 3, True, False, 3),
        ({"num_speculative_tokens": 8}, 2, False, False, 8),
        ({}, 1, True, False, 3),
        ({"num_speculative_tokens": 8}, 1, True, False, 8),
        # Idle ranks draft as deep as they can, so no rank can more than is drafted.
        ({}, 1, False, True, 3),
        ({"num_speculative_tokens": 8}, 1, False, True, 3),
        ({"num_speculative_tokens": 2}, 1, False, True, 2),
        ({"num_speculative_tokens": 6}, 2, False, True, 2),
        ({}, 4, False, True, 3),
        ({"num_speculative_tokens": 5, "controller": "fixed"}, 1, False, True, 5),
    ],
)
def test_the_bound_fits_model_and_ranks(
    given: dict[str, Any], layers: int, is_small: bool, is_common: bool, expected: int
) -> None:
    found = resolve_draft_length(
        MTPPlusConfig(**given), layers, is_small=is_small, is_common=is_common
    )
    assert found == expected


@pytest.mark.parametrize("max_num_seqs", [8, 9, 32, 100, 256, 1024])
@pytest.mark.parametrize("draft_length", [1, 3, 4, 8, 16])
def test_every_tier_has_cuda_graphs_close_to_the_largest_batch(
    draft_length: int, max_num_seqs: int
) -> None:
    tiers = graph_tiers(draft_length)
    assert tiers[0] == 0
    assert tiers[-1] == draft_length
    assert list(tiers) == sorted(set(tiers))
    table = tier_table(draft_length)
    assert [first for first, _, _ in table] == list(range(1, 1025))
    widest = {k: n for n, _, k in table if n <= max_num_seqs}
    assert set(widest) == set(tiers)
    assert min(widest.values()) > max_num_seqs - len(tiers)


def test_a_fixed_draft_length_needs_no_tiers() -> None:
    split = split_options({"controller": "fixed"}, VLLM_KEYS)
    assert "num_speculative_tokens_per_batch_size" not in split.vllm_options(3, 1)


@pytest.mark.parametrize(("asked", "layers"), [(3, 2), (5, 4), (7, 3)])
def test_a_draft_length_that_splits_a_round_of_mtp_layers_is_refused(
    asked: int, layers: int
) -> None:
    with pytest.raises(ConfigError, match=f"a multiple of {layers}"):
        resolve_draft_length(MTPPlusConfig(num_speculative_tokens=asked), layers)


@pytest.mark.parametrize(("asked", "layers"), [(1, 2), (2, 2), (4, 2), (3, 4)])
def test_other_draft_lengths_are_taken_as_they_are(asked: int, layers: int) -> None:
    own = MTPPlusConfig(num_speculative_tokens=asked)
    assert resolve_draft_length(own, layers) == asked
