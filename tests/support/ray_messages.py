"""What crosses to a worker of Ray and arrives there, where no plugin is loaded."""

import pickle
from typing import Any

from vllm.config import VllmConfig

STOP_CHANCES = {"a": ([0.5, -1.0], 0.7, [0.6, 0.3])}


def crossed() -> dict[str, bool]:
    """Whether each kind of message is the same behind Ray's serialization."""
    import ray

    same = {}
    for name, message in make_messages().items():
        arrived = ray.get(ray.put(message))
        same[name] = (
            arrived is not message
            and type(arrived) is type(message)
            and pickle.dumps(arrived) == pickle.dumps(message)
        )
    return same


def look_at(vllm_config: VllmConfig) -> dict[str, Any]:
    """What a process finds that has only received a config."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    from vllm_mtp.integration.load.settings import settings_of
    from vllm_mtp.integration.load.wrapping import is_wrapped

    return {
        "plugin_loaded": is_wrapped(EngineArgs, "create_engine_config"),
        "front_end": {
            owner.__name__: is_wrapped(owner, name)
            for owner, name in (
                (StatLoggerManager, "__init__"),
                (SamplingParams, "_validate_spec_decode"),
                (RequestSpecDecodeMetrics, "to_dict"),
            )
        },
        "worker": resolve_obj_by_qualname(
            vllm_config.parallel_config.worker_cls
        ).__name__,
        "scheduler": vllm_config.scheduler_config.get_scheduler_cls().__name__,
        "options": settings_of(vllm_config).model_dump(mode="json"),
    }


def make_messages() -> dict[str, Any]:
    """One of each kind that scheduler and workers exchange."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from vllm_mtp.integration.scheduler import messages
    from vllm_mtp.records import DraftChances, StopRule

    rule = StopRule(
        {name: DraftChances(*each) for name, each in STOP_CHANCES.items()},
        [0.0, 0.1, 0.3],
        0.2,
    )
    report = messages.WorkerReport(
        vocabulary=messages.VocabularyState(0.97, True),
        shadow_drafts={"a": True},
        new_weights=("target",),
        choices={"a": messages.Choice(1, 1)},
    )
    return {
        "step": messages.directed(SchedulerOutput.make_empty(), rule),
        "drafts": messages.ScoredDraftTokenIds(["a"], [[1, 2]], [(0.5, 0.1)], [2]),
        "output": messages.with_report(EMPTY_MODEL_RUNNER_OUTPUT, report),
    }
