"""A MiMo-style decoder with one MTP layer in plain torch.

The parameters carry the names of the published checkpoints, so that a state
dict *is* a checkpoint that vLLM loads as `MiMoForCausalLM`. Source of the
forward pass: vLLM `model_executor/models/{qwen2,mimo,mimo_mtp}.py`.

Two details that decide whether an MTP layer works:

- the trunk hands it the hidden state *before* the trunk's final norm;
- its own output *after* `final_layernorm` goes to the head, and back in as
  the hidden state of the next draft step.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from examples.tiny_model.attention import QKV, Attention
from examples.tiny_model.shape import ModelShape


class MLP(nn.Module):
    """Gated SiLU MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[..., hidden]` to the same shape."""
        projected: torch.Tensor = self.down_proj(
            F.silu(self.gate_proj(x)) * self.up_proj(x)
        )
        return projected


class DecoderLayer(nn.Module):
    """A Qwen2 decoder layer (norm before, residual after)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        eps = shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps)
        self.mlp = MLP(shape)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps `[batch, seq, hidden]` to the same shape."""
        qkv = self.self_attn.project(self.input_layernorm(hidden), positions)
        return self.feed_forward(hidden + self.self_attn.causal(qkv))

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The half of the layer after attention, residual included."""
        update: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class MTPLayer(DecoderLayer):
    """One MTP layer: a decoder layer fed by a hidden state and an embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        eps, hidden = shape.rms_norm_eps, shape.hidden_size
        self.token_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_layernorm = nn.RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = nn.RMSNorm(hidden, eps)

    def combine(
        self,
        previous_hidden: torch.Tensor,  # [batch, seq, hidden]
        embeddings: torch.Tensor,  # [batch, seq, hidden]
        positions: torch.Tensor,  # [seq]
    ) -> torch.Tensor:
        """Input of the decoder layer. The embedding at position 0 is masked."""
        embeddings = torch.where(positions[:, None] == 0, 0, embeddings)
        parts = (
            self.hidden_layernorm(previous_hidden),
            self.token_layernorm(embeddings),
        )
        combined: torch.Tensor = self.input_proj(torch.cat(parts, dim=-1))
        return combined

    def unroll(
        self,
        trunk_hidden: torch.Tensor,  # [batch, seq, hidden], before the final norm
        embeddings: torch.Tensor,  # [batch, seq, hidden], of the input tokens
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Drafts `num_steps` tokens from every position, fed the true tokens.

        Chain i, step k (from 1) runs at slot i + k - 1 with the embedding of
        token i + k; its output predicts token i + k + 1.

        Returns:
            One tensor for each step, `[batch, num_chains, hidden]`, ready for
            the head, with `num_chains = seq - num_steps`.
        """
        num_chains = trunk_hidden.shape[1] - num_steps
        previous = trunk_hidden[:, :num_chains]
        outputs: list[torch.Tensor] = []
        keys: list[QKV] = []
        for step in range(num_steps):
            positions = torch.arange(num_chains, device=previous.device) + step
            tokens = embeddings[:, step + 1 : step + 1 + num_chains]
            hidden = self.combine(previous, tokens, positions)
            qkv = self.self_attn.project(self.input_layernorm(hidden), positions)
            keys.append(qkv)
            if step == 0:
                attended = self.self_attn.causal(qkv)
            else:
                attended = self.self_attn.chained(qkv.query, keys[0], keys[1:])
            previous = self.final_layernorm(self.feed_forward(hidden + attended))
            outputs.append(previous)
        return outputs


class Backbone(nn.Module):
    """Everything below the head. Holds the MTP layer too, as checkpoints do."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(shape) for _ in range(shape.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mtp_layers = nn.ModuleList([MTPLayer(shape)])


class MiMoModel(nn.Module):
    """Trunk, MTP layer and the head they share."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @property
    def mtp_layer(self) -> MTPLayer:
        """The MTP layer."""
        layer = self.model.mtp_layers[0]
        assert isinstance(layer, MTPLayer), type(layer)
        return layer

    @property
    def drafter(self) -> nn.Module:
        """What is trained while the trunk is frozen."""
        return self.mtp_layer

    def initialize(self, seed: int) -> None:
        """Draws weights from `seed`. Layers start as the identity."""
        generator = torch.Generator().manual_seed(seed)
        std = 1 / math.sqrt(self.shape.hidden_size)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith((".o_proj.weight", ".down_proj.weight", ".bias")):
                    weight.zero_()
                elif weight.ndim == 2:
                    weight.normal_(0, std, generator=generator)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[batch, seq, hidden]` of token ids `[batch, seq]`."""
        embeddings: torch.Tensor = self.model.embed_tokens(token_ids)
        return embeddings

    def trunk_hidden(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Hidden states `[batch, seq, hidden]` before the final norm."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device)
        hidden = embeddings
        for layer in self.model.layers:
            hidden = layer(hidden, positions)
        return hidden

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Trunk logits `[batch, seq, vocab]` of token ids `[batch, seq]`."""
        hidden = self.model.norm(self.trunk_hidden(self.embed(token_ids)))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def draft_logits(
        self, token_ids: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """MTP logits of every chain and step, fed the true tokens.

        Args:
            token_ids: `[batch, seq]`.
            num_steps: Draft tokens of one chain, K.

        Returns:
            For each step `[batch, seq - num_steps, vocab]`: see
            `MTPLayer.unroll` for which token each predicts.
        """
        _, outputs = self.draft_hidden(token_ids, num_steps)
        return [self.lm_head(output) for output in outputs]

    def draft_hidden(
        self, token_ids: torch.Tensor, num_steps: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the head reads, of the trunk and of every chain and step.

        Gradients reach the drafter alone.

        Args:
            token_ids: `[batch, seq]`.
            num_steps: Draft tokens of one chain, K.

        Returns:
            The trunk's `[batch, seq, hidden]`, and for each step
            `[batch, seq - num_steps, hidden]`: see `MTPLayer.unroll`.
        """
        with torch.no_grad():
            embeddings = self.embed(token_ids)
            hidden = self.trunk_hidden(embeddings)
            teacher = self.model.norm(hidden)
        return teacher, self.mtp_layer.unroll(hidden, embeddings, num_steps)
