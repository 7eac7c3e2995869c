"""What follows the longest earlier match of a text's end, by trying all places.

``python -m tests.support.context_matches`` compares it with vLLM's n-gram proposer, in
a process of its own: vLLM's kernel overrides on a CPU fail where numba was imported.
"""

import random
from collections.abc import Sequence


def find_continuation(
    tokens: Sequence[int], least: int, most: int, max_model_len: int, limit: int
) -> list[int]:
    """Up to ``limit`` tokens; none where no match has ``least`` tokens.

    Args:
        tokens: Of the text.
        least: Of a match.
        most: Of which longer ones count as no better; of equals the first is taken.
        max_model_len: Of the text with what is found.
        limit: Of what is found.
    """
    number = min(limit, max_model_len - len(tokens))
    for length in range(most, least - 1, -1):
        ending = tokens[len(tokens) - length :]
        for end in range(length, len(tokens)):
            if number > 0 and list(tokens[end - length : end]) == list(ending):
                return list(tokens[end : end + number])
    return []


def _compare(num_cases: int) -> None:
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import (
        _find_longest_matched_ngram_and_propose_tokens as theirs,
    )

    rng = random.Random(0)
    num_found = 0
    for _ in range(num_cases):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 40))]
        tokens *= rng.randint(1, 3)
        least = rng.randint(1, 8)
        most, limit = least + rng.randint(0, 8), rng.randint(1, 8)
        longest = len(tokens) + rng.randint(0, 10)
        found = find_continuation(tokens, least, most, longest, limit)
        array = np.array(tokens, dtype=np.int32)
        expected = theirs(array, least, most, longest, limit).tolist()
        assert found == expected, (tokens, least, most, longest, limit)
        num_found += bool(found)
    assert num_found > num_cases // 4


if __name__ == "__main__":
    _compare(3000)
