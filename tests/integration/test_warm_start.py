"""A server begins with what another one has learned, and with nothing else."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_mtp.config import ConfigError
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.grouping import BatchKind
from vllm_mtp.drafting.vocabulary import DraftVocabulary, Shard
from vllm_mtp.drafting.vocabulary_policy import VocabularyPolicy
from vllm_mtp.integration.warm_start import beliefs, state_file
from vllm_mtp.integration.warm_start.controllers import KeptController
from vllm_mtp.integration.warm_start.identity import file_name
from vllm_mtp.integration.warm_start.state_file import StateFile, replace_file
from vllm_mtp.records import DecodeRequest, RequestOutcome, StepOutcome

LENGTH = 8
IDENTITY = {"model": "folder/a-model", "hardware": "a machine"}
STEP_S = 0.01


def run(controller: GoodputController, num_steps: int) -> list[int]:
    """Steps of a world where all drafts are accepted and rows cost little.

    Returns:
        The draft depth of each.
    """
    depths, drafted = [], 0
    for _ in range(num_steps):
        controller.may_draft()
        decision = controller.decide([DecodeRequest("a", 100)])
        outcome = RequestOutcome("a", drafted, drafted)
        depth = decision.draft_depth
        controller.observe(
            StepOutcome(
                requests=(outcome,) if drafted else (),
                num_requests=1,
                num_scheduled_tokens=1 + drafted,
                step_time_s=STEP_S * (1.0 + 0.01 * drafted + 0.02 * depth),
                draft_depth=depth,
                num_decode_requests=1,
                num_context_tokens=100,
            )
        )
        drafted = decision.num_draft_tokens["a"]
        depths.append(depth)
    return depths


def learned(num_steps: int = 300) -> GoodputController:
    """A controller that knows this world."""
    controller = GoodputController(LENGTH)
    run(controller, num_steps)
    return controller


def file_in(folder: Path) -> StateFile[beliefs.ControllerState]:
    name = file_name(IDENTITY, "controller")
    return StateFile(folder, name, beliefs.ControllerState, IDENTITY)


def keep(folder: Path, controller: GoodputController) -> KeptController:
    return KeptController(controller, folder, IDENTITY)


def close(folder: Path, controller: GoodputController) -> Path:
    """Let a controller leave its file, and say where."""
    kept = keep(folder, controller)
    kept.close()
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def teacher() -> GoodputController:
    """Not to be changed."""
    return learned()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said about files that are not used."""
    said: list[str] = []
    monkeypatch.setattr(
        state_file.logger, "warning", lambda text, *args: said.append(text % args)
    )
    return said


# -- what is learned ------------------------------------------------------------------


def test_a_warm_controller_drafts_at_once_as_the_other_did_at_the_end(
    tmp_path: Path,
) -> None:
    other = learned()
    close(tmp_path, other)
    warm, cold = GoodputController(LENGTH), GoodputController(LENGTH)
    keep(tmp_path, warm)
    assert run(other, 1) == [LENGTH]
    assert run(warm, 8) == 8 * [LENGTH]
    assert sum(run(cold, 8)) < 4 * LENGTH


def test_a_file_says_what_the_controller_believes(
    tmp_path: Path, teacher: GoodputController
) -> None:
    close(tmp_path, teacher)
    warm = GoodputController(LENGTH)
    keep(tmp_path, warm)
    some_class = warm.survival.see(DecodeRequest("new", 100))
    assert warm.survival.survival_of_class(some_class) == pytest.approx(
        teacher.survival.survival_of_class(some_class)
    )
    for num_requests in (1, 3):
        for depth in (0, 3, LENGTH):
            asked = (num_requests, 100.0, True)
            assert warm.cost.times(*asked).seconds(depth, depth) == pytest.approx(
                teacher.cost.times(*asked).seconds(depth, depth)
            )
    assert warm.cost.num_plain_steps(1, True) == teacher.cost.num_plain_steps(1, True)


