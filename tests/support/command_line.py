"""The program `vllm` in a process that has imported vLLM already."""

import sys


def vllm_refuses(words: list[str]) -> None:
    """Run a command line that it exits from with 2."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2, ended
    else:
        raise AssertionError("it was not refused")
