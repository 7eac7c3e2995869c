"""Early stop of drafting: where it is possible, and how it travels.

What the scheduler wants of a step's drafts goes to the worker with the step, and what
became of it comes back with them: both in subclasses of the objects in which vLLM
itself sends a step and its drafts.
"""

from dataclasses import dataclass, fields
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.scheduler.messages import warn_lost
from vllm_mtp.records import StopRule


@dataclass
class DirectedSchedulerOutput(SchedulerOutput):
    """A step with directions for its drafts."""

    stop_rule: StopRule | None = None
    """Drafting may stop before ``num_spec_tokens_to_schedule`` steps."""


@dataclass
class ScoredDraftTokenIds(DraftTokenIds):
    """Drafts, and what their proposals said of them."""

    # num_reqs x draft steps that were made
    confidences: list[tuple[float, ...]]
    # [num_reqs]: tokens that are worth verifying; None where no rule was given
    lengths: list[int] | None


def directed(
    output: SchedulerOutput, stop_rule: StopRule | None
) -> DirectedSchedulerOutput:
    """The same step with directions; without a rule as well, so that none is missed."""
    known = {field.name: getattr(output, field.name) for field in fields(output)}
    return DirectedSchedulerOutput(**known, stop_rule=stop_rule)


def stop_rule_of(output: SchedulerOutput) -> StopRule | None:
    """The rule of a step in an engine whose drafting may stop early."""
    if isinstance(output, DirectedSchedulerOutput):
        return output.stop_rule
    if output.num_spec_tokens_to_schedule:
        warn_lost(DirectedSchedulerOutput)
    return None


def may_stop_early(vllm_config: Any) -> bool:
    """Whether this engine's drafting may stop early.

    Not where drafts never come back to the scheduler (async scheduling), where a draft
    step is part of a CUDA graph or too short to look at its outcome, where ranks must
    make the same draft steps, or where draft steps differ from each other. Not while a
    trace is written: what was not drafted could not be replayed.
    """
    own, speculation = settings_of(vllm_config), vllm_config.speculative_config
    return (
        own.early_stop
        and own.controller in ("goodput", "random")
        and own.trace_path is None
        and not vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
        and vllm_config.parallel_config.world_size_across_dp == 1
        and (current_platform.is_cpu() or vllm_config.model_config.enforce_eager)
        and not speculation.use_local_argmax_reduction
        and not speculation.use_gemma4_mtp()
        and not speculation.use_step3p5_mtp()
    )
