"""The proof kit finds what it is there to find: bugs put into a correct engine.

Each bug is tried in the same engine, with the comparison and the limit of the kit
(``ALPHA``) and up to ``MAX_SAMPLES`` samples: those of the longer grid. Without a bug
the same engine passes with as many.
"""

from collections.abc import Iterator
from contextlib import ExitStack
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


class Speculating:
    """One engine at a time, started anew when another kind is asked for."""

    def __init__(self, small_list: str) -> None:
        self._small_list = small_list
        self._kind = ""
        self._running = ExitStack()
        self._engine: Any = None

    def of_kind(self, kind: str) -> Any:
        """An engine with an acceptance test and, after a comma, chosen drafts."""
        if kind != self._kind:
            self.stop()
            test, _, change = kind.partition(", ")
            spec = {
                "method": "mtp_plus",
                # All of them within the tokens that are compared.
                "num_speculative_tokens": NUM_TOKENS - 1,
                "controller": "fixed",
                "draft_vocab": self._small_list,
                "draft_sample_method": "greedy" if change == "chosen" else "auto",
                "rejection_sample_method": test,
            }
            started = engine(BUNDLED_CHECKPOINT, speculative_config=spec, **SEATS)
            self._engine = self._running.enter_context(started)
            self._kind = kind
        return self._engine

    def stop(self) -> None:
        self._kind, self._engine = "", None
        self._running.close()


@pytest.fixture(scope="module")
def speculating(small_list: str) -> Iterator[Speculating]:
    """Not parametrized: pytest would start an engine for every single bug."""
    engines = Speculating(small_list)
    yield engines
    engines.stop()


def samples_until_found(llm: Any, setting: str, plain: Samples) -> int | None:
    """Samples after which an engine differs from the target; None if it does not."""
    drawn: Samples = {setting: []}
    while len(drawn[setting]) < MAX_SAMPLES:
        drawn[setting] += sample(llm, [setting], BATCH)[setting]
        if min(p_values(drawn, plain).values()) < ALPHA:
            return len(drawn[setting])
    return None


LONG = (
    "standard-replaces_by_what_the_target_samples",
    "standard-forgets_top_k",
    "standard-adds_the_bias_to_the_first_draft_token_only",
    "standard, chosen-keeps_the_last_draft_token_untested",
    "block-mixes_up_rows_of_the_draft_head",
)
"""Each is much like another one."""


def cases() -> Iterator[Any]:
    """Kind by kind, and without a bug at the end of each."""
    for kind in dict.fromkeys(kind for kind, _ in BUGS):
        for (of_kind, setting), bugs in BUGS.items():
            for bug in bugs if of_kind == kind else ():
                name = f"{kind}-{bug.__name__}"
                marks = [pytest.mark.long] if name in LONG else []
                yield pytest.param(kind, setting, bug, id=name, marks=marks)
        yield pytest.param(kind, "plain", None, id=f"{kind}-no bug")


@pytest.mark.parametrize(("kind", "setting", "bug"), cases())
def test_a_bug_is_found_and_nothing_where_there_is_none(
    speculating: Speculating,
    kind: str,
    setting: str,
    bug: Bug | None,
    plain: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = speculating.of_kind(kind)
    if bug is not None:
        bug(monkeypatch, model_runner(llm))
    found = samples_until_found(llm, setting, plain)
    assert (found is not None) == (bug is not None)
