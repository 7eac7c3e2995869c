"""Draft vocabularies for tests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_mtp.drafting.vocabulary_list import VocabularyList

BUNDLED_VOCAB_SIZE = 16384
BUNDLED_TOKENIZER_SHA256 = (
    "bf5bef4e2cc09154d3b641d90c9b8ea4425a4b4062a778b92dc6220c1747fb24"
)


def write_list(
    path: Path,
    token_ids: Sequence[int],
    tokenizer_sha256: str = BUNDLED_TOKENIZER_SHA256,
) -> str:
    """A list, for the bundled checkpoint; returns the path as an option."""
    listed = VocabularyList(
        vocab_size=BUNDLED_VOCAB_SIZE,
        tokenizer_sha256=tokenizer_sha256,
        token_ids=tuple(token_ids),
        counts=(1,) * len(token_ids),
        num_counted=len(token_ids),
        source={},
    )
    path.write_text(listed.model_dump_json())
    return str(path)


def most_frequent(texts: Iterable[Sequence[int]], number: int) -> list[int]:
    """Token ids that occur most often in texts."""
    counts = Counter(token for text in texts for token in text)
    return [token for token, _ in counts.most_common(number)]
