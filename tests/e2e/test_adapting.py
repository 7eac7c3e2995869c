"""Engines whose head is adapted while they serve: swaps, and what can go wrong.

What a trainer finds is planted here: training itself is in
``tests/unit/test_tune_adapting.py``, and what it brings in ``docs/results/adapting``.
"""

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engine_jobs import V2
from tests.support.engines import engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.planted_heads import (
    NUM_TOKENS,
    PROMPTS,
    SPECULATION,
    planted,
    play,
    say,
    traffic_of,
    write_heads,
)
from tests.support.weight_updates import answers
from vllm_mtp.integration.worker import traffic
from vllm_mtp.metrics import stats
from vllm_mtp.tune.reservoir import INBOX
from vllm_mtp.tune.shards import PATTERN, Texts


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Without speculation."""
    with engine(BUNDLED_CHECKPOINT) as llm:
        return greedy(llm, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_head_is_served_and_taken_back_between_steps(
    runner: str, heads: dict[str, str], expected: list[list[int]], tmp_path: Path
) -> None:
    order: dict[str, Any] = {"heads": heads, "result": str(tmp_path / "result.json")}
    if runner == "v1":
        play(order | {"options": {}})
    else:
        options = {"max_num_seqs": 4, "max_model_len": 128, "async_scheduling": True}
        V2.run(
            "tests.support.planted_heads:play",
            order | {"options": options},
            tmp_path / "log",
            300,
        )
    found = json.loads(Path(order["result"]).read_text())
    for when, is_good in (("before", False), ("served", True), ("back", False)):
        text, accepted = found[when]
        assert text == expected, when
        assert (accepted > 0.3) if is_good else (accepted < 0.1), when
    assert found["levels"][stats.ADAPTING] == 1
    assert found["levels"][stats.ADAPTED_HEAD] == 0
    assert not Path(found["folder"]).exists()


def test_a_head_that_cannot_be_loaded_ends_it(
    heads: dict[str, str],
    expected: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    speculation = SPECULATION | {"model": heads["good"], "adapt": True}
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    (tmp_path / "config.json").write_text("{}")
    with planted(), engine(BUNDLED_CHECKPOINT, speculative_config=speculation) as llm:
        logger = logging.getLogger("vllm.mtp_plus")
        logger.addHandler(caplog.handler)
        say(llm, 1, str(tmp_path))
        before = answers(llm, PROMPTS, NUM_TOKENS)
        after = answers(llm, PROMPTS, NUM_TOKENS)
        logger.removeHandler(caplog.handler)
        assert traffic_of(llm).recorder is None
        assert traffic_of(llm).levels[stats.ADAPTING] == 0
    assert before[0] == after[0] == expected
    assert after[1] > 0.3
    assert "adapting has ended: head" in caplog.text


def test_requests_are_recorded_unless_they_refuse(heads: dict[str, str]) -> None:
    speculation = SPECULATION | {"adapt": True}
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    refusing = SamplingParams(
        max_tokens=8, ignore_eos=True, extra_args={"mtp_plus_record": 0}
    )
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with planted(), engine(BUNDLED_CHECKPOINT, speculative_config=speculation) as llm:
        kept = traffic_of(llm)
        llm.generate(prompts, refusing, use_tqdm=False)
        llm.generate(prompts[:1], sampling, use_tqdm=False)  # tells who has ended
        assert kept.recorder.num_ended == 0
        llm.generate(prompts, sampling, use_tqdm=False)
        greedy(llm, PROMPTS[:1], 1)
        kept.recorder.write()
        texts = Texts(kept.folder / INBOX)
        lengths = [place.end - place.start for place in texts.places]
        assert len(lengths) == 1 + len(PROMPTS)
        assert min(lengths) >= min(map(len, PROMPTS)) + 8 - 1
        # Where the inbox is full nothing comes.
        kept._inbox_bytes = 0
        greedy(llm, PROMPTS[:1], 1)
        kept.recorder.write()  # the one that came before
        greedy(llm, PROMPTS, 4)
        greedy(llm, PROMPTS[:1], 1)
        assert kept.recorder.num_ended == kept.recorder.num_running == 0


def test_a_full_memory_ends_it(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = SPECULATION | {"adapt": True}
    with planted(), engine(BUNDLED_CHECKPOINT, speculative_config=speculation) as llm:
        kept = traffic_of(llm)

        def no_room(rows: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(kept.recorder, "record", no_room)
        assert greedy(llm, PROMPTS, NUM_TOKENS) == expected
        assert kept.recorder is None
        assert greedy(llm, PROMPTS, NUM_TOKENS) == expected


def test_a_trainer_that_is_killed_starts_again_and_then_no_more(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, that looks at real texts."""
    speculation = SPECULATION | {"adapt": True}
    with (
        planted(),
        engine(BUNDLED_CHECKPOINT, speculative_config=speculation) as llm,
    ):
        kept = traffic_of(llm)
        monkeypatch.setattr(traffic, "TRAINER", REAL_TRAINER)
        for number in range(1, traffic.MAX_STARTS):
            os.kill(kept._trainer._process.pid, signal.SIGKILL)
            kept._trainer._process.wait()
            assert greedy(llm, PROMPTS, NUM_TOKENS) == expected
            assert kept._trainer._num_starts == 1 + number
            assert kept.recorder is not None
        _wait_for(kept.folder / "state.json")
        os.kill(kept._trainer._process.pid, signal.SIGKILL)
        kept._trainer._process.wait()
        assert greedy(llm, PROMPTS, NUM_TOKENS) == expected
        assert kept.recorder is None
        assert kept.levels[stats.ADAPTING] == 0
        assert not kept.folder.exists()
        assert greedy(llm, PROMPTS, NUM_TOKENS) == expected


REAL_TRAINER = traffic.TRAINER


def _wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline_s, file
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"hidden_states_path": "x"}, "hidden_states_path records the same"),
        ({"adapt_device": "gpu"}, "adapt_device='gpu' is not allowed"),
        ({"adapt_memory_mib": 1}, "adapt_memory_mib=1 is not allowed"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], sentence: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(BUNDLED_CHECKPOINT),
        speculative_config=SPECULATION | {"adapt": True} | more,
    )
    with pytest.raises(Exception, match=sentence):
        arguments.create_engine_config()


def test_no_room_in_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(traffic, "num_free_bytes", lambda: 2**20)
    arguments = EngineArgs(
        model=str(BUNDLED_CHECKPOINT), speculative_config=SPECULATION | {"adapt": True}
    )
    with pytest.raises(Exception, match=r"/dev/shm must have 128 MiB free .*shm-size"):
        arguments.create_engine_config()


def test_inboxes_of_engines_that_are_gone_are_gone() -> None:
    assert not list(Path("/dev/shm").glob(f"mtp_plus-*/{INBOX}/{PATTERN}"))
