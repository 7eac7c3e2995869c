"""Model Runner V2: full CUDA graphs for any mix of draft lengths.

vLLM captures a graph for each draft length and size of batch; a step whose requests
have unequal ones runs outside of them. It can also capture graphs that serve any mix
(``varlen_decode``, made for adaptive verification). Here those take the place of the
graphs of each draft length, and beside them stand the very graphs of an engine without
speculation, for steps without drafts.

=============  ==========================  =========================================
manager        graphs                      of steps
=============  ==========================  =========================================
target         one row for each request    without drafts
target         any mix of rows             with drafts
draft prefill  any mix of rows             those of the target, padded as it was
draft decode   one draft step              replayed as often as the depth asks for
=============  ==========================  =========================================

A step with drafts is padded by a third of its rows at most (decode steps wait for
weights, not for rows), so there are few sizes: the graphs of all draft lengths are
about as many as vLLM's `mtp` has for one.

Where attention cannot replay any mix, each draft length keeps graphs of its own, of as
few sizes.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import ceil, inf
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from vllm_mtp.config import METHOD
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.load.extend import extend

# Below "vllm", so that vLLM's log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

MAX_PADDING = 1 / 3
"""Of the rows of a step with drafts, but where vLLM's own sizes are further apart."""
FEW_ROWS = 16
"""Up to so many, requests that only pad a graph cost nothing to speak of."""
USUAL_ROWS = 3
"""Rows for each request, in the mean, from which a graph with fewer requests serves a
step: draft heads run once for each request of a graph, there or not."""
EXACT_REQUESTS = 256
"""Up to so many, a step without drafts is padded as one without speculation."""

MANAGER_ATTRIBUTES = (
    "_candidates",
    "_capture_descs",
    "compilation_config",
    "cudagraph_mode",
    "decode_query_len",
    "lora_capture_cases",
    "max_num_reqs",
)


def thinned(sizes: Iterable[int]) -> list[int]:
    """Of some sizes as few as keep the padding within `MAX_PADDING`, rising."""
    kept: list[int] = []
    for size, following in pairwise([*sorted(sizes), inf]):
        if not kept or following > (1 + MAX_PADDING) * kept[-1]:
            kept.append(int(size))
    return kept


def one_row_each(manager: CudaGraphManager) -> list[BatchExecutionDescriptor]:
    """Graphs of steps with a row for each request, as without speculation.

    Args:
        manager: Whose sizes they have.
    """
    sizes = [n for n in _sizes(manager) if n <= manager.max_num_reqs]
    exact = [n for n in sizes if n <= EXACT_REQUESTS]
    return [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, n, n, 1, num_active_loras=loras)
        for n in (*exact, *thinned(sizes[len(exact) :]))
        for loras in manager.lora_capture_cases
    ]


def one_row_each_of_few_sizes(
    manager: CudaGraphManager,
) -> list[BatchExecutionDescriptor]:
    """The same for draft steps, which nobody compares.

    Args:
        manager: Whose sizes they have.
    """
    return [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, n, n, 1)
        for n in thinned(n for n in _sizes(manager) if n <= manager.max_num_reqs)
    ]


def any_mix(manager: CudaGraphManager) -> list[list[BatchExecutionDescriptor]]:
    """Graphs of steps whose requests have one to ``decode_query_len`` rows each.

    Args:
        manager: Whose sizes they have.

    Returns:
        Those with few requests, and those with as many as rows.
    """
    longest = manager.decode_query_len
    sizes = [n for n in _sizes(manager) if n <= manager.max_num_reqs * longest]
    usual_rows = min(USUAL_ROWS, longest)
    every, few = (
        [
            BatchExecutionDescriptor(
                CUDAGraphMode.FULL,
                n,
                min(ceil(n / rows), manager.max_num_reqs),
                max_query_len=longest,
                num_active_loras=loras,
            )
            for n in thinned(sizes)
            for loras in manager.lora_capture_cases
        ]
        for rows in (1, usual_rows)
    )
    few = [each for each in few if each.num_tokens > FEW_ROWS and each not in every]
    return [few, every]


