"""Every K of vLLM's `mtp` against `mtp_plus`, cell by cell."""
