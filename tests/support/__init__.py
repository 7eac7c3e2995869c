"""What several test modules need: random checkpoints, and engines that run them."""
