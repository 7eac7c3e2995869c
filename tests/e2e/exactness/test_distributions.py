"""Speculation on and off: the same joint distribution of the first three tokens.

Acceptance tests, whole and small draft vocabulary, fixed and random draft lengths,
drawn and chosen drafts; in each engine plain sampling, top-k, top-p, min-p, penalties,
biases, restricted tokens and a grammar, in one batch or in two. Compared by chi-square
with an engine that does not speculate. False alarms: each comparison fails a correct
engine once in 100,000 draws (``ALPHA``), all of them together less than once in 600.

Longer: ``EXACTNESS_SAMPLES=3000 make test ARGS='-k follows'`` tries all combinations.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exactness.samples import (
    ALPHA,
    IS_LONG,
    NUM_PLAIN,
    PLAINLY_SAMPLED,
    p_values,
    sample,
    settings,
)
from tests.support.engines import Samples, draft_counts, engine, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.vocabulary import most_frequent, write_list

SEATS = {"max_num_seqs": 48, "max_num_batched_tokens": 8192}
ALL_KINDS = list(
    product(
        ("standard", "block"),
        ("full", "list"),
        ("fixed", "random"),
        ("auto", "greedy"),
    )
)
"""Acceptance test, draft vocabulary, draft lengths, how drafts are chosen."""
USUAL_KINDS = [
    ("standard", "full", "random", "auto"),
    ("standard", "list", "fixed", "greedy"),
    ("block", "full", "fixed", "auto"),
    ("block", "full", "random", "greedy"),
    ("block", "list", "random", "auto"),
]
"""Each value of each with each value of the others; all with ``EXACTNESS_SAMPLES``."""
KINDS = [
    pytest.param(*kind, id="-".join(kind))
    for kind in (ALL_KINDS if IS_LONG else USUAL_KINDS)
]


@pytest.fixture(scope="module")
def plain() -> Samples:
    """Of the target alone."""
    with engine(BUNDLED_CHECKPOINT, **SEATS) as llm:
        return sample(llm, num_samples=NUM_PLAIN)


@pytest.fixture(scope="module")
def small_list(plain: Samples, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half of the tokens that are sampled: much cannot be proposed."""
    texts = [tokens for samples in plain.values() for tokens in samples]
    path = tmp_path_factory.mktemp("lists") / "half.json"
    return write_list(path, most_frequent(texts, 256)[::2])


def speculation(
    rejection: str, vocabulary: str, controller: str, drafts: str, small_list: str
) -> dict[str, Any]:
    return {
        "method": "mtp_plus",
        "num_speculative_tokens": 3,
        "controller": controller,
        "draft_sample_method": drafts,
        "rejection_sample_method": rejection,
        "draft_vocab": small_list if vocabulary == "list" else "full",
    }


def sample_in_batches(llm: Any, of_their_own: bool) -> Samples:
    """From all settings; plainly sampled ones in batches of their own, or among all."""
    if not of_their_own:
        return sample(llm)
    calls = []
    sampler = model_runner(llm).rejection_sampler
    test = sampler._test_drafts
    sampler._test_drafts = lambda *args: calls.append(args) or test(*args)
    samples = sample(llm, PLAINLY_SAMPLED)
    assert len(calls) > 10
    others = [name for name in settings() if name not in PLAINLY_SAMPLED]
    return samples | sample(llm, others)


@pytest.mark.parametrize(("rejection", "vocabulary", "controller", "drafts"), KINDS)
def test_the_output_follows_the_target(
    rejection: str,
    vocabulary: str,
    controller: str,
    drafts: str,
    plain: Samples,
    small_list: str,
) -> None:
    spec = speculation(rejection, vocabulary, controller, drafts, small_list)
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS) as llm:
        samples = sample_in_batches(llm, of_their_own=rejection == "block")
        counts = draft_counts(llm)
    assert counts.num_accepted_tokens > 200
    assert counts.num_rejected_tokens > 200
    found = p_values(samples, plain)
    assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}


def test_two_engines_without_speculation_agree_and_settings_differ(
    plain: Samples,
) -> None:
    """The comparison itself: no false alarm, and it tells settings apart."""
    with engine(BUNDLED_CHECKPOINT, seed=1, **SEATS) as llm:
        again = sample(llm)
    assert min(p_values(again, plain).values()) > ALPHA
    shifted = dict(zip(plain, [*list(plain.values())[1:], plain["plain"]], strict=True))
    confused = {k: p for k, p in p_values(shifted, plain).items() if p > ALPHA}
    assert not confused


def test_the_small_list_is_small_enough_to_matter(
    plain: Samples, small_list: str
) -> None:
    listed = set(most_frequent([t for s in plain.values() for t in s], 256)[::2])
    assert Path(small_list).is_file()
    for name, samples in plain.items():
        tokens = [token for text in samples for token in text]
        share = sum(token in listed for token in tokens) / len(tokens)
        assert share < 0.97, name
