"""A checkpoint that repeats its prompt: an induction circuit before its layers.

The bundled model repeats nothing of its prompt, so no greedy text of it is an edit of a
file. Three attention layers put in front of it find where its last tokens stood before
and what followed (an induction head, Olsson et al. 2022, arXiv 2209.11895); what
followed gets a higher logit. Elsewhere it says what it said. Nothing is trained.

Residual stream of a grown model, `hidden` channels of the old model first::

    old            as before: the circuit writes nothing here
    code           of the token, random signs; its first `SLOT` channels are slot 0
    slots 1 .. 8   the first channels of the codes of the 1 .. 8 tokens before
    followed       mean code of what followed the matches, by their weight
    found          the same where the weight is mostly on one token, else 0
    one            the same for all tokens

1. In the first layer head i - 1 attends to the token i places back: queries and keys
   are constant, and rotation makes their product largest at that distance. In the
   second a head attends four places back and takes slots 1 .. 4 for 5 .. 8.
2. In the third the query is slots 0 .. 7 and the key slots 1 .. 8, in channels that are
   not rotated (`partial_rotary_factor`), so a match is as good far away. Without a
   long match the mean of many codes is found. Its MLP takes away what is below
   `SHARE` of a code, so that little is found behind few tokens that match.
3. Head rows get the code of their token in the channels of what was found.

The MTP layer is as it was: it is told nothing of what was found.
"""

import math
import shutil
from pathlib import Path

import torch

from examples.tiny_model.checkpoint import (
    DTYPES,
    load_weights,
    read_json,
    save_weights,
    write_json,
)
from examples.tiny_model.expand import Weights
from examples.tiny_model.prompts import PROMPTS_FILE
from examples.tiny_model.shape import ModelShape

HEAD_DIM = 128
CODE, SLOT, NUM_SLOTS = 92, 12, 8
"""Channels of a code and of a slot; tokens before, that are kept."""
PLACES = 4
"""Tokens before, that the first layer finds: a head each."""
NUM_NEW_LAYERS = 3
NEW_CHANNELS = 3 * CODE + NUM_SLOTS * SLOT + 1

CODE_SIZE = 2.0**-10
"""Of a channel, of the length of the token's embedding: next to nothing in a norm."""
FOUND_LOGIT = 20.0
"""What a whole match adds. The bundled model's best logit is 11 in the mean."""
MATCH_SCORE = 12.0
"""Exponent of a whole match, an eighth for each token. Unrelated places have 0 with a
deviation of 1.2: a thousand of them weigh as much as one of 7.7, a hundred as one of
5.4. So behind 7 tokens that match one place has nine tenths of the weight. It and
`SHARE` were chosen by how much of an edit is copied and how much of other text stays as
it was (`python -m benchmarks copying`)."""
SHARE, STEEPNESS = 0.6, 20.0
"""Of the weights, that what followed must have; how fast it counts above that."""
PLACE_SCORE = 256.0
"""Product of query and key, of each pair of channels, at the wanted distance."""
_FIRST_LENGTH, _FINAL_LENGTH = 3.42, 270.0
"""Of the bundled model's residual stream at its beginning and at its end, means over
held-out prompts."""
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    PROMPTS_FILE,
)


