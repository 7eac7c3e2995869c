"""Trains MTP layers: updates, measurements on held-out texts, and what resumes them.

A run is decided by its plan and data. What a run needs to go on is in one file that
replaces the one before, so a resumed run ends with the same weights (on a CPU, bit for
bit). With several ranks (torchrun) layers are sharded by FSDP2 and each rank takes
every n-th batch; a rank's gradients are averaged over all.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from vllm_mtp.config import ConfigError
from vllm_mtp.tune.data import Batches
from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.shards import Place, Texts
from vllm_mtp.tune.unroll import Batch, Drafter, Target
from vllm_mtp.tune.updates import Updates, measure_drafts

RESUME_FILE = "resume.pt"
JOURNAL_FILE = "journal.jsonl"
_LOWEST_RATE = 0.1
"""Of the learning rate, at the end of its cosine."""


class Measured(NamedTuple):
    """On held-out texts, by draft step; each given that the steps before held."""

    num_drafts: int
    kl: list[float]
    """Nats."""
    acceptance: list[float]
    """Of drawn draft tokens at temperature 1."""
    agreement: list[float]
    """Of greedy draft tokens."""
    sampled_lengths: list[float]
    """Acceptance length of drafts of each depth, drawn at temperature 1."""
    greedy_lengths: list[float]
    """The same of greedy ones."""


@dataclass
class Progress:
    """Of a run; with the weights and the optimizer's state it is all of it."""

    update: int = 0
    epoch: int = 0
    batch: int = 0
    """Of the epoch: the next one."""