def test_what_is_taken_over_is_believed_less(
    tmp_path: Path, teacher: GoodputController
) -> None:
    """Another load and a busier machine are learned in a few steps."""
    close(tmp_path, teacher)
    warm = GoodputController(LENGTH)
    keep(tmp_path, warm)
    assert warm.survival._engine.precision < teacher.survival._engine.precision
    doubts = [c.cost._blocks[1, True].covariance[0, 0] for c in (teacher, warm)]
    added = beliefs.OTHER_MACHINE_VARIANCE
    assert doubts[1] == pytest.approx(doubts[0] + added)


def test_confidences_are_kept(tmp_path: Path) -> None:
    other, warm = (GoodputController(LENGTH) for _ in range(2))
    other.survival.see(DecodeRequest("a", 1))
    for _ in range(40):
        confidences = tuple(float(j) for j in range(1, 5))
        other.survival.observe([RequestOutcome("a", 4, 2, confidences)])
    other.cost._num_steps = 1
    close(tmp_path, other)
    keep(tmp_path, warm)
    (cell,) = other.survival.confidences
    for name in ("slope", "centres", "_recent", "_counts"):
        values = [getattr(c.survival.confidences[cell], name) for c in (other, warm)]
        assert values[0] == values[1], name


def test_margins_of_stop_rules_are_kept(tmp_path: Path) -> None:
    other, warm = (GoodputController(LENGTH) for _ in range(2))
    kind = BatchKind(4, True, frozenset({True, False}))
    for _ in range(20):
        other._stopping._margins.learn(kind, 6, 3)
    other.cost._num_steps = 1
    close(tmp_path, other)
    keep(tmp_path, warm)
    margins = [c._stopping._margins.of(kind) for c in (other, warm)]
    assert margins[0] == margins[1] != GoodputController(4)._stopping._margins.of(kind)


def test_the_largest_state_fits_into_a_file(tmp_path: Path) -> None:
    controller = GoodputController(16)
    for number in range(2 * beliefs.MAX_BLOCKS):
        block = controller.cost._block((number + 1, True))
        block.mean += np.random.default_rng(number).normal(size=block.mean.shape)
        block.mean[0] = -3.0
        block.updated_at = number + 1
    controller.cost._num_steps = 1000
    path = close(tmp_path, controller)
    assert path.stat().st_size < state_file.MAX_STATE_BYTES / 2
    warm = GoodputController(16)
    keep(tmp_path, warm)
    newest = {n + 1 for n in range(beliefs.MAX_BLOCKS, 2 * beliefs.MAX_BLOCKS)}
    assert {size for size, _ in warm.cost._blocks} == newest


# -- what is not used -----------------------------------------------------------------


def changed(path: Path, *names: Any, value: Any) -> None:
    """Set a value deep in a file."""
    content = json.loads(path.read_text())
    at = content
    for name in names[:-1]:
        at = at[name]
    at[names[-1]] = value
    path.write_text(json.dumps(content))


BAD: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "other hardware": (("identity", "hardware"), "another", "of another model"),
    "no number": (("engine", 0), float("nan"), "engine.0: "),
    "no precision": (("engine", 1), -1.0, "engine.1: "),
    "other K_max": (("positions",), [[0.0, 1.0]], "positions: has 1 values"),
    "short covariance": (("blocks", 0, "covariance"), [1.0], "covariance: has 1"),
    "no covariance": (("blocks", 0, "covariance", 0), -1e3, "covariance: is none"),
    "absurd time": (("blocks", 0, "mean", 0), 1e6, "mean: no time is that long"),
    "new field": (("more",), 1, "more: Extra inputs"),
    "text": (("noise",), "high", "noise: "),
}


@pytest.mark.parametrize(("names", "value", "reason"), BAD.values(), ids=BAD)
def test_a_file_that_does_not_fit_is_ignored_with_one_line(
    names, value, reason, tmp_path, teacher, warnings
) -> None:
    path = close(tmp_path, teacher)
    changed(path, *names, value=value)
    controller = GoodputController(LENGTH)
    keep(tmp_path, controller)
    (line,) = warnings
    assert line.startswith(f"mtp_plus starts cold: {path}: ")
    assert reason in line
    assert run(controller, 8) == run(GoodputController(LENGTH), 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Invalid JSON"),
        (b'{"identity"', "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b" " * (state_file.MAX_STATE_BYTES + 1), "has more than"),
    ],
    ids=["empty", "cut", "binary", "huge"],
)
def test_a_damaged_file_is_ignored(content, reason, tmp_path, warnings) -> None:
    file = file_in(tmp_path)
    file.path.write_bytes(content)
    assert file.read() is None
    assert reason in warnings[0]


