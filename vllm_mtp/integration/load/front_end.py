"""What the process that takes requests needs of ours, wherever its config was made.

Most often that is the process that builds the engine's config. Ray Serve LLM builds it
in a task of its own, where the GPUs are, and sends it to the replica: there vLLM loads
no plugin before the engine starts. So our options in the config install the front end
wherever they are unpickled (`settings.Carried`).
"""

from vllm_mtp.integration.observe import response_metrics, stat_logger
from vllm_mtp.integration.scheduler import request_validation


def install() -> None:
    """Checks of requests, our metrics, and ours in responses. Safe to call twice."""
    request_validation.install()
    stat_logger.install()
    response_metrics.install()
