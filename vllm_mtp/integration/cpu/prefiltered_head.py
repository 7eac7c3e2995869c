"""Model Runner V1 on a CPU: the target's head for greedy requests, prefiltered.

Where nothing is asked of a step but the likeliest token of each row, its logits are
those of `Int8Prefilter`: of the tokens that can be the likeliest as the head has them,
of all others -inf. What vLLM does with logits gives the same tokens then. Wherever more
is asked (sampling, logprobs, penalties, a grammar), the head is multiplied as it is.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.cpu.int8_drafts import has_kernel
from vllm_mtp.integration.cpu.int8_weights import (
    MAX_FEW_ROWS,
    FewRowsProduct,
    Int8Linear,
    multiplies_all_rows,
    quantize_rows,
)
from vllm_mtp.integration.draft_vocab.head import (
    PLAIN_METHODS,
    replace_logits_processors,
)
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.v1.logits_processors import is_plainly_greedy
from vllm_mtp.verification.prefilter import (
    Int8Prefilter,
    RoundingNorms,
    rounding_norms,
    row_order,
)

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

_ORIGINAL_ATTRIBUTES = (
    "head_dtype",
    "logits_as_input",
    "org_vocab_size",
    "scale",
    "soft_cap",
)
PREFILTER_ATTRIBUTES = ("input_batch", "num_prompt_logprobs", "requests")

MIN_WEIGHTS = 2**23
"""Of a prefiltered head: finding the tokens that are left takes some time, too."""
_ROWS_AT_A_TIME = 4096
"""Quantized at once: what that takes for a moment is several times their size."""
_MAX_REST = 256
"""Steps without a try, at most, where too many tokens were left."""


def prefilters_head(vllm_config: Any) -> bool:
    """Whether an engine's greedy tokens are searched in 8 bits first."""
    return settings_of(vllm_config).verify_head != "whole" and _can_prefilter(
        vllm_config
    )


def check_verify_head(vllm_config: Any) -> None:
    """Refuse what this machine or model cannot do.

    Raises:
        ConfigError: It is wanted, and not possible.
    """
    wanted = settings_of(vllm_config).verify_head
    if wanted == "prefiltered" and not _can_prefilter(vllm_config):
        raise ConfigError(
            "speculative_config.verify_head='prefiltered' is not allowed here: it "
            "takes an x86 CPU with AVX2 and without AMX, Model Runner V1 without "
            "tensor or pipeline parallelism or LoRA, and a model whose weights are "
            "float32 or bfloat16, not quantized; leave it unset."
        )


def _can_prefilter(vllm_config: Any) -> bool:
    parallel = vllm_config.parallel_config
    return (
        has_kernel()
        and not vllm_config.use_v2_model_runner
        and vllm_config.quant_config is None
        and vllm_config.lora_config is None
        and parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1
        and vllm_config.model_config.dtype in (torch.float32, torch.bfloat16)
    )


class PlainlyGreedy:
    """Whether a runner's batch is asked for its likeliest tokens and nothing else."""

    def __init__(self, runner: Any) -> None:
        """Nothing is known of a batch yet.

        Args:
            runner: vLLM's V1 model runner.
        """
        self._runner = runner
        self._metadata: Any = None
        self._is_plain = False

    def __call__(self) -> bool:
        """Of the batch whose logits are about to be computed."""
        runner = self._runner
        if not runner.input_batch.num_reqs or runner.num_prompt_logprobs:
            return False
        # vLLM makes it anew whenever a request comes or goes.
        metadata = runner.input_batch.sampling_metadata
        if metadata is not self._metadata:
            self._metadata = metadata
            self._is_plain = is_plainly_greedy(metadata) and not self._has_grammars()
        return self._is_plain

    def _has_grammars(self) -> bool:
        requests = self._runner.requests
        params = [requests[i].sampling_params for i in self._runner.input_batch.req_ids]
        return any(p is None or p.structured_outputs is not None for p in params)


class _Copy(NamedTuple):
    """Of a head in 8 bits."""

    prefilter: Int8Prefilter
    packed: Any
    """vLLM's own copy of the same weights, which it makes anew when they change."""
    max_rows: float = math.inf
    """For which prefiltering takes less time than multiplying by the head as it is."""


