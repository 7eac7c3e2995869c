"""How much flatter or sharper than the target the MTP layers should draw.

A drawn draft token is accepted with probability ``sum(min(target, proposal))``. MTP
layers are surer of themselves than they should be, or less: drawing at another
temperature than the request's may accept more. Which one is learnt from verifications,
where both distributions are known: the same proposal, made a little sharper and a
little flatter, shows in which direction acceptance grows.

Lossless: what is drawn next depends on earlier verifications alone.
"""

import math

import torch

STEP = 0.1
"""Of the logarithm of the factor: how far the other two proposals lie."""
RATE = 1.0
"""Of the logarithm, for each unit of acceptance gained by it."""
LIMITS = (0.5, 2.0)
MAX_ROWS = 16
"""Of a verification that are read; bounds the time it takes."""


class DraftTemperature:
    """A factor on the temperature of drawn drafts."""

    def __init__(self) -> None:
        """Begin with the request's own temperature."""
        self._log_factor = 0.0

    @property
    def factor(self) -> float:
        """Above 1: flatter than the target."""
        return math.exp(self._log_factor)

    def observe(
        self,
        # [num_tokens, vocab_size] each; the same columns
        target: torch.Tensor,
        proposal: torch.Tensor,
    ) -> None:
        """Learn from draft tokens that were drawn.

        Args:
            target: Probabilities after the request's sampling parameters. What lies
                outside the draft vocabulary may be missing.
            proposal: What the tokens were drawn from.
        """
        target, proposal = target[:MAX_ROWS], proposal[:MAX_ROWS]
        log_proposal = proposal.log()
        flatter, sharper = (
            _acceptance(target, log_proposal, math.exp(-sign * STEP))
            for sign in (1.0, -1.0)
        )
        slope = float((flatter - sharper).mean()) / (2 * STEP)
        if math.isfinite(slope):
            low, high = map(math.log, LIMITS)
            moved = self._log_factor + RATE * STEP * slope
            self._log_factor = min(max(moved, low), high)


def _acceptance(
    target: torch.Tensor, log_proposal: torch.Tensor, power: float
) -> torch.Tensor:
    """``[num_tokens]``: of the proposal raised to a power."""
    other = (power * log_proposal).softmax(dim=-1)
    return torch.minimum(target, other).sum(dim=-1)
