"""Measurements on real servers; every result says how it was made."""
