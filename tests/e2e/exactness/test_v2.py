"""Speculation on and off on Model Runner V2: the same joint distribution of tokens.

Under Triton's interpreter, which takes a third of a second for each sample: a model
with a small vocabulary, and fewer settings than on V1 (`test_distributions`). What the
target says does not depend on the runner, so it is asked on V1, where samples cost
next to nothing. False alarms: once in 100,000 for each comparison (``ALPHA``), all
together less than once in 10,000. ``EXACTNESS_SAMPLES`` asks for all kinds of drafts.
"""

from dataclasses import replace

import pytest

from tests.e2e.exactness.samples import ALPHA, IS_LONG, NUM_SAMPLES, p_values
from tests.support.engine_jobs import JobResult, Jobs, run_jobs
from tests.support.random_checkpoints import random_prompts, write_checkpoint

SETTINGS = {
    "top-p, min-p": {"temperature": 2.0, "top_p": 0.9, "min_p": 0.05},
    "bias, top-k, penalties": {
        "temperature": 2.0,
        "top_k": 6,
        "logit_bias": {i: 8.0 if i % 2 else -8.0 for i in range(40)},
        "repetition_penalty": 1.5,
    },
}
"""A random model is so sure of itself that less temperature leaves little to compare,
and more of it outcomes that are too rare to be counted."""
NUM_TOKENS = 3
NUM_OURS = NUM_SAMPLES if IS_LONG else 90
NUM_PLAIN = max(NUM_SAMPLES, 1500)
"""They cost next to nothing, and let fewer of ours tell as much."""
SEATS = {"max_num_seqs": 48, "max_model_len": 64, "max_num_batched_tokens": 4096}
PLAIN = "plain"
ALL_KINDS = {
    "standard-fixed-drawn": ("standard", "fixed", "probabilistic"),
    "block-random-drawn": ("block", "random", "probabilistic"),
    "standard-random-chosen": ("standard", "random", "greedy"),
}
"""Acceptance test, draft lengths, how drafts are chosen."""
OURS = dict(list(ALL_KINDS.items())[: None if IS_LONG else 1])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    """Of an engine that does not speculate, and of ours."""
    engines = {}
    for name, (test, controller, drafts) in OURS.items():
        spec = {
            "method": "mtp_plus",
            "num_speculative_tokens": NUM_TOKENS - 1,
            "controller": controller,
            "rejection_sample_method": test,
            "draft_sample_method": drafts,
            # A quarter of it, so that proposals have fewer columns.
            "draft_vocab_size": 128,
        }
        engines[name] = SEATS | {"speculative_config": spec}
    plain = Jobs(
        model=str(write_checkpoint(tmp_path_factory.mktemp("mimo"), "mimo")),
        prompts=random_prompts(1),
        max_tokens=NUM_TOKENS,
        engines=[dict(SEATS)],
        settings=SETTINGS,
        num_samples=NUM_PLAIN,
    )
    ours = replace(
        plain,
        engines=list(engines.values()),
        v2=True,
        num_samples=NUM_OURS,
    )
    found = run_jobs(ours, timeout_s=24 * NUM_SAMPLES)
    return dict(zip([PLAIN, *engines], run_jobs(plain) + found, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_the_output_follows_the_target(
    name: str, results: dict[str, JobResult]
) -> None:
    ours, plain = results[name], results[PLAIN]
    assert ours.drafter == "MTPPlusSpeculator"
    accepted = ours.counters["accepted_tokens"]
    assert 30 < accepted < ours.counters["draft_tokens"] - 30
    found = p_values(ours.samples, plain.samples)
    assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}


def test_a_setting_is_told_from_another(results: dict[str, JobResult]) -> None:
    """The comparison can fail with as few samples as ours are."""
    plain = results[PLAIN].samples
    few = [samples[:NUM_OURS] for samples in plain.values()]
    found = p_values(dict(zip(plain, [*few[1:], few[0]], strict=True)), plain)
    for name in plain:
        assert min(p for (of, _), p in found.items() if of == name) < ALPHA, name
