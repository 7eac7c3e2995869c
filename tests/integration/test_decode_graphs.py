"""Which CUDA graphs V2's steps get, asked of vLLM's managers; nothing is captured."""

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.draft_lengths import (
    graph_tiers,
    tier_table,
)
from vllm_mtp.integration.load import engine_args
from vllm_mtp.integration.load.doctor import GraphFacts, graphs_of
from vllm_mtp.integration.v2 import decode_graphs
from vllm_mtp.integration.v2.adaptive_verification import VerifiesWhatPays
from vllm_mtp.integration.v2.decode_graphs import (
    keep_few_sizes,
    log_graphs,
    mix_draft_lengths,
    thinned,
)
from vllm_mtp.integration.v2.speculator import MTPPlusSpeculator

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""What vLLM captures on Hopper; a test of vLLM's would notice if it were not."""
TABLE_SIZES = [3, 6, 9, 12, 18, 36, 252, 264, 312, 360, 408, 456, 502, 504]
"""And what it adds for our table of draft lengths, at most 256 requests and K = 8."""
SIZES_OF_SMALL_BATCHES = [1, 2, 4, *range(8, 129, 8)]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    _have_no_graph_pool(monkeypatch)
    monkeypatch.setattr(
        cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False
    )


def _have_no_graph_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


def config(
    max_num_reqs: int,
    max_draft_length: int,
    sizes: list[int],
    has_tiers: bool = False,
) -> Any:
    speculation = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: has_tiers,
        num_speculative_tokens_per_batch_size=tier_table(max_draft_length),
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculation,
        num_speculative_tokens=max_draft_length,
    )


class Managers:
    """A target's, and those of a speculator, as a runner makes them."""

    def __init__(self, *args: Any, loras: list[int] | None = None) -> None:
        self.config = config(*args)
        mode, device = CUDAGraphMode.FULL_AND_PIECEWISE, torch.device("cpu")
        longest = self.config.num_speculative_tokens + 1
        given = self.config, device
        self.target = ModelCudaGraphManager(*given, mode, longest, loras)
        self.prefill = SpeculatorCudaGraphManager(*given, mode, longest)
        self.decode = SpeculatorCudaGraphManager(
            *given, CUDAGraphMode.FULL_DECODE_ONLY, 1
        )

    @property
    def all(self) -> tuple[CudaGraphManager, ...]:
        return self.target, self.prefill, self.decode

    def captured(self) -> "Managers":
        for manager in self.all:
            manager._graphs_captured = True
        return self

    @property
    def num_full(self) -> int:
        return sum(len(each._capture_descs.get(FULL, ())) for each in self.all)


def ours(*args: Any, **kwargs: Any) -> Managers:
    managers = Managers(*args, **kwargs)
    mix_draft_lengths(*managers.all, lambda *_, **__: None)
    return managers.captured()


def theirs(*args: Any) -> Managers:
    return Managers(*args).captured()


def of_each_length(*args: Any) -> Managers:
    """Of an engine whose attention cannot replay any mix."""
    managers = Managers(*args, True)
    keep_few_sizes(*managers.all, lambda *_, **__: None)
    return managers.captured()


def of_step(manager: CudaGraphManager, lengths: list[int], loras: int = 0) -> Any:
    """The graph of a step without prefill, whose requests have so many rows."""
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    return manager.dispatch(
        len(lengths), sum(lengths), uniform, loras, max_query_len=max(lengths)
    )


def batch(lengths: list[int], has_prefill: bool = False) -> Any:
    """What a speculator is told of a step."""
    return SimpleNamespace(
        num_scheduled_tokens=np.array(lengths), has_prefill=has_prefill
    )


def is_room_for(graph: Any, lengths: list[int]) -> bool:
    return graph.num_tokens >= sum(lengths) and graph.num_reqs >= len(lengths)


@pytest.mark.parametrize("max_num_reqs", [16, 256, 1024])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 8])
def test_equal_draft_lengths_have_full_graphs_wherever_mtp_has_them(
    max_num_reqs: int, depth: int
) -> None:
    plus = ours(max_num_reqs, 8, SIZES)
    mtp = theirs(max_num_reqs, depth or 1, SIZES)
    none = theirs(max_num_reqs, 0, SIZES)
    num_full = 0
    for num_reqs in range(1, max_num_reqs + 1):
        lengths = [depth + 1] * num_reqs
        wanted = of_step((mtp if depth else none).target, lengths)
        if wanted.cg_mode != FULL:
            continue
        graph = of_step(plus.target, lengths)
        assert graph.cg_mode == FULL
        assert is_room_for(graph, lengths)
        num_full += 1
    assert num_full


