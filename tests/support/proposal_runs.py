"""Drafts drawn from a draft vocabulary, verified by Model Runner V2's kernels.

Under Triton's interpreter, in a fork, by our rejection sampler, which reads columns of
the draft vocabulary, and by vLLM's, which reads the same proposals over the whole one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB_SIZE = 7
LISTED = (6, 2, 1, 4)
"""Tokens that drafts may be."""
OTHERS = (0, 3, 5, 1)
MAX_DRAFTS = 2
TEMPERATURE = 0.8
TOP_K = 3

Text = tuple[int, ...]
Bug = Callable[["Engine"], None]


def target() -> np.ndarray:
    """``[places, VOCAB_SIZE, VOCAB_SIZE]``: logits by place and token before."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(MAX_DRAFTS + 1, VOCAB_SIZE, VOCAB_SIZE))


def exact(num_tokens: int) -> dict[Text, float]:
    """Probability of each text of so many tokens."""
    probabilities: dict[Text, float] = {(): 1.0}
    for logits in target()[:num_tokens]:
        probabilities = {
            (*text, token): known * share
            for text, known in probabilities.items()
            for token, share in enumerate(_softmax(logits[text[-1] if text else 0]))
        }
    return probabilities


def complete(texts: list[list[int]], num_tokens: int) -> list[Text]:
    """As the target goes on; cut where there are more."""
    rng, logits = np.random.default_rng(3), target()
    whole = []
    for text in texts:
        while len(text) < num_tokens:
            shares = _softmax(logits[len(text)][text[-1]])
            text.append(int(rng.choice(VOCAB_SIZE, p=shares)))
        whole.append(tuple(text[:num_tokens]))
    return whole


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits / TEMPERATURE)
    return weights / weights.sum()


def compare(order: dict[str, Any]) -> None:
    """Verify one batch by both samplers, then by ours with each bug."""
    texts, num_drafts = {}, [2, 1, 0, 2, 2, 1, 2, 2]
    for method in ("standard", "block"):
        for name in ("", "theirs", *(BUGS if method == "block" else ())):
            engine = Engine(method, num_drafts, is_mixed=True)
            texts[f"{method} {name}".strip()] = engine.verify(name)
        for name in ("", "theirs", COPIES_UNSEEN):
            copied = Engine(method, num_drafts, is_mixed=True, num_drawn=1)
            texts[f"{method} copied {name}".strip()] = copied.verify(name)
    result = {"texts": texts, "num_columns": engine.num_columns()}
    Path(order["result"]).write_text(json.dumps(result))


def sample(order: dict[str, Any]) -> None:
    """Verify many requests that are all alike but for their seeds."""
    engine = Engine(
        order["method"],
        [MAX_DRAFTS] * order["num_requests"],
        num_drawn=order.get("num_drawn", MAX_DRAFTS),
    )
    Path(order["result"]).write_text(json.dumps(engine.verify(order["bug"])))


