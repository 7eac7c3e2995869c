"""Before anything imports vllm: one thread, one process, no network."""

from tests.support.engines import prepare_environment

prepare_environment()
