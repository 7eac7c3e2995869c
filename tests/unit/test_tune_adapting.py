"""A head that is adapted: when it is served, and when it is not."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.adapting import counting_texts, plan_of, put, write_model
from tests.support.tuning import random_drafter
from vllm_mtp.tune import adapting
from vllm_mtp.tune.adapting import Adapting, head_folder, read_state
from vllm_mtp.tune.checkpoint import Checkpoint, stored_weights
from vllm_mtp.tune.judgement import MIN_TEXTS, Gain, gain, lengths_by_text
from vllm_mtp.tune.reservoir import KEPT, Reservoir, num_waiting_bytes
from vllm_mtp.tune.shards import PATTERN, Text
from vllm_mtp.tune.trainer_process import CANNOT_ADAPT, take_cores
from vllm_mtp.tune.unroll import Batch
from vllm_mtp.tune.updates import measure_drafts

NUM_TEXTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_model(tmp_path_factory.mktemp("models") / "model")


def adapted(model: Checkpoint, folder: Path, num_rounds: int) -> Adapting:
    """After rounds of the same kind of traffic, always other texts."""
    trainer = Adapting(plan_of(folder, model.folder))
    # Little text, and yet some updates.
    trainer.training = trainer.training.model_copy(update={"batch_tokens": 64})
    for number in range(num_rounds):
        put(folder, number, counting_texts(model, NUM_TEXTS, number * NUM_TEXTS))
        trainer.round()
    return trainer


def test_a_head_that_drafts_better_is_served(model: Checkpoint, tmp_path: Path) -> None:
    trainer = adapted(model, tmp_path, 4)
    state = read_state(tmp_path)
    assert state == trainer.state
    assert state.served == state.num_adopted > 0 == state.num_taken_back
    assert state.length_served > 1.1 * state.length_first
    assert state.num_updates > 0
    assert not num_waiting_bytes(tmp_path)
    # It is written as a head of the checkpoint, and is what was judged.
    written = Checkpoint(head_folder(tmp_path, state.served)).drafter(False)
    served = stored_weights(trainer.served)
    assert stored_weights(written).keys() == served.keys()
    for name, weight in stored_weights(written).items():
        torch.testing.assert_close(weight, served[name], rtol=0, atol=0)


def test_a_long_round_ends_when_there_are_newer_texts(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "_TRAINING_OVER_JUDGING", 0)
    trainer = Adapting(plan_of(tmp_path, model.folder))
    trainer.training = trainer.training.model_copy(update={"batch_tokens": 64})
    put(tmp_path, 0, counting_texts(model, NUM_TEXTS))
    trainer.round()
    whole = trainer.num_updates
    assert whole > 10  # nobody waits
    put(tmp_path, 1, counting_texts(model, NUM_TEXTS, 100))
    places = trainer.reservoir.take()
    put(tmp_path, 2, counting_texts(model, NUM_TEXTS, 200))
    monkeypatch.setattr(trainer.reservoir, "take", lambda: places)
    trainer.round()
    assert trainer.num_updates == whole + 1


def test_another_trainer_goes_on_with_what_is_served(
    model: Checkpoint, tmp_path: Path
) -> None:
    state = adapted(model, tmp_path, 4).state
    other = Adapting(plan_of(tmp_path, model.folder))
    assert other.state == state
    put(tmp_path, 0, counting_texts(model, NUM_TEXTS, 1000))
    other.round()
    assert other.state.length_served > 1.1 * other.state.length_first
    assert other.state.num_updates > state.num_updates


def test_a_head_that_drafts_worse_is_taken_back(
    model: Checkpoint, tmp_path: Path
) -> None:
    trainer = adapted(model, tmp_path, 3)
    assert trainer.state.served
    noise = random_drafter().eval()
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter.normal_(std=3.0, generator=torch.Generator().manual_seed(7))
    # As if traffic had changed to what neither it nor the trained weights can draft.
    trainer.served = noise
    trainer.average.module.load_state_dict(noise.state_dict())
    trainer.first = Checkpoint(head_folder(tmp_path, 1)).drafter(False).eval()
    put(tmp_path, 9, counting_texts(model, NUM_TEXTS, 2000))
    trainer.round()
    assert (trainer.state.served, trainer.state.num_taken_back) == (0, 1)
    assert trainer.served is trainer.first
    assert read_state(tmp_path).served == 0


def test_weights_that_are_no_numbers_are_never_served(
    model: Checkpoint, tmp_path: Path
) -> None:
    trainer = adapted(model, tmp_path, 1)
    for parameter in trainer.updates.drafter.parameters():
        parameter.data.fill_(math.nan)
    trainer.average.module.load_state_dict(trainer.updates.drafter.state_dict())
    put(tmp_path, 9, counting_texts(model, NUM_TEXTS, 2000))
    trainer.round()
    assert (trainer.state.served, trainer.state.num_adopted) == (0, 0)
    for drafter in (trainer.updates.drafter, trainer.average.module):
        assert all(torch.isfinite(each).all() for each in drafter.parameters())


def test_a_loss_that_is_no_number_changes_no_weight(
    model: Checkpoint, tmp_path: Path
) -> None:
    trainer = adapted(model, tmp_path, 1)
    trainer.target.head.weight[0] = math.nan
    put(tmp_path, 9, counting_texts(model, NUM_TEXTS, 2000))
    trainer.round()
    assert trainer.state.num_adopted == 0
    # It has begun anew with what is served.
    after, served = (
        stored_weights(each) for each in (trainer.updates.drafter, trainer.served)
    )
    assert all(torch.equal(served[name], after[name]) for name in served)


def test_random_tokens_leave_the_head_as_it_is(
    model: Checkpoint, tmp_path: Path
) -> None:
    """What a few updates on noise gain on other noise is luck, and is not served."""
    trainer = Adapting(plan_of(tmp_path, model.folder))
    random = torch.Generator().manual_seed(3)
    num_lucky = 0
    for number in range(4):
        texts = [
            Text(
                f"{number}-{index}",
                torch.randint(20, (16,), generator=random),
                torch.full((16, 16), 1e4) * torch.randn(16, 16, generator=random),
            )
            for index in range(NUM_TEXTS)
        ]
        put(tmp_path, number, texts)
        trainer.round()
        state = trainer.state
        num_lucky += state.length_trained > state.length_served
        assert (state.served, state.num_adopted) == (0, 0)
    assert trainer.num_updates > 0
    assert num_lucky > 0, "no rule would have served what was trained"


def test_trained_weights_that_go_astray_begin_anew(
    model: Checkpoint, tmp_path: Path
) -> None:
    trainer = adapted(model, tmp_path, 3)
    astray = trainer.updates
    bad = Gain(1.0, 0.01, NUM_TEXTS, 1.5)
    for _ in range(3):
        trainer._doubt(bad)
    trainer._doubt(Gain(0.0, 0.01, NUM_TEXTS, 1.5))
    for _ in range(3):
        trainer._doubt(bad)
    assert trainer.updates is astray
    trainer._doubt(bad)
    assert trainer.updates is not astray


@pytest.mark.parametrize(
    ("differences", "is_certain"),
    [
        ([0.1] * MIN_TEXTS, True),
        ([0.1] * (MIN_TEXTS - 1), False),
        ([0.001] * MIN_TEXTS, False),  # not worth it
        ([1.0, -0.9] * MIN_TEXTS, False),  # chance
        ([-0.1] * MIN_TEXTS, False),
        ([math.nan] * MIN_TEXTS, False),
    ],
)
def test_what_is_certain(differences: list[float], is_certain: bool) -> None:
    before = torch.full((len(differences),), 2.0)
    found = gain(before, before + torch.tensor(differences))
    assert found.is_certain == is_certain
    assert found.before == pytest.approx(2.0)


def test_lengths_are_those_of_each_text(model: Checkpoint, tmp_path: Path) -> None:
    trainer = Adapting(plan_of(tmp_path, model.folder))
    put(tmp_path, 0, counting_texts(model, 5))
    places = trainer.reservoir.take()
    texts = trainer.reservoir.texts()
    batches = trainer._whole(texts, places)
    found = lengths_by_text(trainer.first, trainer.target, batches, 2)
    alone = []
    for batch in batches:
        for row in range(len(batch.lengths)):
            length = int(batch.lengths[row])
            single = Batch(
                *(each[row : row + 1, :length] for each in batch[:3]),
                batch.lengths[row : row + 1],
            )
            made = measure_drafts(trainer.first, trainer.target, single, 2).found
            accepted = made[:, 1]
            assert accepted.shape[1] == length - 3 + 1
            alone.append(float((1 + accepted[0] + accepted[0] * accepted[1]).mean()))
    torch.testing.assert_close(found, torch.tensor(alone), rtol=1e-4, atol=1e-4)


def sizes(folder: Path) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in sorted(folder.glob(PATTERN))]


def test_a_reservoir_keeps_its_size_and_what_is_new(
    model: Checkpoint, tmp_path: Path
) -> None:
    texts = counting_texts(model, 8)
    reservoir = Reservoir(tmp_path, 2**18, 5)
    put(tmp_path, 0, texts)
    put(tmp_path, 1, texts[:2])
    assert reservoir.num_waiting() == 10
    assert num_waiting_bytes(tmp_path) > 0
    taken = reservoir.take()
    assert [place.name for place in taken] == [t.name for t in [*texts, *texts[:2]]]
    assert reservoir.num_waiting() == num_waiting_bytes(tmp_path) == 0
    (file,) = {place.file for place in taken}
    most = (2**18 - 2**16) // file.stat().st_size
    for _ in range(3 * most):
        put(tmp_path, 0, texts)
        reservoir.take()
    kept = sizes(tmp_path / KEPT)
    assert 0.7 * most <= len(kept) <= 1.4 * most
    assert kept[-2:] == [3 * most - 1, 3 * most]
    # Some of the older ones are there yet, and one that is old goes at random.
    assert kept[0] < 2 * most
    assert Reservoir(tmp_path, 2**18, 5)._next == 3 * most + 1


def test_texts_that_are_of_no_use_are_thrown_away(
    model: Checkpoint, tmp_path: Path
) -> None:
    reservoir = Reservoir(tmp_path, 2**18, 5)
    good, short, broken = counting_texts(model, 3)
    broken.hidden[3, 2] = math.inf
    put(tmp_path, 0, [good, Text("short", short.token_ids[:4], short.hidden[:4])])
    put(tmp_path, 1, [broken])
    assert [place.name for place in reservoir.take()] == [good.name]
    put(tmp_path, 2, [broken])
    assert reservoir.take() == []
    assert reservoir.num_waiting() == 0


def test_a_trainer_takes_cores_that_are_left() -> None:
    mine = os.sched_getaffinity(0)
    try:
        busy = {min(mine)}
        assert take_cores(busy) >= 1
        assert os.sched_getaffinity(0) - busy or len(mine) == 1
        if len(mine) > 1:
            assert not os.sched_getaffinity(0) & busy
        take_cores(range(4096))
        assert os.sched_getaffinity(0) >= mine
    finally:
        os.sched_setaffinity(0, mine)


def test_it_ends_with_its_server_and_leaves_nothing(
    model: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(folder, model.folder).model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mtp.tune.trainer_process", str(plan)],
        stdin=subprocess.PIPE,
    )
    try:
        while not (folder / "state.json").exists():
            assert process.poll() is None
        assert read_state(folder).num_updates == 0
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert not folder.exists()


def test_a_model_that_cannot_be_adapted_is_named(
    model: Checkpoint, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(tmp_path, tmp_path / "gone").model_dump_json())
    (tmp_path / "gone").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mtp.tune.trainer_process", str(plan)],
        stdin=subprocess.PIPE,  # open: else it ends as with its server
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.wait(120) == CANNOT_ADAPT
    assert process.stderr is not None
    assert "config.json cannot be read" in process.stderr.read()
