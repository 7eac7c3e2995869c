"""A draft vocabulary on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.drafting.vocabulary_list import (
    VocabularyList,
    check_belongs,
    fingerprint,
    read_vocabulary_list,
)

CONTENT: dict[str, Any] = {
    "format": "vllm-mtp draft vocabulary 1",
    "vocab_size": 10,
    "tokenizer_sha256": "abc",
    "token_ids": [3, 1, 9],
    "counts": [5, 3, 0],
    "num_counted": 10,
    "source": {"command": ["vllm-mtp"]},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "list.json"
    path.write_text(json.dumps(CONTENT | changes))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    listed = read_vocabulary_list(written(tmp_path))
    assert listed.token_ids == (3, 1, 9)
    assert listed.coverage() == [0.5, 0.8, 0.8]
    path = tmp_path / "again.json"
    path.write_text(listed.model_dump_json())
    assert read_vocabulary_list(path) == listed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "words 7"}, "format: Input should be"),
        ({"token_ids": []}, "token_ids: Tuple should have at least 1 item"),
        ({"token_ids": [1, 1, 2]}, "token_ids: an id occurs twice"),
        ({"token_ids": [1, 2, 10]}, "token_ids: 10 is not from 0 to 9"),
        ({"token_ids": [-1, 2, 3]}, "token_ids: -1 is not from 0 to 9"),
        ({"vocab_size": 2}, "token_ids: there are more than the vocabulary has"),
        ({"counts": [1]}, "counts: must be one for each token id"),
        ({"counts": [1, 2, -3]}, "none below 0"),
        ({"surplus": 1}, "surplus: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_said(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read_vocabulary_list(written(tmp_path, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), ("{", "it is no JSON"), ("[1, 2]", "Input should be")],
)
def test_a_file_that_is_no_list_is_refused(
    content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "list.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="must be 'auto', 'full', or a file") as error:
        read_vocabulary_list(path)
    assert words in str(error.value)


def test_a_list_belongs_to_one_model(tmp_path: Path) -> None:
    path = str(written(tmp_path))
    check_belongs(path, 10, "abc")
    check_belongs(path, 10, None)
    with pytest.raises(ConfigError, match="vocabulary of 10 tokens, and the model's"):
        check_belongs(path, 11, "abc")
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        check_belongs(path, 10, "def")


def test_a_tokenizer_is_known_by_what_its_ids_mean() -> None:
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    assert fingerprint({"a": 0, "b": 1}) != fingerprint({"a": 1, "b": 0})


def test_it_cannot_be_changed() -> None:
    listed = VocabularyList.model_validate(CONTENT)
    with pytest.raises(ValueError, match="frozen"):
        listed.vocab_size = 3
