"""Somebody else decorates vLLM, too: ours stays in force, or the start says why not.

A tracing agent, for instance, before our wrappers are put on or after. Well-behaved
decorators use ``functools.wraps``; others hide the parameters of what they decorate.
"""

import functools
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from tests.support.engines import draft_counts, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import play_script, scheduler_of
from vllm_mtp.config import METHOD
from vllm_mtp.integration.load import compat, engine_args
from vllm_mtp.integration.load.compat import CompatibilityError
from vllm_mtp.integration.load.seams import Seam
from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.load.wrapping import is_wrapped, unwrap
from vllm_mtp.integration.observe import response_metrics, stat_logger
from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger
from vllm_mtp.integration.scheduler import messages, request_validation
from vllm_mtp.integration.v1.drafter import replace_drafter

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CALLED = [seam for seam in compat.SEAMS if not seam.is_data]
FUNCTIONS = [seam for seam in CALLED if not seam.is_class]
CLASSES = [seam for seam in CALLED if seam.is_class]


def hides(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without ``functools.wraps``."""

    def foreign(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return foreign


def says(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with it."""
    return functools.wraps(function)(hides(function))


def decorate(patch: pytest.MonkeyPatch, path: str, decorator: Decorator) -> None:
    """Decorate a function or method where it is; static ones stay static."""
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    found = inspect.getattr_static(owner, name)
    if isinstance(found, staticmethod | classmethod):
        patch.setattr(owner, name, type(found)(decorator(found.__func__)))
    else:
        patch.setattr(owner, name, decorator(found))


def path_of(seam: Seam) -> str:
    return seam.path


@pytest.mark.parametrize("seam", FUNCTIONS, ids=path_of)
def test_a_decorator_that_says_what_it_wraps_is_no_problem(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorate(monkeypatch, seam.path, says)
    assert compat.find_problem(seam) is None


@pytest.mark.parametrize("seam", FUNCTIONS, ids=path_of)
def test_one_that_hides_parameters_which_we_use_is_named(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorate(monkeypatch, seam.path, hides)
    problem = compat.find_problem(seam)
    if seam.parameters:
        assert problem is not None
        assert problem.startswith(f"{seam.path} has no parameter ")
    else:  # called through: see the engine below
        assert problem is None


@pytest.mark.parametrize("seam", CALLED, ids=path_of)
def test_what_cannot_be_called_is_named(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, name = seam.path.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, object())
    problem = compat.find_problem(seam)
    assert problem is not None
    assert problem.startswith(f"{seam.path} is no ")


@pytest.mark.parametrize("seam", CLASSES, ids=path_of)
def test_a_class_that_became_a_function_is_named(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorate(monkeypatch, seam.path, says)
    problem = compat.find_problem(seam)
    assert problem is not None
    assert problem.startswith(f"{seam.path} is no class but <function ")


# -- functions of vLLM that are wrapped in the whole process ------------------------


def create_engine_config_is_ours() -> None:
    config = EngineArgs(
        model=str(BUNDLED_CHECKPOINT),
        max_model_len=64,
        speculative_config={"method": METHOD},
    ).create_engine_config()
    assert config.speculative_config is not None
    assert config.speculative_config.method == "mtp"
    assert SETTINGS_KEY in config.additional_config
    assert config.parallel_config.worker_cls.startswith("vllm_mtp.")


def add_cli_args_is_ours() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--spec-method", METHOD])
    assert given.spec_method == METHOD


def validate_params_is_ours() -> None:
    server = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config={SETTINGS_KEY: {}}, num_speculative_tokens=3
        )
    )
    bad = SamplingParams(extra_args={"mtp_plus_k": 99})
    with pytest.raises(VLLMValidationError, match="mtp_plus_k"):
        InputProcessor._validate_params(server, bad)  # type: ignore[arg-type, call-arg]


def validate_spec_decode_is_ours() -> None:
    token = request_validation._is_ours.set(True)
    try:
        SamplingParams(min_p=0.1)._validate_spec_decode(object())  # type: ignore[arg-type]
    finally:
        request_validation._is_ours.reset(token)


def to_dict_is_ours() -> None:
    figures = RequestSpecDecodeMetrics(3).to_dict()
    assert figures[response_metrics.MEAN_DRAFT_LENGTH] == 0.0


def stat_loggers_are_ours() -> None:
    config = EngineArgs(
        model=str(BUNDLED_CHECKPOINT),
        max_model_len=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    ).create_engine_config()
    config.additional_config = {SETTINGS_KEY: {}}
    manager = StatLoggerManager(config, enable_default_loggers=False)
    ours = [each for each in manager.stat_loggers if type(each) is MTPPlusStatLogger]
    assert len(ours) == 1


WRAPPED: dict[str, tuple[type, Callable[[], None], Callable[[], None]]] = {
    "create_engine_config": (
        EngineArgs,
        engine_args.install,
        create_engine_config_is_ours,
    ),
    "create_speculative_config": (
        EngineArgs,
        engine_args.install,
        create_engine_config_is_ours,
    ),
    "add_cli_args": (EngineArgs, engine_args.install, add_cli_args_is_ours),
    "_validate_params": (
        InputProcessor,
        request_validation.install,
        validate_params_is_ours,
    ),
    "_validate_spec_decode": (
        SamplingParams,
        request_validation.install,
        validate_spec_decode_is_ours,
    ),
    "to_dict": (
        RequestSpecDecodeMetrics,
        functools.partial(response_metrics.install, is_synthetic=False),
        to_dict_is_ours,
    ),
    "__init__": (StatLoggerManager, stat_logger.install, stat_loggers_are_ours),
}
"""By name: class, what installs our wrapper, and a proof that it is in force."""

UNPROVEN = (
    AssertionError,
    KeyError,
    SystemExit,
    TypeError,
    ValueError,
    VLLMValidationError,
)


@pytest.fixture
def as_vllm_made_them() -> Iterator[None]:
    """None of them is wrapped; afterwards they are as before."""
    load_general_plugins()  # as EngineArgs do, once in a process
    places = [(owner, name) for name, (owner, _, _) in WRAPPED.items()]
    before = [inspect.getattr_static(*place) for place in places]
    for owner, name in places:
        unwrap(owner, name)
    yield
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, function)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.usefixtures("as_vllm_made_them")
def test_the_proof_fails_without_our_wrapper(name: str) -> None:
    owner, _, prove = WRAPPED[name]
    assert not is_wrapped(owner, name)
    with pytest.raises(UNPROVEN):
        prove()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.usefixtures("as_vllm_made_them")
def test_ours_is_in_force_around_a_decorator_and_under_one(name: str) -> None:
    owner, install, prove = WRAPPED[name]
    path = f"{owner.__module__}.{owner.__name__}.{name}"
    with pytest.MonkeyPatch.context() as before, pytest.MonkeyPatch.context() as after:
        decorate(before, path, says)
        assert not is_wrapped(owner, name)
        install()
        ours = inspect.getattr_static(owner, name)
        prove()
        decorate(after, path, says)
        assert is_wrapped(owner, name)
        foreign = inspect.getattr_static(owner, name)
        install()
        assert inspect.getattr_static(owner, name) is foreign is not ours
        compat.check({"core"})
        prove()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.usefixtures("as_vllm_made_them")
def test_a_decorator_that_hides_it_stops_the_start_or_leaves_it_in_force(
    name: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, install, prove = WRAPPED[name]
    path = f"{owner.__module__}.{owner.__name__}.{name}"
    engine_args.install()
    if not is_before:
        install()
    else:
        unwrap(owner, name)
    decorate(monkeypatch, path, hides)
    install()
    seam_path = path.removesuffix(".__init__")
    if any(seam.path == seam_path and seam.parameters for seam in compat.SEAMS):
        with pytest.raises(CompatibilityError, match=f"{seam_path} has no parameter"):
            create_engine_config_is_ours()
    else:
        prove()


# -- an engine in which all of vLLM that we touch is decorated ---------------------

SCRIPT = [0] * 9 + [2] * 3 + [0] * 5 + [3, 1]
OURS = (
    "vllm_mtp.integration.v1.drafter.MTPPlusProposer.propose",
    "vllm_mtp.integration.v1.runner.MTPPlusRunner.execute_model",
    "vllm_mtp.integration.v1.runner.MTPPlusRunner.sample_tokens",
    "vllm_mtp.integration.scheduler.scheduler.MTPPlusScheduler.schedule",
    "vllm_mtp.integration.v1.rejection_sampler.MTPPlusRejectionSampler.forward",
)
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner."
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler."
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer."
OF_EVERY_STEP = (
    _RUNNER + "execute_model",
    _RUNNER + "sample_tokens",
    _RUNNER + "_sample",
    _RUNNER + "take_draft_token_ids",
    _SCHEDULER + "schedule",
    _SCHEDULER + "_update_after_schedule",
    _SCHEDULER + "update_from_output",
    _SCHEDULER + "make_stats",
)
OF_SOME = (
    _RUNNER + "_calc_spec_decode_metadata",
    _RUNNER + "_copy_draft_token_ids_to_cpu",
    _SCHEDULER + "add_request",
    _SCHEDULER + "update_draft_token_ids",
    _PROPOSER + "load_model",
    _PROPOSER + "propose",
    _PROPOSER + "_create_draft_vllm_config",
    _PROPOSER + "_get_slot_mapping",
    _PROPOSER + "_sample_draft_tokens",
    _PROPOSER + "_update_positions_dependent_metadata",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor.forward",
    "vllm.v1.sample.sampler.Sampler.greedy_sample",
    "vllm.v1.worker.gpu_worker.Worker.initialize_from_config",
)
"""Functions that ours call."""


def counting(counts: Counter[str], path: str, decorator: Decorator) -> Decorator:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[path] += 1
            return function(*args, **kwargs)

        return decorator(count)

    return wrap


def test_an_engine_of_decorated_functions_answers_as_ever_and_with_our_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = heldout_prompts(4, max_tokens=48)
    with engine(BUNDLED_CHECKPOINT) as llm:
        expected = greedy(llm, prompts, 48)
    foreign, ours, instances = Counter[str](), Counter[str](), Counter[str]()
    decorated = [seam for seam in FUNCTIONS if seam.group in ("core", "v1", "cpu")]
    for seam in decorated:
        # What has no parameters that are checked is called through.
        hidden = says if seam.parameters else hides
        decorate(monkeypatch, seam.path, counting(foreign, seam.path, hidden))
    for path in OURS:
        decorate(monkeypatch, path, counting(ours, path, says))

    def decorates_its_runner(init_device: Callable[..., Any]) -> Callable[..., Any]:
        def foreign_init_device(worker: Any) -> None:
            init_device(worker)
            runner = worker.model_runner
            for name in ("execute_model", "sample_tokens"):
                wrapped = counting(instances, name, hides)(getattr(runner, name))
                setattr(runner, name, wrapped)

        return foreign_init_device

    init_device = "vllm.v1.worker.cpu_worker.CPUWorker.init_device"
    decorate(monkeypatch, init_device, decorates_its_runner)
    lost: list[Any] = []
    monkeypatch.setattr(messages.logger, "warning_once", lambda *a: lost.append(a))
    with engine(BUNDLED_CHECKPOINT, speculative_config={"method": METHOD}) as llm:
        assert "vllm_mtp" in type(scheduler_of(llm)).__module__
        assert "vllm_mtp" in type(model_runner(llm).rejection_sampler).__module__
        play_script(llm, SCRIPT)
        answers = greedy(llm, prompts, 48)
        assert draft_counts(llm).num_accepted_tokens > 10
    assert answers == expected
    assert set(ours) == set(OURS)
    num_steps = ours[OURS[1]]
    assert ours[OURS[2]] == num_steps
    assert {path: foreign[path] for path in OF_EVERY_STEP} == dict.fromkeys(
        OF_EVERY_STEP, num_steps
    )
    assert instances == {"execute_model": num_steps, "sample_tokens": num_steps}
    assert not set(OF_SOME) - set(foreign)
    assert not lost


def test_a_drafter_that_others_have_subclassed_stops_the_start() -> None:
    class Traced:
        """Not one of vLLM's drafters."""

    runner = SimpleNamespace(drafter=Traced())
    with pytest.raises(CompatibilityError, match="no drafter to put in the place of"):
        replace_drafter(runner, rollback=None)  # type: ignore[arg-type]
