"""Conversations of several turns, each of which follows the answer before it."""

from collections.abc import Iterator, Sequence

from vllm_mtp.tools.eval_backends import Answer, Backend
from vllm_mtp.tools.prompts import Prompt


def answers_to_turns(
    backend: Backend, prompts: Sequence[Prompt]
) -> Iterator[tuple[Prompt, list[Answer]]]:
    """Each prompt with the answers to all of its turns, in the order in which they end.

    First turns are answered before second ones, so that batches stay full.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    answers: dict[str, list[Answer]] = {prompt.id: [] for prompt in prompts}
    asked = list(prompts)
    while asked:
        following = []
        for prompt, answer in backend.answers(asked):
            answers[prompt.id].append(answer)
            if prompt.follow_ups:
                following.append(prompt.answered(answer.text))
            else:
                yield by_id[prompt.id], answers.pop(prompt.id)
        asked = following