def make_copying_checkpoint(source: Path, output: Path, *, seed: int = 0) -> None:
    """Write a copy of the checkpoint `source` that repeats its prompt.

    Args:
        source: Folder of the bundled model, or of one with more layers or wider MLPs.
        output: Folder to write; must be empty or not exist yet.
        seed: Of the codes.

    Raises:
        ValueError: An argument is not usable.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output: {output} is not empty; expected a new folder")
    config = read_json(source / "config.json")
    shape = ModelShape.from_hf_config(config)
    hidden_size = shape.num_heads * HEAD_DIM
    if shape.hidden_size + NEW_CHANNELS > hidden_size or shape.num_heads < PLACES:
        raise ValueError(
            f"source: {shape.num_heads} heads and a hidden size of "
            f"{shape.hidden_size} leave no room; expected the bundled model, or one "
            "with more layers or a larger intermediate size"
        )
    weights = load_weights(source / "model.safetensors")
    output.mkdir(parents=True, exist_ok=True)
    write_json(
        output / "config.json",
        config
        | {
            "hidden_size": hidden_size,
            "num_hidden_layers": shape.num_hidden_layers + NUM_NEW_LAYERS,
            "rms_norm_eps": shape.rms_norm_eps * shape.hidden_size / hidden_size,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "partial_rotary_factor": shape.head_dim / HEAD_DIM,
            },
        },
    )
    for name in _FILES:
        shutil.copyfile(source / name, output / name)
    grown = _Circuit(shape, hidden_size, seed).grow(weights)
    save_weights(grown, output / "model.safetensors", DTYPES["bfloat16"])


class _Circuit:
    """Weights of the grown model."""

    def __init__(self, shape: ModelShape, hidden_size: int, seed: int) -> None:
        self._shape, self._hidden = shape, hidden_size
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (shape.vocab_size, CODE), generator=generator)
        self._codes = 2.0 * signs - 1
        self._code = shape.hidden_size
        self._slots = self._code + CODE
        self._followed = self._slots + NUM_SLOTS * SLOT
        self._found = self._followed + CODE
        self._one = self._found + CODE
        # A code after a norm: its share of the stream's length is the same everywhere.
        self._size = CODE_SIZE * math.sqrt(hidden_size)

    def grow(self, weights: Weights) -> Weights:
        """All weights, the old layers behind the new ones."""
        embedding = weights["model.embed_tokens.weight"]
        self._length = embedding.norm(dim=1, keepdim=True)
        grown = {
            self._renamed(name): self._grown(name, weight)
            for name, weight in weights.items()
        }
        matching = self._matches() | self._threshold()
        for index, own in enumerate((self._places(), self._more_places(), matching)):
            grown |= self._layer(index, own)
        return grown

    def _renamed(self, name: str) -> str:
        head, dot, rest = name.partition("model.layers.")
        if not dot:
            return name
        index, _, rest = rest.partition(".")
        return f"{head}{dot}{int(index) + NUM_NEW_LAYERS}.{rest}"

    def _grown(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """An old weight, with zeros for what is new."""
        kind = name.split(".")[-2]
        hidden, old_hidden = self._hidden, self._shape.hidden_size
        if kind.endswith("norm"):
            # The mean over more channels is smaller.
            scale = math.sqrt(old_hidden / hidden)
            new = torch.zeros(hidden)
            new[:old_hidden] = old * scale
            if name == "model.norm.weight":
                new[self._found : self._found + CODE] = 1
            return new
        if kind == "embed_tokens":
            unit = self._length * CODE_SIZE
            return self._columns(old, {self._code: self._codes * unit, self._one: unit})
        if kind == "lm_head":
            found = CODE_SIZE * _FIRST_LENGTH * math.sqrt(hidden) / _FINAL_LENGTH
            gain = FOUND_LOGIT / (CODE * found)
            return self._columns(old, {self._found: gain * self._codes})
        if kind == "input_proj":
            new = torch.zeros(hidden, 2 * hidden)
            new[:old_hidden, :old_hidden] = old[:, :old_hidden]
            new[:old_hidden, hidden : hidden + old_hidden] = old[:, old_hidden:]
            return new
        if kind in ("q_proj", "k_proj", "v_proj"):
            # Scores are divided by the square root of a head's size.
            scale = math.sqrt(HEAD_DIM / self._shape.head_dim)
            spread = self._spread(old) * (scale if kind == "q_proj" else 1)
            return self._columns(spread) if old.ndim == 2 else spread
        if kind == "o_proj":
            new = torch.zeros(hidden, self._shape.num_heads * HEAD_DIM)
            new[:old_hidden] = self._spread(old.T).T
            return new
        if kind == "down_proj":
            return self._columns(old.T).T
        return self._columns(old)  # gate_proj, up_proj

    def _columns(
        self, old: torch.Tensor, new: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """`[rows, hidden]` from `[rows, old hidden]`, and more from each channel on."""
        grown = torch.zeros(old.shape[0], self._hidden)
        grown[:, : old.shape[1]] = old
        for start, block in (new or {}).items():
            grown[:, start : start + block.shape[1]] = block
        return grown

    def _spread(self, old: torch.Tensor) -> torch.Tensor:
        """Rows of heads `[heads * old size, ...]` at the beginning of larger ones."""
        heads = old.reshape(-1, self._shape.head_dim, *old.shape[1:])
        grown = torch.zeros(len(heads), HEAD_DIM, *old.shape[1:])
        grown[:, : self._shape.head_dim] = heads
        return grown.flatten(0, 1)

    def _attention(self) -> Weights:
        """Of a layer that does nothing yet."""
        hidden, kv = self._hidden, self._shape.num_kv_heads * HEAD_DIM
        return {
            "self_attn.q_proj.weight": torch.zeros(hidden, hidden),
            "self_attn.k_proj.weight": torch.zeros(kv, hidden),
            "self_attn.v_proj.weight": torch.zeros(kv, hidden),
            "self_attn.q_proj.bias": torch.zeros(hidden),
            "self_attn.k_proj.bias": torch.zeros(kv),
            "self_attn.v_proj.bias": torch.zeros(kv),
            "self_attn.o_proj.weight": torch.zeros(hidden, hidden),
        }

    def _places(self) -> Weights:
        """The first layer: codes of the tokens before, into the slots."""
        attention = self._attention()
        for head in range(PLACES):
            self._attend_back(attention, head, head + 1)
            start, slot = head * HEAD_DIM, self._slots + head * SLOT
            rows = torch.arange(SLOT)
            attention["self_attn.o_proj.weight"][slot + rows, start + rows] = (
                self._written
            )
        for head in range(self._shape.num_kv_heads):
            rows = torch.arange(SLOT)
            attention["self_attn.v_proj.weight"][
                head * HEAD_DIM + rows, self._code + rows
            ] = 1
        return attention

    def _more_places(self) -> Weights:
        """The second layer: slots of the token four places back, into further ones."""
        attention = self._attention()
        self._attend_back(attention, 0, PLACES)
        rows = torch.arange(PLACES * SLOT)
        attention["self_attn.v_proj.weight"][rows, self._slots + rows] = 1
        further = self._slots + PLACES * SLOT
        attention["self_attn.o_proj.weight"][further + rows, rows] = self._written
        return attention

    def _attend_back(self, attention: Weights, head: int, places: int) -> None:
        """Let a head attend to the token so many places before, whatever it is."""
        half = self._shape.head_dim // 2
        angle = places * self._shape.rope_theta ** -(torch.arange(half) / half)
        size, start = math.sqrt(PLACE_SCORE), head * HEAD_DIM
        bias = torch.cat((angle.cos(), -angle.sin()))
        attention["self_attn.q_proj.bias"][start : start + 2 * half] = size * bias
        for first in range(0, self._shape.num_kv_heads * HEAD_DIM, HEAD_DIM):
            attention["self_attn.k_proj.bias"][first : first + half] = size

    def _matches(self) -> Weights:
        """The third layer: the code of what followed the last tokens before."""
        attention = self._attention()
        width = NUM_SLOTS * SLOT
        channels = self._shape.head_dim + torch.arange(width)
        product = MATCH_SCORE * math.sqrt(HEAD_DIM) / (width * self._size**2)
        before = self._slots + torch.arange(width)
        # Slot 0 is the beginning of the code.
        own = torch.cat((self._code + torch.arange(SLOT), before[:-SLOT]))
        attention["self_attn.q_proj.weight"][channels, own] = math.sqrt(product)
        attention["self_attn.k_proj.weight"][channels, before] = math.sqrt(product)
        rows = torch.arange(CODE)
        attention["self_attn.v_proj.weight"][rows, self._code + rows] = 1
        attention["self_attn.o_proj.weight"][self._followed + rows, rows] = (
            self._written
        )
        return attention

    def _threshold(self) -> Weights:
        """The third layer's MLP: what is above `SHARE`, for each sign of a channel."""
        inner, hidden = self._shape.intermediate_size, self._hidden
        gate, up = torch.zeros(inner, hidden), torch.zeros(inner, hidden)
        down = torch.zeros(hidden, inner)
        whole = STEEPNESS * (1 - SHARE)
        for place, sign in enumerate((1, -1)):
            channels = torch.arange(CODE)
            rows = place * CODE + channels
            gate[rows, self._followed + channels] = sign * STEEPNESS / self._size
            gate[rows, self._one] = -SHARE * STEEPNESS / self._size
            up[rows, self._one] = 1 / self._size
            written = sign * _FIRST_LENGTH * CODE_SIZE / whole
            down[self._found + channels, rows] = written
        return {
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": down,
        }

    @property
    def _written(self) -> float:
        """From a code after a norm to one in the residual stream."""
        return _FIRST_LENGTH * CODE_SIZE / self._size

    def _layer(self, index: int, own: Weights) -> Weights:
        """A whole layer; an MLP that it does not have adds nothing."""
        hidden, inner = self._hidden, self._shape.intermediate_size
        weights = {
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
            "mlp.gate_proj.weight": torch.zeros(inner, hidden),
            "mlp.up_proj.weight": torch.zeros(inner, hidden),
            "mlp.down_proj.weight": torch.zeros(hidden, inner),
            **own,
        }
        return {f"model.layers.{index}.{name}": each for name, each in weights.items()}
