"""What this project is measured with; not part of the wheel. `python -m benchmarks`."""
