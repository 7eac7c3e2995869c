"""A draft vocabulary on disk: made by ``vllm-mtp vocab build``, read by the server."""

import hashlib
import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_mtp.config import ConfigError, MTPPlusConfig


class VocabularyList(BaseModel):
    """Token ids that the MTP layers may propose.

    Attributes:
        format: Of the file.
        vocab_size: Of the model: token ids are below it.
        tokenizer_sha256: Of the tokenizer's vocabulary; see `fingerprint`.
        token_ids: The most frequent first; those that never end up in a text, but
            must not be missing, come with a count of 0.
        counts: How often each was counted.
        num_counted: Tokens that were counted, those of ids not listed included.
        source: What was counted: command, texts, model, time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["vllm-mtp draft vocabulary 1"] = "vllm-mtp draft vocabulary 1"
    vocab_size: int = Field(ge=1)
    tokenizer_sha256: str
    token_ids: tuple[int, ...] = Field(min_length=1)
    counts: tuple[int, ...]
    num_counted: int = Field(ge=0)
    source: Mapping[str, Any]

    @model_validator(mode="after")
    def _ids_are_of_the_model(self) -> Self:
        if len(set(self.token_ids)) != len(self.token_ids):
            raise ValueError("token_ids: an id occurs twice")
        if len(self.token_ids) > self.vocab_size:
            raise ValueError("token_ids: there are more than the vocabulary has")
        wrong = [i for i in self.token_ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(
                f"token_ids: {wrong[0]} is not from 0 to {self.vocab_size - 1}"
            )
        if len(self.counts) != len(self.token_ids) or min(self.counts) < 0:
            raise ValueError("counts: must be one for each token id, and none below 0")
        return self

    def coverage(self) -> list[float]:
        """Share of the counted tokens that the first 1, 2, .. ids cover."""
        total = max(self.num_counted, 1)
        return [covered / total for covered in accumulate(self.counts)]


def read_vocabulary_list(path: str | Path) -> VocabularyList:
    """Read a list.

    Raises:
        ConfigError: It cannot be read, or is none: one sentence that says why.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return VocabularyList.model_validate(content)
    except OSError as error:
        reason = str(error.strerror or error).lower()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Value error, ")
        reason = f"{field}: {words}" if field else words
    except (ValueError, RecursionError):
        reason = "it is no JSON"
    raise ConfigError(
        f"speculative_config.draft_vocab={str(path)!r} is no draft vocabulary "
        f"({reason}): must be 'auto', 'full', or a file that `vllm-mtp vocab build` "
        "wrote."
    )


def listed_token_ids(own: MTPPlusConfig) -> tuple[int, ...] | None:
    """Of the user's list, the most frequent first; None without one.

    Raises:
        ConfigError: See `read_vocabulary_list`.
    """
    if not own.lists_draft_vocab:
        return None
    return read_vocabulary_list(own.draft_vocab).token_ids


def check_belongs(path: str, vocab_size: int, tokenizer_sha256: str | None) -> None:
    """Refuse a list that was made for another model.

    Args:
        path: Of the list.
        vocab_size: Of the model that is to be served.
        tokenizer_sha256: Of its tokenizer; None where the server has none.

    Raises:
        ConfigError: It was, or it cannot be read.
    """
    listed = read_vocabulary_list(path)
    problem = None
    if listed.vocab_size != vocab_size:
        problem = (
            f"was made for a vocabulary of {listed.vocab_size} tokens, and the "
            f"model's has {vocab_size}"
        )
    elif tokenizer_sha256 not in (None, listed.tokenizer_sha256):
        problem = "was made with another tokenizer than the model's"
    if problem:
        raise ConfigError(
            f"speculative_config.draft_vocab={path!r} {problem}: make a list for this "
            "model with `vllm-mtp vocab build`."
        )


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Of a tokenizer: which text each token id is.

    Args:
        vocabulary: Token ids by token.
    """
    ordered = json.dumps(sorted(vocabulary.items()), ensure_ascii=True)
    return hashlib.sha256(ordered.encode()).hexdigest()