@pytest.mark.parametrize("pin", [0, 8])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_pin_costs_no_batch_its_graph(pin: int, depth: int) -> None:
    plus, mtp = ours(256, 8, SIZES), theirs(256, depth, SIZES)
    for num_reqs in range(2, 257):
        if of_step(mtp.target, [depth + 1] * num_reqs).cg_mode != FULL:
            break
        lengths = [depth + 1] * (num_reqs - 1) + [pin + 1]
        if sum(lengths) > SIZES[-1]:
            break
        graph = of_step(plus.target, lengths)
        assert graph.cg_mode == FULL
        assert graph.max_query_len == 9
        assert is_room_for(graph, lengths)
    assert num_reqs > 60


@pytest.mark.parametrize("more", [[], TABLE_SIZES], ids=["", "table"])
def test_a_step_without_drafts_has_the_graph_of_an_engine_without_speculation(
    more: list[int],
) -> None:
    plus, none = ours(1024, 8, sorted(SIZES + more)), theirs(1024, 0, SIZES)
    for num_reqs in range(1, 257):
        assert of_step(plus.target, [1] * num_reqs) == of_step(
            none.target, [1] * num_reqs
        )


@cache
def sizes_with_drafts(max_num_reqs: int, max_draft_length: int) -> list[int]:
    """vLLM's own on Hopper: those of equal batches of each draft length, too."""
    speculation = {
        "method": "mtp",
        "num_speculative_tokens": max_draft_length,
        "num_speculative_tokens_per_batch_size": tier_table(max_draft_length),
    }
    config = EngineArgs(
        model=str(BUNDLED_CHECKPOINT),
        max_num_seqs=max_num_reqs,
        max_num_batched_tokens=8192,
        speculative_config=speculation,
    ).create_engine_config()
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = None
    config._set_cudagraph_sizes()
    sizes: list[int] = compilation.cudagraph_capture_sizes
    assert set(SIZES) <= set(sizes)
    return sizes


@pytest.mark.parametrize(
    ("max_num_reqs", "max_draft_length"),
    [(256, 8), (1024, 8), (1024, 3), (1024, 1), (1024, 16)],
)
def test_there_are_few_of_them(max_num_reqs: int, max_draft_length: int) -> None:
    sizes = sizes_with_drafts(max_num_reqs, max_draft_length)
    assert ours(max_num_reqs, max_draft_length, sizes).num_full <= 128


@pytest.mark.parametrize("max_draft_length", [3, 8, 16])
def test_there_are_not_many_where_each_draft_length_has_its_own(
    max_draft_length: int,
) -> None:
    sizes = sizes_with_drafts(1024, max_draft_length)
    few = of_each_length(1024, max_draft_length, sizes)
    assert few.num_full <= 55 * len(graph_tiers(max_draft_length))
    assert few.num_full < 0.5 * theirs(1024, max_draft_length, sizes, True).num_full


@pytest.mark.parametrize("max_draft_length", [3, 8])
def test_few_sizes_serve_every_batch_that_all_sizes_serve(
    max_draft_length: int,
) -> None:
    sizes = sizes_with_drafts(256, max_draft_length)
    few = of_each_length(256, max_draft_length, sizes)
    many = theirs(256, max_draft_length, sizes, True)
    none = theirs(256, 0, SIZES)
    for depth in graph_tiers(max_draft_length):
        for num_reqs in range(1, 257):
            lengths = [depth + 1] * num_reqs
            wanted, graph = of_step(many.target, lengths), of_step(few.target, lengths)
            if wanted.cg_mode == FULL:
                assert graph.cg_mode == FULL
            if graph.cg_mode != FULL:
                continue
            assert is_room_for(graph, lengths)
            assert graph.num_reqs <= 4 / 3 * num_reqs + 8
            # The first draft step reads what the target's pass has left.
            same = few.prefill.dispatch(num_reqs, graph.num_tokens, depth + 1, 0)
            assert same == graph
            if not depth:
                assert graph.num_tokens <= of_step(none.target, lengths).num_tokens


