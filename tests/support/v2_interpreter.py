"""Model Runner V2 on a machine without a GPU: Triton's interpreter on the CPU.

Triton asks a driver which device it runs on. Here a driver answers "the CPU", and with
``TRITON_INTERPRET=1`` every kernel is executed by Triton's own interpreter. Slow (about
50 ms a step) and exact. Must be installed before anything imports vllm or triton.
"""

import ctypes
import math
import os
from functools import cache
from typing import Any

from tests.support import interpreted_states

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
    interpreted_states.take_triton_kernels()
    _keep_freed_memory()
    _patch_language_once()
    _derive_types_once()
    _take_any_mask()
    _apply_top_p_with_torch()
    _take_log1p_from_triton()
    _sample_in_one_block()


def _keep_freed_memory() -> None:
    """Blocks of the interpreter come and go; the C library gives each back at once.

    The kernel then clears its pages anew, which takes longer than all else.
    """
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
    assert libc.mallopt(trim_threshold, 2**30)
    # KV caches go their own way.
    assert libc.mallopt(mmap_threshold, 2**25)


def _patch_language_once() -> None:
    """Triton's interpreter replaces all of the language anew for each call, and back.

    In a process that compiles nothing it may stay replaced.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang

    @cache
    def patch_language(function: Any) -> Any:
        original(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_language


def _derive_types_once() -> None:
    """Triton's interpreter derives them anew for each value: a fifth of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def get_numpy_type(dtype: tl.dtype) -> Any:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    def initialize(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.shape if type.is_block() else ())

    @cache
    def shape_of(lengths: Any) -> tuple[tl.tuple, tl.constexpr]:
        shape = tl.tuple([tl.constexpr(length) for length in lengths])
        return shape, tl.constexpr(math.prod(lengths))

    interpreter._get_np_dtype = get_numpy_type
    tl.tensor.__init__ = initialize


def _take_any_mask() -> None:
    """Triton's interpreter loads and stores under masks of one dtype only.

    A mask that is combined with a scalar one (``mask & is_valid``) has another.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def create_masked_load(
        self: InterpreterBuilder, ptrs: Any, mask: Any, *rest: Any
    ) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, ptrs, mask, *rest)

    def create_masked_store(
        self: InterpreterBuilder, ptrs: Any, value: Any, mask: Any, policy: Any
    ) -> None:
        mask.data = mask.data.astype(bool)
        store(self, ptrs, value, mask, policy)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def _apply_top_p_with_torch() -> None:
    """Triton's interpreter cannot run vLLM's kernel of top-k and top-p."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = (
        topk_topp_sampler.apply_top_k_top_p_pytorch
    )


def _take_log1p_from_triton() -> None:
    """Of CUDA's device library the interpreter knows nothing: it answers None."""
    import triton.language as tl
    from vllm.triton_utils import tldevice

    tldevice.log1p = lambda x: tl.log(1.0 + x)


def _sample_in_one_block() -> None:
    """The interpreter's time goes by the number of programs, hardly by their size.

    Which random number a token gets does not depend on its block.
    """
    from vllm.v1.worker.gpu.sample import gumbel, logprob, min_p
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    for function in (
        gumbel.gumbel_sample,
        logprob.compute_token_logprobs,
        min_p.apply_min_p,
        rejection_sampler_utils.rejection_sample,
    ):
        code = function.__code__
        assert 1024 in code.co_consts, "vLLM samples in blocks of another size"
        constants = tuple(16384 if each == 1024 else each for each in code.co_consts)
        function.__code__ = code.replace(co_consts=constants)
