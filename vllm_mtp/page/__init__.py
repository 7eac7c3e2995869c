"""The page that shows speculation at work: what it is made of, without a server."""
