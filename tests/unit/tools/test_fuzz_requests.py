"""Random requests: the same seed, every kind, only what vLLM would accept."""

import json
from collections import Counter

import pytest

from tests.unit.tools.fuzz_samples import K_MAX, MAX_MODEL_LEN, corpus
from vllm_mtp.tools.fuzz_options import FIELDS, NOT_SET, RARE
from vllm_mtp.tools.fuzz_requests import (
    ABORT,
    KINDS,
    PRIORITY,
    SESSION,
    WRONG,
    kinds_of,
    make_plays,
)
from vllm_mtp.tools.fuzz_unseeded import is_unseeded

MANY = 2000


@pytest.fixture(scope="module")
def plays() -> list[list[dict]]:
    return make_plays(corpus(), MANY, seed=0)


def test_the_same_seed_makes_the_same_plays(plays: list[list[dict]]) -> None:
    assert make_plays(corpus(), MANY, seed=0) == plays
    assert make_plays(corpus(), MANY, seed=1) != plays


def test_a_request_survives_json(plays: list[list[dict]]) -> None:
    assert json.loads(json.dumps(plays)) == plays


def test_every_field_and_kind_of_input_is_crossed(plays: list[list[dict]]) -> None:
    counts = Counter(kind for play in plays for r in play for kind in kinds_of(r))
    rare = {name for name, share in RARE.items() if share < 1}
    for kind in {*FIELDS, SESSION, ABORT, PRIORITY}:
        least = 2 if kind in rare else 20
        assert counts[kind] >= least, (kind, counts[kind])


def test_names_are_unique_and_all_are_asked(plays: list[list[dict]]) -> None:
    names = [request["name"] for play in plays for request in play]
    assert len(set(names)) == len(names) == MANY


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"max_tokens", WRONG}))
def test_a_kind_can_be_left_out(kind: str) -> None:
    plays = make_plays(corpus(), 300, seed=3, without={kind, WRONG})
    found = {kind for play in plays for r in play for kind in kinds_of(r)}
    if kind in ("temperature", "seed"):
        values = [
            c["sampling"].get(kind) for p in plays for r in p for c in r["chunks"]
        ]
        assert not any(values)
    else:
        assert kind not in found


def test_options_that_contradict_each_other_are_not_asked() -> None:
    for play in make_plays(corpus(), MANY, seed=5, without={WRONG}):
        for request in play:
            for chunk in request["chunks"]:
                sampling = chunk["sampling"]
                if sampling.get("max_tokens") is not None:
                    assert sampling.get("min_tokens", 0) <= sampling["max_tokens"]
                if sampling.get("stop"):
                    assert sampling.get("detokenize", True)
                if sampling.get("n", 1) > 1:
                    assert sampling["temperature"] > 0
                if sampling["temperature"] > 0 and not is_unseeded(request):
                    assert sampling["seed"] is not None
                ids = sampling.get("logprob_token_ids")
                if ids is not None and "logprobs" in sampling:
                    assert sampling["logprobs"] == len(ids)


def test_pins_are_within_what_the_server_allows(plays: list[list[dict]]) -> None:
    pins = Counter()
    for play in plays:
        for request in play:
            for chunk in request["chunks"]:
                extra = chunk["sampling"].get("extra_args")
                if extra:
                    nested = extra.get("mtp_plus", {}).get("k")
                    pins[extra.get("mtp_plus_k", nested)] += 1
    assert set(pins) - {"auto", -1} == set(range(K_MAX + 1))


def test_a_session_fits_into_the_model(plays: list[list[dict]]) -> None:
    sessions = [r for play in plays for r in play if r.get("session")]
    assert max(len(r["chunks"]) for r in sessions) >= 3
    for session in sessions:
        tokens = sum(
            len(chunk["prompt"]) + chunk["sampling"]["max_tokens"]
            for chunk in session["chunks"]
        )
        assert tokens < MAX_MODEL_LEN
        steps = [chunk["step"] for chunk in session["chunks"]]
        assert steps == sorted(steps)
        assert steps[-1] <= session["ends"]


def test_no_field_is_both_drawn_and_left_alone() -> None:
    assert not FIELDS.keys() & NOT_SET.keys()
    assert RARE.keys() <= FIELDS.keys()
