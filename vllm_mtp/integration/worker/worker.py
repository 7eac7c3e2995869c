"""The GPU worker: vLLM's own, whose drafter is replaced before weights are loaded."""

import copy
from collections.abc import Collection
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.worker.gpu_worker import Worker

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.settings import layout_of
from vllm_mtp.integration.worker.adapting import adapter_of
from vllm_mtp.integration.worker.hidden_states import recorder_of
from vllm_mtp.integration.worker.reports import Reports
from vllm_mtp.integration.worker.rollback import Rollback
from vllm_mtp.integration.worker.weight_updates import (
    DRAFT,
    TARGET,
    SleepingState,
    WeightWatch,
)


class ReplacesDrafter(Worker):
    """Puts our drafter in either model runner."""

    rollback: Rollback
    _weights: WeightWatch
    _asleep: SleepingState | None = None

    def init_device(self) -> None:
        self._init_device_with_all_processors()
        self.rollback = Rollback(self.vllm_config, self.device)
        # Imported here because the V2 modules need Triton, which a V1 worker may lack.
        if self.use_v2_model_runner:
            from vllm_mtp.integration.v2.speculator import replace_speculator

            replace_speculator(self.model_runner, self.rollback)
        else:
            from vllm_mtp.integration.v1.drafter import replace_drafter

            replace_drafter(self.model_runner, self.rollback)

    def _init_device_with_all_processors(self) -> None:
        if self.vllm_config.use_v2_model_runner:  # has them
            return super().init_device()
        from vllm_mtp.integration.v1.logits_processors import all_processors

        with all_processors():
            super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if not self.use_v2_model_runner:
            from vllm_mtp.integration.v1.logits_processors import follow_requests
            from vllm_mtp.integration.v1.thinking_budgets import (
                replace_thinking_budgets,
            )

            # Only now vLLM's batch is the one that requests come to.
            follow_requests(self.model_runner)
            replace_thinking_budgets(self.model_runner)
        if self.rollback.scrubs:
            self.rollback.bind_kv_caches(
                self.vllm_config, kv_cache_config, scrubbed_mtp_layers(self._drafter)
            )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._drafter is None:
            return
        self._drafter.weight_watch = self._weights = WeightWatch()
        self._weights.watch(TARGET, self.get_model())
        self._weights.watch(DRAFT, self._drafter.model)
        self._drafter.recorder = recorder_of(self.vllm_config, self.rank)
        self._drafter.adapter = adapter_of(self.vllm_config, self.rank, self._load_head)

    def flush_hidden_states(self) -> None:
        """Write those that have not been written; a tool asks for it."""
        if self._drafter is not None and self._drafter.recorder is not None:
            self._drafter.recorder.flush()

    def shutdown(self) -> None:
        if self._drafter is not None and self._drafter.adapter is not None:
            self._drafter.adapter.close()
        else:
            self.flush_hidden_states()
        super().shutdown()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        # On a GPU it has made steps of whose outputs no scheduler hears.
        if isinstance(self.model_runner, Reports):
            self.model_runner.begin_reports()
        return times

    def reload_weights(
        self, weights_iterator: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        path = self.vllm_config.model_config.model
        super().reload_weights(weights_iterator, *args, **kwargs)
        # Who hands over weights one by one hands over those of the MTP layers by
        # `start_draft_weight_update`.
        if weights_iterator is None and self._drafter is not None:
            self._reload_mtp_layers(path)

    def _reload_mtp_layers(self, old_path: str) -> None:
        """vLLM reloads the target alone."""
        draft = self.vllm_config.speculative_config.draft_model_config
        if draft.model == old_path:  # else they have weights of their own
            self._load_mtp_layers(draft, self.vllm_config.model_config.model)

    def _load_head(self, folder: str | None) -> None:
        """MTP layers of a folder; those that the server began with, of None."""
        draft = copy.copy(self.vllm_config.speculative_config.draft_model_config)
        self._load_mtp_layers(draft, folder or draft.model)

    def _load_mtp_layers(self, draft: Any, path: str) -> None:
        """Of a checkpoint, which the draft model's config will name."""
        from vllm_mtp.integration.worker.loaded_weights import read_unlisted_files

        config = copy.copy(self.vllm_config)
        config.model_config = draft
        read_unlisted_files(self._drafter.model, path, None, layout_of(config).files)
        with set_current_vllm_config(config), self._drafter.plain_weights():
            reload_weights(config, self._drafter.model, None, path, True)

    def sleep(self, level: int = 1) -> None:
        if level == 2 and self._drafter is not None:
            self._asleep = SleepingState(self._drafter.lasting_tensors())
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if self._asleep is not None and (tags is None or "weights" in tags):
            self._asleep.restore()
            self._asleep = None
            self._weights.note(TARGET, DRAFT)

    @property
    def _drafter(self) -> Any:
        """Ours, of either runner; None on all but the last pipeline rank."""
        name = "speculator" if self.use_v2_model_runner else "drafter"
        return getattr(self.model_runner, name, None)


def scrubbed_mtp_layers(drafter: Any) -> Collection[str]:
    """Attention layers whose draft slots are zeroed.

    Raises:
        ConfigError: the drafter's own slots are not known.
    """
    if not drafter.can_scrub:
        raise ConfigError(
            "speculative_config.kv_rollback='scrub' is not allowed for models that run "
            "several MTP layers in turn: leave kv_rollback unset (the output is the "
            "same)."
        )
    return drafter.mtp_layers


class MTPPlusWorker(ReplacesDrafter):
    """GPU worker."""
