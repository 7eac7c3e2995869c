"""A request may fix its own draft length or switch speculation off for itself."""

from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import pytest

from tests.support.engines import engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import (
    RecordingController,
    play_script,
    record_outcomes,
    scheduler_of,
)
from vllm_mtp.control.step_times import CPU_COST_PRIOR, CostPrior

MAX_TOKENS = 40
PINS = [0, 2, None, 4, "auto", 1]


def seeded(llm: Any) -> list[list[int]]:
    """Sampled continuations of requests with a seed each."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [list(prompt) for prompt in heldout_prompts(len(PINS))]
    # vLLM likes to fill those up with draft tokens when others are under way.
    prompts[4:] = [prompt[:1] for prompt in prompts[4:]]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        [
            SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS)
            for i in range(len(PINS))
        ],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


class Plain(NamedTuple):
    """What the target says without speculation."""

    greedy: list[list[int]]
    seeded: list[list[int]]


@pytest.fixture(scope="module")
def without() -> Plain:
    with engine(BUNDLED_CHECKPOINT) as llm:
        return Plain(greedy(llm, heldout_prompts(len(PINS)), MAX_TOKENS), seeded(llm))


@pytest.fixture
def plain(without: Plain) -> list[list[int]]:
    return without.greedy


@pytest.fixture(scope="module", params=["goodput", "fixed", "threshold"])
def llm(request: pytest.FixtureRequest, without: Plain) -> Iterator[Any]:
    spec = {
        "method": "mtp_plus",
        "num_speculative_tokens": 4,
        "controller": request.param,
    }
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec) as llm:
        yield llm


def generate(llm: Any, pins: list[Any]) -> tuple[list[list[int]], dict[int, set[int]]]:
    """Continuations, and the draft lengths that each request was verified with."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    recorder = record_outcomes(llm)
    prompts = heldout_prompts(len(pins))
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        [
            SamplingParams(
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                extra_args=None if pin is None else {"mtp_plus": {"k": pin}},
            )
            for pin in pins
        ],
        use_tqdm=False,
    )
    scheduler_of(llm).controller = recorder.controller
    first = min(int(output.request_id.split("-")[0]) for output in outputs)
    lengths: dict[int, set[int]] = {index: set() for index in range(len(pins))}
    for outcome in recorder.outcomes:
        for request_id, drafted, *_ in outcome.requests:
            lengths[int(request_id.split("-")[0]) - first].add(drafted)
    return [list(output.outputs[0].token_ids) for output in outputs], lengths


def test_pins_are_kept_and_change_no_token(llm: Any, plain: list[list[int]]) -> None:
    outputs, lengths = generate(llm, PINS)
    assert outputs == plain
    assert lengths[0] == set()
    # Near its last token a request gets fewer: nobody would use the others.
    assert max(lengths[1]) == 2
    assert max(lengths[3]) == 4
    assert lengths[5] == {1}
    assert lengths[2]
    assert lengths[4]
    body = {index: lengths[index] - set(range(pin)) for index, pin in ((1, 2), (3, 4))}
    assert body == {1: {2}, 3: {4}}


def test_when_all_are_off_nothing_is_drafted_or_reserved(
    llm: Any, plain: list[list[int]]
) -> None:
    outputs, lengths = generate(llm, [0] * len(PINS))
    assert outputs == plain
    assert not any(lengths.values())


def test_a_bad_pin_is_refused_in_one_sentence_and_the_engine_lives(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"mtp_plus\.k=5 is not allowed") as e:
        generate(llm, [5])
    assert "'auto' or an integer from 0 to 4" in str(e.value)
    assert generate(llm, [None])[0]


def test_a_seed_gives_the_targets_own_text_whatever_is_drafted_beside_it(
    llm: Any, without: Plain
) -> None:
    assert seeded(llm) == without.seeded


@pytest.mark.parametrize("llm", ["goodput"], indirect=True)
def test_the_controller_knows_whether_it_is_on_a_cpu(llm: Any) -> None:
    from vllm.platforms import current_platform

    controller = scheduler_of(llm).controller
    while isinstance(controller, RecordingController):  # left there by other tests
        controller = controller.controller
    prior = controller.options.cost_prior
    expected = CPU_COST_PRIOR if current_platform.is_cpu() else CostPrior()
    assert prior == expected


def test_no_slots_are_reserved_while_drafting_is_off(
    llm: Any, plain: list[list[int]]
) -> None:
    """32 slots a block: a prompt that ends 2 before the border of one needs no more."""
    scheduler = scheduler_of(llm)
    own = scheduler.controller
    seen: list[tuple[int, int]] = []
    update = scheduler.update_from_output

    def watch(*args: Any) -> Any:
        manager = scheduler.kv_cache_manager
        for request in scheduler.running:
            (blocks,) = manager.get_block_ids(request.request_id)
            seen.append((len(blocks), ceil(request.num_computed_tokens / 32)))
        return update(*args)

    scheduler.update_from_output = watch
    counts = {}
    for name, depths in (("off", [0]), ("on", [4])):
        play_script(llm, depths)
        assert greedy(llm, heldout_prompts(len(PINS)), MAX_TOKENS) == plain
        counts[name] = sum(blocks > needed for blocks, needed in seen)
        seen.clear()
    del scheduler.update_from_output
    scheduler.controller = own
    assert counts["off"] == 0 < counts["on"]
