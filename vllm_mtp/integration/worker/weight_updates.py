"""Weights that change under a running server, whoever brings them.

What was made from weights (draft heads, copies in 8 bits) or learned of them must not
outlive them. vLLM's own ways (``reload_weights``, weight transfer) and the extensions
of trainers (verl, OpenRLHF, SkyRL, NeMo-RL) end in a model's ``load_weights``: that is
watched. What is written into parameters directly is seen by a fingerprint of some of
them, taken every 256 steps and read some steps later, so nothing waits for the device.

The text is never at stake: drafts are verified by the weights that are there.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_mtp.integration.scheduler.drafting_failure import SurvivesFailure
from vllm_mtp.integration.scheduler.messages import WorkerReport

logger = init_logger("vllm.mtp_plus")

TARGET, DRAFT = "target", "draft"
STEPS_BETWEEN_LOOKS = 256
_PARAMETERS, _NUMBERS = 16, 1024
"""Of a model, and of a parameter, that a fingerprint is made of."""


class WeightWatch:
    """Of the target and the draft model of a worker."""

    def __init__(self) -> None:
        """Nothing is watched."""
        self._models: dict[str, nn.Module] = {}
        self._changed: set[str] = set()
        self._known: dict[str, torch.Tensor] = {}
        """Fingerprints on the host."""
        self._taken: dict[str, torch.Tensor] = {}
        """Those on their way."""
        self._steps_to_look = STEPS_BETWEEN_LOOKS

    def watch(self, part: str, model: nn.Module) -> None:
        """Notice from now on when weights are loaded into a model.

        Args:
            part: `TARGET` or `DRAFT`.
            model: vLLM's, loaded.
        """
        self._models[part] = model
        load_weights: Any = model.load_weights

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.note(part)
            return load_weights(*args, **kwargs)

        model.load_weights = watched  # type: ignore[assignment]

    def note(self, *parts: str) -> None:
        """These have other weights by now."""
        self._changed.update(parts)

    def take(self) -> Collection[str]:
        """Parts that have changed since the last call; asked once before each step."""
        self._steps_to_look -= 1
        if self._taken:
            self._compare()
        elif self._steps_to_look <= 0:
            self._look()
        changed, self._changed = self._changed, set()
        if changed:
            # The next look only takes note.
            self._known.clear()
            self._taken.clear()
        return changed

    def _look(self) -> None:
        self._steps_to_look = STEPS_BETWEEN_LOOKS
        for part, model in self._models.items():
            self._taken[part] = fingerprint(model).to("cpu", non_blocking=True)

    def _compare(self) -> None:
        # Made a step ago: where steps overlap, that one may still be under way.
        if self._steps_to_look > STEPS_BETWEEN_LOOKS - 4:
            return
        taken, self._taken = self._taken, {}
        for part, found in taken.items():
            known = self._known.get(part)
            if known is not None and not torch.equal(known, found):
                self.note(part)
        self._known.update(taken)


def fingerprint(model: nn.Module) -> torch.Tensor:
    """``[number of parameters looked at]`` float64, on the model's device."""
    parameters = [p for p in model.parameters() if p.numel()]
    every = max(1, len(parameters) // _PARAMETERS)
    return torch.stack([_digest(p) for p in parameters[::every]])


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    every = max(1, parameter.numel() // _NUMBERS)
    numbers = parameter.detach().flatten()[::every].double().nan_to_num()
    # By place, too: rows may have been exchanged.
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return (numbers * places).sum()


class FollowsWeights(SurvivesFailure):
    """Mixin of drafters."""

    weight_watch: WeightWatch | None = None
    _new_weights: Collection[str] = ()

    def follow_weights(self) -> None:
        """A step is about to run: whatever was made from old weights is made anew."""
        if self.weight_watch is None:
            return
        changed = self.weight_watch.take()
        if changed:
            self._new_weights = changed
            with self.surviving():
                self.begin_anew(changed)

    def begin_anew(self, changed: Collection[str]) -> None:
        """Weights have changed.

        Args:
            changed: Whose.
        """
        names = " and ".join(sorted(changed))
        logger.info("mtp_plus: new weights (%s); its copies of them follow", names)
        if self.draft_vocab is not None:
            self.draft_vocab.copy_anew()

    def plain_weights(self) -> AbstractContextManager[None]:
        """The draft model takes the weights of a checkpoint in here."""
        return nullcontext()

    def lasting_tensors(self) -> Iterator[torch.Tensor]:
        """What was learned, beside weights."""
        return tensors_of(getattr(self.draft_vocab, "vocabulary", None))

    def take_report(self) -> WorkerReport:
        report = super().take_report()
        if self._new_weights:
            changed, self._new_weights = frozenset(self._new_weights), ()
            report = report._replace(new_weights=changed)
        return report


def tensors_of(*owners: Any) -> Iterator[torch.Tensor]:
    """Tensors that are attributes of objects, each once."""
    seen = set()
    for owner in owners:
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield value


class SleepingState:
    """What must not be lost while a worker sleeps without its weights (level 2).

    vLLM keeps the buffers of its models; what a drafter has learned is in neither.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy to the host."""
        self._kept = [(each, each.cpu().clone()) for each in tensors]

    def restore(self) -> None:
        """To where it was: CUDA graphs hold the addresses."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)
