"""Training: trunk and MTP layer together, then the MTP layer alone, unrolled."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch.optim import AdamW, Muon, Optimizer

from examples.tiny_model.dataset import iterate_batches
from examples.tiny_model.losses import head_cross_entropy, head_distillation
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.plan import StepReport, TrainingPlan, Watcher


class _Optimizers:
    """Muon for matrices, AdamW for the rest, one schedule for both."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._base_rates = [
            (group, group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def step(self, factor: float) -> None:
        for group, base_rate in self._base_rates:
            group["lr"] = base_rate * factor
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _adamw(groups: Sequence[tuple[Sequence[torch.Tensor], float]]) -> AdamW:
    options = [{"params": list(params), "lr": rate} for params, rate in groups]
    return AdamW(options, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _trunk_optimizers(model: MiMoModel, plan: TrainingPlan) -> _Optimizers:
    layers = [*model.model.layers, *model.model.mtp_layers]
    inner = [weight for layer in layers for weight in layer.parameters()]
    matrices = [weight for weight in inner if weight.ndim == 2]
    vectors = [weight for weight in inner if weight.ndim == 1]
    vectors.append(model.model.norm.weight)
    return _Optimizers(
        (
            Muon(matrices, lr=plan.matrix_learning_rate, weight_decay=0.01),
            _adamw(
                [
                    ([model.model.embed_tokens.weight], plan.embedding_learning_rate),
                    ([model.lm_head.weight], plan.head_learning_rate),
                    (vectors, plan.vector_learning_rate),
                ]
            ),
        )
    )


def _trunk_losses(
    model: MiMoModel,
    batch: torch.Tensor,  # [batch, seq] int64
    phase: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the trunk, and of the MTP layer at every second slot."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = model.embed(batch)
        hidden = model.trunk_hidden(embeddings)
        (draft,) = model.mtp_layer.unroll(hidden, embeddings, 1)
        trunk = model.model.norm(hidden)
    head = model.lm_head.weight
    loss = head_cross_entropy(
        trunk[:, :-1].flatten(0, 1).float(), head, batch[:, 1:].flatten()
    )
    every_second = slice(phase, -1, 2)
    mtp_loss = head_cross_entropy(
        draft[:, every_second].flatten(0, 1).float(),
        head,
        batch[:, 2 + phase :: 2].flatten(),
    )
    return loss, mtp_loss


def _trunk_batches(tokens: torch.Tensor, plan: TrainingPlan) -> Iterator[torch.Tensor]:
    num_long = round(plan.long_share * plan.num_trunk_steps)
    short = iterate_batches(
        tokens,
        batch_size=plan.batch_size,
        seq_len_tokens=plan.seq_len_tokens,
        seed=plan.seed,
    )
    yield from islice(short, plan.num_trunk_steps - num_long)
    yield from islice(_long_batches(tokens, plan, plan.seed + 1), num_long)


def _long_batches(
    tokens: torch.Tensor, plan: TrainingPlan, seed: int
) -> Iterator[torch.Tensor]:
    return iterate_batches(
        tokens,
        batch_size=max(1, plan.batch_size // 2),
        seq_len_tokens=2 * plan.seq_len_tokens,
        seed=seed,
    )


def train_trunk(
    model: MiMoModel,
    tokens: torch.Tensor,  # [num_tokens] int32
    plan: TrainingPlan,
    watch: Watcher,
) -> None:
    """Stage 1: trunk and MTP layer, from the first weight on, in place."""
    optimizers = _trunk_optimizers(model, plan)
    num_steps = plan.num_trunk_steps
    for step, batch in enumerate(_trunk_batches(tokens, plan)):
        loss, mtp_loss = _trunk_losses(model, batch, phase=step % 2)
        (loss + plan.mtp_loss_weight * mtp_loss).backward()  # type: ignore[no-untyped-call]
        optimizers.step(plan.learning_rate_factor(step, num_steps))
        watch(StepReport("trunk", step + 1, num_steps, loss.item(), mtp_loss.item()))


def _mtp_loss(
    model: MiMoModel,
    batch: torch.Tensor,  # [batch, seq] int64
    plan: TrainingPlan,
) -> torch.Tensor:
    """Soft cross entropy of every draft step against the trunk, weighted.

    Step k of chain i predicts what the trunk predicts at position i + k. Only
    positions that every step reaches are used, so that one pass of the
    trunk's head serves all steps.
    """
    num_steps = plan.num_draft_steps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        teacher, outputs = model.draft_hidden(batch, num_steps)
    last = batch.shape[1] - num_steps
    students = [
        output[:, num_steps - step : last - step + 1].flatten(0, 1).float()
        for step, output in enumerate(outputs, start=1)
    ]
    return head_distillation(
        torch.stack(students),
        teacher[:, num_steps : last + 1].flatten(0, 1).float(),
        model.lm_head.weight,
        torch.tensor(plan.step_weights),
    )


def train_mtp(
    model: MiMoModel,
    tokens: torch.Tensor,  # [num_tokens] int32
    plan: TrainingPlan,
    watch: Watcher,
) -> None:
    """Stage 2: the drafter alone, in place. The trunk's weights do not move."""
    weights = list(model.drafter.parameters())
    optimizers = _Optimizers(
        (
            Muon(
                [weight for weight in weights if weight.ndim == 2],
                lr=plan.mtp_matrix_learning_rate,
                weight_decay=0.0,
            ),
            _adamw(
                [
                    (
                        [weight for weight in weights if weight.ndim == 1],
                        plan.mtp_vector_learning_rate,
                    )
                ]
            ),
        )
    )
    batches = _long_batches(tokens, plan, plan.seed + 2)
    for step, batch in enumerate(islice(batches, plan.num_mtp_steps)):
        loss = _mtp_loss(model, batch, plan)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(plan.learning_rate_factor(step, plan.num_mtp_steps))
        value = loss.item()
        watch(StepReport("mtp", step + 1, plan.num_mtp_steps, value, value))
