"""Benchmarks may ask for an acceptance length: it is reached, and nobody is deceived.

Real engines on both model runners, greedy and sampled.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_jobs import V1, V2
from tests.support.fork_server import ForkServer
from tests.support.synthetic_kernels import LENGTHS, TEMPERATURES

OBEY = "tests.support.synthetic_runs:run"
SYNTHETIC = {"rejection_sample_method": "synthetic"}
LENGTH = {"controller": "fixed", "synthetic_acceptance_length": 2.9}
RATES = [0.9, 0.6, 0.3]
"""Of drafts of any length up to three."""
SAID = "the text is NOT the target's"


def run(
    server: ForkServer, folder: Path, max_tokens: int, *engines: dict[str, Any]
) -> list[dict[str, Any]]:
    result = folder / "result.json"
    order = {"engines": engines, "max_tokens": max_tokens, "result": str(result)}
    server.run(OBEY, order, folder / "log", timeout_s=400)
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def check_it_is_said(found: dict[str, Any], is_synthetic: bool) -> None:
    for kind in ("greedy", "sampled"):
        for response in found[kind]["responses"]:
            assert response["synthetic_acceptance"] is is_synthetic
    assert found["gauge"] == float(is_synthetic)
    kinds = {line.split()[0] for line in found["log"] if SAID in line}
    assert kinds == ({"warning", "info"} if is_synthetic else set())
    assert any("request-steps" in line for line in found["log"])


def check_its_length(found: dict[str, Any]) -> None:
    for kind in ("greedy", "sampled"):
        batch = found[kind]
        length = 1 + sum(batch["accepted"]) / batch["num_drafts"]
        assert length == pytest.approx(2.9, rel=0.02), kind
        assert batch["accepted"][0] == batch["num_drafts"]
        assert batch["accepted"][2] == 0


def test_v2_reaches_the_length_that_was_asked_for(tmp_path: Path) -> None:
    (found,) = run(V2, tmp_path, 40, SYNTHETIC | LENGTH)
    check_its_length(found)
    check_it_is_said(found, is_synthetic=True)


def test_v1_accepts_on_a_cpu_what_vllms_kernels_accept(tmp_path: Path) -> None:
    """Under Triton's interpreter, with the same random numbers."""
    result = tmp_path / "result.json"
    obey = "tests.support.synthetic_kernels:compare"
    V2.run(obey, {"result": str(result)}, tmp_path / "log", timeout_s=300)
    batches = json.loads(result.read_text())
    assert {batch["kind"] for batch in batches} == set(TEMPERATURES)
    for batch in batches:
        assert batch["ours"] == batch["theirs"], batch["kind"]
    lengths = {
        (drafted, sum(token >= 0 for token in tokens) - 1)
        for batch in batches
        for drafted, tokens in zip(LENGTHS, batch["ours"], strict=True)
    }
    assert lengths >= {(0, 0), (1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3)}


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(
        V1,
        tmp_path_factory.mktemp("v1"),
        160,
        SYNTHETIC | LENGTH,
        SYNTHETIC | {"controller": "random", "synthetic_acceptance_rates": RATES},
        {"controller": "random"},
    )


def test_v1_reaches_the_length_that_was_asked_for(v1: list[dict[str, Any]]) -> None:
    check_its_length(v1[0])
    check_it_is_said(v1[0], is_synthetic=True)


def test_shorter_drafts_are_accepted_at_the_first_rates(
    v1: list[dict[str, Any]],
) -> None:
    for kind in ("greedy", "sampled"):
        batch = v1[1][kind]
        drafted = [0, 0, 0]
        for response in batch["responses"]:
            for length in response["per_step_drafted"]:
                drafted = [n + (j < length) for j, n in enumerate(drafted)]
        assert min(drafted) > 50
        for rate, n, accepted in zip(RATES, drafted, batch["accepted"], strict=True):
            deviation = (rate * (1 - rate) / n) ** 0.5
            assert accepted / n == pytest.approx(rate, abs=3 * deviation), kind
    check_it_is_said(v1[1], is_synthetic=True)


def test_others_are_said_to_be_the_targets(v1: list[dict[str, Any]]) -> None:
    check_it_is_said(v1[2], is_synthetic=False)


def test_drafts_are_not_judged_by_what_does_not_count(
    v1: list[dict[str, Any]],
) -> None:
    assert [found["stops_early"] for found in v1] == [False, False, True]
    shadow_drafts = [found["num_shadow_drafts"] for found in v1]
    assert shadow_drafts[:2] == [0, 0]
    assert shadow_drafts[2] > 0
