"""The draft head: the rows of the target's head that the draft vocabulary names.

All MTP models of vLLM hand their head and a hidden state to a ``LogitsProcessor``. Ours
takes its place, and hands on the draft head instead: an object with as much of
``ParallelLMHead`` as ``LogitsProcessor`` asks for, so that scale, soft cap, head dtype
and the gathering over ranks stay vLLM's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_mtp.drafting.vocabulary import DraftVocabulary, Shard
from vllm_mtp.integration.cpu.int8_weights import (
    Multiply,
    is_large,
    make_int8,
    quantize_rows,
)

PLAIN_METHODS = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
_COLUMNS_AT_A_TIME = 256


class _ShardIndices(NamedTuple):
    """What ``LogitsProcessor.get_top_tokens`` asks of a shard."""

    org_vocab_start_index: int
    num_org_vocab_padding: int = 0


def shards_of(head: VocabParallelEmbedding) -> list[Shard]:
    """The token ids of each rank's rows of a head."""
    shards = []
    for rank in range(head.tp_size):
        indices = head._get_indices(
            head.num_embeddings_padded,
            head.org_vocab_size_padded,
            head.num_embeddings,
            head.org_vocab_size,
            rank,
            head.tp_size,
        )
        shards.append(Shard(indices.org_vocab_start_index, indices.org_vocab_end_index))
    return shards


