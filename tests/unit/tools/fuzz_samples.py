"""A corpus that needs no engine."""

from random import Random
from typing import Any

from vllm_mtp.tools.fuzz_corpus import Corpus, choose_openings, make_corpus

VOCAB_SIZE, MAX_MODEL_LEN, K_MAX = 1000, 256, 8


def corpus(seed: int = 0) -> Corpus:
    rng = Random(seed)
    texts = [f"def f{i}(a):\n    return a + {i}\n" for i in range(60)]
    ids = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 90))] for _ in texts
    ]
    openings = choose_openings(texts, ids, MAX_MODEL_LEN, seed)
    answers: list[dict[str, Any]] = [
        {
            "token_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(20)],
            "text": "self.value = value\n    return self",
        }
        for _ in openings
    ]
    return make_corpus(openings, answers, VOCAB_SIZE, MAX_MODEL_LEN, K_MAX)


def answer(token_ids: list[int], **changes: Any) -> dict[str, Any]:
    """What an engine says to a request, without logprobs."""
    output = {
        "token_ids": token_ids,
        "text": "".join(chr(97 + token) for token in token_ids),
        "logprobs": None,
        "ends": [("length", None, len(token_ids))],
        "cumulative_logprob": None,
    }
    whole = {
        "refused": "",
        "was_aborted": False,
        "problems": [],
        "num_prompt_tokens": 4,
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
    }
    of_output = {key: changes.pop(key) for key in output.keys() & changes.keys()}
    return whole | {"outputs": {0: output | of_output}} | changes


def request(name: str, **sampling: Any) -> dict[str, Any]:
    """A greedy request."""
    options = {"temperature": 0.0, "max_tokens": 16} | sampling
    return {"name": name, "chunks": [{"prompt": [1, 2, 3, 4], "sampling": options}]}
