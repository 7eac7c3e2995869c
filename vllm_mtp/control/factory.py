"""From the options to a controller: asked once, when the scheduler starts."""

from vllm_mtp.config import MTPPlusConfig
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.randomized import RandomController


def make_controller(config: MTPPlusConfig, max_draft_length: int) -> Controller:
    """Build the controller that ``config`` names.

    Args:
        config: our options.
        max_draft_length: resolved upper bound on K.
    """
    if config.controller == "random":
        return RandomController(max_draft_length, config.controller_seed)
    return FixedController(max_draft_length)
