"""Where prefiltering is no use it is tried ever more seldom, and again when it is."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_mtp.integration.cpu.prefiltered_head import PrefilteredLogits, _Copy

WHOLE, PREFILTERED = torch.zeros(1, 4), torch.ones(1, 4)


class _Screen:
    is_stale = False

    def __init__(self) -> None:
        self.is_of_use = False
        self.num_tries = 0

    def logits(self, *_: Any) -> torch.Tensor | None:
        self.num_tries += 1
        return PREFILTERED if self.is_of_use else None


class _Original:
    """As much of a ``LogitsProcessor`` as is asked for."""

    head_dtype, logits_as_input, org_vocab_size = None, False, 4
    scale, soft_cap = 1.0, None

    def __call__(self, *_: Any) -> torch.Tensor:
        return WHOLE


def test_a_screen_that_is_no_use_is_left_alone_for_longer_and_longer() -> None:
    original: Any = _Original()
    may_prefilter: Any = lambda: True  # noqa: E731
    ours, prefilter = PrefilteredLogits(original, may_prefilter), _Screen()
    head = SimpleNamespace(cpu_linear=object())
    copied: Any = prefilter
    ours._copies[id(head)] = _Copy(copied, head.cpu_linear)

    def tried_in(num_steps: int) -> list[int]:
        """Steps in which the prefilter was asked."""
        tried = []
        for step in range(num_steps):
            before = prefilter.num_tries
            logits = ours(head, torch.zeros(1, 2))
            is_served = prefilter.is_of_use and prefilter.num_tries > before
            assert logits is (PREFILTERED if is_served else WHOLE)
            tried += [step] * (prefilter.num_tries - before)
        return tried

    assert tried_in(68) == [0, 3, 8, 17, 34, 67]
    assert len(tried_in(3000)) < 3000 / 200
    prefilter.is_of_use = True
    last = tried_in(300)
    assert last == list(range(last[0], 300))
