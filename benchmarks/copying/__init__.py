"""What copying from context brings: edits, prose and noise, with and without it."""
