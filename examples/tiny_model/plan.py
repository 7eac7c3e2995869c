"""How a model is trained: every number that shapes the result, in one place.

Imports no torch, so that a command line can show the defaults at once.
"""

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class TrainingPlan(BaseModel):
    """Steps, sizes, rates and the seed of one training run.

    Stage 1 trains trunk and MTP layer together. Stage 2 freezes the trunk and
    unrolls the MTP layer over `num_draft_steps` against the trunk's own
    distribution: on a layer trained for one step, acceptance decays with every
    position (FastMTP, arXiv 2509.18362).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=20260718, ge=0)
    num_threads: PositiveInt = 1

    num_trunk_steps: PositiveInt = 1500
    batch_size: PositiveInt = 16
    seq_len_tokens: int = Field(default=256, ge=8)
    # The last share of stage 1 runs on longer sequences, so that positions
    # up to twice `seq_len_tokens` are trained at a small part of the cost.
    long_share: float = Field(default=0.15, ge=0, le=1)
    mtp_loss_weight: PositiveFloat = 0.5
    matrix_learning_rate: PositiveFloat = 0.02
    embedding_learning_rate: PositiveFloat = 0.01
    head_learning_rate: PositiveFloat = 0.004
    vector_learning_rate: PositiveFloat = 0.01
    warmup_share: float = Field(default=0.04, ge=0, lt=1)
    decay_share: float = Field(default=0.5, gt=0, le=1)

    num_mtp_steps: int = Field(default=150, ge=0)
    num_draft_steps: PositiveInt = 3
    # FastMTP's weights: 0.6 to the power of the step, normalised.
    step_decay: float = Field(default=0.6, gt=0, le=1)
    mtp_matrix_learning_rate: PositiveFloat = 0.008
    mtp_vector_learning_rate: PositiveFloat = 0.002

    # What is written beside the weights: prompts, and figures measured on them.
    num_prompts: PositiveInt = 128
    num_measured_tokens: PositiveInt = 96

    def learning_rate_factor(self, step: int, num_steps: int) -> float:
        """Rises over the warm-up, stays at 1, falls linearly to 0."""
        warmup = max(1.0, self.warmup_share * num_steps)
        remaining = (num_steps - step) / (self.decay_share * num_steps)
        return min(1.0, (step + 1) / warmup, remaining)

    @property
    def step_weights(self) -> list[float]:
        """Loss weight of each draft step; they add up to 1."""
        raw = [self.step_decay**step for step in range(self.num_draft_steps)]
        return [weight / sum(raw) for weight in raw]


class StepReport(NamedTuple):
    """What one training step tells its watcher.

    Attributes:
        stage: `trunk` or `mtp`.
        step: Steps done, this one included.
        num_steps: Steps of the stage.
        loss: Trunk cross entropy (stage `trunk`), or the weighted soft cross
            entropy of the MTP layer (stage `mtp`), nats per token.
        mtp_loss: MTP cross entropy at the first draft position (stage
            `trunk`), or the same as `loss`.
    """

    stage: str
    step: int
    num_steps: int
    loss: float
    mtp_loss: float


Watcher = Callable[[StepReport], None]
