"""The ops themselves: schemas, fakes, which code runs, and how often it is launched."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.caches import Layer, Memory, Scrub
from tests.kernels.greedy_steps import Outputs, Request, step_of
from tests.kernels.plans import Step, decode, outputs_for, prefill, roll_back
from vllm_mtp.kernels import (
    dispatch,
    reference,
    schemas,
    triton_kernels,
    triton_ops,
)

STEP = Step((decode(3, 2), prefill(5), decode(2, 3)), num_tail_rows=2)
OPS = torch.ops.vllm_mtp


class Calls:
    """Every operation of a backend, with arguments that give it work."""

    def __init__(self, backend, device: str) -> None:
        self.plan = STEP.plan(device)
        self.outputs = outputs_for(STEP, self.plan)
        self.memory = Memory(Scrub((Layer("HND"), Layer("CPU vec"))), device)
        self.arguments = {
            "rollback_metadata": (self.plan, *(o.tensor for o in self.outputs)),
            "pad_rejected_rows": (
                self.memory.slot_mappings[0].clone(),
                *self.memory.arguments[3:],
            ),
            "scrub_rejected_slots": self.memory.arguments,
            "accept_greedily": (
                step_of([Request(3, 2), Request(), Request(2, 2)], device=device),
                *Outputs(3, 4, device).tensors,
            ),
        }
        self._backend = backend

    def run(self, name: str) -> None:
        getattr(self._backend, name)(*self.arguments[name])

    def op_arguments(self, name: str) -> tuple[object, ...]:
        """What the op takes: a plan's fields one by one."""
        arguments = self.arguments[name]
        if name in ("rollback_metadata", "accept_greedily"):
            record, *outputs = arguments
            return (*record, *outputs)
        return arguments


class DispatchedOps(TorchDispatchMode):
    """Names of the ops that reach the dispatcher, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(run: Callable[[], None]) -> list[str]:
    with DispatchedOps() as dispatched:
        run()
    return dispatched.names


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_a_call_is_one_op_of_the_intended_backend(fast_backend, name) -> None:
    calls = Calls(fast_backend, fast_backend.device_type)
    suffix = schemas.TRITON_SUFFIX if fast_backend.name == "triton" else ""
    assert ops_of(lambda: calls.run(name)) == [f"vllm_mtp.{name}{suffix}.default"]


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_the_reference_is_seen_as_many_ops_of_torch(name) -> None:
    names = ops_of(lambda: Calls(reference, "cpu").run(name))
    assert len(names) > 3
    assert all(name.startswith("aten.") for name in names)


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_a_fast_backend_computes_nothing_with_torch(
    fast_backend, name, monkeypatch
) -> None:
    """Below its op, too: the reference is not called, nor anything like it."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the reference ran")

    for function in (*schemas.SCHEMAS, "rejected_rows", "byte_offsets"):
        monkeypatch.setattr(reference, function, refuse)
    calls = Calls(fast_backend, fast_backend.device_type)
    with torch.profiler.profile() as profile:
        calls.run(name)
    events = Counter(event.name for event in profile.events())
    assert any(event.startswith(f"vllm_mtp::{name}") for event in events)
    computing = {"aten::where", "aten::index_put_", "aten::copy_", "aten::arange"}
    # Triton's interpreter copies storages that are on no GPU onto themselves.
    allowed = {"aten::copy_"} if triton_ops.INTERPRETED else set()
    assert not (computing & set(events)) - allowed


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_a_call_of_triton_is_one_launch(fast_backend, name) -> None:
    if fast_backend.name != "triton":
        pytest.skip("counts Triton's launches")
    launches: list[str] = []
    kernels = [getattr(triton_kernels, op) for op in schemas.SCHEMAS]
    for op, kernel in zip(schemas.SCHEMAS, kernels, strict=True):
        kernel.add_pre_run_hook(lambda *args, op=op, **kwargs: launches.append(op))
    try:
        Calls(fast_backend, fast_backend.device_type).run(name)
    finally:
        for kernel in kernels:
            kernel.pre_run_hooks.pop()
    assert launches == [name]


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_opcheck_finds_nothing(fast_backend, name) -> None:
    calls = Calls(fast_backend, fast_backend.device_type)
    suffix = schemas.TRITON_SUFFIX if fast_backend.name == "triton" else ""
    torch.library.opcheck(
        getattr(OPS, f"{name}{suffix}").default,
        calls.op_arguments(name),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_a_gpu_call_waits_for_nothing_and_can_be_captured(gpu_backend, name) -> None:
    calls = Calls(gpu_backend, "cuda")
    calls.run(name)  # Compiles.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls.run(name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.run(name)


def test_a_replayed_graph_follows_the_counts_of_its_step(gpu_backend) -> None:
    """Captured with one outcome, replayed with others in the same memory."""
    calls = Calls(gpu_backend, "cuda")
    calls.run("rollback_metadata")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.run("rollback_metadata")
    for sampled in ((4, 1), (1, 3), (2, 2)):
        first, second = sampled
        step = Step(
            (decode(3, first), prefill(5), decode(2, second)),
            num_tail_rows=2,
            seed=first,
        )
        plan = step.plan("cuda")
        tokens = torch.full_like(calls.plan.sampled_token_ids, -1)
        width = min(tokens.shape[1], plan.sampled_token_ids.shape[1])
        tokens[:, :width] = plan.sampled_token_ids[:, :width]
        calls.plan.sampled_token_ids.copy_(tokens)
        for given, new in zip(calls.plan[2:7], plan[2:7], strict=True):
            given.copy_(new)
        graph.replay()
        expected = roll_back(reference, STEP, calls.plan)
        for actual, wanted in zip(calls.outputs, expected, strict=True):
            assert torch.equal(actual.tensor, wanted.tensor)


IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from vllm_mtp.kernels import triton_ops
assert triton_ops.why_unavailable(torch.device("cpu")) == "Triton is not installed"
assert triton_ops.why_unavailable(torch.device("cuda")) == "Triton is not installed"
assert "vllm" not in sys.modules
"""


def test_without_triton_the_module_imports_and_says_so() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_TRITON], check=True)


def test_triton_says_why_it_cannot_run_here() -> None:
    reason = triton_ops.why_unavailable(torch.device("cpu"))
    assert reason is None or "interpreter is off" in reason
    assert "'xpu'" in (triton_ops.why_unavailable(torch.device("xpu")) or "")


def test_every_backend_has_the_functions_of_the_reference(fast_backend) -> None:
    for name in schemas.SCHEMAS:
        assert callable(getattr(fast_backend, name))
        assert callable(getattr(reference, name))
    assert fast_backend.name in dispatch.MODULES