def _sizes(manager: CudaGraphManager) -> list[int]:
    """Those without speculation: where vLLM chooses, a table of draft lengths adds to
    them (``VllmConfig``), for graphs that stand here for no draft length."""
    sizes = sorted(manager.compilation_config.cudagraph_capture_sizes or [])
    usual = {1, 2, 4, *range(8, 256, 8), *range(256, 1 + max(sizes, default=0), 16)}
    chosen = {n for n in usual if n <= max(sizes, default=0)}
    if not chosen <= set(sizes):
        return sizes  # the user's
    return [n for n in sizes if n in chosen or n == manager.max_num_reqs]


def equal_lengths(
    manager: CudaGraphManager,
) -> list[list[BatchExecutionDescriptor]]:
    """Graphs of steps whose requests have equally many rows, by that number.

    Args:
        manager: That has too many of them: each of its sizes for every draft length.
    """
    by_length: dict[Any, list[BatchExecutionDescriptor]] = {}
    for graph in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        by_length.setdefault(graph.uniform_token_count, []).append(graph)
    return [_few(graphs, length) for length, graphs in sorted(by_length.items())]


def _few(
    graphs: list[BatchExecutionDescriptor], length: int
) -> list[BatchExecutionDescriptor]:
    sizes = sorted({_requests(graph) for graph in graphs})
    # As without speculation, where there is nothing else in a step.
    exact = {n for n in sizes if length == 1 and n <= EXACT_REQUESTS}
    kept = exact | set(thinned(sizes))
    return [graph for graph in graphs if _requests(graph) in kept]


def put_in_place(
    manager: CudaGraphManager, kinds: Iterable[list[BatchExecutionDescriptor]]
) -> None:
    """Let a manager capture these graphs instead of its full ones.

    Args:
        manager: That has captured nothing.
        kinds: Graphs, those first that are taken first. Of each kind a step takes the
            smallest that has room.
    """
    kinds = [sorted(kind, key=_rows) for kind in kinds]
    full = [graph for kind in kinds for graph in kind]
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(full, key=_rows, reverse=True)
    others = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
    manager._candidates.clear()
    for kind in (*kinds, sorted(others, key=_rows)):
        for loras in manager.lora_capture_cases:
            graphs = [graph for graph in kind if graph.num_active_loras == loras]
            beyond = 0
            for graph in graphs:
                for num_rows in range(beyond, graph.num_tokens + 1):
                    key = (num_rows, loras)
                    manager._candidates.setdefault(key, []).append(graph)
                beyond = graph.num_tokens + 1


def _rows(graph: BatchExecutionDescriptor) -> int:
    return int(graph.num_tokens)


def _requests(graph: BatchExecutionDescriptor) -> int:
    assert graph.num_reqs is not None, graph
    return int(graph.num_reqs)


