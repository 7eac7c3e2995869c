"""Engines in a fresh process, for settings that a process can only have once.

Importing vLLM takes longer than most jobs. So the processes are forked from one that
has imported it, of which there is one for each model runner: see `fork_server`.
"""

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support import absent_torchvision, recurrent_states
from tests.support.fork_server import ForkServer

ROOT = Path(__file__).parents[2]

SHARED_GPU = {"gpu_memory_utilization": 0.1}
"""Of a GPU's memory vLLM wants that much to be free, not nearly all, before it starts:
test processes beside this one have engines, too. The KV cache is given in bytes."""


@dataclass(frozen=True)
class Jobs:
    """What to run: one engine per entry of ``engines``, all with the same prompts."""

    model: str
    prompts: list[list[int]]
    max_tokens: int
    engines: list[dict[str, Any]]
    """Arguments of ``vllm.LLM``; ``async_scheduling`` is honoured on the CPU, too, and
    ``never_disable`` keeps the MTP layers running while drafting is disabled."""
    v2: bool = False
    """Model Runner V2 under Triton's interpreter."""
    interpreted: bool = False
    """Model Runner V1 under it, too: models with recurrent states need its kernels."""
    num_turns: int = 1
    """With 2, each continuation is part of a second prompt, after all of the first."""
    session: list[list[int]] = field(default_factory=list)
    """Chunks of a streaming session, after all of the prompts."""
    fault: str = ""
    """A function of `recurrent_states`, called before the engines are made."""
    watch_slots: bool = False
    """Look after every step whether rejected KV slots are zero; all must speculate."""
    script: list[int] = field(default_factory=list)
    """Draft depths of the steps, over and over; empty leaves them to the controller."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters beside the greedy ones."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sampling parameters by name: then the first prompt is continued with each, many
    times, and nothing greedily."""
    num_samples: int = 0
    """Of each setting."""
    environment: dict[str, str] = field(default_factory=dict)
    spoils_draft_logits: bool = False
    """On Model Runner V2: draft logits are NaN, wholly or in part."""
    break_drafter_at: int = 0
    """The call of the drafter's `_propose` that fails, after its work; 0 for none."""


@dataclass(frozen=True)
class JobResult:
    """What one engine did."""

    continuations: list[list[int]]
    counters: dict[str, Any]
    """vLLM's ``spec_decode_num_*`` counters; empty without speculation."""
    scheduler: str
    drafter: str
    """Class names, to prove which code ran; empty where it runs elsewhere."""
    violations: list[str] = field(default_factory=list)
    """What ``SlotWatch`` found, if asked to watch."""
    num_checked_slots: int = 0
    accepted: list[list[list[int]]] = field(default_factory=list)
    """Of each step of a script: (request, drafted, accepted)."""
    num_backfill_tokens: int = 0
    num_decisions: int = 0
    num_outcomes: int = 0
    """Of a script: how often it was asked, and steps that it was told of."""
    num_compared_steps: int = 0
    """Steps on Model Runner V2 that were verified by comparing tokens."""
    num_disabled_steps: int = 0
    """Steps on Model Runner V2 without the MTP layers."""
    num_cut_passes: int = 0
    """Passes of its model on Model Runner V2 that stopped on the way."""
    num_failures: int = 0
    """Calls that failed because the jobs said so."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    samples: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    """Fields of ``RequestRounds``, where ``show_rounds`` is asked for."""
    notes_rounds: bool = False
    """Whether the scheduler notes rounds, or the runner sends drafts for it."""

    def __post_init__(self) -> None:
        # JSON has no tuples.
        drawn = {name: list(map(tuple, each)) for name, each in self.samples.items()}
        object.__setattr__(self, "samples", drawn)


V1 = ForkServer(f"{__name__}:prepare_v1")
V2 = ForkServer(f"{__name__}:prepare_v2")
"""Under Triton's interpreter."""


