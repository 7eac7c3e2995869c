"""Model Runner V1: the acceptance test of shadow drafts that were drawn.

While drafting is disabled the controller has shadow drafts made now and then, only to
see whether they would be accepted. A draft that was chosen greedily is compared with
what the target samples next. One that was drawn agrees with another draw less often
than it would be accepted: two draws from the same flat distribution hardly ever agree.
But the row from which the target samples next is the one that would have verified the
draft. So the draft is tested against it as verification would have done, for no row of
its own: accepted with the probability min(1, p / q).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_mtp.integration.v1.truncation import truncate


class ShadowTest:
    """Keeps the first draft token of each request for the step after it was drawn."""

    def __init__(self, device: torch.device) -> None:
        # One of its own: the tokens that are sampled do not depend on this test.
        self._generator = torch.Generator(device)
        self._generator.manual_seed(0)
        self._request_ids: Sequence[str] = ()
        self._token_ids: torch.Tensor | None = None
        self._chances: torch.Tensor | None = None
        self._accepted: dict[str, bool] = {}
        self._is_open = False
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

    def open(self, verifies_nothing: bool) -> None:
        """A step begins to sample.

        Args:
            verifies_nothing: Its rows follow the tokens that were drafted from.
        """
        self._is_open = verifies_nothing and self._token_ids is not None

    def test(
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
        if not self._is_open:
            return
        assert self._token_ids is not None
        assert self._chances is not None
        place_of = {name: place for place, name in enumerate(self._request_ids)}
        tested = [
            (name, row, place_of[name])
            for row, name in enumerate(request_ids)
            if name in place_of
        ]
        if not tested:
            return
        names, rows, places = zip(*tested, strict=True)
        device = logits.device
        chosen, drafted = (torch.tensor(i, device=device) for i in (rows, places))
        logits = logits[chosen].float()
        if top_k is not None or top_p is not None:
            logits = truncate(logits, _of(top_k, chosen), _of(top_p, chosen))
        asked = self._token_ids[drafted].long()
        of_token = logits.gather(1, asked[:, None])[:, 0]
        wanted = (of_token - logits.logsumexp(dim=-1)).exp()
        uniforms = torch.rand(len(names), generator=self._generator, device=device)
        accepted = uniforms * self._chances[drafted] < wanted
        self._accepted = dict(zip(names, accepted.tolist(), strict=True))

    def close(self) -> None:
        """The step has sampled: later rows follow other tokens."""
        self._is_open = False
        self._token_ids = self._chances = None

    def take(self) -> Mapping[str, bool]:
        """Whether each draft would have been accepted; empty where none was tested."""
        accepted, self._accepted = self._accepted, {}
        return accepted


def show_sampled_rows(runner: Any, shadow_test: ShadowTest) -> None:
    """Let a runner's sampler show the rows that it samples from.

    Args:
        runner: vLLM's V1 model runner.
        shadow_test: Of its drafter.
    """
    draws = runner.sampler.topk_topp_sampler
    # vLLM keeps what fits the device on the sampler itself, not on its class.
    draw = draws.forward

    def test_and_draw(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        shadow_test.test(logits, k, p, runner.input_batch.req_ids)
        return draw(logits, generators, k, p)

    draws.forward = test_and_draw


def _of(values: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[rows]
