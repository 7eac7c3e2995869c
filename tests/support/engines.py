"""In-process vLLM engines for tests: small, deterministic, one after another.

Nothing of vLLM is imported at the top: ``prepare_environment`` must run first, in
``conftest.py``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.families import FAMILIES
from tests.support.quick_starts import collect_garbage, imports_frozen
from tests.support.random_checkpoints import ASSISTANT

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    # The engine runs in the test's own process: seconds to start, and patchable.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A second OpenMP thread with a busy neighbour is ten times slower than none.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # By the clock: on a crowded machine a short pattern takes longer than 5 s.
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "60",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every test process and its children run with; the caller's own values win."""

ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    # Fewer seats than prompts: prefills meet verification in one batch.
    "max_num_seqs": 4,
    # Continuations of two dozen tokens cross the border of a block.
    "block_size": 32,
    "kv_cache_memory_bytes": 16 * 2**20,
    "seed": 0,
    "disable_log_stats": False,
}


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. Call before anything imports it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def engine(model: Path, **arguments: Any) -> Iterator["LLM"]:
    """An engine that is gone, process groups included, when the block ends.

    Args:
        model: folder of a checkpoint.
        **arguments: of ``vllm.LLM``; they win over ``ENGINE_ARGUMENTS``.
    """
    from vllm import LLM

    with imports_frozen():
        llm = LLM(str(model), **(ENGINE_ARGUMENTS | arguments))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            collect_garbage()


@contextmanager
def family_engine(
    model: Path,
    family_name: str,
    speculation: dict[str, Any] | None = None,
    **arguments: Any,
) -> Iterator["LLM"]:
    """An engine for a checkpoint of ``write_checkpoint``.

    Args:
        model: folder of the checkpoint.
        family_name: a key of ``FAMILIES``.
        speculation: speculative config; ``None`` for no speculation.
        **arguments: of ``vllm.LLM``.
    """
    from tests.support.vllm_gaps import fill_gaps

    fill_gaps()
    backend = backend_option(family_name)
    if speculation is not None:
        # The drafter does not inherit the target's backend.
        options = backend | assistant_option(model)
        arguments["speculative_config"] = options | speculation
    with engine(model, **backend, **arguments) as llm:
        yield llm


def backend_option(family_name: str) -> dict[str, Any]:
    """Of an engine and of a drafter: the attention backend to insist on."""
    from vllm.platforms import current_platform

    backend = FAMILIES[family_name].cpu_attention_backend
    insists = backend is not None and current_platform.is_cpu()
    return {"attention_backend": backend} if insists else {}


def assistant_option(model: Path) -> dict[str, Any]:
    """Names the checkpoint that drafts, where that is one of its own."""
    assistant = model / ASSISTANT
    return {"model": str(assistant)} if assistant.is_dir() else {}


def greedy(
    llm: "LLM", prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any
) -> list[list[int]]:
    """Greedy continuations, ``max_tokens`` long each, in the order of the prompts.

    Args:
        llm: the engine.
        prompts: token ids.
        max_tokens: of each.
        **sampling: more of vLLM's ``SamplingParams``.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling
        ),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


Samples = dict[str, list[tuple[int, ...]]]
"""The first tokens of many requests, by the name of their sampling parameters."""


def sampled(
    llm: "LLM",
    prompt: Sequence[int],
    settings: Mapping[str, Mapping[str, Any]],
    num_samples: int,
    max_tokens: int,
) -> Samples:
    """Answers to one prompt under several sampling parameters, all in one batch.

    Args:
        llm: the engine.
        prompt: token ids.
        settings: options of ``SamplingParams`` by name.
        num_samples: of each.
        max_tokens: of each answer.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        for options in settings.values()
    ]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt))] * (num_samples * len(params)),
        params * num_samples,
        use_tqdm=False,
    )
    texts = [tuple(output.outputs[0].token_ids) for output in outputs]
    return {name: texts[i :: len(params)] for i, name in enumerate(settings)}


def worker_of(llm: "LLM") -> Any:
    """vLLM's worker."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker


def model_runner(llm: "LLM") -> Any:
    """vLLM's model runner, for tests that look into the worker."""
    return worker_of(llm).model_runner


class DraftCounts(NamedTuple):
    """What became of all draft tokens of an engine so far."""

    num_drafts: int
    """Verification passes of single requests that had draft tokens."""
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted among verified draft tokens, 0..1; 0 if none was verified."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)


def counters(llm: "LLM") -> dict[str, Any]:
    """vLLM's own speculative counters, by their name without the prefix."""
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): getattr(
            metric, "values", getattr(metric, "value", None)
        )
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix)
    }


def draft_counts(llm: "LLM") -> DraftCounts:
    """What vLLM's own counters say. Zero for an engine without speculation."""
    values = counters(llm)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return DraftCounts(*(int(values.get(name, 0)) for name in names))


def forking_servers(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of servers whose engines need not import vLLM again."""
    folder = str(Path(__file__).with_name("forking"))
    paths = filter(None, [folder, environ.get("PYTHONPATH")])
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
