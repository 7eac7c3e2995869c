"""A streaming session beside no other request."""

from collections.abc import Sequence
from typing import Any

from vllm_mtp.integration.fuzz.sessions import Session


def answers_to(
    llm: Any, chunks: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy answers to the chunks of a session, each fed when the last is answered."""
    sampling = {
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "output_kind": "DELTA",
    }
    fed = [{"prompt": list(chunk), "sampling": sampling} for chunk in chunks]
    engine = llm.llm_engine
    session = Session(engine, {"name": "session", "chunks": fed})
    answers: list[list[int]] = []
    for _ in chunks:
        session.go_on()
        answer: list[int] = []
        while len(answer) < max_tokens:
            for output in engine.step():
                answer += output.outputs[0].token_ids
        answers.append(answer)
    session.go_on()
    while engine.has_unfinished_requests():
        engine.step()
    return answers
