"""Seams of every engine: configuration, scheduler, requests, statistics, heads."""

from vllm_mtp.integration.load.seam import Seam

_SCHED = "vllm.v1.core.sched."
_LAYERS = "vllm.model_executor.layers."

CORE: tuple[Seam, ...] = (
    # Configuration (engine_args.py, checkpoint.py)
    Seam("core", "vllm.engine.arg_utils.EngineArgs.create_engine_config"),
    Seam(
        "core",
        "vllm.engine.arg_utils.EngineArgs.create_speculative_config",
        ("target_model_config", "target_parallel_config"),
    ),
    Seam("core", "vllm.engine.arg_utils.EngineArgs.add_cli_args", ("parser",)),
    Seam("core", "vllm.config.SpeculativeConfig.hf_config_override", ("hf_config",)),
    Seam(
        "core",
        "vllm.transformers_utils.config.get_safetensors_params_metadata",
        ("model", "revision"),
    ),
    # Scheduler (scheduler/)
    Seam(
        "core",
        _SCHED + "scheduler.Scheduler._update_after_schedule",
        ("scheduler_output",),
    ),
    Seam(
        "core",
        _SCHED + "scheduler.Scheduler.update_draft_token_ids",
        ("draft_token_ids",),
    ),
    Seam(
        "core",
        _SCHED + "scheduler.Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
    ),
    Seam(
        "core",
        _SCHED + "scheduler.Scheduler.make_spec_decoding_stats",
        (
            "spec_decoding_stats",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_invalid_spec_tokens",
            "request_id",
        ),
    ),
    Seam(
        "core",
        _SCHED + "scheduler.Scheduler._update_request_as_session",
        ("session", "update"),
    ),
    Seam("core", _SCHED + "scheduler.Scheduler.schedule"),
    Seam("core", _SCHED + "scheduler.Scheduler.add_request", ("request",)),
    Seam("core", _SCHED + "async_scheduler.AsyncScheduler"),
    Seam(
        "core",
        _SCHED + "output.SchedulerOutput",
        (
            "num_scheduled_tokens",
            "num_spec_tokens_to_schedule",
            "scheduled_spec_decode_tokens",
            "finished_req_ids",
            "scheduled_cached_reqs",
        ),
    ),
    Seam(
        "core",
        _SCHED + "output.CachedRequestData",
        ("num_computed_tokens", "req_ids", "resumed_req_ids"),
    ),
    Seam("core", "vllm.v1.request.Request.use_structured_output", is_data=True),
    Seam("core", "vllm.v1.outputs.DraftTokenIds", ("req_ids", "draft_token_ids")),
    # Requests (scheduler/request_validation.py)
    Seam(
        "core",
        "vllm.v1.engine.input_processor.InputProcessor._validate_params",
        ("params",),
    ),
    Seam(
        "core",
        "vllm.sampling_params.SamplingParams._validate_spec_decode",
        ("speculative_config",),
    ),
    Seam("core", "vllm.exceptions.VLLMValidationError", ("message", "parameter")),
    # Statistics (observe/, scheduler/vocabulary_news.py)
    Seam("core", _SCHED + "scheduler.Scheduler.make_stats"),
    Seam("core", "vllm.v1.metrics.stats.SchedulerStats", ("kv_connector_stats",)),
    Seam(
        "core",
        "vllm.v1.metrics.loggers.StatLoggerManager",
        ("vllm_config", "enable_default_loggers", "client_count"),
    ),
    Seam(
        "core",
        "vllm.v1.metrics.loggers.AggregateStatLoggerBase.record",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Seam("core", "vllm.v1.metrics.stats.RequestSpecDecodeMetrics.to_dict"),
    Seam("core", "vllm.v1.outputs.ModelRunnerOutput", ("sampled_token_ids",)),
    Seam("core", "vllm.v1.outputs.AsyncModelRunnerOutput.get_output"),
    # Worker (worker/worker.py)
    Seam("core", "vllm.v1.worker.gpu_worker.Worker.init_device"),
    Seam(
        "core",
        "vllm.v1.worker.gpu_worker.Worker.initialize_from_config",
        ("kv_cache_config",),
    ),
    # Where layers keep their KV slots (worker/kv_layout.py)
    Seam(
        "core",
        "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase"
        ".get_attn_backend",
    ),
    Seam("core", "vllm.v1.attention.backend.AttentionBackend.get_name"),
    # Draft heads (draft_vocab/)
    Seam(
        "core",
        _LAYERS + "utils.dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
    ),
    Seam(
        "core",
        _LAYERS + "logits_processor.LogitsProcessor.forward",
        ("lm_head", "hidden_states", "embedding_bias", "skip_gather"),
    ),
    Seam(
        "core",
        _LAYERS + "logits_processor.LogitsProcessor.get_top_tokens",
        ("lm_head", "hidden_states", "embedding_bias"),
    ),
    Seam(
        "core",
        _LAYERS + "vocab_parallel_embedding.VocabParallelEmbedding._get_indices",
        (
            "vocab_size_padded",
            "org_vocab_size_padded",
            "vocab_size",
            "org_vocab_size",
            "tp_rank",
            "tp_size",
        ),
    ),
    Seam("core", _LAYERS + "vocab_parallel_embedding.UnquantizedEmbeddingMethod"),
    Seam(
        "core",
        _LAYERS + "linear.UnquantizedLinearMethod.process_weights_after_loading",
        ("layer",),
    ),
    # Passes for keys and values alone (worker/draft_model_gate.py)
    Seam("core", _LAYERS + "linear.LinearBase", ("input_size", "return_bias")),
    Seam(
        "core",
        _LAYERS + "fused_moe.runner.moe_runner_interface.MoERunnerInterface.forward",
        ("hidden_states",),
    ),
    Seam(
        "core",
        "vllm.v1.attention.backend.AttentionBackend.forward_includes_kv_cache_update",
        is_data=True,
    ),
    Seam("core", "vllm.v1.attention.backend.MLAAttentionImpl.do_kv_cache_update"),
    Seam("core", _LAYERS + "attention.attention.unified_kv_cache_update"),
    Seam("core", _LAYERS + "attention.mla_attention.MLAAttention.update_kv_cache"),
    # Draft vocabulary (draft_vocab/policy.py, engine_args.py)
    Seam("core", _SCHED + "output.NewRequestData", ("prompt_token_ids",)),
    Seam("core", "vllm.tokenizers.cached_tokenizer_from_config", ("model_config",)),
)
