"""What the process that takes requests needs of ours, wherever its config was made.

Most often that is the process that builds the engine's config. Ray Serve LLM builds it
in a task of its own, where the GPUs are, and sends it to the replica: there vLLM loads
no plugin before the engine starts. So our options in the config install the front end
wherever they are unpickled (`settings.Carried`).
"""

from vllm_mtp.config import SYNTHETIC, MTPPlusConfig
from vllm_mtp.integration.observe import response_metrics, stat_logger
from vllm_mtp.integration.scheduler import request_validation


def install(own: MTPPlusConfig) -> None:
    """Checks of requests, our metrics, and ours in responses. Safe to call twice.

    Args:
        own: Our options, of the engine that this process takes requests for.
    """
    request_validation.install()
    stat_logger.install()
    response_metrics.install(own.rejection_sample_method == SYNTHETIC)
