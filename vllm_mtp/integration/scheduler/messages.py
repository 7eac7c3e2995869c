"""vLLM's messages carry ours in subclasses: what is said where ours do not arrive.

Whoever stands between scheduler and worker may copy a message field by field. Tokens
are right all the same, but then nobody would know why drafts are longer than they pay.
"""

from vllm.logger import init_logger

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")


def warn_lost(carrier: type) -> None:
    """Say once that messages arrive without our part.

    Args:
        carrier: The subclass that was sent.
    """
    logger.warning_once(
        "%s arrives as vLLM's plain %s: something between scheduler and worker copies "
        "it, and what mtp_plus sends with it is lost. The output is right, but drafts "
        "are not chosen as well as they could be.",
        carrier.__name__,
        carrier.__base__.__name__ if carrier.__base__ else "object",
    )
