"""The shape of a model: sizes and constants, and nothing learnt."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator


class ModelShape(BaseModel):
    """Sizes of a MiMo-style decoder with one MTP layer.

    Raises:
        pydantic.ValidationError: With the name of the field, its value and
            what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(default=16384, ge=1)
    hidden_size: int = Field(default=128, ge=2)
    intermediate_size: int = Field(default=384, ge=1)
    num_hidden_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=2048, ge=2)
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of "
                f"num_heads ({self.num_heads})"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} is not a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size: {self.hidden_size} over num_heads "
                f"({self.num_heads}) gives an odd head size ({self.head_dim}); "
                "rotary embeddings need an even one"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    def to_hf_config(self, *, eos_token_id: int, dtype: str) -> dict[str, Any]:
        """`config.json` of a checkpoint that vLLM loads without remote code."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": dtype,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> Self:
        """Reads back what `to_hf_config` wrote.

        Raises:
            ValueError: If the model is of another kind, or a field is missing.
        """
        wanted = {
            "architectures": ["MiMoForCausalLM"],
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
        }
        for field, expected in wanted.items():
            if config.get(field) != expected:
                raise ValueError(
                    f"config.json: {field} is {config.get(field)!r}; "
                    f"only {expected!r} is supported"
                )
        renamed = {
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
        }
        fields = {name: renamed.get(name, name) for name in cls.model_fields}
        missing = [key for key in fields.values() if key not in config]
        if missing:
            raise ValueError(f"config.json: {', '.join(missing)} missing")
        return cls(**{name: config[key] for name, key in fields.items()})
