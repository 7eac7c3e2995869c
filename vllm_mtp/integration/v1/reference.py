"""Model Runner V1: an engine without speculation as the measure of one with it.

What a request is answered must not depend on who else is in its batch. In vLLM 0.32 and
0.33 it does without speculation, too, in two cases that ours works around: logprobs
beside a request that lists tokens (`listed_logprobs`), and whoever takes the place of a
request with a thinking budget (`thinking_budgets`). To compare answers, the reference
has the same workarounds.
"""

from typing import Any

from vllm_mtp.integration.v1.listed_logprobs import answer_each_request
from vllm_mtp.integration.v1.thinking_budgets import replace_thinking_budgets


def answer_as_if_alone(runner: Any) -> None:
    """Install both workarounds in an engine without speculation.

    Args:
        runner: vLLM's V1 model runner, of an engine without requests.
    """
    answer_each_request(runner)
    replace_thinking_budgets(runner)
