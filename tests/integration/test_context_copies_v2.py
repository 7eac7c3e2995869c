"""Model Runner V2: drafts continued from contexts, under Triton's interpreter.

The scheduler is the real one, its controller `random`: who copies how far is drawn, so
rows are scheduled for fillers, too.
"""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from tests.e2e.exactness.samples import (
    ALPHA,
    IS_LONG,
    NUM_SAMPLES,
    prompt_token_ids,
)
from tests.support.copying_v2 import MAX_DRAFTS
from tests.support.engine_jobs import V2
from tests.support.engines import Samples, engine, greedy, sampled
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from vllm_mtp.integration.scheduler.messages import CopyReport, OfferedCopies
from vllm_mtp.integration.v2.adaptive_verification import CONFIDENCES
from vllm_mtp.integration.v2.context_copies import CopiesFromContext
from vllm_mtp.integration.v2.proposals import DrawnDrafts
from vllm_mtp.integration.worker.copying import LOOK_STEPS

SETTINGS: dict[str, dict[str, Any]] = {"plain": {"temperature": 0.8}}
NUM_TOKENS = 5
ENGINES = ("sync", "async", "adaptive")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of prompts after which the bundled model repeats itself, up to its end."""
    folder = tmp_path_factory.mktemp("copies")
    prompts = [heldout_prompts(40, max_tokens=12)[i] for i in (16, 22, 38, 39)]
    order = {"prompts": prompts, "result": str(folder / "result.json")}
    V2.run("tests.support.copying_v2:play", order, folder / "log", 500)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.parametrize("name", [*ENGINES, "failing", "off"])
def test_greedy_texts_are_those_without_speculation(
    name: str, played: dict[str, Any]
) -> None:
    texts, plain = played[name]["texts"], played["plain"]["texts"]
    num_tokens = len(texts[0])
    assert texts == [text[:num_tokens] for text in plain]
    assert num_tokens > 15


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_go_on_as_texts_do(name: str, played: dict[str, Any]) -> None:
    assert played[name]["wrong"] == []
    assert played[name]["num_offers"] > 10
    assert set(played[name]["depths"]) - {0} == set(range(1, MAX_DRAFTS + 1))


@pytest.mark.parametrize("name", ENGINES[:2])
def test_copies_are_verified_and_accepted(name: str, played: dict[str, Any]) -> None:
    assert played[name]["num_copied"] > played[name]["num_accepted"] > 10
    assert played[name]["num_verified"] >= played[name]["num_copied"]


@pytest.mark.parametrize("name", ENGINES)
def test_the_scheduler_hears_of_every_offer(name: str, played: dict[str, Any]) -> None:
    counts, reported = played[name]["counts"], played[name]["reported"]
    assert reported == counts[: len(reported)]
    # Those of the last steps come with no output.
    assert len(counts) - len(reported) < 8
    matched = sum(matched for _, _, matched in reported)
    # Where rows are made dear, drafts are hardly ever verified to their ends.
    assert matched > 10 or name == "adaptive"


def test_long_matches_are_seen_where_nothing_is_drafted(
    played: dict[str, Any],
) -> None:
    found = played["off"]
    assert found["wrong"] == []
    assert set(found["depths"]) == {0}
    assert found["num_alone"] > 2
    assert found["num_copying"] > LOOK_STEPS
    num_tokens = sum(map(len, found["texts"]))
    assert len(found["depths"]) <= num_tokens / LOOK_STEPS


def test_the_device_leaves_copies_out(played: dict[str, Any]) -> None:
    assert played["adaptive"]["num_left_out"] > 0
    assert 0 < played["adaptive"]["num_copied"] < played["adaptive"]["num_verified"]


def test_a_drafter_that_fails_owes_no_copies(played: dict[str, Any]) -> None:
    assert played["num_failures"] > 0


class Estimates:
    """As much of a speculator as judges and ranks draft tokens."""

    drawn_part = CopiesFromContext.drawn_part
    take_copies = CopiesFromContext.take_copies
    expect_acceptance = CopiesFromContext._expect_acceptance

    def __init__(self, num_drawn: list[int], scheduled: list[int]) -> None:
        counts = torch.tensor(num_drawn, dtype=torch.int32)
        self.drawn = DrawnDrafts(counts.numpy(), counts)
        self.copies = self.acceptance_estimator = object()
        self.num_speculative_steps = MAX_DRAFTS
        self._has_looked = False
        self._offers = ["a", "b"], np.array([[2, 0], [0, 0], [0, 0]], dtype=np.int32)
        batch = SimpleNamespace(
            req_ids=["a", "b", "c"],
            idx_mapping_np=np.array([2, 0, 1]),
            num_draft_tokens_per_req=np.array(scheduled, dtype=np.int32),
        )
        self._step = SimpleNamespace(input_batch=batch)


def test_acceptance_is_learned_from_drafts_of_the_mtp_layer_alone() -> None:
    estimates = Estimates([3, 2, 2], [5, 5, 5])
    requests = torch.tensor([2, 0, 1])
    # Accepted: a copy; two of the chain; nothing is sampled yet.
    sampled = torch.tensor([4, 3, 0], dtype=torch.int32)
    rejected = torch.tensor([2, 3, 0], dtype=torch.int32)
    counts = estimates.drawn_part(requests, sampled, rejected)
    assert [each.tolist() for each in counts] == [[3, 3, 0], [0, 1, 0]]


def test_without_copies_it_learns_from_all_of_them() -> None:
    estimates = Estimates([3, 2, 2], [2, 3, 2])
    counts = torch.tensor([3, 4, 1]), torch.tensor([0, 0, 2])
    assert estimates.drawn_part(torch.tensor([2, 0, 1]), *counts) == counts


def test_copies_are_ranked_behind_the_drafts_before_them() -> None:
    estimates: Any = Estimates([2, 2, 2], [5, 5, 5])
    estimates.draft_token_confidence_probs = torch.full((4, MAX_DRAFTS), 0.9)
    estimates.expect_acceptance(torch.tensor([2, 0, 3]), 2, 1.0)
    found = estimates.draft_token_confidence_probs
    assert found[:3, 2:].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert (found[:, :2] == 0.9).all()
    assert (found[3] == 0.9).all()
    survival = found.clamp(*CONFIDENCES).cumprod(1)
    assert (survival.diff() < 0).all()


def test_a_report_has_offers_of_the_step_before_and_rows_of_this_one() -> None:
    estimates: Any = Estimates([3, 2, 2], [1, 5, 3])
    copies = estimates.take_copies(estimates._step)
    assert isinstance(copies, OfferedCopies)
    assert copies.reports.behind_drafts == {
        "a": CopyReport(2, 0, 0),
        "b": CopyReport(0, 0, 0, num_verified=2),
        "c": CopyReport(0, 0, 0, num_verified=1),
    }
    assert not copies.reports.alone
    # Told once; rows are told of anyhow.
    reports = estimates.take_copies(estimates._step).reports
    assert reports.behind_drafts.keys() == {"b", "c"}
    estimates._offers = ["a"], np.array([[2], [0], [0]], dtype=np.int32)
    estimates._step.input_batch.num_draft_tokens_per_req = None
    estimates._has_looked = True
    reports = estimates.take_copies(estimates._step).reports
    assert reports == ({}, {"a": CopyReport(2)})
    assert estimates.take_copies(estimates._step) is None


@pytest.fixture(scope="module")
def plain() -> tuple[list[int], tuple[int, ...], Samples]:
    """A text, the target's answer to it, and what follows both and the text again
    without speculation."""
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=48) as llm:
        text = list(prompt_token_ids())
        answer = tuple(greedy(llm, [text], 16)[0])
        prompt = [*text, *answer, *text]
        samples = sampled(llm, prompt, SETTINGS, 4 * NUM_SAMPLES, NUM_TOKENS)
        return prompt, answer, samples


@pytest.mark.skipif(not IS_LONG, reason="minutes each")
@pytest.mark.parametrize("rejection", ["standard", "block"])
def test_samples_follow_the_target(
    rejection: str,
    plain: tuple[list[int], tuple[int, ...], Samples],
    tmp_path: Path,
) -> None:
    prompt, answer, expected = plain
    order = {
        "prompt": prompt,
        "settings": SETTINGS,
        "num_samples": NUM_SAMPLES,
        "num_tokens": NUM_TOKENS,
        "rejection": rejection,
        "result": str(tmp_path / "result.json"),
    }
    V2.run("tests.support.copying_v2:sample", order, tmp_path / "log", 900)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["num_copied"] > NUM_SAMPLES
    # Of how many texts go on for so long as the one that is copied.
    compared = {}
    for number, name in product(range(1, NUM_TOKENS + 1), SETTINGS):
        pair = [
            Counter(tuple(text[:number]) == answer[:number] for text in samples[name])
            for samples in (found["samples"], expected)
        ]
        table = [[counts[True], counts[False]] for counts in pair]
        compared[name, number] = float(chi2_contingency(table).pvalue)
    assert min(compared.values()) > ALPHA, compared
