"""A reasoning parser for the bundled checkpoint, which has no tokens for thinking.

`python -m benchmarks http-fuzz` gives this file to ``--reasoning-parser-plugin``. The
chat template of that command puts the start token in front of a thinking answer and
the end token in front of any other; a bias lets the model end its thinking itself.
Neither token is part of another one, so that texts can be split at them.
"""

from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

PARSER_NAME = "mtp_plus_fuzz"


@ReasoningParserManager.register_module(PARSER_NAME)
class FuzzReasoningParser(DeepSeekR1ReasoningParser):
    """Thinking lies between two of the checkpoint's tokens."""

    @property
    def start_token(self) -> str:
        return "assertFalse"

    @property
    def end_token(self) -> str:
        return "assertTrue"

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, *args: Any
    ) -> DeltaMessage | None:
        """Told from the whole text: how it is cut into pieces makes no difference."""
        before, now = self._split(previous_text), self._split(current_text)
        reasoning, content = (
            new.removeprefix(old) for old, new in zip(before, now, strict=True)
        )
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    def _split(self, text: str) -> tuple[str, str]:
        """Reasoning and content; what may become the end token waits."""
        reasoning, end, content = text.partition(self.end_token)
        if not end:
            for length in range(len(self.end_token) - 1, 0, -1):
                if reasoning.endswith(self.end_token[:length]):
                    return reasoning[:-length], ""
        return reasoning, content