class DraftHead(nn.Module):
    """This rank's rows of the draft vocabulary."""

    weight: torch.Tensor
    cpu_linear: Multiply

    def __init__(
        self,
        head: VocabParallelEmbedding,
        vocabulary: DraftVocabulary,
        is_int8: bool = False,
    ) -> None:
        """Copy the rows; they follow the vocabulary from now on.

        Args:
            head: The target's head or the MTP layer's own, loaded.
            vocabulary: Names the rows.
            is_int8: Multiply by them in 8 bits, if that pays; on a CPU only.
        """
        super().__init__()
        self.tp_size = head.tp_size
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_rank = head.tp_rank
        self._first_id = shards_of(head)[head.tp_rank].first
        # Not a submodule: its weights are another's.
        self._read_rows: Callable[[torch.Tensor], torch.Tensor] = lambda rows: _rows_of(
            head, rows
        )
        self._vocabulary = vocabulary
        self._is_int8 = is_int8
        self._int8: tuple[torch.Tensor, torch.Tensor] | None = None
        """Rows in 8 bits and their scales."""
        self.register_buffer("weight", torch.empty(0), False)
        self._begin_anew()
        vocabulary.on_rows_changed.append(self._follow)

    def bias_of(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The rows' part of the head's bias."""
        if bias is None:
            return None
        return bias[self._vocabulary.token_ids[self._own] - self._first_id]

    def _read(
        self,
        # [num_rows] int64, of this rank's shard
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        return self._read_rows(token_ids - self._first_id)

    def _begin_anew(self) -> None:
        """Read all rows, however many the vocabulary has by now."""
        num_rows = self._vocabulary.num_rows // self.tp_size
        first_row = self.tp_rank * num_rows
        self.shard_indices = _ShardIndices(first_row)
        self._own = slice(first_row, first_row + num_rows)
        self.weight = self._read(self._vocabulary.token_ids[self._own])
        is_int8 = self._is_int8 and is_large(self.weight)
        self._int8 = quantize_rows(self.weight) if is_int8 else None
        self._pack()

    def copy_anew(self) -> None:
        """The head's weights have changed: in place, since graphs hold the copy."""
        self.weight.copy_(self._read(self._vocabulary.token_ids[self._own]))
        if self._int8 is not None:
            self._int8 = quantize_rows(self.weight)
        self._pack()

    def _follow(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        if self._vocabulary.num_rows != self.weight.shape[0] * self.tp_size:
            self._begin_anew()
            return
        if slots.is_cuda:  # all of them; asking which are ours would wait
            self.weight.copy_(self._read(token_ids[self._own]))
            return
        is_own = (slots >= self._own.start) & (slots < self._own.stop)
        if is_own.any():
            places = slots[is_own] - self._own.start
            self.weight[places] = rows = self._read(token_ids[is_own])
            if self._int8 is not None:
                for kept, new in zip(self._int8, quantize_rows(rows), strict=True):
                    kept[places] = new
            self._pack()

    def _pack(self) -> None:
        """On a CPU: a copy that lies as its matrix units like it, as of any layer.

        Anew whenever a row has changed, which takes as long as a few draft steps and
        happens once in 64 at most. Multiplying by the plain rows took longer than by
        all of a packed head, for 8 requests.
        """
        if self._int8 is not None:
            self.cpu_linear = make_int8(
                *self._int8, self.weight.dtype, self._pack_plain
            )
        elif self.weight.device.type == "cpu":
            self.cpu_linear = self._pack_plain()

    def _pack_plain(self) -> Multiply:
        dispatch_cpu_unquantized_gemm(self, remove_weight=False)
        packed: Multiply = self.cpu_linear
        return packed


def _rows_of(head: Any, rows: torch.Tensor) -> torch.Tensor:
    """``[num_rows, hidden_size]`` of a head, whatever form its weights have."""
    if isinstance(head.quant_method, PLAIN_METHODS):
        return head.weight[rows]
    # What a head makes of the unit vectors are its columns.
    size, device = head.embedding_dim, rows.device
    columns = []
    for first in range(0, size, _COLUMNS_AT_A_TIME):
        units = torch.zeros(
            min(_COLUMNS_AT_A_TIME, size - first),
            size,
            dtype=head.params_dtype,
            device=device,
        )
        units[:, first:].fill_diagonal_(1.0)
        columns.append(head.quant_method.apply(head, units, bias=None)[:, rows])
    return torch.cat(columns).t().contiguous()


class HeadChoice(Protocol):
    """What draft logits are to be of."""

    takes_top_tokens: bool
    """Ask for the best choice of each row instead of its logits: over ranks two
    numbers travel for each row, not all of its logits."""

    def head_for(self, head: Any) -> DraftHead | None:
        """The draft head to use for a head now; None for itself."""

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits, without tokens that cannot come."""


class DraftLogits(nn.Module):
    """Takes the place of a draft model's ``LogitsProcessor``."""

    def __init__(self, original: LogitsProcessor, choice: HeadChoice) -> None:
        """Nothing changes until a draft head is given out.

        Args:
            original: vLLM's, of the draft model.
            choice: Asked at every draft step.
        """
        super().__init__()
        self.original = original
        self._choice = choice

    def forward(
        self,
        lm_head: Any,
        # [num_rows, hidden_size]
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """``[num_rows, size of the draft vocabulary]``, or of the whole one.

        Where top tokens are taken: ``[num_rows]`` int64.
        """
        if self._choice.takes_top_tokens:
            return self.get_top_tokens(lm_head, hidden_states, embedding_bias)
        head, bias = self._choose(lm_head, embedding_bias)
        logits = self.original(head, hidden_states, bias, skip_gather)
        return None if logits is None else self._choice.mask(logits)

    def get_top_tokens(
        self,
        lm_head: Any,
        # [num_rows, hidden_size]
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[num_rows]`` int64: rows of the draft vocabulary, or token ids."""
        head, bias = self._choose(lm_head, embedding_bias)
        return self.original.get_top_tokens(head, hidden_states, bias)

    def _choose(
        self, lm_head: Any, bias: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None]:
        head = self._choice.head_for(lm_head)
        return (lm_head, bias) if head is None else (head, head.bias_of(bias))


def replace_logits_processors(
    model: nn.Module, make_ours: Callable[[LogitsProcessor], nn.Module]
) -> list[LogitsProcessor]:
    """Put ours in the place of every ``LogitsProcessor`` of a model.

    Returns:
        Those that were there.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, LogitsProcessor)
    ]
    for parent, name, child in found:
        setattr(parent, name, make_ours(child))
    return [child for _, _, child in found]
