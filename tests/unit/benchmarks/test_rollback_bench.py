"""The rollback benchmark's parts: statistics, targets, cases, checks, file, picture."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.options import hardware_slug
from benchmarks.rollback.layouts import (
    BLOCK_SIZE,
    FILL_BYTE,
    HND,
    MLA,
    NHD,
    cpu_block_major,
)
from benchmarks.rollback.metadata import (
    MetadataCase,
    MetadataResult,
    measure_metadata,
    verified_plan,
)
from benchmarks.rollback.options import RollbackBenchOptions
from benchmarks.rollback.payload import (
    PayloadBench,
    PayloadCase,
    PayloadResult,
    plan_cases,
)
from benchmarks.rollback.report import print_report, write_plot
from benchmarks.rollback.targets import Target, judge
from benchmarks.rollback.timing import (
    Contender,
    ContendersDifferError,
    Timing,
    measure,
)
from benchmarks.spread import Spread
from vllm_mtp.config import ConfigError
from vllm_mtp.kernels import dispatch
from vllm_mtp.tools.provenance import replacing

CPU = torch.device("cpu")
H200 = "NVIDIA H200"
REFERENCE = dispatch.choose(CPU, "reference")


def timing(host_us: float, device_us: float | None = None) -> Timing:
    device = None if device_us is None else Spread.of([device_us] * 2)
    return Timing(Spread.of([host_us] * 2), device, None)


def metadata_result(batch: int, chain_us: float, device_us: float) -> MetadataResult:
    timings = {
        "native": timing(20.0, device_us),
        "native_as_called": timing(40.0),
        "vllm_chain": timing(chain_us),
    }
    return MetadataResult(MetadataCase(batch, 4), timings)


def payload_result(batch: int, zeroed_bytes: int, device_us: float) -> PayloadResult:
    case = PayloadCase("mla", batch, 4, 61, "all")
    timings = {"native": timing(99.0, device_us), "torch_indexing": timing(500.0)}
    return PayloadResult(case, zeroed_bytes, 1, timings, {"reference": "too slow"})


METADATA = [metadata_result(1, 80.0, 3.0), metadata_result(256, 20.0, 7.0)]
# 70 MB in 50 us are 1,400 GB/s.
PAYLOAD = [payload_result(1, 280_000, 5.0), payload_result(256, 70_000_000, 50.0)]


def verdicts(device_name: str, device_type: str) -> list[bool | None]:
    targets = judge("native", METADATA, PAYLOAD, 2000.0, device_name, device_type)
    return [target.passed for target in targets]


def result() -> dict:
    """As it is written to the file."""
    targets = judge("native", METADATA, PAYLOAD, 2000.0, "Some CPU", "cpu")
    return {
        "centre": {"batch": 256, "draft_length": 4, "layers": 61},
        "device": {"type": "cpu", "name": "Some CPU", "num_threads": 1},
        "backends": {"chosen": "native", "left_out": {"triton": "no GPU"}},
        "layouts": {"measured": {"mla": "MLA, 576 wide"}, "left_out": {}},
        "metadata": [each.as_json("native") for each in METADATA],
        "payload": [each.as_json(2000.0) for each in PAYLOAD],
        "copy_bandwidth": {"gb_per_s": Spread.of([2000.0]).as_json()},
        "targets": [each.as_json() for each in targets],
        "provenance": {"versions": {"vllm": "0", "torch": "0"}},
    }


def test_a_spread_is_median_and_inclusive_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])[:3] == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0, (7.0,))


def test_a_ratio_pairs_what_was_measured_in_the_same_repeat() -> None:
    ratio = Spread.of_ratio(Spread.of([10.0, 30.0]), Spread.of([10.0, 60.0]))
    assert ratio.each == (1.0, 0.5)


def test_every_repeat_measures_each_contender_and_another_one_begins() -> None:
    calls: list[str] = []

    def slow(name: str) -> Contender:
        # Slow enough that one call is a measurement.
        return Contender(name, [lambda: (calls.append(name), sum(range(10**6)))])

    timings = measure([slow("a"), slow("b")], 2, CPU)
    assert list(timings) == ["a", "b"]
    assert all(len(each.host_us.each) == 2 for each in timings.values())
    assert all(each.host_us.median > 0 for each in timings.values())
    order = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    # a and b are calibrated, then a begins, then b.
    assert order == ["a", "b", "a", "b", "a"]


def test_calls_of_a_contender_take_turns() -> None:
    calls = []
    contender = Contender("a", [lambda n=n: calls.append(n) for n in range(3)])
    measure([contender], 1, CPU)
    assert calls[:6] == [0, 1, 2, 0, 1, 2]


class FakeGPU:
    """Stands in for ``torch.cuda``: a graph's replay takes 2 us for each call in it."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.graph_calls = 0
        self.fails = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
        stream = SimpleNamespace(wait_stream=nothing)
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": nothing,
            "synchronize": nothing,
            "CUDAGraph": lambda: SimpleNamespace(replay=self._replay),
            "graph": self._capture,
            "Event": lambda enable_timing: FakeEvent(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def _capture(self, graph, stream):
        before = len(CALLED)
        yield
        self.graph_calls = len(CALLED) - before
        if self.fails:
            raise RuntimeError("operation not permitted\nand more")

    def _replay(self) -> None:
        self.now_us += 2.0 * self.graph_calls


class FakeEvent:
    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self.at_us = self._gpu.now_us

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at_us - self.at_us) / 1e3


