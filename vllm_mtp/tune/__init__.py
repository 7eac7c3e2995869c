"""Tunes MTP layers for the draft depths at which they are served. Imports no vLLM."""
