"""Model Runner V1: drawn drafts that are not verified stand the acceptance test, too.

While drafting is off the controller has something drafted now and then, only to see
whether it would be accepted. A draft that was chosen greedily is compared with what the
target samples next. One that was drawn agrees with another draw less often than it
would be accepted: two draws from the same flat distribution hardly ever agree. But the
row from which the target samples next is the one that would have verified the draft. So
the draft is tested against it as verification would have done, for no row of its own:
accepted with the probability min(1, p / q).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


class DraftJudge:
    """Keeps the first draft token of each request for the step after it was drawn."""

    def __init__(self, device: torch.device) -> None:
        # One of its own: the tokens that are sampled do not depend on who judges.
        self._generator = torch.Generator(device)
        self._generator.manual_seed(0)
        self._request_ids: Sequence[str] = ()
        self._token_ids: torch.Tensor | None = None
        self._chances: torch.Tensor | None = None
        self._verdicts: dict[str, bool] = {}
        self.is_open = False
        """The rows of the sampler's next call are those that follow the drafts."""

    def begin_pass(self, request_ids: Sequence[str]) -> None:
        """A draft pass begins.

        Args:
            request_ids: Of the rows that it will draft for.
        """
        self._request_ids = tuple(request_ids)
        self._token_ids = self._chances = None

    def drawn(
        self,
        # [num_requests] int64, of the target's vocabulary
        token_ids: torch.Tensor,
        # [num_requests]: probability of each in the proposal
        chances: torch.Tensor,
    ) -> None:
        """Take note of a draft step's tokens; those after the first do not count."""
        if self._token_ids is None:
            self._token_ids, self._chances = token_ids, chances

    @property
    def has_drafts(self) -> bool:
        return self._token_ids is not None

    def judge(
        self,
        # [num_requests, vocab_size], processed but for top-k and top-p
        logits: torch.Tensor,
        # [num_requests] each
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        request_ids: Sequence[str],
    ) -> None:
        """Test the drafts of those that are still there.

        Args:
            logits: Of the tokens after the committed ones; left as they are.
            top_k: Of each row.
            top_p: Of each row.
            request_ids: Of each row.
        """
        assert self._token_ids is not None
        assert self._chances is not None
        place_of = {name: place for place, name in enumerate(self._request_ids)}
        judged = [
            (name, row, place_of[name])
            for row, name in enumerate(request_ids)
            if name in place_of
        ]
        if not judged:
            return
        names, rows, places = zip(*judged, strict=True)
        device = logits.device
        chosen, drafted = (torch.tensor(i, device=device) for i in (rows, places))
        logits = logits[chosen].float()
        if top_k is not None or top_p is not None:
            logits = apply_top_k_top_p(logits, _of(top_k, chosen), _of(top_p, chosen))
        asked = self._token_ids[drafted].long()
        of_token = logits.gather(1, asked[:, None])[:, 0]
        wanted = (of_token - logits.logsumexp(dim=-1)).exp()
        uniforms = torch.rand(len(names), generator=self._generator, device=device)
        accepted = uniforms * self._chances[drafted] < wanted
        self._verdicts = dict(zip(names, accepted.tolist(), strict=True))

    def close(self) -> None:
        """The step has sampled: later rows follow other tokens."""
        self.is_open = False
        self._token_ids = self._chances = None

    def take_verdicts(self) -> Mapping[str, bool]:
        """Whether each draft would have been accepted; empty where none was tested."""
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts


def judge_unverified(runner: Any, judge: DraftJudge) -> None:
    """Let a runner's sampler show its rows, in steps that verify nothing.

    Args:
        runner: vLLM's V1 model runner.
        judge: Of its drafter.
    """
    draws = runner.sampler.topk_topp_sampler
    draw, sample = draws.forward, runner._sample

    def judge_and_draw(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        if judge.is_open:
            judge.judge(logits, k, p, runner.input_batch.req_ids)
        return draw(logits, generators, k, p)

    def sample_of_step(logits: Any, spec_decode_metadata: Any) -> Any:
        verifies = (
            spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
        )
        judge.is_open = judge.has_drafts and not verifies
        try:
            return sample(logits, spec_decode_metadata)
        finally:
            judge.close()

    draws.forward = judge_and_draw
    runner._sample = sample_of_step


def _of(values: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[rows]
