"""Model Runner V1: proposals that resemble what the target will sample from."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.temperature import DraftTemperature
from vllm_mtp.integration.v1.logits_processors import min_p_of
from vllm_mtp.integration.v1.truncation import truncate
from vllm_mtp.integration.worker.draft_sampling import draws_drafts
from vllm_mtp.verification.drawing import draw

_GREEDY_TEMPERATURE = 1e-5


_MAX_PROPOSAL_BYTES = 256 * 2**20
"""Of a step's draft distributions, for which no memory was set apart. Larger ones, of
many requests over a whole vocabulary, are not kept, and drafts are chosen instead."""


class DrawsLikeTarget(SpecDecodeBaseProposer):
    """Mixin of drafters: sampled requests get drafts drawn with their own parameters.

    vLLM applies the temperature alone. A request's top-k, top-p and min-p cut off
    tokens that the target will never sample, so a draft of them is wasted. And it draws
    noise for every token of the vocabulary (`draw`).
    """

    draft_temperature: DraftTemperature

    @property
    def num_draft_columns(self) -> int:
        """Of draft logits now."""
        return int(self.draft_model_config.get_vocab_size())

    def prepare_to_draw(self) -> None:
        self.draft_temperature = DraftTemperature()
        self._enable_probabilistic_draft_probs = draws_drafts(self.vllm_config)

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_values = len(hidden_states) * self.num_draft_columns
        num_bytes = 4 * num_values * self.num_speculative_tokens
        if num_bytes > _MAX_PROPOSAL_BYTES:
            return self._greedy_sample(hidden_states), None
        return super()._sample_draft_tokens(hidden_states, sampling_metadata)

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choices, and the distribution that each was drawn from."""
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return super()._sample_from_logits(logits, sampling_metadata)
        probs = _sure_where_unknown(self._proposal(logits, sampling_metadata))
        uniforms = torch.rand(len(probs), dtype=torch.float64, device=probs.device)
        choices = draw(probs, uniforms)
        if not sampling_metadata.all_random:
            is_greedy = sampling_metadata.temperature < _GREEDY_TEMPERATURE
            choices = torch.where(is_greedy, probs.argmax(dim=-1), choices)
        _choose_for_seeds(choices, probs, sampling_metadata.generators)
        return choices, probs

    def _proposal(
        self,
        # [num_requests, rows of the draft vocabulary], changed in place
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> torch.Tensor:
        """Distribution that each request's draft is drawn from, as wide."""
        temperature = sampling_metadata.temperature[:, None]
        temperature = temperature.masked_fill(temperature < _GREEDY_TEMPERATURE, 1.0)
        scaled = logits.float().div_(self.draft_temperature.factor * temperature)
        min_p = min_p_of(sampling_metadata)
        if min_p is not None:
            min_p.apply(scaled)
        top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
        if top_k is not None:  # unset it is the size of the whole vocabulary
            top_k = top_k.clamp(max=logits.shape[1])
        return truncate(scaled, top_k, top_p).softmax(dim=-1)


def _sure_where_unknown(
    # [num_requests, rows of the draft vocabulary], changed in place
    probs: torch.Tensor,
) -> torch.Tensor:
    """The same, but the first token for sure where broken weights gave no numbers.

    One NaN or infinity among logits makes NaN of the whole row. It must not reach the
    acceptance test, which takes the proposal out of the target's distribution.
    """
    is_unknown = probs[:, 0].isnan()
    if probs.is_cuda or is_unknown.any():  # where it would wait for the GPU: always
        probs.masked_fill_(is_unknown[:, None], 0.0)
        probs[:, 0].masked_fill_(is_unknown, 1.0)
    return probs


def _choose_for_seeds(
    # [num_requests] int64
    choices: torch.Tensor,
    # [num_requests, rows of the draft vocabulary]
    probs: torch.Tensor,
    generators: Mapping[int, torch.Generator],
) -> None:
    """Requests with a seed get the likeliest tokens, in place: nothing random."""
    if not generators:
        return
    rows = torch.tensor(list(generators), device=choices.device)
    likeliest = probs[rows].argmax(dim=-1)
    choices[rows] = likeliest
    probs[rows] = 0.0
    probs[rows, likeliest] = 1.0
