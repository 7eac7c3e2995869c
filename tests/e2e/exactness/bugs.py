"""Bugs that would be easy to make, to be put into a running engine.

Each takes pytest's ``monkeypatch`` and vLLM's model runner. Nothing crashes, texts look
as ever: only their distribution is wrong.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

Bug = Callable[[pytest.MonkeyPatch, Any], None]


def _wrap(
    patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    """Replace ``owner.name`` by ``wrong``, which is given the original first."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kw: wrong(original, *args, **kw))


def _vllm() -> Any:
    from vllm.v1.sample import rejection_sampler

    return rejection_sampler


def _block() -> Any:
    from vllm_mtp.verification import block

    return block


# -- the ratio test ---------------------------------------------------------------


def accepts_with_the_inverse_ratio(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def wrong(
        verify: Any,
        output: Any,
        ends: Any,
        ids: Any,
        draft: Any,
        target: Any,
        *rest: Any,
    ) -> None:
        verify(output, ends, ids, target, draft, *rest)

    _wrap(patch, _vllm(), "_rejection_random_sample", wrong)


def replaces_by_what_the_target_samples(patch: pytest.MonkeyPatch, runner: Any) -> None:
    """The residual forgets what the proposal has already given."""

    def wrong(recover: Any, *args: Any, **kw: Any) -> Any:
        return recover(*args[:4], torch.zeros_like(args[4]), *args[5:], **kw)

    _wrap(patch, _vllm(), "sample_recovered_tokens", wrong)


def replaces_a_chosen_token_by_any(patch: pytest.MonkeyPatch, runner: Any) -> None:
    """Of a chosen token all was given: it must not come back."""

    def wrong(recover: Any, *args: Any, **kw: Any) -> Any:
        return recover(*args[:4], torch.zeros_like(args[5]), *args[5:], **kw)

    _wrap(patch, _vllm(), "sample_recovered_tokens", wrong)


def replaces_by_another_rows_token(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _wrap(
        patch,
        _vllm(),
        "sample_recovered_tokens",
        lambda recover, *args, **kw: recover(*args, **kw).roll(1),
    )


def one_uniform_for_all_draft_tokens(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def wrong(draw: Any, num_tokens: int, lengths: list[int], *rest: Any) -> Any:
        uniforms = draw(num_tokens, lengths, *rest)
        counts = torch.tensor(lengths)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        return uniforms[first]

    _wrap(patch, _vllm(), "generate_uniform_probs", wrong)


def keeps_the_last_draft_token_untested(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def wrong(draw: Any, num_tokens: int, lengths: list[int], *rest: Any) -> Any:
        uniforms = draw(num_tokens, lengths, *rest)
        counts = torch.tensor(lengths)
        uniforms[counts.cumsum(0)[counts > 0] - 1] = 0.0
        return uniforms

    _wrap(patch, _vllm(), "generate_uniform_probs", wrong)


# -- what the test is given -------------------------------------------------------

TARGET_LOGITS, BONUS = 5, 6
"""Places among the arguments of vLLM's ``rejection_sample``."""


def _change_argument(
    patch: pytest.MonkeyPatch, place: int, change: Callable[[tuple[Any, ...]], Any]
) -> None:
    def wrong(verify: Any, *args: Any, **kw: Any) -> Any:
        changed = change(args)
        return verify(*args[:place], changed, *args[place + 1 :], **kw)

    _wrap(patch, _vllm(), "rejection_sample", wrong)


def reads_the_logits_of_the_row_before(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _change_argument(patch, TARGET_LOGITS, lambda args: args[TARGET_LOGITS].roll(1, 0))


def takes_the_bonus_token_from_the_row_before(
    patch: pytest.MonkeyPatch, runner: Any
) -> None:
    def change(args: tuple[Any, ...]) -> torch.Tensor:
        last_rows = (args[3].long() - 1).clamp(min=0)
        probs = args[TARGET_LOGITS].softmax(dim=-1)[last_rows]
        return torch.multinomial(probs, 1).to(args[BONUS].dtype)

    _change_argument(patch, BONUS, change)


def _change_rows_of_drafts(
    patch: pytest.MonkeyPatch, change: Callable[[Any, torch.Tensor], dict[str, Any]]
) -> None:
    """Rows of draft tokens forget a sampling parameter; the bonus row keeps it."""
    from vllm_mtp.integration.v1 import rejection_sampler

    def wrong(rows: Any, metadata: Any, sampling: Any) -> Any:
        found = rows(metadata, sampling)
        is_draft = torch.ones(found.starts[-1], dtype=torch.bool)
        is_draft[metadata.bonus_logits_indices] = False
        changed = replace(found.sampling, **change(found.sampling, is_draft))
        return found._replace(sampling=changed)

    _wrap(patch, rejection_sampler, "verified_rows", wrong)


def forgets_the_temperature(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _change_rows_of_drafts(
        patch, lambda s, rows: {"temperature": s.temperature.masked_fill(rows, 1.0)}
    )


def forgets_top_k(patch: pytest.MonkeyPatch, runner: Any) -> None:
    every = runner.input_batch.vocab_size
    _change_rows_of_drafts(
        patch, lambda s, rows: {"top_k": s.top_k.masked_fill(rows, every)}
    )


def forgets_penalties(patch: pytest.MonkeyPatch, runner: Any) -> None:
    neutral = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    _change_rows_of_drafts(
        patch,
        lambda s, rows: {
            (field := f"{name}_penalties"): getattr(s, field).masked_fill(rows, value)
            for name, value in neutral.items()
        },
    )


def forgets_min_p(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def change(sampling: Any, rows: torch.Tensor) -> dict[str, Any]:
        for processor in sampling.logitsprocs.argmax_invariant:
            processor.min_p = processor.min_p.masked_fill(rows[:, None], 0.0)
        return {}

    _change_rows_of_drafts(patch, change)


def _forget_biases(sampling: Any, rows: torch.Tensor) -> dict[str, Any]:
    for processor in sampling.logitsprocs.non_argmax_invariant:
        if getattr(processor, "biases", None):
            row, token_id = processor.logits_slice
            kept = ~rows[row.long()]
            processor.logits_slice = row[kept], token_id[kept]
            processor.bias_tensor = processor.bias_tensor[kept]
    return {}


def forgets_the_bias(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _change_rows_of_drafts(patch, _forget_biases)


def adds_the_bias_to_the_first_draft_token_only(
    patch: pytest.MonkeyPatch, runner: Any
) -> None:
    def change(sampling: Any, rows: torch.Tensor) -> dict[str, Any]:
        # The row before the first of a request is a bonus row, or there is none.
        is_first = rows & ~torch.cat([torch.tensor([False]), rows[:-1]])
        return _forget_biases(sampling, rows & ~is_first)

    _change_rows_of_drafts(patch, change)


# -- the proposal that it is told ------------------------------------------------


def _change_spread(
    patch: pytest.MonkeyPatch, wrong: Callable[[Any, Any, torch.Tensor], Any]
) -> None:
    from vllm_mtp.drafting.vocabulary import DraftVocabulary

    _wrap(
        patch,
        DraftVocabulary,
        "spread",
        lambda original, self, values, fill: wrong(original, self, values),
    )


def proposes_a_little_outside_its_vocabulary(
    patch: pytest.MonkeyPatch, runner: Any
) -> None:
    _change_spread(
        patch, lambda spread, self, values: spread(self, values, 1 / values.shape[1])
    )


def mixes_up_rows_of_the_draft_head(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _change_spread(
        patch, lambda spread, self, values: spread(self, values.roll(1, 1), 0.0)
    )


def draws_with_another_temperature(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def wrong(draw: Any, *args: Any) -> Any:
        choices, probs = draw(*args)
        flat = probs.sqrt()
        return choices, flat / flat.sum(dim=-1, keepdim=True)

    _wrap(patch, runner.drafter, "_sample_from_logits", wrong)


def chooses_what_it_says_it_drew(patch: pytest.MonkeyPatch, runner: Any) -> None:
    def wrong(draw: Any, *args: Any) -> Any:
        _, probs = draw(*args)
        return probs.argmax(dim=-1), probs

    _wrap(patch, runner.drafter, "_sample_from_logits", wrong)


# -- block verification -----------------------------------------------------------


def block_weighs_with_the_inverse_ratio(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _wrap(
        patch,
        _block(),
        "_ratios",
        lambda ratios, ids, draft, target: ratios(ids, target, draft),
    )


def block_forgets_the_weight_in_the_residual(
    patch: pytest.MonkeyPatch, runner: Any
) -> None:
    _wrap(
        patch,
        _block(),
        "_missing",
        lambda missing, before, *rest: missing(torch.ones_like(before), *rest),
    )


def block_cuts_by_the_wrong_row(patch: pytest.MonkeyPatch, runner: Any) -> None:
    _wrap(
        patch,
        _block(),
        "_accepts",
        lambda accepts, weights, passes, *rest: accepts(weights, passes.roll(1), *rest),
    )


def block_forgets_the_tokens_before(patch: pytest.MonkeyPatch, runner: Any) -> None:
    """Each token is weighed by itself."""

    def wrong(weights: Any, ratios: torch.Tensor, is_drafted: torch.Tensor) -> Any:
        own = torch.where(is_drafted, ratios, 1.0).clamp(max=1.0)
        return torch.nn.functional.pad(own, (1, 0), value=1.0)

    _wrap(patch, _block(), "_weights", wrong)


BUGS: dict[tuple[str, str], list[Bug]] = {
    ("standard", "plain"): [
        accepts_with_the_inverse_ratio,
        replaces_by_what_the_target_samples,
        replaces_by_another_rows_token,
        keeps_the_last_draft_token_untested,
        reads_the_logits_of_the_row_before,
        takes_the_bonus_token_from_the_row_before,
        proposes_a_little_outside_its_vocabulary,
        mixes_up_rows_of_the_draft_head,
        draws_with_another_temperature,
        chooses_what_it_says_it_drew,
    ],
    ("standard", "cool, top-k"): [forgets_the_temperature, forgets_top_k],
    ("standard", "penalties"): [forgets_penalties],
    ("standard", "min-p"): [forgets_min_p],
    ("standard", "bias, penalties"): [
        forgets_the_bias,
        adds_the_bias_to_the_first_draft_token_only,
    ],
    # Chosen drafts are kept about half the time, one after another.
    ("standard, chosen", "plain"): [
        one_uniform_for_all_draft_tokens,
        keeps_the_last_draft_token_untested,
        replaces_a_chosen_token_by_any,
    ],
    ("block", "plain"): [
        block_weighs_with_the_inverse_ratio,
        block_forgets_the_weight_in_the_residual,
        block_cuts_by_the_wrong_row,
        block_forgets_the_tokens_before,
        mixes_up_rows_of_the_draft_head,
    ],
}
"""By acceptance test and the sampling parameters that must show them."""
