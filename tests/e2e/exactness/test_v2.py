"""Speculation on and off on Model Runner V2: the same joint distribution of tokens.

Under Triton's interpreter, which takes its time: fewer settings and samples than on V1
(`test_distributions`), the same comparison. False alarms: once in 100,000 for each
(``ALPHA``), all together less than once in 2,000.
"""

import pytest

from tests.e2e.exactness.samples import ALPHA, NUM_SAMPLES, p_values
from tests.support.engine_jobs import JobResult, Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.vocabulary import most_frequent, write_list

SETTINGS = ["top-p", "min-p", "bias, penalties", "allowed, bad words"]
SEATS = {"max_num_seqs": 48, "max_model_len": 64, "max_num_batched_tokens": 4096}
PLAIN = "plain"
OURS = {
    "standard-list-random": {
        "controller": "random",
        "draft_vocab": "list",
        "rejection_sample_method": "standard",
    },
    "block-full-fixed": {
        "controller": "fixed",
        "draft_vocab": "full",
        "rejection_sample_method": "block",
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    """Of an engine that does not speculate, and of ours."""
    path = tmp_path_factory.mktemp("lists") / "half.json"
    listed = write_list(path, most_frequent(heldout_prompts(64), 512)[::2])
    engines = {PLAIN: SEATS}
    for name, options in OURS.items():
        spec = options | {
            "method": "mtp_plus",
            "num_speculative_tokens": 2,
            "draft_sample_method": "probabilistic",
        }
        if spec["draft_vocab"] == "list":
            spec["draft_vocab"] = listed
        engines[name] = SEATS | {"speculative_config": spec}
    jobs = Jobs(
        model=str(BUNDLED_CHECKPOINT),
        prompts=[],
        max_tokens=0,
        engines=list(engines.values()),
        v2=True,
        num_samples=NUM_SAMPLES // 2,
        settings=SETTINGS,
    )
    found = run_jobs(jobs, timeout_s=24 * NUM_SAMPLES)
    return dict(zip(engines, found, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_the_output_follows_the_target(
    name: str, results: dict[str, JobResult]
) -> None:
    ours, plain = results[name], results[PLAIN]
    assert ours.drafter == "MTPPlusSpeculator"
    accepted = ours.counters["accepted_tokens"]
    assert 100 < accepted < ours.counters["draft_tokens"] - 100
    found = p_values(ours.samples, plain.samples)
    assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}


def test_settings_differ(results: dict[str, JobResult]) -> None:
    """The comparison can fail with so few samples, too."""
    samples = list(results[PLAIN].samples.values())
    shifted = dict(zip(SETTINGS, [*samples[1:], samples[0]], strict=True))
    found = p_values(shifted, results[PLAIN].samples)
    assert not {k: p for k, p in found.items() if p > ALPHA}
