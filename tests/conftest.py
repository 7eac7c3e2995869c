"""Before anything imports vllm: one thread, one process, no network."""

import gc

from tests.support.engines import prepare_environment

prepare_environment()
# Imports of test files leave hardly any garbage, and looking for it takes a quarter of
# their time.
gc.disable()


def pytest_collection_finish() -> None:
    """All of them are imported."""
    gc.enable()
