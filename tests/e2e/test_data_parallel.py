"""Data parallel 2 with experts: no step hangs, and greedy output is the target's.

A rank without requests runs dummy steps, since the other's experts wait for it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.data_parallel import RankRequest, RankResult
from tests.support.engine_jobs import V1, V2
from tests.support.random_checkpoints import random_prompts, write_checkpoint

DRAFT_LENGTH = 3
PINS = (None, 0, 1, None, 2)
"""Requests' own K in turn: ranks verify unequally many drafts."""
PROMPTS = random_prompts(24)
LONG_PROMPT = [token for prompt in PROMPTS for token in prompt][:150]
OURS = {
    "speculative_config": {"method": "mtp_plus"},
    "max_num_batched_tokens": 64,  # some steps of the idle rank are of a prompt alone
}


class Size(NamedTuple):
    """Of a run."""

    num_busy: int
    """Requests of the busy rank."""
    max_tokens: int
    num_steps: int
    """At least."""


SIZES = {"v1": Size(12, 58, 120), "v2": Size(3, 41, 40)}
"""Triton's interpreter takes its time."""
RUNNERS = {"v1": V1, "v2": V2}


def requests(size: Size) -> list[list[RankRequest]]:
    """Of a busy rank, and of one that is idle between two requests, if there are
    enough steps, and later. The second has a long prompt."""
    busy = [
        RankRequest(prompt, size.max_tokens, draft_length=PINS[i % len(PINS)])
        for i, prompt in enumerate(PROMPTS[: size.num_busy])
    ]
    idle = [
        RankRequest(prompt, 12, arrives_at=i * size.num_steps // 2)
        for i, prompt in enumerate([PROMPTS[-1], LONG_PROMPT])
    ]
    return [busy, idle]


def run(runner: str, size: Size, engine: dict[str, Any], folder: Path) -> Any:
    """What both ranks did."""
    order = {
        "model": str(write_checkpoint(folder / "model", "glm4_moe")),
        "engine": engine,
        "requests": [[asdict(each) for each in rank] for rank in requests(size)],
        "result": str(folder / "result.json"),
    }
    obey = "tests.support.data_parallel:run_in_fork"
    RUNNERS[runner].run(obey, order, folder / "log", timeout_s=150)
    ranks = json.loads((folder / "result.json").read_text())
    return [RankResult(**rank) for rank in ranks]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Texts without speculation, by rank."""
    folder = tmp_path_factory.mktemp("plain")
    size = SIZES["v1"]._replace(num_steps=0)
    ranks = run("v1", size, {"max_num_seqs": 22}, folder)
    assert not any(rank.counters for rank in ranks)
    return [[*rank.texts.values()] for rank in ranks]


@pytest.mark.parametrize("runner", RUNNERS)
def test_idle_and_busy_ranks_do_the_same_together(
    runner: str, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    size = SIZES[runner]
    busy, idle = run(runner, size, OURS, tmp_path)
    assert len(busy.is_dummy) == len(idle.is_dummy) >= size.num_steps
    assert not any(busy.is_dummy)
    assert sum(idle.is_dummy) > size.num_steps / 2
    assert set(busy.num_passes) == set(idle.num_passes) == {DRAFT_LENGTH}
    assert busy.collectives == idle.collectives
    assert all(map(len, busy.collectives))
    assert 0 < busy.counters["accepted_tokens"] < busy.counters["draft_tokens"]
    wanted = [text[: size.max_tokens] for text in expected[0][: size.num_busy]]
    assert [*busy.texts.values()] == wanted
    assert [*idle.texts.values()] == expected[1]
