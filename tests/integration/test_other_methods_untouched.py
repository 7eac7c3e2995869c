"""With another method, or none, the plugin changes nothing at all."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.random_checkpoints import write_checkpoint
from vllm_mtp.integration.load import engine_args
from vllm_mtp.integration.load.plugin import register
from vllm_mtp.integration.load.wrapping import is_wrapped

CONFIGS = {
    "none": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mimo"), "mimo")


def touched_classes() -> list[type]:
    """Every class of vLLM that the plugin subclasses or wraps."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    return [
        AsyncScheduler,
        Scheduler,
        InputProcessor,
        SamplingParams,
        StatLoggerManager,
        RequestSpecDecodeMetrics,
        RejectionSampler,
        EagleProposer,
        SpecDecodeBaseProposer,
        CPUModelRunner,
        CPUWorker,
        GPUModelRunner,
        Worker,
    ]


def plain(config: Any, depth: int = 0) -> Any:
    """A config as nested plain values, for comparison."""
    if depth < 6 and hasattr(config, "__dict__") and not inspect.isclass(config):
        return {k: plain(v, depth + 1) for k, v in sorted(vars(config).items())}
    return repr(config)


def without_identity(config: Any) -> dict[str, Any]:
    """All of an engine config but the id that vLLM draws anew for each."""
    values = plain(config)
    values.pop("instance_id")
    return values


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_config_is_the_same_as_without_the_plugin(
    name: str, mimo: Path
) -> None:
    def build() -> Any:
        return EngineArgs(
            model=str(mimo), max_model_len=64, speculative_config=CONFIGS[name]
        ).create_engine_config()

    # EngineArgs loads the plugins once; what it installs is taken out again here.
    build()
    engine_args.uninstall()
    without = build()
    register()
    assert is_wrapped(EngineArgs, "create_engine_config")
    with_plugin = build()
    assert without_identity(with_plugin) == without_identity(without)
    assert with_plugin.compute_hash() == without.compute_hash()
    assert with_plugin.additional_config == {}
    assert with_plugin.scheduler_config.scheduler_cls is None
    assert with_plugin.parallel_config.worker_cls.startswith("vllm.")


def test_registering_touches_no_class_but_engine_args() -> None:
    engine_args.uninstall()
    before = {cls: dict(vars(cls)) for cls in touched_classes()}
    args_before = dict(vars(EngineArgs))
    register()
    assert {cls: dict(vars(cls)) for cls in touched_classes()} == before
    changed = {k for k, v in vars(EngineArgs).items() if args_before.get(k) is not v}
    assert changed == {
        "create_engine_config",
        "create_speculative_config",
        "add_cli_args",
    }


def test_registering_twice_wraps_once_and_can_be_undone() -> None:
    engine_args.uninstall()
    original = EngineArgs.create_engine_config
    register()
    wrapped = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is wrapped
    assert wrapped.__wrapped__ is original
    engine_args.uninstall()
    assert EngineArgs.create_engine_config is original
    register()


def test_what_vllm_refuses_when_it_speculates_it_goes_on_refusing() -> None:
    """Even in a process that has had an engine with our method."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    from vllm_mtp.integration.scheduler import request_validation

    request_validation.install()
    with pytest.raises(VLLMValidationError, match="min_p"):
        SamplingParams(min_p=0.1)._validate_spec_decode(object())
