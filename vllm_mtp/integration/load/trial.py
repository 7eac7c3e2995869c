"""Tries ways to give vLLM's draft model the MTP weights of a checkpoint."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from vllm.config import VllmConfig

from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.headers import Headers, unlisted_headers
from vllm_mtp.integration.load.layout import (
    Layout,
    Quantization,
    config_to_build_by,
    prefixes,
    quantizations,
)
from vllm_mtp.integration.load.weight_health import DryLoad, Header

_MAX_SECONDS = 30.0
"""After which no further way is begun: a loader takes seconds for 60,000 weights."""


def try_loading(config: VllmConfig, headers: Headers) -> DryLoad | str:
    """Ask vLLM's draft model which tensors it takes.

    Args:
        config: Finished, with a speculative config.
        headers: Of the draft model's checkpoint, as far as vLLM loads it.

    Returns:
        The first way in which no weight is missing; vLLM's own if there is none. Why
        vLLM could not be asked, where it could not.
    """
    usual: DryLoad | str = "nothing was tried"
    for quantization in quantizations(config):
        tried = in_child(_Trial(config, quantization, headers))
        if isinstance(tried, DryLoad) and tried.is_whole:
            return tried
        if quantization == "target":
            usual = tried
        if isinstance(tried, str):
            break
    return usual


class _Trial:
    """Of a draft model that is built with one quantization config."""

    def __init__(
        self, config: VllmConfig, quantization: Quantization, headers: Headers
    ) -> None:
        assert config.speculative_config is not None
        # Lists of layers that were not quantized name MTP layers as the checkpoint
        # does, and vLLM's model as layers after the target's.
        self.config = config_to_build_by(config, quantization)
        self.quantization, self.headers = quantization, headers
        self.checkpoint = config.speculative_config.draft_model_config.model

    def __call__(self) -> DryLoad:
        """Answer in a process that is thrown away."""
        from vllm_mtp.integration.load.dry_build import draft_model_on_meta

        start = time.monotonic()
        self.model = draft_model_on_meta(self.config)
        usual = self._load(self.headers, "", {})
        if usual.is_whole:
            return usual
        for prefix, unlisted in self._others(is_lost=not usual.own):
            if time.monotonic() - start > _MAX_SECONDS:
                break
            tried = self._load({**self.headers, **unlisted}, prefix, unlisted)
            if tried.is_whole:
                return tried
        return usual

    def _others(self, is_lost: bool) -> Iterator[tuple[str, dict[str, Header]]]:
        """Prefixes and headers of unlisted files; the former if nothing was found."""
        unlisted = unlisted_headers(self.checkpoint)
        for more in ({}, unlisted) if unlisted else ({},):
            if more:
                yield "", more
            if is_lost:
                for prefix in prefixes({**self.headers, **more}):
                    yield prefix, more

    def _load(
        self, headers: Headers, prefix: str, unlisted: Mapping[str, Header]
    ) -> DryLoad:
        from vllm_mtp.integration.load.dry_load import dry_load

        names = {name.removeprefix(prefix): name for name in headers}
        tried = dry_load(
            self.model,
            {name: headers[original] for name, original in names.items()},
            self.config.model_config.get_total_num_hidden_layers(),
        )
        own = [names[name] for name in tried.own]
        files = {
            unlisted[name].file.name  # type: ignore[union-attr]
            for name in own
            if name in unlisted
        }
        layout = Layout(self.quantization, prefix, tuple(sorted(files)))
        return replace(tried, own=own, layout=layout)
