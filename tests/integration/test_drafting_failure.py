"""What breaks in drafting: switched off where one is alone, raised where ranks wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.integration.scheduler.drafting_failure import (
    DraftingSwitch,
    SurvivesFailure,
)
from vllm_mtp.integration.scheduler.messages import NOTHING


def config(ranks: int) -> Any:
    parallel = SimpleNamespace(world_size_across_dp=ranks, data_parallel_size=ranks)
    return SimpleNamespace(parallel_config=parallel)


def breaks() -> int:
    raise RuntimeError("broken")


def drafter(ranks: int) -> SurvivesFailure:
    made = SurvivesFailure()
    made.vllm_config = config(ranks)
    return made


def test_a_drafter_alone_gives_up_and_tells_it_once() -> None:
    alone = drafter(1)
    with alone.surviving():
        breaks()
    assert alone.has_failed
    assert alone.pending is alone.draft_vocab is None
    assert alone.take_report().failed_part == "drafter"
    assert alone.take_report() == NOTHING


def test_a_drafter_among_ranks_raises() -> None:
    one_of_two = drafter(2)
    with pytest.raises(RuntimeError, match="broken"), one_of_two.surviving():
        breaks()
    assert not one_of_two.has_failed


def test_a_controller_alone_is_asked_until_it_breaks() -> None:
    failed: list[str] = []
    switch = DraftingSwitch(config(1), failed.append)
    assert switch.ask(lambda: 3, otherwise=0) == 3
    assert not switch.is_off
    assert switch.ask(breaks, otherwise=0) == 0
    assert switch.ask(lambda: 3, otherwise=0) == 0
    assert switch.is_off
    switch.failed("drafter")
    switch.failed("drafter")
    assert failed == ["controller", "drafter"]


def test_a_controller_of_data_parallel_ranks_raises() -> None:
    switch = DraftingSwitch(config(2), lambda part: None)
    with pytest.raises(RuntimeError, match="broken"):
        switch.ask(breaks, otherwise=0)
    assert not switch.is_off
