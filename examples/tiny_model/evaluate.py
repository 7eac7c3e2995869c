"""Acceptance of the MTP layer, measured without vLLM, on text the trunk wrote.

One forward pass tells what every step of a speculative run would have done,
because with a text y drawn from the target (at temperature 0: its greedy
choice), verification can be replayed on y:

- a greedy draft token is accepted with the target's probability of it, which
  is the probability that y has just this token there: accepted = equal;
- a draft token drawn from q, given that the step commits y's token, was
  accepted with probability min(p, q) / p of that token.

As long as drafts are accepted they are y's own tokens, so the layer fed with
y's tokens is the layer of the real run (see `MTPLayer.unroll`).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from examples.tiny_model.model import DecoderLayer, MiMoModel

DraftMethod = Literal["greedy", "probabilistic"]


class AcceptanceCount(NamedTuple):
    """Counts of one run, as vLLM's counters give them.

    Attributes:
        num_drafts: Verification steps.
        num_accepted_per_pos: How often the draft token of each position was
            accepted; one entry for each of the K positions.
    """

    num_drafts: int
    num_accepted_per_pos: tuple[int, ...]

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Survival probability S_j of each position."""
        return [count / self.num_drafts for count in self.num_accepted_per_pos]

    @property
    def acceptance_length(self) -> float:
        """Mean of the tokens committed in one step, in 1..K+1."""
        return 1 + sum(self.acceptance_per_pos)


@torch.no_grad()
def trunk_cross_entropy(
    model: MiMoModel,
    batch: torch.Tensor,  # [batch, seq] int64
) -> float:
    """Mean loss of the trunk on a text, nats per token."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


@torch.no_grad()
def teacher_forced_agreement(
    model: MiMoModel,
    batch: torch.Tensor,  # [batch, seq] int64
    num_steps: int,
) -> list[float]:
    """How often each draft step picks the trunk's most likely token.

    On the given text, whether or not earlier steps agreed.
    """
    choices = model(batch).argmax(-1)
    agreement = []
    for step, logits in enumerate(model.draft_logits(batch, num_steps), start=1):
        trunk = choices[:, step : step + logits.shape[1]]
        agreement.append((logits.argmax(-1) == trunk).float().mean().item())
    return agreement


class _Cache(NamedTuple):
    """Keys and values of one layer, `[batch, kv_heads, max_seq, head_dim]`."""

    key: torch.Tensor
    value: torch.Tensor


def _empty_caches(model: MiMoModel, batch_size: int, max_seq: int) -> list[_Cache]:
    shape = model.shape
    size = (batch_size, shape.num_kv_heads, max_seq, shape.head_dim)
    return [_Cache(torch.empty(size), torch.empty(size)) for _ in model.model.layers]


def _next_logits(
    model: MiMoModel,
    token_ids: torch.Tensor,  # [batch] int64
    position: int,
    caches: list[_Cache],
) -> torch.Tensor:
    """Trunk logits `[batch, vocab]` after the tokens at one position."""
    hidden = model.embed(token_ids[:, None])
    positions = torch.tensor([position])
    for layer, cache in zip(model.model.layers, caches, strict=True):
        assert isinstance(layer, DecoderLayer), type(layer)
        qkv = layer.self_attn.project(layer.input_layernorm(hidden), positions)
        cache.key[:, :, position] = qkv.key[:, :, 0]
        cache.value[:, :, position] = qkv.value[:, :, 0]
        attended = F.scaled_dot_product_attention(
            qkv.query,
            cache.key[:, :, : position + 1],
            cache.value[:, :, : position + 1],
            enable_gqa=True,
        )
        hidden = layer.feed_forward(hidden + layer.self_attn.merge(attended))
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden[:, 0]))
    return logits


@torch.no_grad()
def generate(
    model: MiMoModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """Continues prompts with the trunk alone; ends of text are not heeded.

    All requests walk through the positions together; a row takes its
    prompt's tokens as long as it has some, and its own choices after that.

    Returns:
        Prompt and continuation of each request.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    max_seq = int(lengths.max()) + max_new_tokens
    ids = torch.zeros(len(prompts), max_seq, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    caches = _empty_caches(model, len(prompts), max_seq)
    for position in range(max_seq - 1):
        logits = _next_logits(model, ids[:, position], position, caches)
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            probs = (logits / temperature).softmax(-1)
            chosen = probs.multinomial(1, generator=generator)[:, 0]
        free = lengths <= position + 1
        ids[free, position + 1] = chosen[free]
    ends = (lengths + max_new_tokens).tolist()
    return [ids[row, :end].tolist() for row, end in enumerate(ends)]


def _acceptance_probabilities(
    model: MiMoModel,
    ids: torch.Tensor,  # [1, seq] int64
    num_steps: int,
    method: DraftMethod,
    temperature: float,
) -> torch.Tensor:
    """Probability `[num_steps, num_chains]` that y's token came from the draft."""
    drafts = torch.stack(model.draft_logits(ids, num_steps))[:, 0]
    num_chains = drafts.shape[1]
    tokens = ids[0].unfold(0, num_steps, 1)[2 : 2 + num_chains].T
    if method == "greedy":
        return (drafts.argmax(-1)[:, : tokens.shape[1]] == tokens).float()
    target = (model(ids)[0] / temperature).log_softmax(-1)
    wanted = []
    for step in range(num_steps):
        token = tokens[step, :, None]
        draft = (drafts[step, : token.shape[0]] / temperature).log_softmax(-1)
        p = target[step + 1 : step + 1 + token.shape[0]].gather(1, token)
        wanted.append((draft.gather(1, token) - p).clamp_max(0).exp()[:, 0])
    return torch.stack(wanted)


@torch.no_grad()
def replay_acceptance(
    model: MiMoModel,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    num_steps: int,
    method: DraftMethod,
    temperature: float,
    seed: int = 0,
) -> AcceptanceCount:
    """Counts what speculation of draft length K would have accepted.

    Args:
        model: Trunk and MTP layer.
        texts: From `generate`, at the same temperature.
        prompt_lengths: Tokens of each text that were the prompt.
        num_steps: Draft length K.
        method: How draft tokens are chosen. At temperature 0: greedy.
        temperature: Of target and draft.
        seed: For the acceptance of drafts that are not greedy.

    Raises:
        ValueError: If `method` is probabilistic at temperature 0.
    """
    if method == "probabilistic" and temperature == 0:
        raise ValueError("method: probabilistic drafts need a temperature above 0")
    generator = torch.Generator().manual_seed(seed)
    num_drafts, accepted = 0, [0] * num_steps
    for text, prompt_length in zip(texts, prompt_lengths, strict=True):
        ids = torch.tensor([list(text)])
        chances = _acceptance_probabilities(model, ids, num_steps, method, temperature)
        lucky = torch.rand(chances.shape, generator=generator) < chances
        # Tokens before `committed` are final; the prompt's prefill made one.
        committed = prompt_length + 1
        while committed + num_steps <= len(text):
            chain = lucky[:, committed - 2].tolist()
            survived = [*chain, False].index(False)
            for position in range(survived):
                accepted[position] += 1
            num_drafts += 1
            committed += survived + 1
    return AcceptanceCount(num_drafts, tuple(accepted))