def test_they_can_be_counted_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the doctor does, in a process that is thrown away."""
    sizes = sizes_with_drafts(256, 8)
    expected = [make(256, 8, sizes).num_full for make in (ours, of_each_length)]
    monkeypatch.undo()  # it has a distributed environment of its own
    _have_no_graph_pool(monkeypatch)
    args = EngineArgs(
        model=str(BUNDLED_CHECKPOINT),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        speculative_config={"method": "mtp_plus"},
    )
    engine_args.install()
    config = args.create_engine_config()
    assert isinstance(graphs_of(config), str)
    # As on a GPU.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
    config.compilation_config.cudagraph_capture_sizes = sizes
    found = graphs_of(config)
    assert isinstance(found, GraphFacts), found
    assert [found.num_for_any_mix, found.num_for_equal_lengths] == expected


@pytest.mark.parametrize("mixes", [True, False])
def test_the_log_says_how_many_were_captured(
    mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        decode_graphs.logger, "info", lambda text, *words: said.append(text % words)
    )
    managers = ours(16, 3, SIZES_OF_SMALL_BATCHES)
    for manager in managers.all:
        manager.graphs = dict.fromkeys(manager._capture_descs[FULL])
    speculator = SimpleNamespace(
        mixes_draft_lengths=mixes,
        prefill_cudagraph_manager=managers.prefill,
        decode_cudagraph_manager=managers.decode,
    )
    runner = SimpleNamespace(cudagraph_manager=managers.target, speculator=speculator)
    log_graphs(runner, 3 * 2**29)
    (line,) = said
    assert f"{managers.num_full} full CUDA graphs" in line
    assert ("any mix" in line) == mixes
    assert "1.50 GiB" in line


def test_sizes_that_a_user_chose_are_kept() -> None:
    plus = ours(16, 8, [3, 5, 16])
    assert [of_step(plus.target, [1] * n).num_reqs for n in (3, 4, 6)] == [3, 5, 16]


@pytest.mark.parametrize("max_draft_length", [1, 2, 3, 8])
@pytest.mark.parametrize("max_num_reqs", [1, 3, 16, 100, 1024])
def test_a_dummy_batch_fits_each(max_num_reqs: int, max_draft_length: int) -> None:
    """What vLLM captures with has no request longer than the graph promises."""
    plus = ours(max_num_reqs, max_draft_length, SIZES)
    for manager in plus.all:
        captured = manager._capture_descs[FULL]
        assert len(set(captured)) == len(captured), "captured twice"
        for graph in captured:
            longest = graph.max_query_len or graph.uniform_token_count
            assert 0 < graph.num_reqs <= min(graph.num_tokens, max_num_reqs)
            assert -(-graph.num_tokens // graph.num_reqs) <= longest


def test_little_of_a_graph_is_padding() -> None:
    plus = ours(256, 8, SIZES)
    for num_rows in range(24, 513):
        usual = [4] * (num_rows // 4)
        graph = of_step(plus.target, usual)
        assert graph.num_tokens <= sum(usual) * 4 / 3 + 8
        assert graph.num_reqs <= len(usual) * 2


def test_draft_prefill_replays_what_the_target_has_replayed() -> None:
    plus = ours(64, 8, SIZES)
    for lengths in ([1, 4, 9], [2] * 30, [9] * 7, [1] * 20 + [2], [4] * 33, [1] * 40):
        graph = of_step(plus.target, lengths)
        rows = torch.tensor(lengths).numpy()
        plus.prefill.expect(
            SimpleNamespace(num_scheduled_tokens=rows, has_prefill=False)
        )
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        own = plus.prefill.dispatch(len(lengths), graph.num_tokens, uniform, 0)
        if max(lengths) == 1:
            # Its attention metadata is of another graph.
            assert own.cg_mode == PIECEWISE
        else:
            assert own == graph


def test_draft_prefill_of_a_prompt_is_as_vllms() -> None:
    plus = ours(64, 8, SIZES)
    plus.prefill.expect(batch([4, 4], has_prefill=True))
    assert plus.prefill.dispatch(2, 8, None, 0).cg_mode == PIECEWISE


def test_prompts_are_in_no_full_graph() -> None:
    plus = ours(64, 8, SIZES)
    graph = plus.target.dispatch(2, 8, None, 0, max_query_len=None)
    assert graph.cg_mode == PIECEWISE


def test_each_number_of_loras_has_graphs() -> None:
    plus = ours(16, 3, SIZES_OF_SMALL_BATCHES, loras=[0, 1, 2])
    for loras in (0, 1, 2):
        graph = of_step(plus.target, [2, 4, 1], loras)
        assert graph.cg_mode == FULL
        assert graph.num_active_loras == loras


def test_draft_steps_are_replayed_as_often_as_the_depth_asks_for() -> None:
    plus = ours(16, 8, SIZES_OF_SMALL_BATCHES)
    replays = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    plus.decode._is_fused = True
    step = of_step(plus.decode, [1] * 5)
    plus.decode.graphs[step] = graph
    for depth in (2, 3, 5, 8):
        replays.clear()
        plus.decode.run_fullgraph(plus.decode.specialize_spec_tokens(step, depth))
        assert len(replays) == depth - 1


def test_a_single_step_is_captured_where_all_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[Any] = []
    monkeypatch.setattr(
        SpeculatorCudaGraphManager,
        "capture",
        lambda self, forward, *args, **kwargs: captured.append(forward),
    )

    def all_steps() -> None: ...

    def one_step() -> None: ...

    managers = Managers(16, 8, SIZES_OF_SMALL_BATCHES)
    mix_draft_lengths(*managers.all, one_step)
    managers.decode.capture(all_steps, specialize_spec_tokens=True)
    # vLLM replays this one once for each step itself.
    managers.decode.capture(one_step, specialize_spec_tokens=False)
    assert captured == [one_step, one_step]
    managers.decode.specialize_spec_tokens(None, 8)
    assert managers.decode._num_replays == 1


class Draft:
    """What a speculator's draft steps touch, on the CPU: counted, not computed."""

    def __init__(self) -> None:
        self.current_draft_step = torch.zeros((), dtype=torch.int64)
        self.idx_mapping = torch.arange(4)
        self.input_buffers = SimpleNamespace(
            query_start_loc=torch.arange(5), positions=torch.arange(4)
        )
        self.block_tables = self
        self.advance_draft_positions = True
        self.calls: list[Any] = []

    def compute_slot_mappings(self, *args: Any) -> None:
        self.calls.append(("slots", len(args[0]), args[-1]))

    def _update_draft_decode_metadata(self, metadata: Any, num_reqs: int) -> None:
        self.calls.append(("metadata", metadata, num_reqs))

    def _generate_draft(self, *args: Any) -> None:
        step = int(self.current_draft_step)
        self.calls.append(("draft", step, args[:2]))


