"""Before anything imports vllm: one thread, one process, no network."""

import gc
import os

import pytest

from tests.support.engines import prepare_environment

prepare_environment()
# Imports of test files leave hardly any garbage, and looking for it takes a quarter of
# their time.
gc.disable()


IS_LONG = "LONG_TESTS" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes long and is much like what is not left out."""
    skip = pytest.mark.skip(reason="takes long: make test-long")
    for item in () if IS_LONG else items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """All of them are imported."""
    gc.enable()
