"""Tuning runs: they learn, go on where they were, and are the same on two ranks."""

from pathlib import Path

import pytest
import torch

from tests.support.tuning import (
    PLAN,
    BothRanks,
    free_port,
    random_drafter,
    random_target,
    train_on_rank,
    write_texts,
)
from vllm_mtp.config import ConfigError
from vllm_mtp.tune.data import Batches
from vllm_mtp.tune.shards import Texts
from vllm_mtp.tune.train import Trainer, split


def trainer(folder: Path, texts: Texts) -> Trainer:
    folder.mkdir(exist_ok=True)
    return Trainer(random_drafter(), random_target(), texts, PLAN, folder)


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in run.drafter.state_dict().items()}


def test_a_run_learns(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", write_texts(tmp_path / "texts"))
    before = run.measure()
    seen: list[int] = []
    run.run(lambda update, loss: seen.append(update))
    after = run.measure()
    assert seen == list(range(1, run.num_updates + 1))
    assert before.num_drafts == after.num_drafts > 0
    for step in range(PLAN.num_steps):
        assert after.kl[step] < 0.9 * before.kl[step]
        assert after.acceptance[step] > before.acceptance[step]
        for name in ("sampled_lengths", "greedy_lengths"):
            lengths = getattr(after, name)
            assert 1 < lengths[step] <= 2 + step
            assert lengths == sorted(lengths)
    first = 1 + after.acceptance[0], 1 + after.agreement[0]
    assert (after.sampled_lengths[0], after.greedy_lengths[0]) == pytest.approx(first)


class Interrupted(Exception):
    """In the middle of a run."""


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    whole = trainer(tmp_path / "whole", texts)
    whole.run(lambda update, loss: None)
    cut = trainer(tmp_path / "cut", texts)
    stop_at = whole.num_updates * 2 // 3  # in the second epoch

    def watch(update: int, loss: float) -> None:
        if update == stop_at:
            raise Interrupted

    with pytest.raises(Interrupted):
        cut.run(watch, save_every=3)
    resumed = trainer(tmp_path / "cut", texts)
    assert resumed.resume()
    assert 0 < resumed.progress.update < stop_at
    resumed.run(lambda update, loss: None)
    for name, wanted in weights(whole).items():
        assert torch.equal(weights(resumed)[name], wanted), name
    other = Trainer(
        random_drafter(),
        random_target(),
        texts,
        PLAN.model_copy(update={"learning_rate": 1e-3}),
        tmp_path / "cut",
    )
    assert not other.resume()


@pytest.mark.parametrize(("other", "agrees"), [(400, True), (200, False), (-1, False)])
def test_ranks_go_on_from_the_same_update_or_begin_anew(
    other: int, agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path / "run", write_texts(tmp_path / "texts"))
    run.num_ranks = 2

    def all_reduce(mine: torch.Tensor, op: torch.distributed.ReduceOp) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        mine.copy_(torch.minimum(mine, torch.tensor([other, -other])))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert run._is_of_all_ranks(400) == agrees


def test_texts_are_held_out_whole_and_stay_so(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    held_out, others = split(texts.places, 0.2)
    assert {each.name for each in held_out} | {each.name for each in others} == {
        each.name for each in texts.places
    }
    assert 1 <= len(held_out) < len(others)
    fewer, _ = split(texts.places[:12], 0.2)
    assert {each.name for each in fewer} <= {each.name for each in held_out} | {
        texts.places[11].name  # where none is held out by its name
    }


def test_an_epoch_has_every_window_once(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    batches = Batches(
        texts,
        texts.places,
        window_tokens=12,
        batch_tokens=40,
        min_tokens=5,
        seed=3,
    )
    first, second = batches.of_epoch(0), batches.of_epoch(1)
    assert first == batches.of_epoch(0) != second
    for epoch in (first, second):
        windows = [window for batch in epoch for window in batch]
        assert sorted(windows) == sorted(batches.windows)
        for batch in epoch:
            longest = max(window.num_tokens for window in batch)
            assert len(batch) == 1 or len(batch) * longest <= 40
    one = first[0][0]
    read = batches.read([one])
    assert read.positions[0, 0] == one.start
    assert read.lengths.tolist() == [one.num_tokens]


def test_too_few_texts_are_named(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", num_texts=3)
    plan = PLAN.model_copy(update={"num_steps": 12})
    with pytest.raises(ConfigError, match="data: 3 texts are too few: of at least 14"):
        Trainer(random_drafter(), random_target(), texts, plan, tmp_path)


def test_a_run_of_another_plan_begins_its_journal_anew(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", write_texts(tmp_path / "texts"))
    run.note(held_out="of another run")
    run.begin()
    assert run.first_note() == run.measure()._asdict()


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no shard"):
        Texts(tmp_path)


def test_two_ranks_train_as_one_process_with_both_of_their_batches(
    tmp_path: Path,
) -> None:
    texts = write_texts(tmp_path / "texts")
    port = free_port()
    torch.multiprocessing.spawn(train_on_rank, (2, str(tmp_path), port), nprocs=2)
    found = torch.load(tmp_path / "of-2" / "found.pt")
    one = BothRanks(random_drafter(), random_target(), texts, PLAN, tmp_path)
    losses = one.run_both(len(found["losses"]))
    assert found["losses"] == pytest.approx(losses, rel=1e-3)
    (layer,) = one.drafter.layers
    state = layer.stored(layer.state_dict())  # type: ignore[operator]
    for name, wanted in state.items():
        torch.testing.assert_close(found["weights"][name], wanted, rtol=1e-3, atol=1e-4)
