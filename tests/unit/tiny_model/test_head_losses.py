"""The chunked losses against the plain formulas, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from examples.tiny_model.losses import CHUNK_ROWS, head_cross_entropy, head_distillation

# Less than one chunk, exactly one, and a last chunk that is not full.
ROWS = [7, CHUNK_ROWS, 2 * CHUNK_ROWS + 5]
VOCAB, HIDDEN = 113, 16


def draw(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", ROWS)
def test_hard_loss_and_gradients_equal_the_plain_formula(num_rows: int) -> None:
    hidden = draw(num_rows, HIDDEN, seed=0).requires_grad_()
    weight = draw(VOCAB, HIDDEN, seed=1).requires_grad_()
    targets = torch.arange(num_rows) % VOCAB

    loss = head_cross_entropy(hidden, weight, targets, compute_dtype=torch.float32)
    plain = F.cross_entropy(hidden @ weight.T, targets)

    torch.testing.assert_close(loss, plain)
    grads = torch.autograd.grad(2 * loss, (hidden, weight))
    plain_grads = torch.autograd.grad(2 * plain, (hidden, weight))
    torch.testing.assert_close(grads, plain_grads)


@pytest.mark.parametrize("num_rows", ROWS)
def test_soft_loss_and_gradients_equal_the_plain_formula(num_rows: int) -> None:
    students = draw(3, num_rows, HIDDEN, seed=0).requires_grad_()
    teacher, weight = draw(num_rows, HIDDEN, seed=1), draw(VOCAB, HIDDEN, seed=2)
    step_weights = torch.tensor([0.5, 0.3, 0.2])

    loss = head_distillation(
        students, teacher, weight, step_weights, compute_dtype=torch.float32
    )
    wanted = (teacher @ weight.T).softmax(-1)
    logs = (students @ weight.T).log_softmax(-1)
    plain = -(step_weights * (wanted * logs).sum(-1).mean(-1)).sum()

    torch.testing.assert_close(loss, plain)
    (grad,) = torch.autograd.grad(2 * loss, students)
    (plain_grad,) = torch.autograd.grad(2 * plain, students)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-4, atol=1e-7)


def test_bfloat16_stays_within_two_percent_of_float32() -> None:
    hidden = draw(300, HIDDEN, seed=0).requires_grad_()
    weight, targets = draw(VOCAB, HIDDEN, seed=1), torch.arange(300) % VOCAB

    exact, rounded = (
        head_cross_entropy(hidden, weight, targets, compute_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    (exact_grad,) = torch.autograd.grad(exact, hidden)
    (rounded_grad,) = torch.autograd.grad(rounded, hidden)

    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert (rounded_grad - exact_grad).norm() < 0.02 * exact_grad.norm()


def test_a_student_equal_to_the_teacher_has_no_gradient() -> None:
    teacher, weight = draw(40, HIDDEN, seed=1), draw(VOCAB, HIDDEN, seed=2)
    students = teacher[None].clone().requires_grad_()

    loss = head_distillation(
        students, teacher, weight, torch.ones(1), compute_dtype=torch.float32
    )
    (grad,) = torch.autograd.grad(loss, students)

    assert grad.abs().max() < 1e-6
