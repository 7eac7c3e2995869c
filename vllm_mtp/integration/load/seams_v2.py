"""Seams of Model Runner V2."""

from vllm_mtp.integration.load.seam import Seam

_V2 = "vllm.v1.worker.gpu.spec_decode."

V2: tuple[Seam, ...] = (
    # The runner and the draft vocabulary (v2/runner.py, v2/draft_vocab.py)
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
    # Model Runner V2 (v2/speculator.py)
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
    Seam(
        "v2",
        _V2 + "rejection_sampler.RejectionSampler",
        ("sampler", "spec_config", "device", "watermark_key"),
    ),
    # Logprobs of listed tokens (v2/listed_logprobs.py)
    Seam(
        "v2",
        _V2 + "rejection_sampler.RejectionSampler._verify_in_chunks",
        ("logits", "input_batch"),
    ),
    Seam(
        "v2",
        _V2 + "rejection_sampler.RejectionSampler._get_logprobs_tensors",
        (
            "sampled",
            "num_sampled",
            "logits",
            "cu_num_logits",
            "cu_num_logits_np",
            "max_num_logprobs",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.sample.logprob.compute_topk_scores",
        (
            "logits",
            "num_logprobs",
            "sampled_token_ids",
            "cu_num_logits",
            "logprob_token_ids_state",
            "expanded_idx_mapping",
            "max_per_req_token_ids",
            "logits_mode",
        ),
    ),
    Seam(
        "v2",
        "vllm.v1.worker.gpu.sample.logprob.LogprobTokenIdsState.max_num_token_ids",
        ("idx_mapping_np",),
    ),
    Seam("v2", "vllm.v1.worker.gpu.model_runner.GPUModelRunner.load_model"),
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
    # KV backfill (v2/kv_backfill.py)
    Seam(
        "v2",
        _V2 + "target_dependent_ar.speculator.TargetDependentARSpeculator._prefill",
        ("num_reqs",),
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
)