class PrefilteredLogits(nn.Module):
    """Takes the place of a target's ``LogitsProcessor``."""

    def __init__(self, original: LogitsProcessor, may_prefilter: PlainlyGreedy) -> None:
        """Nothing changes until a head is met.

        Args:
            original: vLLM's, of the target.
            may_prefilter: Asked at every step.
        """
        super().__init__()
        check_attributes(original, _ORIGINAL_ATTRIBUTES)
        self.original = original
        self._may_prefilter = may_prefilter
        self._copies: dict[int, _Copy | None] = {}
        """Of each head, which this model holds on to; None of those left as they are.
        """
        self._num_failed = 0
        self._num_to_rest = 0

    def forward(
        self,
        lm_head: Any,
        # [num_rows, hidden_size]
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """``[num_rows, vocab_size]``, like vLLM's."""
        copy = self._copy_of(lm_head)
        logits: torch.Tensor | None = None
        is_plain = embedding_bias is None and not skip_gather
        if (
            copy is not None
            and is_plain
            and len(hidden_states) <= copy.max_rows
            and self._may_prefilter()
        ):
            logits = self._prefiltered(copy.prefilter, lm_head, hidden_states)
        if logits is None:
            logits = self.original(lm_head, hidden_states, embedding_bias, skip_gather)
        return logits

    def _copy_of(self, lm_head: Any) -> _Copy | None:
        """A copy of the head as it is now, if prefiltering it pays."""
        key = id(lm_head)
        copy = self._copies.get(key)
        is_old = copy is not None and (
            copy.prefilter.is_stale or copy.packed is not lm_head.cpu_linear
        )
        if key not in self._copies or is_old:
            is_worth_it = _is_worth_it(self.original, lm_head)
            copy = self._make_copy(lm_head) if is_worth_it else None
            self._copies[key] = copy
        return copy

    def _make_copy(self, lm_head: Any) -> _Copy:
        logger.info(
            "greedy requests: the head is prefiltered by a copy in 8 bits of %d MiB",
            lm_head.weight.numel() >> 20,
        )
        weight = lm_head.weight.data[: self.original.org_vocab_size]
        max_rows = math.inf if multiplies_all_rows() else MAX_FEW_ROWS
        return _Copy(make_prefilter(weight), lm_head.cpu_linear, max_rows)

    def _prefiltered(
        self, prefilter: Int8Prefilter, lm_head: Any, hidden_states: torch.Tensor
    ) -> torch.Tensor | None:
        """None where it is no use; then it is left for some steps, ever more."""
        if self._num_to_rest:
            self._num_to_rest -= 1
            return None
        logits = prefilter.logits(hidden_states, partial(self.original, lm_head))
        self._num_failed = self._num_failed + 1 if logits is None else 0
        if self._num_failed:
            self._num_to_rest = min(2**self._num_failed, _MAX_REST)
        return logits


def _is_worth_it(original: LogitsProcessor, lm_head: Any) -> bool:
    return (
        isinstance(lm_head, VocabParallelEmbedding)
        and isinstance(lm_head.quant_method, PLAIN_METHODS)
        and lm_head.tp_size == 1
        and lm_head.weight.numel() >= MIN_WEIGHTS
        and original.head_dtype in (None, lm_head.weight.dtype)
        and original.scale == 1.0
        and original.soft_cap is None
        and not original.logits_as_input
    )


def make_prefilter(
    # [vocab_size, hidden_size]
    weight: torch.Tensor,
) -> Int8Prefilter:
    """Copy a head in 8 bits."""
    token_ids = row_order(weight)
    takes_all = multiplies_all_rows()
    scale_dtype = torch.float32 if takes_all else FewRowsProduct.SCALE_DTYPE
    quantized = torch.empty(len(token_ids), weight.shape[1], dtype=torch.int8)
    scales, errors, sizes = torch.empty(3, len(token_ids), 1)
    for first in range(0, len(token_ids), _ROWS_AT_A_TIME):
        where = slice(first, first + _ROWS_AT_A_TIME)
        part = weight[token_ids[where]]
        quantized[where], scales[where] = quantize_rows(part, scale_dtype)
        norms = rounding_norms(part, quantized[where], scales[where])
        errors[where, 0], sizes[where, 0] = norms
    norms = RoundingNorms(errors[:, 0], sizes[:, 0])
    if takes_all:
        multiply = Int8Linear(quantized, scales, torch.float32).multiply_into
        return Int8Prefilter(multiply, norms, token_ids, weight)
    multiply = FewRowsProduct(quantized, scales).multiply_into
    return Int8Prefilter(multiply, norms, token_ids, weight, FewRowsProduct.ROUNDOFF)


def prefilter_head(runner: Any, model: nn.Module) -> None:
    """Let a target prefilter its head wherever its batch allows.

    Args:
        runner: vLLM's V1 model runner.
        model: Its target, whose weights are loaded.
    """
    may_prefilter = PlainlyGreedy(runner)
    if replace_logits_processors(
        model, lambda theirs: PrefilteredLogits(theirs, may_prefilter)
    ):
        # So that its head is known, and copied, before requests come.
        config = runner.model_config
        hidden = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype)
        model.compute_logits(hidden)  # type: ignore[operator]
