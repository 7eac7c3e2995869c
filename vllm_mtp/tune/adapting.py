"""Adapts a head to the traffic of a running server, in a process of its own.

The server puts texts into an inbox (`reservoir`) and reads what it shall serve from
``state.json``; nothing here can stop or slow it but the cores that it takes. Round by
round:

1. The newest texts, which nothing here has seen, judge three heads: the one that is
   served, the one that the server began with, and the newest average of the trained
   weights. Another is served only if it is certain to be better (`judgement`).
2. The trained weights go over the new texts twice, and over as many older ones, so
   that what traffic was like before is not forgotten.

So the work is bounded by the traffic. Whatever happens to the trained weights, they
are served only after they have drafted better for texts that they were not trained on.
"""

import copy
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from pydantic import BaseModel, ConfigDict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vllm_mtp.tune.checkpoint import (
    Checkpoint,
    local_folder,
    stored_weights,
    write_head,
)
from vllm_mtp.tune.data import Batches, Window
from vllm_mtp.tune.judgement import MIN_TEXTS, Gain, gain, lengths_by_text
from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.reservoir import Reservoir
from vllm_mtp.tune.shards import Place, Texts, count_tokens
from vllm_mtp.tune.unroll import Batch, Drafter
from vllm_mtp.tune.updates import Updates

STATE_FILE, HEADS_FOLDER = "state.json", "heads"
JUDGED_STEPS = 3
"""Draft tokens of the lengths that are compared: most requests verify no more."""
PASSES = 2
"""Over new texts."""
MAX_ROUND_TOKENS = 2**16
"""Newer texts do not wait until more are trained on."""
_JUDGED_TEXTS = 4 * MIN_TEXTS
_RATE_NUMBER = 0.4
"""Learning rate times hidden size: 1e-4, which published recipes agree on, is of
layers of 4096; AdamW's rate goes with the inverse of the width (arXiv 2203.03466)."""
_WARMUP_UPDATES = 20
_AVERAGE_DECAY = 0.98
"""Of the trained weights, from update to update: what is judged and served."""
_PATIENCE = 4
"""Rounds in which the trained weights are certainly worse than what is served."""
_TRAINING_OVER_JUDGING = 8
"""Of time: after so much training newer texts are worth a look, if there are any."""
_WAIT_S = 0.5


class AdaptingPlan(BaseModel):
    """What a trainer is told, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """Shared with the server, in memory."""
    model: str
    """Folder or hub name."""
    head: str | None = None
    """With the MTP layers; None: the model has them."""
    revision: str | None = None
    head_revision: str | None = None
    num_steps: int
    num_rows: int
    """Of the draft vocabulary; 0: all tokens."""
    max_bytes: int
    """Of the texts."""
    device: str = "cpu"
    share: float = 1.0
    """Of the time that it may work."""
    busy_cores: tuple[int, ...] = ()
    """That the server's threads are bound to."""


class State(NamedTuple):
    """What a trainer has come to; what a server reads."""

    served: int = 0
    """Number of the head to serve; 0: the one it began with."""
    num_updates: int = 0
    num_tokens: int = 0
    """Trained on, with repetitions."""
    num_adopted: int = 0
    num_taken_back: int = 0
    length_served: float = math.nan
    """On the newest texts, drafts of three tokens, temperature 1."""
    length_first: float = math.nan
    """Of the head that the server began with."""
    length_trained: float = math.nan
    reason: str = ""
    """Why `served` is what it is."""


def read_state(folder: Path) -> State:
    """A trainer's last word.

    Raises:
        OSError: It has said nothing.
    """
    return State(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))


def head_folder(folder: Path, number: int) -> Path:
    """Of a head that was trained."""
    return folder / HEADS_FOLDER / f"{number:06}"


