"""Scrub mode: after every step no KV slot above a committed length holds anything.

The cache is read back through a worker RPC after each step of a real engine, in both
halves: what was rejected is zero, in the target's layers and in the MTP layer, and
what was committed is byte for byte what it was. The output never changes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.checked import checked
from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import draft_counts, engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.kv_cache import SlotWatch, generate_watched
from tests.support.processor import can_cache_fp8
from tests.support.watch import counter, scheduler_of
from vllm_mtp.kernels.planes import NUM_COLUMNS, SlotPlane

SCRUB = {
    "method": "mtp_plus",
    "num_speculative_tokens": 5,
    "controller": "random",
    "controller_seed": 1,
    "kv_rollback": "scrub",
}
UNSCRUBBED = SCRUB | {"kv_rollback": "metadata"}
NUM_TOKENS = 40
SMALL_CACHE = 6 * 2**20
"""Bytes: read back whole after every step."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [list(prompt) for prompt in heldout_prompts(10, max_tokens=96)]


@pytest.fixture(scope="module")
def wanted(prompts: list[list[int]]) -> list[list[int]]:
    """What the target alone makes of them."""
    with engine(BUNDLED_CHECKPOINT) as llm:
        return greedy(llm, prompts, NUM_TOKENS)


@contextmanager
def scrubbing_engine(**arguments: Any) -> Iterator[Any]:
    settings = {
        "kv_cache_memory_bytes": SMALL_CACHE,
        "speculative_config": SCRUB,
    }
    with engine(BUNDLED_CHECKPOINT, **(settings | arguments)) as llm:
        yield llm


def check_rejections_were_looked_for(llm: Any, watch: SlotWatch) -> None:
    counts = draft_counts(llm)
    assert counts.num_rejected_tokens > 20
    assert counts.num_accepted_tokens > 20
    assert watch.num_checked_slots > 1000
    assert watch.num_committed_slots > 1000


