"""Drafts from a part of the vocabulary: never another output, only other drafts.

Greedy requests; sampled ones are compared in ``exactness/``.
"""

from typing import Any

import pytest

from tests.e2e.conftest import NUM_TOKENS, Reference
from tests.e2e.small_jobs import small_jobs
from tests.support.engine_jobs import run_jobs
from tests.support.engines import counters, draft_counts, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.vocabulary import most_frequent, write_list

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}
FIXED = {"method": "mtp_plus", "controller": "fixed"}
NUM_ROWS = 128
NUM_PARALLEL_TOKENS = 24
NUM_V2_PROMPTS, NUM_V2_TOKENS = 4, 20
"""Under Triton's interpreter."""
END_OF_SEQUENCE = 0
"""It is always among the rows."""


@pytest.fixture(scope="module")
def small_list(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, set[int]]:
    """A list that lacks a tenth of the text, and what is in it."""
    token_ids = most_frequent(reference.continuations, NUM_ROWS)
    path = tmp_path_factory.mktemp("lists") / "small.json"
    return write_list(path, token_ids), set(token_ids)


def record_drafts(llm: Any) -> list[int]:
    """All draft tokens from now on."""
    runner, drafted = model_runner(llm), []
    take = runner.take_draft_token_ids

    def take_and_record() -> Any:
        taken = take()
        if taken is not None:
            drafted.extend(token for ids in taken.draft_token_ids for token in ids)
        return taken

    runner.take_draft_token_ids = take_and_record
    return drafted


def test_a_list_changes_no_token_and_nothing_else_is_drafted(
    reference: Reference, small_list: tuple[str, set[int]]
) -> None:
    path, listed = small_list
    committed = [token for text in reference.continuations for token in text]
    assert 0.8 < sum(token in listed for token in committed) / len(committed) < 0.95
    with engine(
        BUNDLED_CHECKPOINT,
        max_num_seqs=16,
        speculative_config=RANDOM | {"draft_vocab": path, "copy_from_context": False},
    ) as llm:
        drafted = record_drafts(llm)
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        counts = draft_counts(llm)
    assert outputs == reference.continuations
    assert counts.num_accepted_tokens > 100
    assert counts.num_rejected_tokens > 100
    assert set(drafted) <= listed | {END_OF_SEQUENCE}
    assert len(set(drafted)) > 50


def test_the_automatic_vocabulary_learns_the_text_and_accepts_as_much(
    reference: Reference,
) -> None:
    accepted = {}
    for draft_vocab in ("full", "auto"):
        spec = FIXED | {"draft_vocab": draft_vocab}
        with engine(
            BUNDLED_CHECKPOINT, max_num_seqs=16, speculative_config=spec
        ) as llm:
            outputs = greedy(llm, reference.prompts, NUM_TOKENS)
            drafting = model_runner(llm).drafter.draft_vocab
            if draft_vocab == "full":
                assert drafting.vocabulary is None
            else:
                assert drafting.vocabulary.num_rows == 4096
                assert drafting.is_active, drafting.vocabulary.coverage()
            accepted[draft_vocab] = counters(llm)["accepted_tokens"]
        assert outputs == reference.continuations
    assert accepted["auto"] > 0.97 * accepted["full"]
    assert accepted["auto"] != accepted["full"], "it is in use"


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What the target says, of whichever runner it is asked."""
    (result,) = run_jobs(small_jobs([{}], max_tokens=NUM_PARALLEL_TOKENS))
    return result.continuations


def test_v2_equals(small_list: tuple[str, set[int]], plain: list[list[int]]) -> None:
    path, _ = small_list
    listed, drawn = run_jobs(
        small_jobs(
            [
                {"speculative_config": RANDOM | {"draft_vocab": path}},
                {
                    "speculative_config": RANDOM
                    | {"draft_vocab": path, "draft_sample_method": "probabilistic"},
                    # Last: from here on this process schedules async.
                    "async_scheduling": True,
                },
            ],
            NUM_V2_PROMPTS,
            max_tokens=NUM_V2_TOKENS,
            v2=True,
        )
    )
    for result in (listed, drawn):
        assert result.drafter == "MTPPlusSpeculator"
        assert 0 < result.counters["accepted_tokens"] < result.counters["draft_tokens"]
        expected = [text[:NUM_V2_TOKENS] for text in plain[:NUM_V2_PROMPTS]]
        assert result.continuations == expected


def test_tensor_parallel_2_equals(
    small_list: tuple[str, set[int]], plain: list[list[int]]
) -> None:
    path, _ = small_list
    parallel = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    specs = [
        RANDOM | {"draft_vocab": path},
        RANDOM | {"draft_sample_method": "probabilistic", "draft_vocab": path},
    ]  # with the whole vocabulary: test_greedy_other_runners
    results = run_jobs(
        small_jobs(
            [parallel | {"speculative_config": spec} for spec in specs],
            max_tokens=NUM_PARALLEL_TOKENS,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
    )
    for result in results:
        assert 0 < result.counters["accepted_tokens"] < result.counters["draft_tokens"]
        assert result.continuations == plain
