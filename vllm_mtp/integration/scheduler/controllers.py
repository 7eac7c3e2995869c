"""Which controller a scheduler gets, and which depths it may choose."""

from typing import Any

from vllm.platforms import current_platform

from vllm_mtp.control.controller import Controller
from vllm_mtp.control.factory import make_controller
from vllm_mtp.draft_lengths import graph_tiers
from vllm_mtp.integration.load.settings import settings_of, trace_header, trace_path
from vllm_mtp.integration.load.synthetic_acceptance import is_synthetic
from vllm_mtp.integration.observe.tracing import TracingController
from vllm_mtp.integration.scheduler.early_stop import may_stop_early
from vllm_mtp.integration.worker.copying import may_copy, may_copy_drafts
from vllm_mtp.integration.worker.draft_sampling import draws_drafts, tests_shadow_drafts


def controller_of(vllm_config: Any, sees_shadow_drafts: bool) -> Controller:
    """The controller that an engine's configuration asks for, traced if it says so.

    Args:
        vllm_config: vLLM's.
        sees_shadow_drafts: Drafts come back to the scheduler, verified or not.
    """
    own, bound = settings_of(vllm_config), vllm_config.num_speculative_tokens
    depths = allowed_depths(vllm_config)
    controller = make_controller(
        own,
        bound,
        depths,
        max_graph_rows=max_graph_rows(vllm_config),
        sees_shadow_drafts=sees_shadow_drafts and not is_synthetic(vllm_config),
        draws_drafts=draws_drafts(vllm_config) and not tests_shadow_drafts(vllm_config),
        stops_early=may_stop_early(vllm_config),
        copies=may_copy(vllm_config),
        copies_drafts=may_copy_drafts(vllm_config),
        is_cpu=current_platform.is_cpu(),
    )
    if own.trace_path is None:
        return controller
    path = trace_path(own.trace_path, vllm_config)
    return TracingController(controller, path, trace_header(vllm_config), bound)


def doubt_acceptance(controller: Controller) -> None:
    """New weights: what a controller has learned of acceptance is old, costs stay."""
    # A trace is written by a controller around the one that decides.
    deciding = getattr(controller, "controller", controller)
    survival = getattr(deciding, "survival", None)
    if survival is not None:
        survival.doubt()


def allowed_depths(vllm_config: Any) -> tuple[int, ...] | None:
    """Depths that a step may have; None for all.

    Ranks of a data-parallel engine agree by never choosing, each still verifies only
    the drafts that pay. Elsewhere those that have CUDA graphs.
    """
    bound = vllm_config.num_speculative_tokens
    if vllm_config.parallel_config.data_parallel_size > 1:
        return (bound,)
    return graph_tiers(bound) if _has_full_graphs(vllm_config) else None


def _has_full_graphs(vllm_config: Any) -> bool:
    """Whether steps of equal draft lengths are replayed whole."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(vllm_config.use_v2_model_runner and mode.has_full_cudagraphs())


def max_graph_rows(vllm_config: Any) -> int:
    """Rows of the longest step that only equal draft lengths can make a graph."""
    compilation = vllm_config.compilation_config
    mixed_mode = compilation.cudagraph_mode.mixed_mode()
    if not _has_full_graphs(vllm_config) or mixed_mode.has_full_cudagraphs():
        return 0
    return int(compilation.max_cudagraph_capture_size or 0)
