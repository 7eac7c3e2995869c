"""Model Runner V1: logprobs of a batch in which some ask for listed tokens.

A workaround of vLLM 0.32 and 0.33 (docs/upstream/logprob-token-ids.md). Where one
request of a batch has ``logprob_token_ids``, vLLM's sampler answers all others with
them, too: those that asked for the likeliest tokens get padding. With speculation the
engine dies, since the rows of draft tokens are not those of requests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from vllm_mtp.integration.load.compat import check_attributes


def gather_logprobs(
    # [num_rows, vocab_size]
    logprobs: torch.Tensor,
    # [num_rows] int64
    sampled: torch.Tensor,
    num_logprobs: int | None,
    token_ids: Mapping[int, Sequence[int]],
) -> LogprobsTensors:
    """Each row's sampled token, then what its request asked for.

    Args:
        logprobs: Or logits, if those are wanted.
        sampled: Token of each row.
        num_logprobs: Likeliest tokens that the most demanding request wants.
        token_ids: Of rows that list tokens instead.
    """
    all_listed = len(token_ids) == len(sampled)
    num_likeliest = 0 if all_listed else num_logprobs or 0
    likeliest = Sampler.gather_logprobs(logprobs, num_likeliest, sampled)
    if not token_ids:
        return likeliest
    ids, _, ranks, *rest = likeliest
    width = 1 + max(num_likeliest, *map(len, token_ids.values()))
    # Padded with what the answer has anyhow.
    asked = torch.cat([ids.long(), sampled[:, None].repeat(1, width - ids.shape[1])], 1)
    for row, listed in token_ids.items():
        if listed:
            asked[row, 1:] = listed[-1]
            asked[row, 1 : len(listed) + 1] = asked.new_tensor(listed)
    return LogprobsTensors(asked.to(ids.dtype), logprobs.gather(1, asked), ranks, *rest)


def answer_each_request(runner: Any) -> None:
    """Let a runner's sampler, which verifies nothing, answer so, too.

    Args:
        runner: vLLM's V1 model runner.
    """
    check_attributes(runner.sampler, ("gather_specific_token_logprobs",))

    def gather(
        logprobs: torch.Tensor,
        logprob_token_ids: dict[int, list[int]],
        sampled: torch.Tensor,
    ) -> LogprobsTensors:
        num_logprobs = runner.input_batch.sampling_metadata.max_num_logprobs
        return gather_logprobs(logprobs, sampled, num_logprobs, logprob_token_ids)

    runner.sampler.gather_specific_token_logprobs = gather
