"""Training learns, repeats itself, and leaves the trunk alone in stage 2."""

from dataclasses import dataclass, field

import pytest
import torch

from examples.tiny_model.evaluate import teacher_forced_agreement
from examples.tiny_model.heads import HeadsModel
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.plan import StepReport, TrainingPlan
from examples.tiny_model.shape import ModelShape
from examples.tiny_model.train import train_mtp, train_trunk

SHAPE = ModelShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_heads=2,
    num_kv_heads=1,
)
PLAN = TrainingPlan(
    num_trunk_steps=60, num_mtp_steps=40, batch_size=4, seq_len_tokens=24
)


@dataclass
class Reports:
    """Keeps every report."""

    seen: list[StepReport] = field(default_factory=list)

    def __call__(self, report: StepReport) -> None:
        self.seen.append(report)


def make_tokens() -> torch.Tensor:
    """A text with a rule to learn: each token decides most of the next one."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(6000, generator=generator) < 0.1
    jumps = torch.randint(64, (6000,), generator=generator)
    tokens = [1]
    for surprised, jump in zip(noise.tolist(), jumps.tolist(), strict=True):
        tokens.append(jump if surprised else (tokens[-1] * 5 + 3) % 64)
    return torch.tensor(tokens, dtype=torch.int32)


def train_from_scratch(seed: int) -> tuple[MiMoModel, Reports]:
    model, reports = MiMoModel(SHAPE), Reports()
    model.initialize(seed)
    plan = PLAN.model_copy(update={"seed": seed})
    train_trunk(model, make_tokens(), plan, reports)
    return model, reports


@pytest.fixture(scope="module")
def trained() -> tuple[MiMoModel, Reports]:
    return train_from_scratch(seed=7)


def test_stage_one_learns_trunk_and_mtp_layer(
    trained: tuple[MiMoModel, Reports],
) -> None:
    _, reports = trained
    first, last = reports.seen[0], reports.seen[-1]

    assert [report.step for report in reports.seen] == list(range(1, 61))
    # Nine tokens of ten follow the rule: knowing it is worth 3 nats and more.
    assert first.loss > 4 > 2 > last.loss
    assert first.mtp_loss > 4 > 2 > last.mtp_loss


def test_the_same_seed_gives_the_same_weights(
    trained: tuple[MiMoModel, Reports],
) -> None:
    again, _ = train_from_scratch(seed=7)
    other, _ = train_from_scratch(seed=8)

    weights = trained[0].state_dict()
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert not torch.equal(other.lm_head.weight, weights["lm_head.weight"])


def test_stage_two_improves_the_mtp_layer_and_nothing_else(
    trained: tuple[MiMoModel, Reports],
) -> None:
    model, reports = MiMoModel(SHAPE), Reports()
    model.load_state_dict(trained[0].state_dict())
    # A layer that has forgotten what it knew, so that there is much to gain.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.mtp_layer.input_proj.weight.normal_(0, 0.2, generator=generator)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = make_tokens()[:960].view(40, 24).long()
    agreement_before = teacher_forced_agreement(model, batch, 3)

    train_mtp(model, make_tokens(), PLAN, reports)

    for name, weight in model.state_dict().items():
        moved = not torch.equal(weight, before[name])
        assert moved == name.startswith("model.mtp_layers."), name
    assert reports.seen[-1].loss < reports.seen[0].loss - 0.5
    pairs = zip(
        teacher_forced_agreement(model, batch, 3), agreement_before, strict=True
    )
    for after, earlier in pairs:
        assert after > earlier + 0.2


def test_extra_heads_learn_on_a_trunk_that_does_not_move(
    trained: tuple[MiMoModel, Reports],
) -> None:
    model, reports = HeadsModel(trained[0], num_heads=3), Reports()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = make_tokens()[:960].view(40, 24).long()
    agreement_before = teacher_forced_agreement(model, batch, 3)

    train_mtp(model, make_tokens(), PLAN, reports)

    for name, weight in model.state_dict().items():
        moved = not torch.equal(weight, before[name])
        assert moved == name.startswith("extra_heads."), name
    assert reports.seen[-1].loss < reports.seen[0].loss - 0.5
    # The text follows a rule, so that the tokens between need not be seen.
    pairs = zip(
        teacher_forced_agreement(model, batch, 3), agreement_before, strict=True
    )
    for after, earlier in pairs:
        assert after > earlier + 0.1


def test_extra_heads_read_what_the_last_layer_reads(
    trained: tuple[MiMoModel, Reports],
) -> None:
    """They begin as copies of it, so they say what it says."""
    model = HeadsModel(trained[0], num_heads=2)
    batch = make_tokens()[:96].view(4, 24).long()
    with torch.no_grad():
        teacher, outputs = model.draft_hidden(batch, 2)
    for output in outputs:
        torch.testing.assert_close(output, teacher[:, :-2])


def test_the_learning_rate_rises_stays_and_falls() -> None:
    plan = TrainingPlan(warmup_share=0.1, decay_share=0.5)
    factors = [plan.learning_rate_factor(step, 100) for step in range(100)]

    assert factors[:10] == sorted(factors[:10])
    assert factors[0] == pytest.approx(0.1)
    assert set(factors[10:51]) == {1.0}
    assert factors[51:] == sorted(factors[51:], reverse=True)
    assert factors[-1] == pytest.approx(0.02)


def test_default_step_weights_are_those_of_fastmtp() -> None:
    assert TrainingPlan().step_weights == pytest.approx([0.51, 0.31, 0.18], abs=0.005)


@pytest.mark.parametrize(
    "changes", [{"num_trunk_steps": 0}, {"decay_share": 0.0}, {"steps": 3}]
)
def test_a_plan_out_of_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        TrainingPlan(**changes)
