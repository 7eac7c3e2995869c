"""A replica whose model is in a folder downloads nothing."""

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):  # type: ignore[misc, unused-ignore]
    """Ray imports vLLM in one more process for what would be downloaded."""

    async def on_before_node_init(self) -> None:
        """Leave that process out."""
        self.ctx.run_init_node = False
