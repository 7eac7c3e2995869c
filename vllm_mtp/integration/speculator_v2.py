"""Drafters of Model Runner V2: vLLM's own, which also announce rejected slots."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.integration.rejected_slots import AnnouncesRejectedSlots
from vllm_mtp.records import RejectedSlots


class _MTPPlusSpeculator(AnnouncesRejectedSlots, DraftModelSpeculator):
    def observe_verification(
        self,
        # [num_reqs] each, on the device
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        super().observe_verification(idx_mapping, num_sampled, num_rejected)
        if self.on_rejected_slots is not None:
            self.on_rejected_slots(
                RejectedSlots(num_rejected, query_start_loc=None, slot_mapping=None)
            )


class MTPPlusSpeculator(_MTPPlusSpeculator, MTPSpeculator):
    """Most families: one MTP layer, run K times."""


class MTPPlusMultiModuleSpeculator(_MTPPlusSpeculator, MultiModuleMTPSpeculator):
    """Several MTP layers, run in turn."""


class MTPPlusGemma4Speculator(_MTPPlusSpeculator, Gemma4Speculator):
    """Gemma 4: the drafter reads the target's KV and keeps its position."""


OURS_BY_THEIRS: dict[type, type[_MTPPlusSpeculator]] = {
    MTPSpeculator: MTPPlusSpeculator,
    MultiModuleMTPSpeculator: MTPPlusMultiModuleSpeculator,
    Gemma4Speculator: MTPPlusGemma4Speculator,
}


def replace_speculator(runner: Any) -> None:
    """Put our speculator where vLLM's was built; neither has loaded weights yet.

    Args:
        runner: vLLM's V2 model runner. Only the last pipeline rank has a speculator.
    """
    theirs = runner.speculator
    if theirs is None:
        return
    ours = OURS_BY_THEIRS[type(theirs)]
    # The cached draft logits alone can be gigabytes: free them before ours are made.
    runner.speculator = None
    del theirs
    runner.speculator = ours(runner.vllm_config, runner.device)
