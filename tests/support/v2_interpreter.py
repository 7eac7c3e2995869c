"""Model Runner V2 on a machine without a GPU: Triton's interpreter on the CPU.

Triton asks a driver which device it runs on. Here a driver answers "the CPU", and with
``TRITON_INTERPRET=1`` every kernel is executed by Triton's own interpreter. Slow (about
50 ms a step) and exact. Must be installed before anything imports vllm or triton.
"""

import os

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def install() -> None:
    """Add the CPU driver to Triton and select Model Runner V2 in this process."""
    os.environ.update(ENVIRONMENT)
    import torch
    from triton import backends
    from triton.backends.compiler import GPUTarget

    class CPUDriver:
        """What Triton asks of a driver when kernels are interpreted."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    any_backend = next(iter(backends.backends.values()))
    backends.backends["cpu"] = backends.Backend(
        compiler=any_backend.compiler, driver=CPUDriver
    )