class MixedDraftPrefill(SpeculatorCudaGraphManager):
    """Mixin: chooses by the longest request, too, which vLLM does not say here.

    A step replays the graph that the target's pass has replayed, whose attention
    metadata it reads. A step with one row for each request has none.
    """

    max_query_len: int | None = None
    """Rows of the longest request of the step; None where the target had no such
    graph."""

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        return super().dispatch(*args, **kwargs | {"max_query_len": self.max_query_len})

    def expect(self, batch: Any) -> None:
        """A step is about to draft.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        longest = int(batch.num_scheduled_tokens.max())
        is_mix = not batch.has_prefill and longest > 1
        self.max_query_len = longest if is_mix else None


class RepeatedDraftStep(SpeculatorCudaGraphManager):
    """Mixin: captures one draft step and replays it, instead of all steps of a depth.

    Where attention metadata cannot be refreshed within a graph vLLM does so by itself.
    """

    draft_step: Callable[..., None]
    """Set by the speculator: as its ``_generate_fused_drafts``, for one step."""
    _is_fused = False
    _num_replays = 1

    def capture(
        self, forward_fn: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        self._is_fused = kwargs.pop("specialize_spec_tokens", False)
        captured = self.draft_step if self._is_fused else forward_fn
        super().capture(captured, *args, **kwargs)

    def specialize_spec_tokens(
        self, desc: BatchExecutionDescriptor, num_speculative_tokens: int
    ) -> BatchExecutionDescriptor:
        self._num_replays = num_speculative_tokens - 1 if self._is_fused else 1
        return desc

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> None:
        for _ in range(self._num_replays):
            super().run_fullgraph(desc)


def may_mix(runner: Any) -> bool:
    """Whether a runner's steps can be replayed whatever mix of draft lengths they have.

    Args:
        runner: vLLM's V2 model runner, which knows its attention groups and graphs.
    """
    model_support, _ = runner.model_state.get_additional_cg_support()
    return bool(
        may_choose_graphs(runner)
        and model_support == AttentionCGSupport.ALWAYS
        and get_varlen_cudagraph_unsupported_backend(
            runner.attn_groups, runner.vllm_config, runner.decode_query_len
        )
        is None
    )


def may_choose_graphs(runner: Any) -> bool:
    """Whether a runner's graphs may be others than vLLM's.

    Where ranks must agree on a graph (data, pipeline, context parallel, microbatches)
    they may not, yet.

    Args:
        runner: vLLM's V2 model runner.
    """
    mode = runner.cudagraph_manager.cudagraph_mode
    parallel = runner.vllm_config.parallel_config
    return bool(
        mode.separate_routine()
        and mode.decode_mode() == CUDAGraphMode.FULL
        and parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        and runner.pcp_manager is None
        and runner.ubatch_runner is None
    )


def log_graphs(runner: Any, num_bytes: int) -> None:
    """Say how many graphs were captured.

    Args:
        runner: vLLM's V2 model runner, with our speculator.
        num_bytes: Of memory, that vLLM has measured.
    """
    speculator = runner.speculator
    managers = [
        each
        for each in (runner.cudagraph_manager, *vars(speculator).values())
        if isinstance(each, CudaGraphManager)
    ]
    logger.info(
        "%s: %d full CUDA graphs for %s, %.2f GiB with all others",
        METHOD,
        sum(len(each.graphs) for each in managers),
        "any mix of draft lengths"
        if speculator.mixes_draft_lengths
        else "equal draft lengths",
        num_bytes / 2**30,
    )


def keep_few_sizes(
    target: CudaGraphManager,
    prefill: SpeculatorCudaGraphManager,
    decode: SpeculatorCudaGraphManager,
    draft_step: Callable[..., None],
) -> None:
    """Have three managers capture graphs of equal draft lengths, of few sizes.

    Args:
        target: Of the target's pass.
        prefill: Of the first draft step, which has the target's sizes.
        decode: Of the others.
        draft_step: One of the others, as vLLM's ``_generate_fused_drafts``.
    """
    check_attributes(target, MANAGER_ATTRIBUTES)
    put_in_place(target, equal_lengths(target))
    put_in_place(prefill, equal_lengths(prefill))
    _repeat(decode, draft_step)


def mix_draft_lengths(
    target: CudaGraphManager,
    prefill: SpeculatorCudaGraphManager,
    decode: SpeculatorCudaGraphManager,
    draft_step: Callable[..., None],
) -> None:
    """Change what three managers will capture; see the top of this file.

    Args:
        target: Of the target's pass.
        prefill: Of the first draft step, which reads the target's rows.
        decode: Of the others.
        draft_step: One of the others, as vLLM's ``_generate_fused_drafts``.
    """
    check_attributes(target, MANAGER_ATTRIBUTES)
    put_in_place(target, [one_row_each(target), *any_mix(target)])
    put_in_place(prefill, any_mix(prefill))
    extend(prefill, MixedDraftPrefill)
    _repeat(decode, draft_step)


def count_graphs(config: Any) -> tuple[int, int]:
    """Full graphs that an engine with one MTP layer captures.

    Args:
        config: Finished, of an engine with full graphs for decode steps.

    Returns:
        Where attention replays any mix of draft lengths, and where it does not.
    """
    mode = config.compilation_config.cudagraph_mode
    longest = 1 + config.num_speculative_tokens
    device = torch.device("cpu")
    counts = []
    for choose in (mix_draft_lengths, keep_few_sizes):
        managers = (
            ModelCudaGraphManager(config, device, mode, longest),
            SpeculatorCudaGraphManager(config, device, mode, longest),
            SpeculatorCudaGraphManager(
                config, device, CUDAGraphMode.FULL_DECODE_ONLY, 1
            ),
        )
        choose(*managers, _nothing)
        full = (each._capture_descs[CUDAGraphMode.FULL] for each in managers)
        counts.append(sum(map(len, full)))
    return counts[0], counts[1]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a draft step."""


def _repeat(
    decode: SpeculatorCudaGraphManager, draft_step: Callable[..., None]
) -> None:
    put_in_place(decode, [one_row_each_of_few_sizes(decode)])
    extend(decode, RepeatedDraftStep)
    decode.draft_step = draft_step
