"""Lossless, self-tuning speculative decoding for vLLM (method ``mtp_plus``)."""

__version__ = "0.1.0"
