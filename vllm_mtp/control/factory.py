"""From the options to a controller: asked once, when the scheduler starts."""

from vllm_mtp.config import MTPPlusConfig
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.options import GoodputOptions
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.control.step_times import CPU_COST_PRIOR, CostPrior
from vllm_mtp.control.threshold import ThresholdController


def make_controller(
    config: MTPPlusConfig,
    max_draft_length: int,
    depths: tuple[int, ...] | None = None,
    *,
    max_graph_rows: int = 0,
    sees_shadow_drafts: bool = False,
    draws_drafts: bool = False,
    stops_early: bool = False,
    copies: bool = False,
    copies_drafts: bool = False,
    is_cpu: bool = False,
) -> Controller:
    """Build the controller that ``config`` names.

    Args:
        config: our options.
        max_draft_length: resolved upper bound on K.
        depths: draft depths that a step may have; None for all up to the bound.
        max_graph_rows: rows of the longest step with a CUDA graph; only steps whose
            requests have equally many draft tokens have one.
        sees_shadow_drafts: outcomes hold drafts that were compared, not verified.
        draws_drafts: those of sampled requests are drawn from the proposal, and not
            tested unless they are verified.
        stops_early: the worker follows a `StopRule`.
        copies: drafts may be continued from contexts.
        copies_drafts: or be copied from them altogether.
        is_cpu: the model runs on one, where a pass is bound by arithmetic early.
    """
    if config.controller == "random":
        seed = config.controller_seed
        return RandomController(
            max_draft_length, seed, stops_early, copies, copies_drafts
        )
    if config.controller == "fixed":
        return FixedController(max_draft_length)
    if config.controller == "threshold":
        return ThresholdController(max_draft_length)
    latency_s = None if config.max_tpot_ms is None else config.max_tpot_ms / 1e3
    return GoodputController(
        max_draft_length,
        GoodputOptions(
            max_token_latency_s=latency_s,
            depths=depths,
            max_graph_rows=max_graph_rows,
            sees_shadow_drafts=sees_shadow_drafts,
            draws_drafts=draws_drafts,
            stops_early=stops_early,
            copies=copies,
            copies_drafts=copies_drafts,
            cost_prior=CPU_COST_PRIOR if is_cpu else CostPrior(),
        ),
    )
