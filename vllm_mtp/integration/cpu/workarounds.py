"""Workarounds for faults of vLLM 0.32 and 0.33 on CPU, each bounded and tested.

A server with another method keeps vLLM's own code.

``expand_kernel``
    ``vllm/utils/cpu_triton_utils.py:_expand_kernel_impl`` hands the C++ kernel int64
    *copies* of its float32 or int32 output and input and never copies back: the
    per-token temperature, top-k and top-p of speculative sampling are uninitialised
    memory. For upstream: copy the output back as its two neighbours do, or give the
    kernel a float path; an int64 copy of a temperature is also truncated. Our
    verification does without that kernel; benchmarks replace it for vLLM's own ``mtp``.

seeded requests
    ``GPUModelRunner._bookkeeping_sync`` rewinds the generator of a request whose
    prefill is chunked with ``set_offset(get_offset() - 4)``, which a CPU generator
    refuses: one such request ends the engine, with or without speculation. For
    upstream: save and restore the state of a CPU generator instead.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample import rejection_sampler

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"

_SEEDS = count(1)


def expand_kernel(
    # [num_tokens], dtype of input_val
    output: torch.Tensor,
    # [num_reqs]
    input_val: torch.Tensor,
    # [num_reqs], inclusive running sum of each request's tokens
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens, in place in ``output``.

    Same contract as vLLM's Triton kernel, in which a value of ``replace_from`` becomes
    ``replace_to`` (a greedy request's temperature 0 becomes 1).
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(torch.repeat_interleave(values, counts.long()))


def replace_expand_kernel() -> None:
    """Replace vLLM's faulty CPU kernel; does nothing where it does its work."""
    if not _expands():
        with _hidden_modules("llvmlite", "numba"):
            register_kernels({EXPAND_KERNEL: expand_kernel})


@contextmanager
def _hidden_modules(*packages: str) -> Iterator[None]:
    """Keep modules from being looked through, which ends at llvmlite's.

    vLLM's `ngram` imports it. One of its objects answers ``__dict__`` with a function
    of its library, which `register_kernels` takes for a dictionary.
    """
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in packages
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _expands() -> bool:
    """Whether the kernel that vLLM calls repeats numbers: a working Triton, a fix.

    Tried, not concluded from which function it is: decorators hide that. A faulty
    one leaves memory as it was, so the numbers are new ones at each call.
    """
    values = torch.rand(2, generator=torch.Generator().manual_seed(next(_SEEDS)))
    ends = torch.tensor([1, 3], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 3)
    return torch.equal(expanded, values[[0, 1, 1]])


class RewindableGenerator(torch.Generator):
    """A CPU generator that understands vLLM's "forget the last draw".

    vLLM speaks in Philox offsets, where a discarded draw is 4 back. A CPU generator
    has no offset; its state of before the draw, kept by ``mark``, is the same place.
    """

    _marked_state: torch.Tensor

    @classmethod
    def continuing(cls, generator: torch.Generator) -> "RewindableGenerator":
        """A rewindable generator that will draw what ``generator`` would have."""
        ours = cls(device="cpu")
        ours.set_state(generator.get_state())
        return ours

    def mark(self) -> None:
        """Remember this place as the one to come back to."""
        self._marked_state = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.set_state(self._marked_state)


def make_generators_rewindable(runner: Any) -> None:
    """Prepare the generators of seeded requests whose draw will be discarded.

    Args:
        runner: vLLM's V1 CPU model runner, between its forward pass and sampling.
    """
    generators = runner.input_batch.generators
    for index, generator in generators.items():
        if not runner.discard_request_mask.np[index]:
            continue
        if not isinstance(generator, RewindableGenerator):
            generator = RewindableGenerator.continuing(generator)
            generators[index] = generator
            # vLLM refills the batch from the request when its rows move.
            request_id = runner.input_batch.req_ids[index]
            runner.requests[request_id].generator = generator
        generator.mark()
