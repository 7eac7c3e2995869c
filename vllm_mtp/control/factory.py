"""From the options to a controller: asked once, when the scheduler starts."""

from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, MTPPlusConfig
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController, GoodputOptions
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.threshold import ThresholdController


def make_controller(
    config: MTPPlusConfig, max_draft_length: int, data_parallel_size: int = 1
) -> Controller:
    """Build the controller that ``config`` names.

    Args:
        config: our options.
        max_draft_length: resolved upper bound on K.
        data_parallel_size: ranks that must draft equally deep.
    """
    if config.controller == "random":
        return RandomController(max_draft_length, config.controller_seed)
    if config.controller == "fixed":
        return FixedController(max_draft_length)
    if data_parallel_size > 1:
        # What a rank learns differs from what the others learn.
        return FixedController(min(max_draft_length, DEFAULT_FIXED_DRAFT_LENGTH))
    if config.controller == "threshold":
        return ThresholdController(max_draft_length)
    return GoodputController(max_draft_length, _goodput_options(config))


def _goodput_options(config: MTPPlusConfig) -> GoodputOptions:
    options = GoodputOptions()
    if config.max_tpot_ms is None:
        return options
    return options._replace(max_token_latency_s=config.max_tpot_ms / 1e3)