def test_without_a_file_nothing_is_said(tmp_path: Path, warnings: list[str]) -> None:
    assert file_in(tmp_path / "missing").read() is None
    assert warnings == []


def test_another_model_or_machine_has_another_file() -> None:
    others = [IDENTITY | {key: "another"} for key in IDENTITY]
    names = {file_name(each, "controller") for each in (IDENTITY, *others)}
    assert len(names) == 1 + len(others)


def test_a_server_that_has_done_nothing_leaves_no_file(tmp_path: Path) -> None:
    keep(tmp_path, GoodputController(LENGTH)).close()
    assert list(tmp_path.iterdir()) == []


# -- writing --------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    replace_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_a_whole_file_while_several_write(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    contents = [bytes([number]) * 100_000 for number in range(4)]
    replace_file(path, contents[0])

    def write(content: bytes) -> None:
        for _ in range(20):
            replace_file(path, content)

    writers = [threading.Thread(target=write, args=[each]) for each in contents]
    for writer in writers:
        writer.start()
    num_read = 0
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
        num_read += 1
    assert num_read > 0


def test_a_folder_that_cannot_be_written_to_stops_no_server(
    tmp_path: Path, teacher: GoodputController, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        state_file.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "folder", teacher).close()
    assert "mtp_plus cannot write" in said[0]


def test_it_is_saved_now_and_then(
    tmp_path: Path, teacher: GoodputController, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(state_file.time, "monotonic", lambda: now[0])
    file = file_in(tmp_path)
    taken: list[float] = []

    def take() -> beliefs.ControllerState:
        taken.append(now[0])
        return beliefs.take(teacher, IDENTITY)

    steps_at = ((1, 63), (2, 64), (3, 500), (11, 500), (13, 500), (30, 563), (31, 564))
    for now[0], num_steps in steps_at:
        file.save_if_due(num_steps, take)
        file.wait()
    assert taken == [2, 13, 31]
    assert file.path.is_file()


def test_what_killed_writers_have_left_is_removed(
    tmp_path: Path, teacher: GoodputController
) -> None:
    path = close(tmp_path, teacher)
    old, new, other = (
        tmp_path / name
        for name in (f".{path.name}.a", f".{path.name}.b", ".another.json.a")
    )
    for pending in (old, new, other):
        pending.write_text("")
    for pending in (old, other):
        os.utime(pending, (0, 0))
    keep(tmp_path, teacher).close()
    assert set(tmp_path.iterdir()) == {path, new, other}


def test_a_name_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"^speculative_config\.warm_start_path=.*"):
        state_file.check_folder(str(path))
    state_file.check_folder(str(tmp_path))
    state_file.check_folder(str(tmp_path / "free"))


# -- the draft vocabulary -------------------------------------------------------------


def policy(num_rows: int = 4096) -> VocabularyPolicy:
    vocabulary = DraftVocabulary(num_rows, [Shard(0, 16384)], (), torch.device("cpu"))
    return VocabularyPolicy(
        vocabulary, is_fixed=False, may_switch=True, may_resize=True
    )


def test_a_vocabulary_goes_on_with_the_rows_that_another_had() -> None:
    other, warm = policy(), policy()
    text = torch.arange(9000, 9600).repeat(4)
    other.vocabulary.observe(text)
    ranked = other.vocabulary.ranked_token_ids(10_000)
    assert set(ranked) == set(range(9000, 9600))
    warm.begin_with(ranked, 2048, is_active=True)
    assert warm.is_active
    assert warm.vocabulary.num_rows == 2048
    warm.vocabulary.observe(text)
    assert warm.vocabulary.coverage()[0] == 1.0
    cold = policy()
    cold.vocabulary.observe(text)
    assert cold.vocabulary.coverage()[0] == 0.0


def test_a_number_of_rows_that_no_policy_chooses_is_not_taken_over() -> None:
    warm = policy()
    warm.begin_with([9000], 1000, is_active=False)
    assert warm.vocabulary.num_rows == 4096
    assert not warm.is_active
