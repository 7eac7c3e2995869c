"""Drafters of Model Runner V1: vLLM's own, which also announce rejected slots."""

from typing import Any

import torch
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

from vllm_mtp.integration.rejected_slots import AnnouncesRejectedSlots
from vllm_mtp.records import RejectedSlots


class _MTPPlusDrafter(AnnouncesRejectedSlots, SpecDecodeBaseProposer):
    def prepare_inputs_padded(
        self,
        common_attn_metadata: Any,
        spec_decode_metadata: Any,
        # [num_reqs] int32
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        prepared = super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )
        if self.on_rejected_slots is not None:
            metadata, _, num_rejected_tokens = prepared
            self.on_rejected_slots(
                RejectedSlots(
                    num_rejected_tokens, metadata.query_start_loc, metadata.slot_mapping
                )
            )
        return prepared


class MTPPlusProposer(_MTPPlusDrafter, EagleProposer):
    """Most families: one MTP layer, run K times."""


class MTPPlusGemma4Proposer(_MTPPlusDrafter, Gemma4Proposer):
    """Gemma 4: the drafter reads the target's KV and keeps its position."""


class MTPPlusStep3p5Proposer(_MTPPlusDrafter, Step3p5MTPProposer):
    """Step 3.5: several MTP layers, run in turn."""


OURS_BY_THEIRS: dict[type, type[_MTPPlusDrafter]] = {
    EagleProposer: MTPPlusProposer,
    Gemma4Proposer: MTPPlusGemma4Proposer,
    Step3p5MTPProposer: MTPPlusStep3p5Proposer,
}


def replace_drafter(runner: Any) -> None:
    """Put our drafter where vLLM's was built; neither has loaded weights yet.

    Args:
        runner: vLLM's V1 model runner. Only the last pipeline rank has a drafter.
    """
    theirs = getattr(runner, "drafter", None)
    if theirs is None:
        return
    ours = OURS_BY_THEIRS[type(theirs)]
    runner.drafter = None  # free its buffers before ours are made
    del theirs
    runner.drafter = ours(runner.vllm_config, runner.device, runner)
