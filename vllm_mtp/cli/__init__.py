"""The command line: thin, one subcommand per file."""