CALLED: list[int] = []
ON_GPU = Contender("c", [lambda n=n: CALLED.append(n) for n in range(3)])


def test_device_time_is_that_of_one_call_in_a_graph_of_all(monkeypatch) -> None:
    gpu = FakeGPU()
    gpu.install(monkeypatch)
    timed = measure([ON_GPU], 2, torch.device("cuda"))["c"]
    assert timed.device_us.each == pytest.approx((2.0, 2.0))
    assert timed.best_us is timed.device_us
    assert gpu.graph_calls % 3 == 0


def test_what_cannot_be_captured_has_host_time_and_the_reason(monkeypatch) -> None:
    gpu = FakeGPU()
    gpu.fails = True
    gpu.install(monkeypatch)
    waiting = ON_GPU._replace(name="w", waits_for_device=True)
    timed = measure([ON_GPU, waiting], 1, torch.device("cuda"))
    assert timed["c"].device_us is None
    assert timed["c"].why_no_device_us.endswith("captured: operation not permitted")
    assert "waits" in timed["w"].why_no_device_us
    assert timed["c"].best_us is timed["c"].host_us


@pytest.mark.parametrize(
    ("comparison", "value", "passed"),
    [("<=", 6.0, True), ("<=", 6.1, False), (">=", 6.0, True), (">=", 5.9, False)],
)
def test_a_target_is_met_at_its_limit(comparison, value, passed) -> None:
    assert Target("t", comparison, 6.0, value).passed is passed


def test_on_the_stated_gpu_its_targets_are_judged_by_device_time() -> None:
    # 7 us of metadata, 70 % of the copy, 5 us of scrub; ratios are not judged.
    assert verdicts(H200, "cuda") == [False, True, True, None, None]


def test_on_another_gpu_values_are_given_and_not_judged() -> None:
    targets = judge("native", METADATA, PAYLOAD, 2000.0, "NVIDIA A100", "cuda")
    assert [target.value for target in targets] == [7.0, 0.7, 5.0, 0.5, 2.0]
    assert all(target.passed is None for target in targets)


def test_on_a_cpu_the_ratio_is_judged_at_every_batch() -> None:
    # As called 40 us, where vLLM's chain takes 80 and 20.
    assert verdicts("Some CPU", "cpu") == [None, None, None, True, False]


def test_a_target_whose_case_was_left_out_is_not_judged() -> None:
    targets = judge("native", [], [], 2000.0, H200, "cuda")
    assert [(target.value, target.passed) for target in targets] == [(None, None)] * 3
    assert all(target.why_not_judged for target in targets)


def test_a_case_holds_figures_and_why_some_are_missing() -> None:
    case = json.loads(json.dumps(PAYLOAD[1].as_json(2000.0)))
    native = case["contenders"]["native"]
    assert native["device_us"] == {
        "median": 50.0,
        "quartiles": [50.0, 50.0],
        "each": [50.0, 50.0],
    }
    assert native["gb_per_s"] == pytest.approx(1400.0)
    assert native["copy_fraction"] == pytest.approx(0.7)
    assert case["left_out"] == {"reference": "too slow"}
    ratio = METADATA[0].as_json("native")["as_called_over_chain"]
    assert ratio["each"] == [0.5, 0.5]
    assert METADATA[0].as_json("triton")["as_called_over_chain"] is None


def test_the_picture_is_a_png_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    path.write_text("old")
    write_plot(result(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_the_report_shows_times_shares_and_verdicts() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(result(), console)
    printed = console.file.getvalue()
    assert "0.5" in printed
    assert "50  70%" in printed
    assert "pass" in printed
    assert "FAIL" in printed
    assert "Not measured: triton: no GPU" in printed


def test_an_interrupted_file_leaves_the_old_one_and_nothing_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "p.png"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as pending:
            pending.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "intel-xeon-processor-2.10ghz"),
        ("", "unknown"),
    ],
)
def test_hardware_becomes_part_of_a_file_name(name: str, slug: str) -> None:
    assert hardware_slug(name) == slug


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("device", "tpu", "device: 'tpu' is not allowed; must be one of auto, cpu"),
        ("batches", "1,x", "batches: '1,x' is not allowed; must be whole numbers"),
        ("batches", "0", "batches: '0' is not allowed; .* from 1 to 4096"),
        ("batches", "8,8", "batches: '8,8' is not allowed; .* each once"),
        ("batches", "", "batches: '' is not allowed"),
        ("draft-lengths", "17", "draft-lengths: '17' is not allowed; .* 1 to 16"),
        ("layers", "-1", "layers: '-1' is not allowed"),
        ("repeats", "0", "repeats: 0 is not allowed; must be a number from 1"),
        ("output", "/no/such", "output: '/no/such' is not allowed; .* folder"),
    ],
)
def test_a_bad_option_is_named_with_value_and_what_is_allowed(
    option, value, message
) -> None:
    result = CliRunner().invoke(app, ["rollback", f"--{option}", value])
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr


