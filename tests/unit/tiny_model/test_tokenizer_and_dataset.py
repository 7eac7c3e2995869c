"""Tokenizer, chat form and batches."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from examples.tiny_model.corpus import SourceFile
from examples.tiny_model.dataset import as_chat, encode_files, iterate_batches
from examples.tiny_model.tokenizer import (
    END_OF_TEXT,
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    load_tokenizer,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

TEXT = "def square(number):\n    return number * number  # naïve, 数\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], MIN_VOCAB_SIZE + 10)


def test_any_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    unseen = "\tclass Ünseen:\r\n  π = '🙂'\n"

    assert tokenizer.decode(tokenizer.encode(unseen).ids) == unseen


def test_special_tokens_are_single_and_come_first(tokenizer: Tokenizer) -> None:
    assert [token_id(tokenizer, token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.encode(TURN_START).ids == [1]


def test_an_unknown_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token '<nope>'"):
        token_id(tokenizer, "<nope>")


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE - 1, 5000])
def test_a_vocabulary_that_cannot_be_filled_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer([TEXT], vocab_size)


def test_transformers_reads_tokenizer_and_chat_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, model_max_length=64)

    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    prompt = loaded.apply_chat_template(
        [{"role": "user", "content": "x = 1"}],
        tokenize=False,
        add_generation_prompt=True,
    )

    assert prompt == (f"{TURN_START}user\nx = 1{TURN_END}\n{TURN_START}assistant\n")
    assert loaded.eos_token == END_OF_TEXT
    assert loaded(TEXT)["input_ids"] == load_tokenizer(tmp_path).encode(TEXT).ids


def test_chat_form_loses_no_line_and_closes_every_turn() -> None:
    lines = [f"line {number}" for number in range(200)]

    chat = as_chat("\n".join(lines), random.Random(0))

    assert chat.count(TURN_START) == chat.count(TURN_END) >= 4
    assert all(chat.count(f"{line}\n") + chat.count(f"{line}<") == 1 for line in lines)


def test_encoding_is_decided_by_the_seed(tokenizer: Tokenizer) -> None:
    files = [SourceFile(f"{number}.py", f"x = {number}\n") for number in range(40)]

    first, same, other = (
        encode_files(files, tokenizer, seed=seed) for seed in (1, 1, 2)
    )

    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.max() < tokenizer.get_vocab_size()


def test_an_epoch_shows_every_row_once_and_the_next_one_moves() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    batches = iterate_batches(tokens, batch_size=3, seq_len_tokens=100, seed=0)

    first_epoch = torch.cat([next(batches) for _ in range(3)])
    second_epoch = torch.cat([next(batches) for _ in range(3)])

    for epoch in (first_epoch, second_epoch):
        assert epoch.unique().numel() == 900
        assert torch.equal(epoch[:, 1:] - epoch[:, :-1], torch.ones(9, 99).long())
    assert first_epoch.min() != second_epoch.min()


def test_a_corpus_too_short_for_one_batch_is_refused() -> None:
    batches = iterate_batches(
        torch.arange(100, dtype=torch.int32), batch_size=4, seq_len_tokens=32, seed=0
    )

    with pytest.raises(ValueError, match="100 tokens are too few"):
        next(batches)
