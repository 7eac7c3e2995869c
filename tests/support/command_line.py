"""The program `vllm` in a process that has imported vLLM already."""

import sys

import pytest


def vllm_refuses(words: list[str]) -> None:
    """Run a command line that it exits from with 2."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *words]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
