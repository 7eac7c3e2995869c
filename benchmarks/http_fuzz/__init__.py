"""Random requests over HTTP, to servers with and without speculation."""
