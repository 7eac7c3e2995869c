"""Which backends the kernel tests run on: every one that this process can run.

Triton has no CPU target. Its interpreter must be on before our kernels are imported and
then stays on, so that it gets a process of its own: ``test_triton_interpreter``.
"""

import pytest
import torch

from vllm_mtp.kernels import dispatch, triton_ops

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = [
    pytest.param((name, "cuda"), marks=needs_gpu, id=f"{name}-cuda")
    for name in ("reference", "native", "triton")
]
CPU_BACKENDS = ("triton",) if triton_ops.INTERPRETED else ("reference", "native")
EVERYWHERE = [
    *(pytest.param((name, "cpu"), id=f"{name}-cpu") for name in CPU_BACKENDS),
    *ON_GPU,
]


def _choose(parameter: tuple[str, str]) -> dispatch.Backend:
    name, device_type = parameter
    device = torch.device(device_type)
    reason = dispatch.available(device)[name]
    if reason is not None:
        pytest.skip(reason)
    return dispatch.choose(device, name)


@pytest.fixture(scope="session", params=EVERYWHERE)
def backend(request):
    """A backend and the device it runs on, as ``dispatch.Backend``."""
    return _choose(request.param)


@pytest.fixture(scope="session", params=[p for p in EVERYWHERE if "ref" not in p.id])
def fast_backend(request):
    """Like ``backend``, without the reference."""
    return _choose(request.param)


@pytest.fixture(scope="session", params=[p for p in ON_GPU if "ref" not in p.id])
def gpu_backend(request):
    """Like ``fast_backend``, on a GPU only."""
    return _choose(request.param)