def run_jobs(jobs: Jobs, timeout_s: float = 600) -> list[JobResult]:
    """Run ``jobs`` in a fresh process and collect its results."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        order = {"jobs": asdict(jobs), "result": str(result)}
        server = V2 if jobs.v2 or jobs.interpreted else V1
        obey = f"{__name__}:run_in_fork"
        server.run(obey, order, Path(folder) / "log", timeout_s)
        return [JobResult(**entry) for entry in json.loads(result.read_text())]


def prepare_v1() -> None:
    """Import what all jobs need."""
    from tests.support.engines import prepare_environment
    from tests.support.quick_starts import freeze_imports

    prepare_environment()
    _import_what_engines_import()
    freeze_imports()


def _import_what_engines_import() -> None:
    """Most of it: vLLM and we import some parts when they are first needed."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # the worker replaces parts of torch.cuda
    for module in (
        "vllm.model_executor.models.mimo_mtp",
        "vllm_mtp.integration.cpu.worker",
        "vllm_mtp.integration.scheduler.scheduler",
        "vllm_mtp.integration.v1.drafter",
        "vllm_mtp.integration.v2.speculator",
    ):
        import_module(module)


def prepare_v2() -> None:
    """The same for Model Runner V2 under Triton's interpreter."""
    from tests.support import v2_interpreter
    from tests.support.engines import prepare_environment

    prepare_environment()
    v2_interpreter.install()
    prepare_v1()


def run_in_fork(order: dict[str, Any]) -> None:
    """Run jobs in this process, which may be changed by them for good."""
    from tests.support.vllm_gaps import fill_gaps

    jobs = Jobs(**order["jobs"])
    fill_gaps()
    os.environ.update(jobs.environment)
    if jobs.interpreted:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if jobs.fault:
        getattr(recurrent_states, jobs.fault)()
    _fork_workers()
    with absent_torchvision.stand_in():
        results = [asdict(_run(jobs, arguments)) for arguments in jobs.engines]
    Path(order["result"]).write_text(json.dumps(results))


def _run(jobs: Jobs, arguments: dict[str, Any]) -> JobResult:
    from tests.support.engines import counters, engine, greedy, sampled

    is_async = arguments.pop("async_scheduling", False)
    if is_async:
        let_the_cpu_schedule_async()
    if arguments.pop("never_disable", False):
        _never_disable()
    failures = _break_drafter(jobs) if jobs.break_drafter_at else [0]
    if jobs.spoils_draft_logits:
        _spoil_draft_logits()
    compared, disabled = _count_steps() if jobs.v2 else ([0], [0])
    with engine(Path(jobs.model), **arguments) as llm:
        watch = _watch(llm) if jobs.watch_slots else None
        num_cut_passes = _count_cut_passes(llm) if jobs.v2 else int
        recorder = _play(llm, jobs.script) if jobs.script else None
        samples, continuations = {}, []
        if jobs.settings:
            samples = sampled(
                llm,
                jobs.prompts[0],
                {name: _from_json(each) for name, each in jobs.settings.items()},
                jobs.num_samples,
                jobs.max_tokens,
            )
        else:
            sampling = _from_json(jobs.sampling)
            prompts = jobs.prompts
            for _ in range(jobs.num_turns):
                answers = greedy(llm, prompts, jobs.max_tokens, **sampling)
                # The last one first: the prefix cache is likeliest to have it still.
                turns = zip(prompts[::-1], answers[::-1], strict=True)
                prompts = [[*prompt, *answer, 1] for prompt, answer in turns]
                continuations += answers
            if jobs.session:
                from tests.support.sessions import answers_to

                continuations += answers_to(llm, jobs.session, jobs.max_tokens)
        totals = {metric.name: metric for metric in llm.get_metrics()}
        return JobResult(
            continuations,
            counters(llm),
            *_class_names(llm),
            violations=watch.violations if watch else [],
            num_checked_slots=watch.num_checked_slots if watch else 0,
            accepted=accepted_by_step(recorder.outcomes) if recorder else [],
            num_backfill_tokens=(
                sum(o.num_backfill_tokens for o in recorder.outcomes) if recorder else 0
            ),
            num_decisions=len(recorder.decisions) if recorder else 0,
            num_outcomes=len(recorder.outcomes) if recorder else 0,
            num_compared_steps=compared[0],
            num_disabled_steps=disabled[0],
            num_cut_passes=num_cut_passes(),
            samples=samples,
            shown=shown_rounds(llm),
            notes_rounds=_notes_rounds(llm),
            num_failures=failures[0],
            num_preemptions=totals["vllm:num_preemptions"].value,
            num_cached_tokens=totals["vllm:prefix_cache_hits"].value,
        )


