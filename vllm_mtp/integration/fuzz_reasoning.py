"""A reasoning parser for the bundled checkpoint, which has no tokens for thinking.

`vllm-mtp verify --http-requests` gives this file to ``--reasoning-parser-plugin``. The
chat template of that command puts the start token in front of a thinking answer and
the end token in front of any other; a bias lets the model end its thinking itself.
Neither token is part of another one, so that texts can be split at them.
"""

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