def test_one_step_repeated_is_what_vllm_captures_for_all() -> None:
    """But for the number of steps it is told, beyond which inputs are not prepared."""
    ours, theirs = Draft(), Draft()
    arguments = (3, 4, {"layer": 1}, None, None, FULL)
    for _ in range(4):
        MTPPlusSpeculator._draft_step(ours, *arguments, 8)  # type: ignore[arg-type]
    MTPSpeculator._generate_fused_drafts(theirs, *arguments, 5)  # type: ignore[arg-type]
    assert ours.calls == theirs.calls
    assert len(ours.calls) == 12


def test_few_sizes_are_kept() -> None:
    kept = thinned(SIZES)
    assert kept[0] == 1
    assert kept[-1] == 512
    assert set(kept) <= set(SIZES)
    assert len(kept) < len(SIZES) / 2
    for lower, upper in pairwise(kept):
        between = [n for n in SIZES if lower < n < upper]
        assert upper <= lower * 4 / 3 or not between


def test_no_size_stays_no_size() -> None:
    assert thinned([]) == []


@pytest.mark.parametrize("max_num_reqs", [16, 256, 1024])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_costs_are_taken_of_the_graphs_that_steps_with_drafts_replay(
    max_num_reqs: int, depth: int
) -> None:
    target = ours(max_num_reqs, depth, SIZES).target
    manager = VerifiesWhatPays.__new__(VerifiesWhatPays)
    manager.model_runner = SimpleNamespace(
        cudagraph_manager=target, decode_query_len=depth + 1
    )
    manager.req_states = SimpleNamespace(
        max_num_batched_tokens=8192, max_num_reqs=max_num_reqs
    )
    batches = list(manager.batches_to_profile(target.captured_token_counts()))
    assert all(b["num_tokens"] <= 8192 for b in batches)
    decodes = {b["num_tokens"] for b in batches if b.get("uniform_decode")}
    largest = max(SIZES[-1] // (depth + 1), 1) * (depth + 1)
    for num_tokens in decodes:
        num_reqs, rest = divmod(num_tokens, depth + 1)
        assert not rest
        assert num_reqs <= max_num_reqs
        if num_tokens <= min(largest, max_num_reqs * (depth + 1)):
            graph = of_step(target, [depth + 1] * num_reqs)
            assert graph.cg_mode == FULL
            assert graph.max_query_len == depth + 1
    assert len(decodes) > 4