class Trainer:
    """One run."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        texts: Texts,
        plan: TuningPlan,
        folder: Path,
    ) -> None:
        """
        Args:
            drafter: On its device, in float32, on several ranks already sharded.
            target: On the same device.
            texts: All.
            plan: Of the run.
            folder: For the journal and what resumes the run.

        Raises:
            ConfigError: There are too few texts.
        """
        self.drafter, self.target, self.plan = drafter, target, plan
        self.folder = folder
        self.rank, self.num_ranks = _rank(), _num_ranks()
        held_out, trained = split(texts.places, plan.held_out_share)
        self.held_out = self._batches(texts, held_out)
        self.trained = self._batches(texts, trained)
        self.progress = Progress()
        self.updates = Updates(drafter, target, plan)
        per_epoch = len(self.trained.of_epoch(0)) // self.num_ranks
        if not per_epoch or not self.held_out.windows:
            raise ConfigError(
                f"data: {len(texts.places)} texts are too few: of at least "
                f"{plan.num_steps + 2} tokens there must be a batch for each rank and "
                "one held-out text"
            )
        self.num_updates = max(1, math.ceil(per_epoch * plan.epochs))

    def _batches(self, texts: Texts, places: Sequence[Place]) -> Batches:
        return Batches(
            texts,
            places,
            window_tokens=self.plan.window_tokens,
            batch_tokens=self.plan.batch_tokens,
            min_tokens=self.plan.num_steps + 2,
            seed=self.plan.seed,
        )

    def run(self, watch: Callable[[int, float], None], save_every: int = 200) -> None:
        """Train to the end.

        Args:
            watch: Told the number of updates and the loss after each.
            save_every: Updates between two saves of what resumes the run.
        """
        for batch in self._rest():
            share = self._rate_share()
            loss = self.updates.run(batch, share, self.progress.update)
            self.progress.update += 1
            self.progress.batch += 1
            watch(self.progress.update, loss)
            if self.progress.update % save_every == 0:
                self.save()
        self.save()

    def _rest(self) -> Iterator[Batch]:
        progress = self.progress
        while progress.update < self.num_updates:
            epoch = self.trained.of_epoch(progress.epoch)
            mine = epoch[self.rank :: self.num_ranks]
            # Ranks make the same number of updates.
            per_epoch = len(epoch) // self.num_ranks
            for windows in mine[progress.batch : per_epoch]:
                if progress.update == self.num_updates:
                    return
                yield self.trained.read(windows)
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _rate_share(self) -> float:
        done = self.progress.update / self.num_updates
        warm = self.plan.warmup_share
        if done < warm:
            share = (self.progress.update + 1) / max(1.0, warm * self.num_updates)
        else:
            cosine = 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))
            share = _LOWEST_RATE + (1 - _LOWEST_RATE) * cosine
        return min(1.0, share)

    def measure(self, max_drafts: int = 2**15) -> Measured:
        """On held-out texts, until there are so many drafts."""
        num_drafts, found = 0, []
        for windows in self.held_out.of_epoch(0):
            if num_drafts >= max_drafts:
                break
            batch = self.updates.place(self.held_out.read(windows))
            made = measure_drafts(self.drafter, self.target, batch, self.plan.num_steps)
            found.append(made.found.cpu())
            num_drafts += found[-1].shape[-1]
        kl, acceptance, agreement = torch.cat(found, -1).unbind(1)
        return Measured(
            num_drafts,
            *(each.mean(-1).tolist() for each in (kl, acceptance, agreement)),
            *(
                (1 + each.cumprod(0).mean(-1).cumsum(0)).tolist()
                for each in (acceptance, agreement)
            ),
        )

    def begin(self) -> None:
        """Measure before the first update, in a journal that has nothing else."""
        measured = self.measure()
        if self.rank == 0:
            (self.folder / JOURNAL_FILE).unlink(missing_ok=True)
        self.note(held_out=measured._asdict())

    def note(self, **entry: Any) -> None:
        """Append a line to the journal."""
        if self.rank == 0:
            with (self.folder / JOURNAL_FILE).open("a", encoding="utf-8") as journal:
                journal.write(json.dumps({"update": self.progress.update} | entry))
                journal.write("\n")

    def first_note(self) -> dict[str, Any]:
        """What was measured before the first update."""
        with (self.folder / JOURNAL_FILE).open(encoding="utf-8") as journal:
            found: dict[str, Any] = json.loads(journal.readline())["held_out"]
        return found

    def save(self) -> None:
        """Write what a resumed run needs."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if self.num_ranks > 1:
            state = get_state_dict(self.drafter, self.updates.optimizer)
        else:
            state = self.drafter.state_dict(), self.updates.optimizer.state_dict()
        path = self.folder / f"{self.rank}-{RESUME_FILE}"
        unfinished = path.with_suffix(".unfinished")
        torch.save(
            {
                "decided_by": self._decided_by,
                "progress": vars(self.progress),
                "mean_acceptance": self.updates.mean_acceptance,
                "state": state,
            },
            unfinished,
        )
        os.replace(unfinished, path)

    @property
    def _decided_by(self) -> tuple[Any, ...]:
        num_tokens = sum(window.num_tokens for window in self.trained.windows)
        return self.plan.model_dump(), num_tokens, self.num_ranks

    def resume(self) -> bool:
        """Go on where a run of the same plan and data was saved; False if none was.

        All ranks do, or none: one may have been lost while the others saved.
        """
        saved = self._saved()
        update = -1 if saved is None else saved["progress"]["update"]
        if not self._is_of_all_ranks(update) or saved is None:
            return False
        model, optimizer = saved["state"]
        if self.num_ranks > 1:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            set_state_dict(
                self.drafter,
                self.updates.optimizer,
                model_state_dict=model,
                optim_state_dict=optimizer,
            )
        else:
            self.drafter.load_state_dict(model)
            self.updates.optimizer.load_state_dict(optimizer)
        self.progress = Progress(**saved["progress"])
        self.updates.mean_acceptance.copy_(saved["mean_acceptance"])
        return True

    def _saved(self) -> dict[str, Any] | None:
        """What this rank has saved of this run."""
        path = self.folder / f"{self.rank}-{RESUME_FILE}"
        if not path.is_file():
            return None
        saved: dict[str, Any] = torch.load(
            path, map_location=self.updates.device, weights_only=False
        )
        return saved if saved["decided_by"] == self._decided_by else None

    def _is_of_all_ranks(self, update: int) -> bool:
        if self.num_ranks == 1:
            return True
        extremes = torch.tensor([update, -update], device=self.updates.device)
        distributed.all_reduce(extremes, distributed.ReduceOp.MIN)
        lowest, highest = extremes[0].item(), -extremes[1].item()
        return lowest == highest


def split(
    places: Sequence[Place], held_out_share: float
) -> tuple[list[Place], list[Place]]:
    """Held-out texts and the others; a text stays where it is as others come."""
    held_out: list[Place] = []
    others: list[Place] = []
    for place in places:
        is_held_out = zlib.crc32(place.name.encode()) < held_out_share * 2**32
        (held_out if is_held_out else others).append(place)
    if not held_out and others:
        held_out.append(others.pop())
    return held_out, others


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _num_ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1