class Engine:
    """What a worker has after a draft pass."""

    def __init__(
        self,
        method: str,
        num_drafts: list[int],
        *,
        is_mixed: bool = False,
        num_drawn: int = MAX_DRAFTS,
    ) -> None:
        """Draw the drafts.

        Args:
            method: Of rejection sampling.
            num_drafts: Of each request.
            is_mixed: Requests are in other places of the batch than of vLLM's states,
                differ in temperature and proposals, and some are greedy.
            num_drawn: Draft tokens that were; others were copied.
        """
        import torch

        from vllm_mtp.drafting.vocabulary import DraftVocabulary, Shard
        from vllm_mtp.integration.v2.proposals import Proposals

        self.num_drafts, self.is_mixed = num_drafts, is_mixed
        num_reqs = len(num_drafts)
        device = torch.device("cpu")
        self.requests = torch.arange(num_reqs)
        temperature = torch.full((num_reqs,), TEMPERATURE)
        if is_mixed:
            self.requests = self.requests * 3 % num_reqs
            temperature = torch.tensor([0.8, 1.3, 0.0, 2.0] * 2)
        self.states = _states(temperature)
        self.theirs, self.ours = _samplers(method, self.states)
        self.vocabulary = DraftVocabulary(
            len(LISTED), [Shard(0, VOCAB_SIZE)], (), device
        )
        self.vocabulary.prefer(LISTED)
        self.proposals = self.ours.proposals = Proposals(
            (num_reqs, MAX_DRAFTS), VOCAB_SIZE, self.vocabulary, torch.float32, device
        )
        self.drafts = self._draw()
        values = self.proposals.logits.flatten(0, 1)
        whole = self.vocabulary.spread(values, -torch.inf)
        self.whole = whole.view(num_reqs, MAX_DRAFTS, VOCAB_SIZE)
        if num_drawn < MAX_DRAFTS:
            self._copy_behind(num_drawn)

    def _copy_behind(self, num_drawn: int) -> None:
        """Copy the draft tokens behind some: any tokens, listed or not."""
        import torch

        from vllm_mtp.integration.v2.proposals import DrawnDrafts

        counts = torch.full((len(self.requests),), num_drawn, dtype=torch.int32)
        self.proposals.drawn = DrawnDrafts(counts.numpy(), counts)
        for step in range(num_drawn, MAX_DRAFTS):
            copies = (self.drafts[:, step - 1] + COPIED_AFTER) % VOCAB_SIZE
            self.drafts[:, step] = copies
            certain = torch.full((len(copies), VOCAB_SIZE), -torch.inf)
            certain.scatter_(1, copies[:, None], 0.0)
            self.whole[self.requests, step] = certain

    def verify(self, name: str) -> list[list[int]]:
        """Tokens of each request: by vLLM's sampler, or by ours with a bug or none."""
        sampler, cached = self.ours, self.proposals.logits
        if name == "theirs":
            sampler, cached = self.theirs, self.whole
        elif name:
            (BUGS | COPY_BUGS)[name](self)
        output = sampler(self._target_rows(), self._batch(), cached, None)
        tokens, counts = output.sampled_token_ids.tolist(), output.num_sampled.tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]

    def num_columns(self) -> dict[str, list[int]]:
        """Columns that drafts could be drawn from, of greedy requests and others."""
        counts = self.proposals.logits.isfinite().sum(dim=-1)
        is_greedy = self.states.temperature.gpu == 0.0
        return {
            "greedy": counts[is_greedy].flatten().tolist(),
            "sampled": counts[~is_greedy].flatten().tolist(),
        }

    def _draw(self) -> Any:
        """``[num_reqs, MAX_DRAFTS]`` token ids, as the speculator draws them."""
        import torch
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        num_reqs, temperature = len(self.requests), self.states.temperature.gpu
        self.proposals.begin_pass(self.states, self.requests.numpy())
        rng, drafts = np.random.default_rng(11), []
        for step in range(MAX_DRAFTS):
            logits = torch.from_numpy(rng.normal(size=(num_reqs, len(LISTED)))).float()
            if not self.is_mixed:
                logits = logits[:1].repeat(num_reqs, 1)
            self.proposals.truncate(logits, self.requests, temperature)
            chosen = gumbel_sample(
                logits,
                self.requests,
                temperature,
                self.states.seeds.gpu,
                torch.full((num_reqs,), 40 + step),
                apply_temperature=True,
                is_drafting=True,
                logits_cache=self.proposals.logits,
                logits_cache_col=torch.tensor(step),
            )
            drafts.append(self.vocabulary.to_target(chosen))
        return torch.stack(drafts, 1)

    def _target_rows(self) -> Any:
        import torch

        logits, rows = torch.from_numpy(target()).float(), []
        for drafts, count, request in zip(
            self.drafts, self.num_drafts, self.requests, strict=True
        ):
            heat = float(self.states.temperature.gpu[request]) or 1.0
            before = [0, *drafts[:count].tolist()]
            rows += [logits[i, token] / heat for i, token in enumerate(before)]
        return torch.stack(rows)

    def _batch(self) -> Any:
        """vLLM's ``InputBatch`` of requests that generate."""
        import torch

        widths = torch.tensor(self.num_drafts) + 1
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)]).int()
        places = torch.cat([torch.arange(width) for width in widths.tolist()])
        tokens = [
            token
            for drafts, count in zip(self.drafts, self.num_drafts, strict=True)
            for token in (0, *drafts[:count].tolist())
        ]
        lengths = torch.full((len(widths),), 60, dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=len(widths),
            num_draft_tokens=sum(self.num_drafts),
            num_draft_tokens_per_req=np.array(self.num_drafts, dtype=np.int32),
            input_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=50 + places,
            logits_indices=torch.arange(len(tokens)),
            idx_mapping=self.requests,
            idx_mapping_np=self.requests.numpy(),
            expanded_idx_mapping=self.requests.repeat_interleave(widths),
            expanded_local_pos=places.int(),
            cu_num_logits=starts,
            cu_num_logits_np=starts.numpy(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
        )


def _states(temperature: Any) -> SimpleNamespace:
    """As much of vLLM's ``SamplingStates`` as is asked for."""
    import torch

    def both(values: Any) -> SimpleNamespace:
        return SimpleNamespace(gpu=values, np=values.numpy())

    num_reqs = len(temperature)
    return SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        temperature=both(temperature),
        seeds=both(torch.arange(num_reqs) * 7919),
        top_k=both(torch.full((num_reqs,), TOP_K, dtype=torch.int32)),
        top_p=both(torch.ones(num_reqs)),
        min_p=both(torch.zeros(num_reqs)),
        max_num_logprobs=lambda requests: -1,
    )


