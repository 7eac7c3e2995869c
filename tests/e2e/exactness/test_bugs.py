"""The proof kit finds what it is there to find: bugs put into a correct engine.

Each bug is tried in the same engine, with the comparison and the limit of the kit
(``ALPHA``) and up to ``MAX_SAMPLES`` samples: those of the longer grid. Without a bug
the same engine passes with as many.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.exactness.bugs import BUGS, Bug
from tests.e2e.exactness.samples import ALPHA, NUM_TOKENS, p_values, sample
from tests.support.engines import Samples, engine, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.vocabulary import most_frequent, write_list

SEATS = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
BATCH = 400
MAX_SAMPLES = 2000
SETTINGS = tuple(dict.fromkeys(setting for _, setting in BUGS))


@pytest.fixture(scope="module")
def plain() -> Samples:
    """Of the target alone."""
    with engine(BUNDLED_CHECKPOINT, **SEATS) as llm:
        return sample(llm, SETTINGS, MAX_SAMPLES)


@pytest.fixture(scope="module")
def small_list(plain: Samples, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half of the tokens that are sampled: much cannot be proposed."""
    texts = [tokens for samples in plain.values() for tokens in samples]
    path = tmp_path_factory.mktemp("lists") / "half.json"
    return write_list(path, most_frequent(texts, 256)[::2])


@pytest.fixture(scope="module")
def speculating(request: pytest.FixtureRequest, small_list: str) -> Iterator[Any]:
    """An engine with the acceptance test and the drafts that the parameter names."""
    test, _, change = request.param.partition(", ")
    spec = {
        "method": "mtp_plus",
        # All of them within the tokens that are compared.
        "num_speculative_tokens": NUM_TOKENS - 1,
        "controller": "fixed",
        "draft_vocab": small_list,
        "draft_sample_method": "greedy" if change == "chosen" else "auto",
        "rejection_sample_method": test,
    }
    with engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS) as llm:
        yield llm


def samples_until_found(llm: Any, setting: str, plain: Samples) -> int | None:
    """Samples after which an engine differs from the target; None if it does not."""
    drawn: Samples = {setting: []}
    while len(drawn[setting]) < MAX_SAMPLES:
        drawn[setting] += sample(llm, [setting], BATCH)[setting]
        if min(p_values(drawn, plain).values()) < ALPHA:
            return len(drawn[setting])
    return None


CASES = [
    pytest.param(test, setting, bug, id=f"{test}-{bug.__name__}")
    for (test, setting), bugs in BUGS.items()
    for bug in bugs
]


@pytest.mark.parametrize(
    ("speculating", "setting", "bug"), CASES, indirect=["speculating"]
)
def test_a_bug_is_found(
    speculating: Any,
    setting: str,
    bug: Bug,
    plain: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch, model_runner(speculating))
    assert samples_until_found(speculating, setting, plain)


@pytest.mark.parametrize(
    "speculating", ["standard", "standard, chosen", "block"], indirect=True
)
def test_without_a_bug_nothing_is_found(speculating: Any, plain: Samples) -> None:
    assert samples_until_found(speculating, "plain", plain) is None
