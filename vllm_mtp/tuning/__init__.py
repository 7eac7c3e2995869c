"""Making of MTP models: corpus, training, expansion. Never imports vLLM."""
