"""Which scheduler and worker run: chosen from what the platform resolved."""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.integration.cpu.int8_drafts import check_draft_weights
from vllm_mtp.integration.cpu.prefiltered_head import check_verify_head
from vllm_mtp.integration.cpu.recurrent_layers import check_recurrent_layers
from vllm_mtp.integration.extra_heads.registration import settle
from vllm_mtp.integration.load import compat, front_end
from vllm_mtp.integration.load.settings import settings_of, trace_path
from vllm_mtp.integration.observe import tracing
from vllm_mtp.integration.warm_start.state_file import check_folder

# Below "vllm", so that vLLM's log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

_PACKAGE = "vllm_mtp.integration"

WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": f"{_PACKAGE}.worker.worker.MTPPlusWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_PACKAGE}.cpu.worker.MTPPlusCPUWorker",
}
"""Ours by vLLM's. Other platforms (TPU, XPU, out-of-tree) were never tried."""

SCHEDULERS = {
    False: f"{_PACKAGE}.scheduler.scheduler.MTPPlusScheduler",
    True: f"{_PACKAGE}.scheduler.scheduler.MTPPlusAsyncScheduler",
}
"""Ours by whether async scheduling was resolved to be on."""


def name_our_classes(config: VllmConfig) -> None:
    """Name our worker and scheduler in a finished config.

    Raises:
        ConfigError: the platform's worker is not supported, or options contradict.
        CompatibilityError: a symbol that this runner needs is missing.
    """
    worker = config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise ConfigError(
            f"method {METHOD!r} runs on vLLM's GPU and CPU workers "
            f"({', '.join(sorted(WORKERS))}), but this platform uses {worker}."
        )
    runner = "v2" if config.use_v2_model_runner else "v1"
    _refuse_contradictions(config)
    own = settings_of(config)
    settle(config.speculative_config, own.hidden_states_path is not None)
    if "cpu_worker" in worker:
        check_recurrent_layers(config.model_config)
    compat.check({"core", runner, *({"cpu"} if "cpu_worker" in worker else ())})
    is_async = bool(config.scheduler_config.async_scheduling)
    front_end.install(own)
    config.parallel_config.worker_cls = WORKERS[worker]
    config.scheduler_config.scheduler_cls = SCHEDULERS[is_async]
    assert config.speculative_config is not None
    if config.use_v2_model_runner:
        _warn_of_further_turns(config.speculative_config)
    logger.info(
        "%s: up to K=%d draft tokens, %s controller, model runner %s, %s scheduling",
        METHOD,
        config.speculative_config.num_speculative_tokens,
        own.controller,
        runner.upper(),
        "async" if is_async else "sync",
    )


def _warn_of_further_turns(speculative_config: Any) -> None:
    draft_length = speculative_config.num_speculative_tokens
    num_layers = speculative_config.draft_model_config.hf_config.n_predict
    if 1 < num_layers < draft_length:
        logger.warning(
            "num_speculative_tokens=%d with %d MTP layers: Model Runner V2 overwrites "
            "keys and values of the first turn, and fewer drafts are accepted than "
            "with %d.",
            draft_length,
            num_layers,
            num_layers,
        )


def _refuse_contradictions(config: VllmConfig) -> None:
    own = settings_of(config)
    if own.trace_path is not None:
        tracing.check_path(trace_path(own.trace_path, config))
    if own.warm_start_path is not None:
        check_folder(own.warm_start_path)
    check_draft_weights(config)
    check_verify_head(config)
    if own.kv_rollback == "scrub":
        _refuse_scrub_where_slots_are_elsewhere(config.parallel_config)
    ranks = config.parallel_config.data_parallel_size
    if own.controller in ("random", "threshold") and ranks > 1:
        raise ConfigError(
            f"speculative_config.controller={own.controller!r} is not allowed with "
            f"data_parallel_size={ranks}: ranks must draft equally deep; leave it "
            "unset or use 'fixed'."
        )


def _refuse_scrub_where_slots_are_elsewhere(parallel_config: Any) -> None:
    """Scrubbing happens where tokens are sampled, on whole batches."""
    for option, default in (
        ("pipeline_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("use_ubatching", False),
    ):
        value = getattr(parallel_config, option)
        if value != default:
            raise ConfigError(
                "speculative_config.kv_rollback='scrub' is not allowed with "
                f"{option}={value}, only with {default}: leave kv_rollback unset (the "
                "output is the same)."
            )
