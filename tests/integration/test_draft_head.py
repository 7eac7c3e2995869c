"""The draft head has the target's rows, whatever form they are in, on every rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.integration.cpu import int8_weights
from vllm_mtp.integration.cpu.int8_drafts import has_kernel
from vllm_mtp.integration.draft_vocab.head import DraftHead, shards_of

VOCAB_SIZE, HIDDEN_SIZE, NUM_ROWS = 1000, 320, 256
WEIGHT = torch.randn(1024, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))


class Quantized:
    """Weights that can only be multiplied by."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return x @ self._weight.t()


def head(rank: int, num_ranks: int, *, is_quantized: bool = False) -> Any:
    """A rank's part of a head with 24 rows of padding at the end."""
    num_padded = 1024
    per_rank = num_padded // num_ranks
    weight = WEIGHT[rank * per_rank : (rank + 1) * per_rank].clone()
    method = Quantized(weight) if is_quantized else UnquantizedEmbeddingMethod()
    found = SimpleNamespace(
        tp_rank=rank,
        tp_size=num_ranks,
        num_embeddings=VOCAB_SIZE,
        num_embeddings_padded=num_padded,
        org_vocab_size=VOCAB_SIZE,
        org_vocab_size_padded=num_padded,
        embedding_dim=HIDDEN_SIZE,
        params_dtype=torch.float32,
        quant_method=method,
        _get_indices=VocabParallelEmbedding._get_indices,
    )
    if not is_quantized:
        found.weight = weight
    return found


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_its_rows_are_the_vocabularys_now_and_later(
    num_ranks: int, is_quantized: bool
) -> None:
    heads = [head(r, num_ranks, is_quantized=is_quantized) for r in range(num_ranks)]
    shards = shards_of(heads[0])
    assert shards[-1].end == VOCAB_SIZE
    vocabulary = DraftVocabulary(NUM_ROWS, shards, {5}, torch.device("cpu"))
    draft_heads = [DraftHead(each, vocabulary) for each in heads]
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        rows = torch.cat([each.weight for each in draft_heads])
        torch.testing.assert_close(rows, WEIGHT[vocabulary.token_ids])
        hidden = torch.randn(3, HIDDEN_SIZE, generator=generator)
        logits = [each.quant_method.apply(each, hidden) for each in draft_heads]
        # Other kernels add in another order.
        whole = hidden @ rows.t()
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-4, atol=1e-4)
        seen = torch.randint(0, VOCAB_SIZE, (600,), generator=generator)
        vocabulary.observe(seen)
        vocabulary.refresh()
        if number == 1:
            vocabulary.resize(NUM_ROWS // 2)
    starts = [each.shard_indices.org_vocab_start_index for each in draft_heads]
    assert starts == [rank * NUM_ROWS // 2 // num_ranks for rank in range(num_ranks)]


def test_a_bias_is_that_of_the_rows() -> None:
    heads = [head(rank, 2) for rank in range(2)]
    vocabulary = DraftVocabulary(
        NUM_ROWS, shards_of(heads[0]), set(), torch.device("cpu")
    )
    bias = torch.arange(1024.0)
    found = torch.cat(
        [
            DraftHead(each, vocabulary).bias_of(bias[512 * rank : 512 * (rank + 1)])
            for rank, each in enumerate(heads)
        ]
    )
    assert torch.equal(found, bias[vocabulary.token_ids])
    assert DraftHead(heads[0], vocabulary).bias_of(None) is None


@pytest.mark.skipif(not has_kernel(), reason="no AVX2, or AMX")
def test_rows_in_8_bits_follow_the_vocabulary_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8_weights, "MIN_WEIGHTS", NUM_ROWS * HIDDEN_SIZE)
    whole = head(0, 1)
    vocabulary = DraftVocabulary(NUM_ROWS, shards_of(whole), {5}, torch.device("cpu"))
    rounded = DraftHead(whole, vocabulary, is_int8=True)
    generator = torch.Generator().manual_seed(1)
    met = set()
    for number in range(4):
        hidden = torch.randn(3, HIDDEN_SIZE, generator=generator)
        found = rounded.quant_method.apply(rounded, hidden)
        wanted = hidden @ WEIGHT[vocabulary.token_ids].t()
        # After the second round they are too few to be rounded.
        least, most = (1e-4, 0.02) if number < 2 else (0.0, 1e-5)
        assert least <= (found - wanted).norm() / wanted.norm() < most
        met.add(tuple(vocabulary.token_ids.tolist()))
        vocabulary.observe(torch.randint(0, VOCAB_SIZE, (600,), generator=generator))
        vocabulary.refresh()
        if number == 1:
            vocabulary.resize(NUM_ROWS // 2)
    assert len(met) == 4
