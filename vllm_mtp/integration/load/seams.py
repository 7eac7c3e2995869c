"""Every symbol of vLLM that this package is built on, with the parameters it uses.

Data alone: ``compat.check`` looks at it when an engine starts. Those of every engine
and of either runner have files of their own, ``seams_*.py``.
"""

from vllm_mtp.integration.load.seam import Seam
from vllm_mtp.integration.load.seams_core import CORE
from vllm_mtp.integration.load.seams_v1 import V1
from vllm_mtp.integration.load.seams_v2 import V2

_CPU: tuple[Seam, ...] = (
    # Weights in 8 bits (cpu/int8_weights.py)
    Seam("cpu", "vllm._custom_ops.onednn_scaled_int8_quant", ("input",)),
    Seam(
        "cpu",
        "vllm._custom_ops.onednn_scaled_mm",
        (
            "dnnl_handler",
            "x",
            "output",
            "input_scale",
            "input_zp",
            "input_zp_adj",
            "bias",
        ),
    ),
    Seam(
        "cpu",
        "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"
        ".process_weights_for_onednn",  # sets the handler and the adjustment
        ("layer",),
    ),
    # CPU (cpu/worker.py)
    Seam("cpu", "vllm.v1.worker.cpu_worker.CPUWorker.init_device"),
)

SEAMS: tuple[Seam, ...] = (*CORE, *V1, *V2, *_CPU)
