"""How a head is trained. Defaults are those of published recipes where there is one."""

from pydantic import BaseModel, ConfigDict, Field

from vllm_mtp.tune.losses import Loss


class TuningPlan(BaseModel):
    """Everything that decides the weights, beside the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_steps: int = Field(
        default=7, ge=1, le=16, description="Draft steps that are unrolled."
    )
    loss: Loss = Field(
        default="lk", description="`lk`: acceptance itself; `kl`: KL alone."
    )
    step_decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Weight of a draft step relative to the one before.",
    )
    epochs: float = Field(
        default=1.0, gt=0, le=100, description="Passes over the data."
    )
    learning_rate: float = Field(
        default=1e-4,
        gt=0,
        le=1,
        description="Highest, of AdamW with betas 0.9 and 0.95.",
    )
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="Of all updates.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Of matrices.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Longer gradients are cut."
    )
    window_tokens: int = Field(
        default=2048,
        ge=16,
        le=2**20,
        description="Longer texts are cut into such windows.",
    )
    batch_tokens: int = Field(
        default=8192,
        ge=16,
        le=2**24,
        description="Of one update on one rank, with padding.",
    )
    held_out_share: float = Field(
        default=0.05, gt=0, lt=0.5, description="Of texts that are only measured on."
    )
    seed: int = Field(
        default=0, ge=0, le=2**31, description="Of the order of the data."
    )
    mtp_layers: int | None = Field(
        default=None, ge=1, le=16, description="Of the head; None: as many as before."
    )
    checkpoints_activations: bool = Field(
        default=False, description="Compute activations twice and keep fewer."
    )
