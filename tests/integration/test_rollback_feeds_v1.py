"""One launch feeds every consumer of vLLM's own chain with the same values.

A real engine runs; at each of vLLM's hooks the chain of small kernels that ours
replaces is run beside it on the same inputs and compared.
"""

from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.support.engines import engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}


class ChainBeside:
    """Runs vLLM's own chain at each hook and remembers what both said."""

    def __init__(self, drafter: Any) -> None:
        from vllm.v1.spec_decode.eagle import EagleProposer

        self.drafter = drafter
        self.theirs = EagleProposer
        self.num_with_drafts = self.num_without = self.num_discarded = 0
        self.num_rejected = 0
        for name in (
            "prepare_next_token_ids_padded",
            "prepare_inputs_padded",
            "_update_positions_dependent_metadata",
        ):
            setattr(drafter, "ours_" + name, getattr(drafter, name))
            setattr(drafter, name, getattr(self, name))

    def prepare_next_token_ids_padded(
        self, sampled: torch.Tensor, requests: Any, batch: Any, discard: torch.Tensor
    ) -> Any:
        ours = self.drafter.ours_prepare_next_token_ids_padded(
            sampled, requests, batch, discard
        )
        theirs = self.theirs.prepare_next_token_ids_padded(
            self.drafter, sampled, requests, batch, discard
        )
        kept = ~discard[: batch.num_reqs]
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0][kept], theirs[0][kept])
        for row in (~kept).nonzero()[:, 0].tolist():
            self.num_discarded += 1
            request = requests[batch.req_ids[row]]
            length = int(self.drafter.model_runner.optimistic_seq_lens_cpu[row])
            assert int(ours[0][row]) == request.get_token_id(length)
        self.counts = theirs[1]
        drafts = self.drafter._step.spec_decode_metadata.num_draft_tokens
        self.num_without += not any(drafts)
        return ours

    def prepare_inputs_padded(self, metadata: Any, verified: Any, counts: Any) -> Any:
        ours = self.drafter.ours_prepare_inputs_padded(metadata, verified, counts)
        theirs = self.theirs.prepare_inputs_padded(
            self.drafter, metadata, verified, self.counts
        )
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[2], theirs[2])
        for field in fields(theirs[0]):
            if field.name != "slot_mapping":
                self._check_equal(getattr(ours[0], field.name), theirs[0], field.name)
        self._check_slot_mapping(ours[0], theirs[0].slot_mapping, theirs[2])
        self.num_with_drafts += any(verified.num_draft_tokens)
        self.num_rejected += int(theirs[2].sum())
        self.seq_lens = metadata.seq_lens - theirs[2]
        return ours

    def _check_equal(self, ours: Any, metadata: Any, name: str) -> None:
        theirs = getattr(metadata, name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs), name
        else:
            assert ours == theirs, name

    def _check_slot_mapping(
        self, ours: Any, slots: torch.Tensor, rejected: torch.Tensor
    ) -> None:
        starts = ours.query_start_loc.tolist()
        expected = slots.clone()
        for row, count in enumerate(rejected.tolist()):
            expected[starts[row + 1] - count : starts[row + 1]] = -1
        assert torch.equal(ours.slot_mapping, expected)

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, metadata: Any, *arguments: Any
    ) -> Any:
        result = self.drafter.ours__update_positions_dependent_metadata(
            positions, metadata, *arguments
        )
        # Draft steps that compute nothing leave the metadata alone.
        if self.seq_lens is not None and not self.drafter.has_stopped:
            assert torch.equal(metadata.seq_lens, self.seq_lens + 1)
            self.seq_lens = None
        return result

    seq_lens: torch.Tensor | None = None


@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}],
    ids=["whole", "chunked"],
)
def test_every_hook_hands_out_what_vllms_chain_would(arguments: dict) -> None:
    with engine(
        BUNDLED_CHECKPOINT,
        speculative_config=RANDOM,
        enable_prefix_caching=False,
        **arguments,
    ) as llm:
        beside = ChainBeside(model_runner(llm).drafter)
        greedy(llm, heldout_prompts(16), 40)
        assert not beside.drafter.has_failed, "a check above"
    assert beside.num_with_drafts > 20
    assert beside.num_without > 2
    assert beside.num_rejected > 20
    assert bool(beside.num_discarded) == bool(arguments)
