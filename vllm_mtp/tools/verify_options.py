"""What the user of ``vllm-mtp verify`` chose, and what follows from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_method, check_name, check_output
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option

HOSTILE = f"{METHOD}, random K"
"""The same server with draft lengths that nobody would choose: a controller that finds
drafting useless drafts nothing, and then nothing is verified."""

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
class VerifyOptions(Options):
    """What the user chose."""

    model: str = argument(MODEL_HELP)
    speculative_config: dict[str, Any] = option(
        {"method": METHOD}, "What is verified (JSON), as for `vllm serve`."
    )
    prompts: Path | None = option(
        None, "Prompts (.jsonl with `text`). Unset: the checkpoint's, or built-in ones."
    )
    num_prompts: int = option(32, "Greedy texts.", 1, 1000)
    max_tokens: int = option(96, "Of each greedy text.", 1, 4096)
    num_samples: int = option(
        1000, "Of each sampling setting.", 100, 100_000, name="samples"
    )
    sampled_tokens: int = option(3, "First tokens of a sample that are compared.", 1, 8)
    dtype: str = option(
        "float32", "float32 tells most; bfloat16 and float16 exchange near-ties."
    )
    tie_tolerance: float | None = option(
        None,
        "Difference of log-probabilities that counts as a near-tie. Unset: 0.001 for "
        "float32, 0.05 for float16, 0.3 for bfloat16.",
        0,
        10,
    )
    false_alarm_rate: float = option(
        1e-3, "How often a correct server may be refused.", 1e-12, 0.1
    )
    engine_args: dict[str, Any] = option(
        {},
        "Further arguments of vLLM's EngineArgs (JSON), for example "
        '{"tensor_parallel_size": 2}.',
    )
    output: Path | None = option(None, "Also write a report (JSON).")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
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
