"""The fuzzer knows every field of vLLM's ``SamplingParams``, and no other."""

from dataclasses import fields

from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.unit.tools.fuzz_samples import corpus
from vllm_mtp.integration.fuzz.engine import sampling_params
from vllm_mtp.tools.fuzz_grammars import KINDS, OPTIONS
from vllm_mtp.tools.fuzz_options import FIELDS, NOT_SET
from vllm_mtp.tools.fuzz_requests import WRONG, make_plays


def test_each_field_is_drawn_or_left_alone_for_a_reason() -> None:
    assert {*FIELDS, *NOT_SET} == set(SamplingParams.__struct_fields__)


def test_each_kind_of_structured_output_is_drawn_or_an_option_of_one() -> None:
    names = {f.name for f in fields(StructuredOutputsParams) if f.init}
    assert {*KINDS, *OPTIONS} == names


def test_vllm_accepts_what_is_drawn() -> None:
    for play in make_plays(corpus(), 1000, seed=11, without={WRONG}):
        for request in play:
            for chunk in request["chunks"]:
                sampling_params(chunk["sampling"], is_final_only=False)
