"""Controllers without a model: synthetic and recorded worlds, the oracle, regret."""