def shown_rounds(llm: Any) -> list[dict[str, Any]]:
    """Requests whose rounds the front end has."""
    from vllm_mtp.integration.observe.stat_logger import MTPPlusStatLogger

    return [
        asdict(request)
        for logger in llm.llm_engine.logger_manager.stat_loggers
        if isinstance(logger, MTPPlusStatLogger)
        for request in logger.recent_requests.newest_first().values()
    ]


def _notes_rounds(llm: Any) -> bool:
    from tests.support.engines import model_runner
    from tests.support.watch import scheduler_of

    notes = getattr(scheduler_of(llm), "rounds", None) is not None
    try:
        return notes or getattr(model_runner(llm), "sends_drafts", False)
    except AttributeError:  # the workers are other processes
        return notes


def _fork_workers() -> None:
    """Workers that are processes need not import vLLM: this one has."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _break_drafter(jobs: Jobs) -> list[int]:
    from tests.support.faults import break_call

    if jobs.v2:
        from vllm_mtp.integration.v2.speculator import _MTPPlusSpeculator as drafter
    else:
        from vllm_mtp.integration.v1.drafter import _MTPPlusDrafter as drafter
    return break_call(drafter, "_propose", jobs.break_drafter_at, runs_first=True)


def _spoil_draft_logits() -> None:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    compute = DraftModelSpeculator.compute_draft_logits

    @functools.wraps(compute)  # its signature is checked when an engine starts
    def spoilt(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        logits[::2] = float("nan")
        logits[:, ::3] = float("nan")
        return logits

    DraftModelSpeculator.compute_draft_logits = spoilt


def _from_json(sampling: dict[str, Any]) -> dict[str, Any]:
    biases = sampling.get("logit_bias")
    if biases is None:
        return sampling
    return sampling | {"logit_bias": {int(i): bias for i, bias in biases.items()}}


def accepted_by_step(outcomes: Any) -> list[list[list[int]]]:
    """(number of the request, drafted, accepted) of each step."""
    return [
        sorted([int(i.split("-")[0]), k, ok] for i, k, ok, *_ in step.requests)
        for step in outcomes
    ]


def _play(llm: Any, script: list[int]) -> Any:
    from tests.support.watch import play_script

    return play_script(llm, script)


def _never_disable() -> None:
    """From here on this process keeps the MTP layers' KV always up to date."""
    from vllm_mtp.integration.worker import drafting_disabled

    drafting_disabled.may_disable = lambda config: False


def _count_steps() -> tuple[list[int], list[int]]:
    """Steps verified as greedy ones, and without the MTP layers, from here on."""
    from vllm_mtp.integration.v2.greedy_verification import GreedyVerification
    from vllm_mtp.integration.v2.kv_backfill import BackfillsKV

    return (
        _count_calls(GreedyVerification, "sample"),
        _count_calls(BackfillsKV, "keep_pending"),
    )


def _count_calls(owner: type, name: str) -> list[int]:
    count, method = [0], getattr(owner, name)

    def counted(*args: Any) -> Any:
        count[0] += 1
        return method(*args)

    setattr(owner, name, counted)
    return count


def _count_cut_passes(llm: Any) -> Callable[[], int]:
    from tests.support.drafter_passes import drafter_of, watch_passes

    try:
        drafter = drafter_of(llm)
    except AttributeError:  # the workers are other processes
        return int
    if drafter is None:
        return int
    passes = watch_passes(llm)
    return lambda: len(passes.begun) - len(passes.whole)


def _watch(llm: Any) -> Any:
    from tests.support.kv_cache import watch_on_worker

    return watch_on_worker(llm)


def let_the_cpu_schedule_async() -> None:
    """The CPU platform switches async scheduling off, though it works there.

    It does so whenever a config is made or made anew, in the engine core as well.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_async)


def _class_names(llm: Any) -> tuple[str, str]:
    from tests.support.engines import model_runner
    from tests.support.watch import scheduler_of

    scheduler = type(scheduler_of(llm)).__name__
    try:
        runner = model_runner(llm)
    except AttributeError:  # the workers are other processes
        return scheduler, ""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return scheduler, type(drafter).__name__ if drafter is not None else ""