class Adapting:
    """One trainer."""

    def __init__(self, plan: AdaptingPlan) -> None:
        """
        Raises:
            ConfigError: Model or head cannot be read.
        """
        self.plan = plan
        self.device = torch.device(plan.device)
        self.model = source = Checkpoint(local_folder(plan.model, plan.revision))
        if plan.head is not None:
            source = Checkpoint(local_folder(plan.head, plan.head_revision))
        width = int(self.model.text_config["hidden_size"])
        num_steps = plan.num_steps
        if source.num_mtp_layers > 1:  # each drafts one token
            num_steps = min(num_steps, source.num_mtp_layers)
        self.training = TuningPlan(
            num_steps=num_steps,
            learning_rate=min(1.0, _RATE_NUMBER / width),
            window_tokens=1024,
            batch_tokens=1024,
        )
        self.reservoir = Reservoir(plan.folder, plan.max_bytes, num_steps + 2)
        self.first = source.drafter(False).to(self.device).eval()
        self.dtypes = source.dtypes(self.first)
        self.target = self.model.target(self.device)
        self.state = self._last_state()
        self.served = self._read_served()
        self._begin()

    def _last_state(self) -> State:
        """Of a trainer before this one, that was ended."""
        try:
            return read_state(self.plan.folder)
        except OSError:
            return State()

    def _read_served(self) -> Drafter:
        if not self.state.served:
            return self.first
        folder = head_folder(self.plan.folder, self.state.served)
        return Checkpoint(folder).drafter(False).to(self.device).eval()

    def _begin(self) -> None:
        """Train what is served, from now on."""
        trained = copy.deepcopy(self.served).train()
        self.updates = Updates(trained, self.target, self.training)
        average = get_ema_multi_avg_fn(_AVERAGE_DECAY)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(trained, multi_avg_fn=average)
        self.num_updates, self.num_worse = 0, 0

    def _choose_drafted(self) -> None:
        """The tokens that are commonest now."""
        if self.plan.num_rows:
            vocab_size = int(self.model.text_config["vocab_size"])
            counts = count_tokens(self.reservoir.kept, vocab_size)
            drafted = counts.topk(self.plan.num_rows).indices.sort().values
            head = self.target.head
            self.target.head = head._replace(drafted=drafted.to(self.device))

    def run(self) -> NoReturn:
        """Adapt as long as the process lives."""
        self._say(self.state)
        while True:
            if self._has_new():
                self.round()
            else:
                time.sleep(_WAIT_S)

    def round(self) -> None:
        """Judge by the newest texts, then train on them."""
        new = self.reservoir.take()
        if not new:
            return
        texts = self.reservoir.texts()
        self._choose_drafted()
        start_s = time.perf_counter()
        self._judge(texts, new[-_JUDGED_TEXTS:])
        judging_s = time.perf_counter() - start_s
        training_s = 0.0
        for batch in self._batches(texts, new):
            start_s = time.perf_counter()
            self._update(batch)
            busy_s = time.perf_counter() - start_s
            time.sleep(busy_s * (1 / self.plan.share - 1))
            training_s += busy_s
            if training_s > _TRAINING_OVER_JUDGING * judging_s and self._has_new():
                break
        self._say(self.state)

    def _has_new(self) -> bool:
        return self.reservoir.num_waiting() >= MIN_TEXTS

    def _batches(self, texts: Texts, new: list[Place]) -> Iterator[Batch]:
        """New texts twice, and by turns as many older ones."""
        fresh = self._windows(texts, _newest(new, MAX_ROUND_TOKENS))
        every = self._windows(texts, texts.places)
        older: list[list[Window]] = []
        for number in range(PASSES):
            epoch = self.state.num_updates + number
            for windows in fresh.of_epoch(epoch):
                yield fresh.read(windows)
                older = older or every.of_epoch(epoch)
                yield every.read(older.pop())

    def _windows(self, texts: Texts, places: list[Place]) -> Batches:
        plan = self.training
        return Batches(
            texts,
            places,
            window_tokens=plan.window_tokens,
            batch_tokens=plan.batch_tokens,
            min_tokens=plan.num_steps + 2,
            seed=plan.seed,
        )

    def _update(self, batch: Batch) -> None:
        share = min(1.0, (self.num_updates + 1) / _WARMUP_UPDATES)
        self.updates.run(batch, share, self.num_updates)
        self.average.update_parameters(self.updates.drafter)
        self.num_updates += 1
        self.state = self.state._replace(
            num_updates=self.state.num_updates + 1,
            num_tokens=self.state.num_tokens + int(batch.lengths.sum()),
        )

    def _judge(self, texts: Texts, places: list[Place]) -> None:
        """Choose what is served, by texts that nothing was trained on."""
        steps = min(JUDGED_STEPS, self.training.num_steps)
        batches = [self.updates.place(each) for each in self._whole(texts, places)]

        def lengths(head: Drafter) -> torch.Tensor:
            return lengths_by_text(head, self.target, batches, steps)

        served, average = lengths(self.served), lengths(self._averaged)
        first = served if self.served is self.first else lengths(self.first)
        self.state = self.state._replace(
            length_served=float(served.mean()),
            length_first=float(first.mean()),
            length_trained=float(average.mean()),
        )
        by_average, by_first = gain(served, average), gain(served, first)
        if by_average.is_certain and by_average.mean >= by_first.mean:
            self._adopt(by_average)
        elif by_first.is_certain:
            self._take_back(by_first)
        self._doubt(gain(average, served))
        self._say(self.state)

    def _doubt(self, by_served: Gain) -> None:
        """Weights that have gone astray begin anew with what is served."""
        self.num_worse = self.num_worse + 1 if by_served.is_certain else 0
        if self.num_worse == _PATIENCE or math.isnan(by_served.mean):
            self._begin()

    @property
    def _averaged(self) -> Drafter:
        averaged = self.average.module
        assert isinstance(averaged, Drafter)
        return averaged

    def _whole(self, texts: Texts, places: Collection[Place]) -> list[Batch]:
        """A row for each text, of its last tokens."""
        most = self.training.window_tokens
        batches = self._windows(texts, [])
        for place in places:
            length = place.end - place.start
            window = Window(place, max(0, length - most), min(most, length))
            batches.windows.append(window)
        return [batches.read(windows) for windows in batches.of_epoch(0)]

    def _adopt(self, by: Gain) -> None:
        number = self.state.num_adopted + 1
        weights = stored_weights(self._averaged)
        stored = {name: weights[name].to(self.dtypes[name]) for name in weights}
        folder = head_folder(self.plan.folder, number)
        write_head(folder, self.model, stored, {"adapted": self.state._asdict()})
        self.served = copy.deepcopy(self._averaged).eval()
        self._serve(number, by)
        self.state = self.state._replace(num_adopted=number)

    def _take_back(self, by: Gain) -> None:
        self.served = self.first
        self._serve(0, by)
        number = self.state.num_taken_back + 1
        self.state = self.state._replace(num_taken_back=number)

    def _serve(self, number: int, by: Gain) -> None:
        reason = (
            f"acceptance length {by.before:.3f} -> {by.before + by.mean:.3f} "
            f"(+- {by.error:.3f}) on the newest {by.num_texts} texts"
        )
        self.state = self.state._replace(served=number, reason=reason)

    def _say(self, state: State) -> None:
        """Whole or not at all."""
        path = self.plan.folder / STATE_FILE
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(state._asdict()), encoding="utf-8")
        os.replace(unfinished, path)
        # The server may still be reading the one before.
        for folder in (self.plan.folder / HEADS_FOLDER).glob("*"):
            number = int(folder.name)
            if number < state.num_adopted - 1 and number != state.served:
                shutil.rmtree(folder, ignore_errors=True)


def _newest(places: list[Place], max_tokens: int) -> list[Place]:
    """The last ones that have so many tokens, and at least one."""
    found: list[Place] = []
    for place in reversed(places):
        if found and max_tokens <= 0:
            break
        found.append(place)
        max_tokens -= place.end - place.start
    return found
