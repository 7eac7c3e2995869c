"""What the user of ``vllm-mtp verify`` chose, and what follows from it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import (
    check_fields,
    check_method,
    check_name,
    check_output,
    refuse,
)

HOSTILE = f"{METHOD}, random K"
"""The same server with draft lengths that nobody would choose: a controller that finds
drafting useless drafts nothing, and then nothing is verified."""

MAX_PROMPTS = 1000
MAX_TOKENS = 4096
SAMPLE_LIMITS = (100, 100_000)
SEATS = 64

SAMPLED_SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=1, top-k 6": {"temperature": 1.0, "top_k": 6},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=1, penalties": {
        "temperature": 1.0,
        "top_k": 12,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
}

TIE_TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""How far apart the logarithms of two probabilities may lie so that rounding alone can
exchange them. A pass over several rows adds in another order than a pass over one: each
time 2^-24, 2^-11 or 2^-8 of a number is lost, over many layers, and logits are tens."""


@dataclass(frozen=True)
class VerifyOptions:
    """What the user chose.

    Attributes:
        model: Folder or hub name.
        speculative_config: What is verified.
        prompts: A ``.jsonl``, one ``text`` a line; None for those of the checkpoint.
        num_prompts: Greedy texts.
        max_tokens: Of each greedy text.
        num_samples: Of each setting of `SAMPLED_SETTINGS`.
        sampled_tokens: First tokens of a sample that are compared.
        dtype: Weights and arithmetic.
        tie_tolerance: See `TIE_TOLERANCES`; None for the dtype's.
        false_alarm_rate: How often sampled texts of a correct server may be refused.
        engine_args: Further arguments of vLLM's ``EngineArgs``.
        output: File for the report (JSON); None for none.
    """

    model: str
    speculative_config: dict[str, Any] = field(
        default_factory=lambda: {"method": METHOD}
    )
    prompts: Path | None = None
    num_prompts: int = 32
    max_tokens: int = 96
    num_samples: int = 1000
    sampled_tokens: int = 3
    dtype: str = "float32"
    tie_tolerance: float | None = None
    false_alarm_rate: float = 1e-3
    engine_args: dict[str, Any] = field(default_factory=dict)
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        check_fields(
            self,
            {
                "num_prompts": (1, MAX_PROMPTS),
                "max_tokens": (1, MAX_TOKENS),
                "num_samples": SAMPLE_LIMITS,
                "sampled_tokens": (1, 8),
                "false_alarm_rate": (1e-12, 0.1),
            },
        )
        if self.tie_tolerance is not None and not 0 <= self.tie_tolerance <= 10:
            refuse("tie-tolerance", self.tie_tolerance, "a number from 0 to 10")
        check_name("dtype", self.dtype, tuple(TIE_TOLERANCES))
        check_method(self.speculative_config)
        check_output(self.output)

    @property
    def tolerance(self) -> float:
        """Largest difference of logarithms that counts as a tie."""
        if self.tie_tolerance is not None:
            return self.tie_tolerance
        return TIE_TOLERANCES[self.dtype]

    @property
    def contenders(self) -> dict[str, dict[str, Any] | None]:
        """Speculative config of each engine; the first one is what they are held to."""
        return {
            NO_SPECULATION: None,
            METHOD: self.speculative_config,
            HOSTILE: self.speculative_config | {"controller": "random"},
        }