def _samplers(method: str, states: Any) -> tuple[Any, Any]:
    """vLLM's and ours."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_mtp.integration.v2.rejection_sampler import MTPPlusRejectionSampler

    prefill_len = torch.full((len(states.seeds.gpu),), 20, dtype=torch.int32)
    sampler = SimpleNamespace(
        compute_nans=False,
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=prefill_len)),
        sampling_states=states,
        logprob_token_ids_state=SimpleNamespace(max_num_token_ids=lambda requests: 0),
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        use_fp64_gumbel=False,
        apply_sampling_params=lambda logits, *others: logits,
    )
    config = SimpleNamespace(
        num_speculative_tokens=MAX_DRAFTS,
        enable_adaptive_verification=False,
        rejection_sample_method=method,
    )
    device = torch.device("cpu")
    return tuple(
        kind(sampler, config, device)
        for kind in (RejectionSampler, MTPPlusRejectionSampler)
    )


def _move_rows(engine: Engine) -> None:
    engine.vocabulary.prefer(OTHERS)


def _believe_moved_rows(engine: Engine) -> None:
    _move_rows(engine)
    engine.proposals.outdated_rows = lambda batch: None


def _read_the_first_step(engine: Engine) -> None:
    of_rows = engine.proposals.of_rows
    engine.proposals.of_rows = lambda mapping, steps: of_rows(mapping, 0 * steps)


def _read_by_place(engine: Engine) -> None:
    of_rows = engine.proposals.of_rows
    engine.proposals.of_rows = lambda mapping, steps: of_rows(
        mapping.sort().values, steps
    )


def _spread_by_rank(engine: Engine) -> None:
    engine.vocabulary.token_ids = engine.vocabulary.token_ids.roll(1)


def _believe_copies_were_drawn(engine: Engine) -> None:
    engine.proposals.drawn = None


def _fill_with_zeros(engine: Engine) -> None:
    spread = engine.vocabulary.spread
    engine.vocabulary.spread = lambda values, fill: spread(values, 0.0)


COPIED_AFTER = 1
"""A token is followed by the one so much further."""
COPIES_UNSEEN = "copies are taken for drawn ones"
MOVED = "rows moved"
"""No bug: drafts of other rows are rejected unseen."""
BUGS: dict[str, Bug] = {
    "rows moved and are believed": _believe_moved_rows,
    "proposal of another step": _read_the_first_step,
    "proposal of another request": _read_by_place,
    "columns in another order": _spread_by_rank,
    "rest of the vocabulary proposed": _fill_with_zeros,
    MOVED: _move_rows,
}
COPY_BUGS: dict[str, Bug] = {COPIES_UNSEEN: _believe_copies_were_drawn}
