"""What to keep of a draft: acceptance tests and what takes a rejected token's place."""
