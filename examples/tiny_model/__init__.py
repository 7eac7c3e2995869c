"""A tiny MTP model, and how it is trained and expanded. Never imports vLLM."""

from pathlib import Path

TINY_MODEL = Path(__file__).with_name("mimo-python")
"""Its checkpoint: trained on the standard library of CPython, 12 MB."""

EXTRA_HEADS = Path(__file__).with_name("extra-heads")
"""Independent heads trained on its trunk, without the trunk: 1.2 MB."""
