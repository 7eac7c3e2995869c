"""Entry point of vLLM's plugin system (group ``vllm.general_plugins``).

vLLM calls ``register`` in every process it starts, before ``EngineArgs`` is built.
An exception while *importing* this module would only be logged by vLLM and the
plugin would be silently missing, so nothing but the standard library is imported at
the top.
"""


def register() -> None:
    """Teach vLLM the method ``mtp_plus``. Safe to call more than once.

    Installs the seam on ``EngineArgs`` and the architectures of models with extra
    heads, which have names of their own: without ``{"method": "mtp_plus"}`` and with
    any other model vLLM runs exactly its own code. Whether this vLLM fits
    is checked when the method is asked for, because a user of another method must
    not lose his server to our compatibility check.
    """
    from vllm_mtp.integration.extra_heads import registration
    from vllm_mtp.integration.load import engine_args

    engine_args.install()
    registration.install()
