"""Losses over a large vocabulary without its logits ever being whole.

The head is the dearest part of a small model: 4,096 tokens times 16,384
logits are 268 MB in float32. Each function works on chunks of rows, and
computes the gradients in the forward pass, where the probabilities are at
hand. (The idea is Liger-Kernel's fused linear cross entropy, arXiv 2410.10989.)
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 256


def _softmax_into(
    out: torch.Tensor,  # [rows, vocab], overwritten
    hidden: torch.Tensor,  # [rows, hidden]
    head: torch.Tensor,  # [vocab, hidden]
    column: torch.Tensor | None = None,  # [rows, 1] int64
) -> torch.Tensor:
    """Writes softmax(hidden head^T) into `out`.

    Returns:
        With `column`, the log of the softmax's denominator, float32
        `[rows, 1]`: logit minus log probability in that column, which should
        be one of high probability. Without it, an empty tensor.
    """
    torch.mm(hidden, head.T, out=out)
    logit = out.new_empty(0) if column is None else out.gather(1, column)
    torch.softmax(out, dim=-1, out=out)
    if column is None:
        return logit.float()
    return logit.float() - _safe_log(out.gather(1, column))


def _safe_log(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.float().clamp_min(torch.finfo(torch.float32).tiny).log()


class _HardCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        compute_dtype: torch.dtype,
    ) -> torch.Tensor:
        num_rows = hidden.shape[0]
        low_weight = weight.detach().to(compute_dtype)
        low_hidden = hidden.detach().to(compute_dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32)
        # Written over and over: fresh memory for each chunk costs as much in
        # page faults as the arithmetic.
        buffer = low_weight.new_empty(CHUNK_ROWS, weight.shape[0])
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = slice(start, min(start + CHUNK_ROWS, num_rows))
            target = targets[rows, None]
            grad = buffer[: target.shape[0]]
            _softmax_into(grad, low_hidden[rows], low_weight)
            picked = grad.gather(1, target)
            loss -= _safe_log(picked).sum()
            grad.scatter_(1, target, picked - 1)
            grad_hidden[rows] = (grad @ low_weight).to(hidden.dtype)
            grad_weight += grad.T @ low_hidden[rows]
        ctx.save_for_backward(grad_hidden.div_(num_rows), grad_weight.div_(num_rows))
        return loss / num_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None


def head_cross_entropy(
    hidden: torch.Tensor,  # [num_rows, hidden]
    weight: torch.Tensor,  # [vocab, hidden]
    targets: torch.Tensor,  # [num_rows] int64
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Mean cross entropy of the head against token ids, in nats.

    Gradients reach `hidden` and `weight`. Scalar, float32.
    """
    loss: torch.Tensor = _HardCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, compute_dtype
    )
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """With p the student's and t the teacher's probabilities, W the head.

    loss = logsumexp(logits) - t . logits, and t . logits = (t W) . student;
    gradient = (p - t) W = p W - t W. So t W serves both, and no array of the
    size of the vocabulary is ever subtracted or multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        students: torch.Tensor,
        teacher: torch.Tensor,
        weight: torch.Tensor,
        step_weights: torch.Tensor,
        compute_dtype: torch.dtype,
    ) -> torch.Tensor:
        num_rows = teacher.shape[0]
        head = weight.detach().to(compute_dtype)
        low_students = students.detach().to(compute_dtype)
        low_teacher = teacher.detach().to(compute_dtype)
        grads = torch.empty_like(students)
        losses = torch.zeros(students.shape[0], dtype=torch.float32)
        buffer = head.new_empty(CHUNK_ROWS, head.shape[0])
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = slice(start, min(start + CHUNK_ROWS, num_rows))
            probs = buffer[: rows.stop - start]
            _softmax_into(probs, low_teacher[rows], head)
            wanted = probs @ head
            likely = probs.argmax(-1, keepdim=True)
            for step, student in enumerate(low_students[:, rows]):
                log_sums = _softmax_into(probs, student, head, likely)
                dot = (wanted.float() * student.float()).sum()
                losses[step] += log_sums.sum() - dot
                grads[step, rows] = (probs @ head).to(grads.dtype) - wanted
        grads *= step_weights[:, None, None] / num_rows
        ctx.save_for_backward(grads)
        return (losses * step_weights).sum() / num_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (grads,) = ctx.saved_tensors
        return grad * grads, None, None, None, None


def head_distillation(
    students: torch.Tensor,  # [num_steps, num_rows, hidden]
    teacher: torch.Tensor,  # [num_rows, hidden]
    weight: torch.Tensor,  # [vocab, hidden]
    step_weights: torch.Tensor,  # [num_steps]
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Cross entropy of the students against the teacher's distribution.

    Both go through the same head, which is frozen: gradients reach `students`
    only. The mean over rows, weighted over steps, in nats; scalar, float32.
    """
    loss: torch.Tensor = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        students, teacher, weight, step_weights, compute_dtype
    )
    return loss