def test_sweeps_cross_where_the_targets_are_stated() -> None:
    options = RollbackBenchOptions(device="cpu", layers=(4, 61))
    cases = plan_cases(options, "mla")
    assert len(set(cases)) == len(cases)
    assert {case.batch for case in cases} == set(options.batches)
    for batch in (1, 256):
        assert PayloadCase("mla", batch, 4, 61, "all") in cases
    assert PayloadCase("mla", 256, 4, 4, "all") in cases
    assert PayloadCase("mla", 256, 5, 61, "all") in cases
    assert PayloadCase("mla", 256, 4, 61, "half") in cases


def test_sweeps_cross_at_the_largest_without_the_stated_values() -> None:
    options = RollbackBenchOptions(batches=(1, 8), draft_lengths=(2,), layers=(3,))
    centre = options.centre_batch, options.centre_draft_length, options.centre_layers
    assert centre == (8, 2, 3)


def test_a_verified_step_has_every_number_of_accepted_drafts() -> None:
    plan = verified_plan(MetadataCase(64, 3), CPU)
    num_sampled = (plan.sampled_token_ids != -1).sum(1)
    assert set(num_sampled.tolist()) == {1, 2, 3, 4}
    assert plan.slot_mapping.unique().shape == (64 * 4,)


@pytest.mark.parametrize("draft_length", [1, 3])
def test_ours_and_vllms_chain_agree_and_are_timed(draft_length) -> None:
    measured = measure_metadata(MetadataCase(5, draft_length), [REFERENCE], 2, CPU)
    assert list(measured.timings) == ["reference", "reference_as_called", "vllm_chain"]
    assert measured.ratio("reference").median > 0


def test_a_backend_with_other_results_is_not_timed() -> None:
    def wrong(plan, per_request, slot_mapping) -> None:
        REFERENCE.rollback_metadata(plan, per_request, slot_mapping)
        per_request[3, 0] += 1

    backend = dataclasses.replace(REFERENCE, name="wrong", rollback_metadata=wrong)
    with pytest.raises(ContendersDifferError, match=r"wrong .* differ in per_request"):
        measure_metadata(MetadataCase(4, 2), [backend], 1, CPU)


LAYOUTS = [MLA, NHD, HND, *(cpu_block_major(isa) for isa in ("vec", "vec16", "amx"))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.title)
def test_planes_and_torch_indices_of_a_layout_are_the_same_bytes(layout) -> None:
    slots = torch.tensor([BLOCK_SIZE, 3 * BLOCK_SIZE - 1, BLOCK_SIZE + 37])
    by_planes, by_index = (layout.new_layer(4, CPU) for _ in range(2))
    assert int((by_index.storage == FILL_BYTE).sum()) == by_index.storage.numel()
    for view, index in layout.indexed(by_index.cache, slots):
        view[index] = 0
    assert int((by_index.storage == 0).sum()) == len(slots) * layout.slot_bytes

    from vllm_mtp.kernels.planes import plane_table

    REFERENCE.scrub_rejected_slots(
        [by_planes.storage],
        [slots],
        plane_table(layout.planes(by_planes.cache, slots), CPU),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
    )
    assert torch.equal(by_planes.storage, by_index.storage)


@pytest.mark.parametrize("rejected", ["all", "half"])
def test_a_scrub_is_measured_with_the_bytes_that_it_zeroes(rejected) -> None:
    case = PayloadCase("mla", 6, 2, 2, rejected)
    measured = PayloadBench(MLA, [case], CPU).measure(case, [REFERENCE], 1)
    assert list(measured.timings) == ["reference", "torch_indexing"]
    most = 6 * 2 * 2 * MLA.slot_bytes
    assert measured.zeroed_bytes == most or rejected == "half"
    assert 0 < measured.zeroed_bytes <= most
    assert measured.gb_per_s("reference").median > 0


def test_a_backend_that_zeroes_other_bytes_is_not_timed() -> None:
    def nothing(*arguments) -> None:
        """Leaves everything as it is."""

    backend = dataclasses.replace(REFERENCE, name="idle", scrub_rejected_slots=nothing)
    case = PayloadCase("hnd", 2, 1, 1, "all")
    with pytest.raises(ContendersDifferError, match="torch_indexing and idle zero"):
        PayloadBench(HND, [case], CPU).measure(case, [backend], 1)


def test_caches_that_do_not_fit_are_refused_with_both_sizes() -> None:
    case = PayloadCase("nhd", 4096, 16, 10**6, "all")
    with pytest.raises(ConfigError, match=r"layers: 1000000 is not allowed.*GiB"):
        PayloadBench(NHD, [case], CPU)
