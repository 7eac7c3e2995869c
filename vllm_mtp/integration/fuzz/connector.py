"""A KV connector for the fuzzer: vLLM's ``ExampleConnector`` in a folder of its own.

Prompts whose whole blocks are known get their KV, also of the MTP layers, from files.
"""

from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)


class FuzzConnector(ExampleConnector):
    """Counts what is loaded, and can forget all of it."""

    num_loaded_tokens = 0
    """In this process, since somebody set it to zero."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; scheduler and worker of a process share a folder."""
        super().__init__(*args, **kwargs)
        self._storage_path = _folder().name

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's, but for sessions: what a chunk knows may exceed whole blocks."""
        count, is_async = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return max(0, count or 0), is_async

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Count."""
        FuzzConnector.num_loaded_tokens += num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def reset_cache(self) -> bool:
        """Forget all KV."""
        for path in Path(self._storage_path).iterdir():
            rmtree(path)
        return True


@cache
def _folder() -> Any:
    return TemporaryDirectory(prefix="vllm-mtp-kv-")
