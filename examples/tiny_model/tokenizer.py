"""A byte-level BPE tokenizer with a chat template, in Hugging Face's format.

A vocabulary of 16k tokens on 30 MB of code has a real long tail: most tokens
are rare, which is what a draft vocabulary lives on.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# ChatML, as Qwen2 and MiMo write it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, show_progress: bool = False
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer. Special tokens get the lowest ids.

    Args:
        texts: Documents to learn merges from.
        vocab_size: Tokens in all, special ones and the 256 bytes included.
        show_progress: Whether the library draws its own progress bar.

    Raises:
        ValueError: If the vocabulary cannot hold the bytes and special tokens,
            or the texts are too short to fill it.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size: {vocab_size} is too small; at least {MIN_VOCAB_SIZE} "
            "tokens are needed for all bytes and the special tokens"
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: {vocab_size} tokens cannot be learnt from this corpus; "
            f"it yields {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that must exist.

    Raises:
        ValueError: If the tokenizer does not know the token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"tokenizer: no token {token!r}")
    return int(found)


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, model_max_length: int
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json` from a checkpoint folder.

    Raises:
        ValueError: If the file is missing.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} is missing")
    return Tokenizer.from_file(str(path))
