"""Random greedy steps, verified by Model Runner V2's rejection sampler and by ours."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_STEPS = 40
VOCAB_SIZE = 97
MAX_DRAFTS = 7


def compare_steps(order: dict[str, Any]) -> None:
    """Verify random steps both ways; in a fork."""
    from tests.kernels.greedy_steps import Request, step_of

    rng, seen = random.Random(order["seed"]), []
    theirs = _their_sampler(order["method"])
    for number in range(NUM_STEPS):
        requests = [
            Request(
                num_drafts := rng.choice((0, 1, 3, MAX_DRAFTS)),
                rng.randint(0, num_drafts + 1),
                rng.random() < 0.5,
                rng.choice((0, 0, 2)),
                rng.choice((0, 0, 0, 2)),
                rng.random() < 0.2,
            )
            for _ in range(rng.randint(1, 4))
        ]
        step = step_of(requests, seed=number)
        logits = _logits_of(step.target_token_ids, rng)
        batch = _batch_of(step)
        theirs.sampler.req_states.prefill_len.gpu = step.prefill_len
        seen.append(
            {
                "theirs": _tokens(theirs(logits, batch)),
                "ours": _tokens(_ours(theirs, logits, step, batch)),
            }
        )
    Path(order["result"]).write_text(json.dumps(seen))


def _logits_of(targets: Any, rng: random.Random) -> Any:
    """The target's choice is the largest, with others behind it that are as large."""
    import torch

    levels = [rng.uniform(-3.0, 3.0) for _ in range(len(targets) * VOCAB_SIZE)]
    logits = torch.tensor(levels).view(len(targets), VOCAB_SIZE)
    for row, target in enumerate(targets.tolist()):
        logits[row, target] = 4.0
        for _ in range(2):
            logits[row, rng.randint(target, VOCAB_SIZE - 1)] = 4.0
    return logits.bfloat16()


def _batch_of(step: Any) -> Any:
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    num_rows = len(step.logits_indices)
    mapping, positions = expand_idx_mapping(
        step.idx_mapping, num_rows, step.cu_num_logits, MAX_DRAFTS + 1
    )
    return SimpleNamespace(
        num_reqs=len(step.idx_mapping),
        num_draft_tokens=num_rows - len(step.idx_mapping),
        input_ids=step.input_ids,
        positions=step.positions,
        logits_indices=step.logits_indices,
        idx_mapping=step.idx_mapping,
        idx_mapping_np=step.idx_mapping.numpy(),
        expanded_idx_mapping=mapping,
        expanded_local_pos=positions,
        cu_num_logits=step.cu_num_logits,
        cu_num_logits_np=step.cu_num_logits.numpy(),
        seq_lens=step.seq_lens[: len(step.idx_mapping)],
        seq_lens_cpu_upper_bound=step.seq_lens,
    )


def _their_sampler(method: str) -> Any:
    """vLLM's, with as much of a sampler as it asks for."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.zeros(16), np=torch.zeros(16).numpy()),
        seeds=SimpleNamespace(gpu=torch.arange(16)),
        max_num_logprobs=lambda requests: -1,
    )
    sampler = SimpleNamespace(
        compute_nans=False,
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
        sampling_states=states,
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        use_fp64_gumbel=False,
        needs_logits_processing=torch.zeros(16, dtype=torch.bool).numpy(),
        get_logprobs_dims=lambda requests: None,
        apply_sampling_params=lambda logits, *others: logits,
    )
    config = SimpleNamespace(
        num_speculative_tokens=MAX_DRAFTS,
        enable_adaptive_verification=False,
        rejection_sample_method=method,
    )
    return RejectionSampler(sampler, config, torch.device("cpu"))


def _ours(theirs: Any, logits: Any, step: Any, batch: Any) -> Any:
    import torch

    from vllm_mtp.integration.v2.greedy_verification import GreedyVerification

    runner = SimpleNamespace(
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        speculator=SimpleNamespace(num_speculative_steps=MAX_DRAFTS),
        sampler=theirs.sampler,
        req_states=theirs.sampler.req_states,
        model=SimpleNamespace(compute_logits=lambda hidden_states: logits),
    )
    greedy = GreedyVerification(runner)
    output, num_sampled, num_rejected = greedy.sample(step.input_ids, batch)
    assert num_sampled is output.num_sampled
    assert num_rejected is output.num_rejected
    return output


def _tokens(output: Any) -> list[Any]:
    """What others read of an output: tokens as far as they count, and counts."""
    counts = output.num_sampled.tolist()
    rows = output.sampled_token_ids.tolist()
    tokens = [row[:count] for row, count in zip(rows, counts, strict=True)]
    return [tokens, counts, output.num_rejected.tolist()]
