"""Two data-parallel ranks, processes of their own, joined by gloo.

All of it is vLLM's: a rank without requests runs dummy steps for as long as the other
has some. Of each step is noted how often the MTP layers ran and what the ranks did
together: where they differ in that, both wait for ever.
"""

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NUM_RANKS = 2
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_tensor",
)
"""Of torch."""


@dataclass(frozen=True)
class RankRequest:
    """A greedy request of one rank."""

    prompt: list[int]
    max_tokens: int
    arrives_at: int = 0
    """The step before which it comes."""
    draft_length: int | None = None
    """Its own K; None leaves it to the controller."""


@dataclass
class RankResult:
    """What one rank did."""

    texts: dict[str, list[int]]
    """By number of the request, in order."""
    num_passes: list[int] = field(default_factory=list)
    """Of the MTP layers, in each step."""
    collectives: list[list[str]] = field(default_factory=list)
    """By name, in each step."""
    is_dummy: list[bool] = field(default_factory=list)
    """Whether a step was one without requests."""
    counters: dict[str, Any] = field(default_factory=dict)


def run_in_fork(order: dict[str, Any]) -> None:
    """Run an engine of two ranks.

    Args:
        order: ``model``; ``engine``, its arguments; ``requests`` of each rank, as
            `RankRequest`; ``result``, a file for what each did.
    """
    from vllm.utils.network_utils import get_open_port

    context = multiprocessing.get_context("fork")
    port, result = get_open_port(), Path(order["result"])
    files = [result.with_suffix(f".{rank}") for rank in range(NUM_RANKS)]
    ranks = [
        context.Process(target=_run_rank, args=(order, rank, port, file))
        for rank, file in enumerate(files)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not any(rank.exitcode for rank in ranks)
    result.write_text(json.dumps([json.loads(file.read_text()) for file in files]))


def _run_rank(order: dict[str, Any], rank: int, port: int, file: Path) -> None:
    from tests.support.engines import engine

    os.environ |= {
        "VLLM_DP_SIZE": str(NUM_RANKS),
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_MASTER_PORT": str(port),
    }
    _give_gloo_unequal_sizes()
    arguments = {"distributed_executor_backend": "uni"} | order["engine"]
    requests = [RankRequest(**each) for each in order["requests"][rank]]
    with engine(Path(order["model"]), **arguments) as llm:
        file.write_text(json.dumps(asdict(_play(llm, requests))))


def _play(llm: Any, requests: list[RankRequest]) -> RankResult:
    from tests.support.drafter_passes import Passes, drafter_of, watch_passes
    from tests.support.engines import counters

    texts = {str(number): [] for number in range(len(requests))}
    found, engine = RankResult(texts), llm.llm_engine
    passes = Passes() if drafter_of(llm) is None else watch_passes(llm)
    names: list[str] = []
    _note_collectives(names)
    _add(engine, requests, 0)
    # Ranks agree here, so that they go on until none has a request left.
    while engine.has_unfinished_requests():
        found.is_dummy.append(engine.should_execute_dummy_batch)
        before = len(passes.begun)
        names.clear()
        outputs = engine.step()
        found.num_passes.append(len(passes.begun) - before)
        found.collectives.append([*names])
        for each in outputs:
            texts[each.request_id] = list(each.outputs[0].token_ids)
        _add(engine, requests, len(found.is_dummy))
    found.counters = counters(llm)
    return found


def _add(engine: Any, requests: list[RankRequest], step: int) -> None:
    from vllm import SamplingParams, TokensPrompt

    for number, each in enumerate(requests):
        if each.arrives_at != step:
            continue
        pin = {} if each.draft_length is None else {"mtp_plus_k": each.draft_length}
        parameters = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=each.max_tokens, extra_args=pin
        )
        prompt = TokensPrompt(prompt_token_ids=each.prompt)
        engine.add_request(str(number), prompt, parameters)


def _note_collectives(names: list[str]) -> None:
    """From here on, of what ranks do together."""
    from torch import distributed

    for name in COLLECTIVES:
        setattr(distributed, name, _noted(getattr(distributed, name), names))


def _noted(collective: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:
        names.append(collective.__name__)
        return collective(*args, **kwargs)

    return noted


def _give_gloo_unequal_sizes() -> None:
    """vLLM spreads tokens over experts of data-parallel ranks on GPUs only."""
    import torch
    from torch import distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gathered(part: torch.Tensor, sizes: list[int], group: Any) -> torch.Tensor:
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=group)
        return torch.cat([each[:n] for each, n in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, parts: Any, dim: int, sizes: list[int]) -> Any:
        return [gathered(part, sizes, self.device_group) for part in parts]

    def reduce_scatterv(self: Any, whole: Any, dim: int, sizes: list[int]) -> Any:
        whole = whole.contiguous()
        distributed.all_reduce(whole, group=self.device_group)
        return whole.split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
