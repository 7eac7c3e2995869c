"""What Model Runner V2 does in a step: torch's operations and Triton's launches.

Under Triton's interpreter, in a fork. What it says of a GPU is which operations are
launched, not how long they take.
"""

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_TOKENS = 24
SKIPPED = 8
"""Steps before any is counted: prompts, and drafting that has not been disabled yet."""

Operations = Counter[str]
WAITS = "waits:"
"""Before the name of an operation for whose result the host waits, on a GPU."""
_READ = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
SEARCH = "score_matches"


def count(order: dict[str, Any]) -> None:
    """Of each engine and kind of request: operations of the most frequent kind of step,
    its share of steps, and the share of those that search texts beside it."""
    from tests.support.engine_jobs import let_the_cpu_schedule_async
    from tests.support.engines import engine
    from tests.support.heldout import BUNDLED_CHECKPOINT

    let_the_cpu_schedule_async()
    found = []
    for options in order["engines"]:
        arguments = {"max_num_seqs": 4, "max_model_len": 64} | options
        with engine(BUNDLED_CHECKPOINT, **arguments) as llm:
            steps: list[Operations] = []
            watch_steps(llm, steps)
            found.append([_usual(llm, each, steps) for each in order["samplings"]])
    Path(order["result"]).write_text(json.dumps(found))


def _usual(
    llm: Any, sampling: dict[str, Any], steps: list[Operations]
) -> tuple[Operations, float, float]:
    from vllm import SamplingParams, TokensPrompt

    from tests.support.heldout import heldout_prompts

    parameters = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    prompts = [
        TokensPrompt(prompt_token_ids=list(tokens))
        for tokens in heldout_prompts(2, max_tokens=12)
    ]
    steps.clear()
    llm.generate(prompts, parameters, use_tqdm=False)
    kinds = Counter(tuple(sorted(step.items())) for step in steps[SKIPPED:])
    ((usual, number),) = kinds.most_common(1)
    num_looks = 0
    if SEARCH not in dict(usual):
        num_looks = sum(n for kind, n in kinds.items() if SEARCH in dict(kind))
    num_steps = kinds.total()
    return Counter(dict(usual)), number / (num_steps - num_looks), num_looks / num_steps


def watch_steps(llm: Any, steps: list[Operations]) -> None:
    """Count the operations of each step of an engine from now on."""
    from tests.support.engines import model_runner

    runner = model_runner(llm)
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        steps.append(Counter())
        with counted(steps[-1]):
            return execute(*args, **kwargs)

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        with counted(steps[-1]):
            return sample(*args, **kwargs)

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the size of a result, or more, has to be read from the device.

    But for what would be on the host with a GPU, too.
    """
    return _reads(name, args, kwargs) and not any(
        "cpu_attn.py" in frame.filename or "cpu_upper_bound" in (frame.line or "")
        for frame in traceback.extract_stack()
    )


def _reads(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("aten::index", "aten::index_put_"):
        return any(each is not None and each.dtype.itemsize == 1 for each in args[1])
    return name in _READ


@contextmanager
def counted(into: Operations) -> Iterator[None]:
    """Count what is launched within; views and what is empty launch nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor

    launch: Callable[..., Any] = GridExecutor.__call__

    class Counting(TorchDispatchMode):
        is_on = True

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = function.overloadpacket._qualified_op_name
            if self.is_on and _waits(name, args, kwargs or {}):
                into[f"{WAITS} {name}"] += 1
            result = function(*args, **kwargs or {})
            is_empty = isinstance(result, torch.Tensor) and not result.numel()
            if self.is_on and not function.is_view and not is_empty:
                into[name] += 1
            return result

    counting = Counting()

    def launch_and_count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        into[executor.fn.__name__] += counting.is_on
        was_on, counting.is_on = counting.is_on, False
        try:
            return launch(executor, *args, **kwargs)
        finally:
            counting.is_on = was_on

    GridExecutor.__call__ = launch_and_count
    try:
        with counting:
            yield
    finally:
        GridExecutor.__call__ = launch
