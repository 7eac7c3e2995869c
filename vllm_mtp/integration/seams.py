"""Every symbol of vLLM that this package is built on, with the parameters it uses.

Data alone: ``compat.check`` looks at it when an engine starts.
"""

from typing import NamedTuple

_V1 = "vllm.v1.spec_decode."
_PROPOSER = _V1 + "llm_base_proposer.SpecDecodeBaseProposer."
_V2 = "vllm.v1.worker.gpu.spec_decode."
_SCHED = "vllm.v1.core.sched."
_PROCESSORS = "vllm.v1.sample.logits_processor.builtin."
_LAYERS = "vllm.model_executor.layers."


class Seam(NamedTuple):
    """One symbol of vLLM and the parameter names that we pass or override."""

    group: str
    """``core`` or the runner that needs it: ``v1``, ``v2``, ``cpu``."""
    path: str
    """Dotted module path, then attribute path."""
    parameters: tuple[str, ...] = ()


SEAMS: tuple[Seam, ...] = (
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
    # Scheduler (scheduler.py)
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
    Seam("core", "vllm.v1.request.Request.use_structured_output"),
    Seam("v1", "vllm.v1.worker.gpu_input_batch.CachedRequestState.num_tokens"),
    Seam("core", "vllm.v1.outputs.DraftTokenIds", ("req_ids", "draft_token_ids")),
    # Requests (request_validation.py)
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
    # Statistics (step_metrics.py, stat_logger.py, vocabulary_news.py,
    # response_metrics.py)
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
    # Worker (worker.py)
    Seam("core", "vllm.v1.worker.gpu_worker.Worker.init_device"),
    Seam(
        "core",
        "vllm.v1.worker.gpu_worker.Worker.initialize_from_config",
        ("kv_cache_config",),
    ),
    # Where layers keep their KV slots (kv_layout.py)
    Seam(
        "core",
        "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase"
        ".get_attn_backend",
    ),
    Seam("core", "vllm.v1.attention.backend.AttentionBackend.get_name"),
    # Draft heads (draft_head.py, draft_vocab*.py)
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
    # Weights in 8 bits (rounded_weights.py)
    Seam("cpu", "vllm._custom_ops.onednn_scaled_int8_quant", ("input",)),
    Seam(
        "cpu",
        "vllm._custom_ops.onednn_scaled_mm",
        (
            "dnnl_handler",
            "x",
            "output",
            "input_scale",
            "input_zp",
            "input_zp_adj",
            "bias",
        ),
    ),
    Seam(
        "cpu",
        "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"
        ".process_weights_for_onednn",  # sets the handler and the adjustment
        ("layer",),
    ),
    Seam(
        "v1",
        "vllm.model_executor.kernels.linear.init_int8_linear_kernel",
        (
            "is_channelwise",
            "is_static_input_scheme",
            "input_symmetric",
            "module_name",
        ),
    ),
    Seam(
        "v1",
        _LAYERS + "quantization.base_config.QuantizationConfig.get_quant_method",
        ("layer", "prefix"),
    ),
    Seam("v1", _PROPOSER + "_create_draft_vllm_config"),
    Seam("core", _SCHED + "output.NewRequestData", ("prompt_token_ids",)),
    Seam("core", "vllm.tokenizers.cached_tokenizer_from_config", ("model_config",)),
    Seam("v1", _PROPOSER + "load_model", ("target_model",)),
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model",
        ("scheduler_output",),
    ),
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
        ("logits", "spec_decode_metadata"),
    ),
    Seam("v1", "vllm.v1.outputs.SamplerOutput", ("sampled_token_ids",)),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.execute_model",
        ("scheduler_output",),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample",
        ("hidden_states", "input_batch", "grammar_output"),
    ),
    Seam(
        "v2",
        _V2 + "speculator.DraftModelSpeculator.load_model",
        ("target_model",),
    ),
    Seam(
        "v2",
        _V2 + "speculator.DraftModelSpeculator.compute_draft_logits",
        ("hidden_states", "spec_step_idx"),
    ),
    Seam(
        "v2",
        _V2 + "speculator.DraftModelSpeculator.get_draft_top_tokens",
        ("hidden_states", "spec_step_idx"),
    ),
    Seam(
        "v2",
        _V2 + "speculator.DraftModelSpeculator.sample_draft",
        ("hidden_states", "draft_logits"),
    ),
    # Model Runner V1 (proposer_v1.py)
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens",
        ("grammar_output",),
    ),
    Seam("v1", _V1 + "eagle.EagleProposer", ("vllm_config", "device", "runner")),
    Seam("v1", _V1 + "gemma4.Gemma4Proposer", ("vllm_config", "device", "runner")),
    Seam("v1", _V1 + "step3p5.Step3p5MTPProposer", ("vllm_config", "device", "runner")),
    Seam(
        "v1",
        _PROPOSER + "prepare_next_token_ids_padded",
        (
            "sampled_token_ids",
            "requests",
            "gpu_input_batch",
            "discard_request_mask",
        ),
    ),
    Seam(
        "v1",
        _PROPOSER + "prepare_inputs_padded",
        (
            "common_attn_metadata",
            "spec_decode_metadata",
            "valid_sampled_tokens_count",
        ),
    ),
    Seam(
        "v1",
        _PROPOSER + "propose",
        (
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "num_rejected_tokens_gpu",
        ),
    ),
    Seam(
        "v1",
        _PROPOSER + "_update_positions_dependent_metadata",
        ("positions", "common_attn_metadata"),
    ),
    Seam("v1", _PROPOSER + "_get_slot_mapping", ("num_tokens", "slot_mapping")),
    Seam("v1", _PROPOSER + "_greedy_sample", ("hidden_states",)),
    Seam("v1", _PROPOSER + "_sample_from_logits", ("logits", "sampling_metadata")),
    Seam(
        "v1",
        _PROPOSER + "_sample_draft_tokens",
        ("hidden_states", "sampling_metadata"),
    ),
    Seam("v1", "vllm.v1.worker.gpu_model_runner.GPUModelRunner.take_draft_token_ids"),
    Seam(
        "v1",
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "causal",
            "dcp_local_seq_lens",
        ),
    ),
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.ExecuteModelState",
        (
            "scheduler_output",
            "spec_decode_metadata",
            "spec_decode_common_attn_metadata",
            "slot_mappings",
        ),
    ),
    Seam(
        "v1",
        "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
        ("cu_num_draft_tokens", "num_draft_tokens"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.rejection_sampler.RejectionSampler",
        ("sampler", "spec_config", "device"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.rejection_sampler.RejectionSampler.forward",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.rejection_sampler.rejection_sample",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
        ),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.rejection_sampler.generate_uniform_probs",
        ("num_tokens", "num_draft_tokens", "generators", "device"),
    ),
    Seam("v1", "vllm.v1.sample.rejection_sampler.GREEDY_TEMPERATURE"),
    Seam(
        "v1",
        "vllm.v1.sample.rejection_sampler.RejectionSampler.apply_logits_processors",
        ("logits", "sampling_metadata", "metadata"),
    ),
    # Sampling on a CPU (sampling_v1.py)
    Seam(
        "v1",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
        ("logprobs_mode", "use_fp64_gumbel"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
        ("logits", "generators", "k", "p"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p",
        ("logits", "k", "p"),
    ),
    Seam("v1", "vllm.v1.sample.sampler.Sampler.greedy_sample", ("logits",)),
    Seam("v1", "vllm.config.model.PROCESSED_LOGPROBS_MODES"),
    # Biases and min_p of draft tokens (logits_processors_v1.py)
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.build_logitsprocs",
        (
            "vllm_config",
            "device",
            "is_pin_memory",
            "is_pooling_model",
            "custom_logitsprocs",
        ),
    ),
    Seam("v1", "vllm.v1.sample.logits_processor.LogitsProcessors"),
    Seam("v1", _PROCESSORS + "LogitBiasLogitsProcessor.apply", ("logits",)),
    Seam("v1", _PROCESSORS + "MinPLogitsProcessor.apply", ("logits",)),
    Seam("v1", _PROCESSORS + "MinTokensLogitsProcessor"),
    # Drawn drafts that are not verified (judging_v1.py)
    Seam(
        "v1",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_native",
        ("logits", "generators", "k", "p"),
    ),
    # Drafts of structured requests (grammar_v1.py)
    Seam(
        "v1",
        "vllm.v1.structured_output.StructuredOutputManager.grammar_init",
        ("request",),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.StructuredOutputManager._create_grammar",
        ("request",),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.request.StructuredOutputRequest"
        ".from_sampling_params",
        ("sampling_params",),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.accept_tokens",
        ("request_id", "tokens"),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar"
        ".validate_tokens",
        ("tokens",),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.rollback",
        ("num_tokens",),
    ),
    Seam(
        "v1",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar.fill_bitmask",
        ("bitmask", "batch_index"),
    ),
    # Model Runner V2 (speculator_v2.py)
    Seam(
        "v2",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample_tokens",
        ("grammar_output",),
    ),
    Seam(
        "v2",
        _V2 + "rejection_sampler.gather_draft_sampled",
        (
            "input_ids",
            "positions",
            "logits_indices",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "prefill_len",
        ),
    ),
    Seam("v2", _V2 + "rejection_sampler.get_max_chunk_logits", ("vocab_size",)),
    Seam("v2", _V2 + "rejection_sampler.RejectionSampler", ("sampler", "spec_config")),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params",
        (
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.sample.sampler.Sampler.get_logprobs_dims",
        ("idx_mapping_np",),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.sample.output.SamplerOutput",
        (
            "sampled_token_ids",
            "logprobs_tensors",
            "num_nans",
            "num_sampled",
            "num_rejected",
        ),
    ),
    Seam(
        "v2",
        _V2 + "utils.get_drafter_hidden_states",
        ("model", "hidden_states"),
    ),
    Seam("v2", _V2 + "mtp.speculator.MTPSpeculator", ("vllm_config", "device")),
    Seam("v2", _V2 + "multi_module_mtp.speculator.MultiModuleMTPSpeculator"),
    Seam("v2", _V2 + "gemma4.speculator.Gemma4Speculator"),
    Seam(
        "v2",
        _V2 + "speculator.DraftModelSpeculator.observe_verification",
        ("idx_mapping", "num_sampled", "num_rejected"),
    ),
    Seam(
        "v2",
        _V2 + "target_dependent_ar.speculator.TargetDependentARSpeculator.propose",
        ("input_batch", "dummy_run", "num_speculative_tokens"),
    ),
    Seam(
        "v2",
        _V2 + "target_dependent_ar.speculator.TargetDependentARSpeculator._run_model",
        ("num_tokens", "attn_metadata", "slot_mappings", "num_tokens_across_dp"),
    ),
    Seam(
        "v2",
        _V2 + "target_dependent_ar.speculator.TargetDependentARSpeculator"
        ".on_prefill_begin",
        ("num_reqs",),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.attn_utils.build_attn_metadata",
        (
            "attn_groups",
            "num_reqs",
            "num_tokens",
            "query_start_loc_gpu",
            "query_start_loc_cpu",
            "max_query_len",
            "seq_lens",
            "max_seq_len",
            "block_tables",
            "slot_mappings",
            "kv_cache_config",
            "seq_lens_cpu_upper_bound",
            "positions",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.model_runner.ExecuteModelState",
        (
            "input_batch",
            "slot_mappings_by_layer",
            "hidden_states",
            "num_spec_tokens_to_schedule",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.block_table.BlockTables.compute_slot_mappings",
        (
            "idx_mapping",
            "query_start_loc",
            "positions",
            "num_tokens_padded",
            "out",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.attn_utils.build_slot_mappings_by_layer",
        ("slot_mappings", "kv_cache_config"),
    ),
    # CPU (cpu_worker.py, mends.py)
    Seam("cpu", "vllm.v1.worker.cpu_worker.CPUWorker.init_device"),
    Seam(
        "cpu",
        "vllm.utils.cpu_triton_utils._expand_kernel_impl",
        ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
    ),
    Seam("cpu", "vllm.triton_utils.dispatcher.register_kernels", ("overrides",)),
    Seam("cpu", "vllm.v1.sample.rejection_sampler.expand_kernel"),
)
