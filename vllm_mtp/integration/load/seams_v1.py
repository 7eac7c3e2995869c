"""Seams of Model Runner V1."""

from vllm_mtp.integration.load.seam import Seam

_V1 = "vllm.v1.spec_decode."
_PROPOSER = _V1 + "llm_base_proposer.SpecDecodeBaseProposer."
_SAMPLER = "vllm.v1.sample.sampler.Sampler."
_THINKING = "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder."
_PROCESSORS = "vllm.v1.sample.logits_processor.builtin."
_LAYERS = "vllm.model_executor.layers."

V1: tuple[Seam, ...] = (
    # Weights in 8 bits (cpu/int8_weights.py)
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
    # The runner and the draft vocabulary (v1/runner.py, v1/draft_vocab.py)
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
    # Steps without drafts (v1/steps_without_drafts.py)
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._calc_spec_decode_metadata",
        ("num_draft_tokens", "cu_num_scheduled_tokens"),
    ),
    Seam(
        "v1",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._copy_draft_token_ids_to_cpu",
    ),
    # Drafters (v1/drafter.py)
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
    Seam("v1", "vllm.v1.sample.rejection_sampler.GREEDY_TEMPERATURE", is_data=True),
    # Rows of a verification (v1: rejection_sampler, verified_rows, listed_logprobs)
    Seam(
        "v1",
        _SAMPLER + "apply_logits_processors",
        ("logits", "sampling_metadata", "predict_bonus_token"),
    ),
    Seam("v1", _SAMPLER + "sample", ("logits", "sampling_metadata")),
    Seam("v1", _SAMPLER + "apply_temperature", ("logits", "temp", "all_random")),
    Seam("v1", _SAMPLER + "compute_logprobs", ("logits",)),
    Seam(
        "v1",
        _SAMPLER + "gather_logprobs",
        ("logprobs", "num_logprobs", "token_ids"),
    ),
    Seam(
        "v1",
        _SAMPLER + "gather_specific_token_logprobs",
        ("logprobs", "logprob_token_ids", "sampled"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.metadata.SamplingMetadata",
        (
            "temperature",
            "top_p",
            "top_k",
            "generators",
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
            "output_token_ids",
            "spec_token_ids",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
            "logprob_token_ids",
            "max_num_logprobs",
            "thinking_budget_state_holder",
        ),
    ),
    # Thinking budgets (v1/thinking_budgets.py)
    Seam(
        "v1",
        _THINKING + "__init__",
        (
            "reasoning_config",
            "max_num_seqs",
            "num_spec_tokens",
            "device",
            "is_pin_memory",
        ),
    ),
    Seam(
        "v1",
        _THINKING + "update_state",
        ("output_token_ids", "spec_token_ids", "repeat_indices"),
    ),
    Seam("v1", _THINKING + "sync_batch", ("batch_update",)),
    Seam("v1", _THINKING + "_update_think_state", ("state",)),
    Seam(
        "v1",
        _THINKING + "_init_state_entry",
        ("prompt_tok_ids", "thinking_token_budget"),
    ),
    # Sampling on a CPU (v1/cpu_sampling.py)
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
    Seam("v1", _SAMPLER + "greedy_sample", ("logits",)),
    Seam("v1", "vllm.config.model.PROCESSED_LOGPROBS_MODES", is_data=True),
    # What requests ask of their logits (v1/logits_processors.py)
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
    Seam(
        "v1",
        _PROCESSORS + "process_dict_updates",
        ("req_entries", "batch_update", "new_state"),
    ),
    Seam(
        "v1",
        "vllm.v1.sample.logits_processor.interface.BatchUpdate",
        ("batch_size", "removed", "added", "moved"),
    ),
    Seam("v1", "vllm.v1.sample.logits_processor.interface.LogitsProcessor"),
    # Drawn drafts that are not verified (v1/shadow_drafts.py)
    Seam(
        "v1",
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_native",
        ("logits", "generators", "k", "p"),
    ),
    # Drafts of structured requests (v1/draft_grammars.py)
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
)