@pytest.mark.parametrize("copies", [True, False])
def test_rejected_slots_are_zero_and_committed_ones_unchanged(
    copies: bool, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    spec = SCRUB | {"copy_from_context": copies}
    with scrubbing_engine(max_num_seqs=len(prompts), speculative_config=spec) as llm:
        watch = SlotWatch(llm)
        outputs = generate_watched(llm, prompts, NUM_TOKENS, watch)
        check_rejections_were_looked_for(llm, watch)
        if copies:
            assert scheduler_of(llm)._copying.num_verified > 10
    assert watch.violations == []
    # Where somebody copies there is hardly a step in which nobody has a draft.
    assert copies or watch.num_backfilled_slots > 10, "drafting was never disabled"
    # A request that ends hands its blocks on with its tokens in them; most have none.
    assert watch.num_inherited_slots < 0.1 * watch.num_checked_slots
    assert [outputs[i] for i in range(len(prompts))] == wanted


def test_without_scrubbing_the_same_watch_finds_rejected_tokens(
    prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    with scrubbing_engine(speculative_config=UNSCRUBBED) as llm:
        watch = SlotWatch(llm)
        outputs = generate_watched(llm, prompts, NUM_TOKENS, watch)
    layers = {text.split("layer ")[1].split(":")[0] for text in watch.violations}
    assert len(layers) == 5, "four layers of the target and the MTP layer"
    assert all("not committed" in text for text in watch.violations)
    assert [outputs[i] for i in range(len(prompts))] == wanted


def test_shared_prefixes_stay_as_they_are(
    prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    # Each prompt goes on with what was generated: cached blocks, then drafts.
    longer = [p + c[:16] for p, c in zip(prompts, wanted, strict=True)]
    with scrubbing_engine(
        enable_prefix_caching=True, kv_cache_memory_bytes=4 * SMALL_CACHE
    ) as llm:
        first = generate_watched(llm, prompts, NUM_TOKENS, None)
        watch = SlotWatch(llm)
        second = generate_watched(llm, longer, NUM_TOKENS - 16, watch)
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        assert watch.num_checked_slots > 1000
    assert watch.violations == []
    assert [first[i] for i in range(len(prompts))] == wanted
    assert [second[i] for i in range(len(prompts))] == [c[16:] for c in wanted]


def test_preemption_aborts_and_reused_blocks(
    prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    aborted = {"1": 6, "5": 30}

    with scrubbing_engine(max_num_seqs=8, num_gpu_blocks_override=16) as llm:
        watch = SlotWatch(llm)

        def abort(step: int) -> None:
            for request_id, at in aborted.items():
                if step == at:
                    llm.llm_engine.abort_request([request_id])

        outputs = generate_watched(llm, prompts, NUM_TOKENS, watch, abort)
        assert counter(llm, "vllm:num_preemptions") > 0
        assert watch.num_inherited_slots > 0, "blocks must be used again"
        check_rejections_were_looked_for(llm, watch)
    assert watch.violations == []
    for index, tokens in wanted_of(outputs, wanted):
        assert outputs[index] == tokens, f"request {index}"
    assert any(len(outputs.get(int(i), [])) < NUM_TOKENS for i in aborted)


def wanted_of(
    outputs: dict[int, list[int]], wanted: list[list[int]]
) -> list[tuple[int, list[int]]]:
    """The target's tokens, as many as each request got."""
    return [(i, wanted[i][: len(tokens)]) for i, tokens in outputs.items()]


def test_a_prompt_in_chunks_is_not_scrubbed_away(
    prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    with scrubbing_engine(
        max_num_batched_tokens=24,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
    ) as llm:
        watch = SlotWatch(llm)
        outputs = generate_watched(llm, prompts, NUM_TOKENS, watch)
        check_rejections_were_looked_for(llm, watch)
    assert watch.violations == []
    assert [outputs[i] for i in range(len(prompts))] == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param(
            {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            id="fp8",
            marks=pytest.mark.skipif(
                not can_cache_fp8(), reason="vLLM's fp8 KV cache takes AVX-512 or AMX"
            ),
        ),
    ],
)
def test_packed_and_quantized_caches(
    arguments: dict[str, str], prompts: list[list[int]]
) -> None:
    with engine(BUNDLED_CHECKPOINT, **arguments) as llm:
        plain = greedy(llm, prompts, 24)
    with scrubbing_engine(**arguments) as llm:
        watch = SlotWatch(llm)
        outputs = generate_watched(llm, prompts, 24, watch)
        check_rejections_were_looked_for(llm, watch)
    assert watch.violations == []
    # This CPU rounds a row alike in every batch: see test_bfloat16.py.
    assert [outputs[i] for i in range(len(prompts))] == plain


Scrub = Callable[..., None]


def one_row_too_many(scrub: Scrub, *arguments: Any) -> None:
    *others, starts, num_rejected = arguments
    scrub(*others, starts, torch.where(num_rejected > 0, num_rejected + 1, 0))


def one_row_too_few(scrub: Scrub, *arguments: Any) -> None:
    *others, starts, num_rejected = arguments
    scrub(*others, starts, (num_rejected - 1).clamp(min=0))


def wrong_request(scrub: Scrub, *arguments: Any) -> None:
    *others, starts, num_rejected = arguments
    scrub(*others, starts, num_rejected.roll(1))


def wrong_block_stride(scrub: Scrub, *arguments: Any) -> None:
    storages, mappings, planes, *others = arguments
    scrub(storages, mappings, changed(planes, "block_stride", 0.5), *others)


def last_layer_forgotten(scrub: Scrub, *arguments: Any) -> None:
    storages, mappings, planes, *others = arguments
    scrub(storages, mappings, planes[:-1], *others)


def only_half_a_slot(scrub: Scrub, *arguments: Any) -> None:
    storages, mappings, planes, *others = arguments
    scrub(storages, mappings, changed(planes, "chunk_bytes", 0.5), *others)


def the_block_before(scrub: Scrub, *arguments: Any) -> None:
    """Its owner may be another request: blocks are handed out in turn."""
    storages, mappings, *others = arguments
    for mapping in mappings:
        mapping -= 32
    scrub(storages, mappings, *others)
    for mapping in mappings:
        mapping += 32


def changed(planes: torch.Tensor, column: str, factor: float) -> torch.Tensor:
    planes = planes.clone()
    index = list(SlotPlane.__dataclass_fields__).index(column)
    assert index < NUM_COLUMNS
    planes[:, index] = (planes[:, index] * factor).long()
    return planes


@pytest.mark.parametrize(
    "broken",
    [
        one_row_too_many,
        one_row_too_few,
        wrong_request,
        wrong_block_stride,
        last_layer_forgotten,
        only_half_a_slot,
        the_block_before,
    ],
)
def test_a_broken_kernel_is_caught(
    broken: Callable[..., None], prompts: list[list[int]]
) -> None:
    with scrubbing_engine() as llm:
        watch = SlotWatch(llm)
        llm.collective_rpc(_break, args=(broken,))
        generate_watched(llm, prompts[:4], 16, watch)
    assert watch.violations


def _break(worker: Any, broken: Callable[..., None]) -> None:
    kernels = worker.rollback.kernels
    scrub = kernels.scrub_rejected_slots
    worker.rollback.kernels = dataclasses.replace(
        kernels, scrub_rejected_slots=lambda *arguments: broken(scrub, *arguments)
    )


def test_every_plan_of_a_real_engine_passes_the_checked_mode(
    prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    calls: list[str] = []
    with scrubbing_engine(
        max_num_batched_tokens=24, enable_chunked_prefill=True
    ) as llm:
        llm.collective_rpc(_check_plans, args=(calls,))
        outputs = generate_watched(llm, prompts, NUM_TOKENS, None)
    assert set(calls) == {
        "rollback_metadata",
        "pad_rejected_rows",
        "scrub_rejected_slots",
    }
    assert list(outputs.values()) == wanted


def _check_plans(worker: Any, calls: list[str]) -> None:
    def counted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            calls.append(name)
            function(*arguments)

        return call

    kernels = checked(worker.rollback.kernels)
    names = ("rollback_metadata", "pad_rejected_rows", "scrub_rejected_slots")
    worker.rollback.kernels = dataclasses.replace(
        kernels, **{name: counted(name, getattr(kernels, name)) for name in names}
    )


def jobs(engines: list[dict], **settings: Any) -> Jobs:
    small = {"max_num_seqs": 4, "max_model_len": 192, "speculative_config": SCRUB}
    return Jobs(
        model=str(BUNDLED_CHECKPOINT),
        prompts=[list(p) for p in heldout_prompts(8, max_tokens=48)],
        engines=[
            small | {"kv_cache_memory_bytes": SMALL_CACHE} | arguments
            for arguments in engines
        ],
        watch_slots=True,
        **settings,
    )


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_both_runners_sync_and_async(v2: bool) -> None:
    unscrubbed, sync, asynchronous = run_jobs(
        jobs(
            [
                {"speculative_config": UNSCRUBBED},
                {},
                # Last: from here on this process schedules async.
                {"async_scheduling": True},
            ],
            # Triton's interpreter is slow.
            max_tokens=12 if v2 else 24,
            v2=v2,
        )
    )
    assert "Async" in asynchronous.scheduler
    assert "Async" not in sync.scheduler
    assert unscrubbed.violations
    for result in (sync, asynchronous):
        assert result.violations == []
        assert result.num_checked_slots > (250 if v2 else 500)
        assert result.continuations == unscrubbed.continuations
