"""Rollback kernels against what they replace."""
