"""Payload rollback: our kernels in one launch, and torch indexing layer by layer."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.rollback.layouts import (
    BLOCK_SIZE,
    FILL_BYTE,
    KVLayout,
    LayerCache,
)
from benchmarks.rollback.options import RollbackBenchOptions
from benchmarks.rollback.timing import (
    Contender,
    ContendersDifferError,
    Timing,
    measure,
)
from benchmarks.spread import Spread
from vllm_mtp.config import ConfigError
from vllm_mtp.kernels.dispatch import Backend
from vllm_mtp.kernels.planes import SlotPlane, plane_table

TORCH_INDEXING = "torch_indexing"
SEED = 0
MAX_ROTATIONS = 512
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CPU_CACHE_BYTES = 32 * 2**20
MAX_CACHE_BYTES = {"cpu": 3 * 2**29, "cuda": 16 * 2**30}
"""Of all layers of a layout; a case that needs more gets what it needs."""
MAX_REFERENCE_BYTES = 2**20
"""Above, the reference, which computes the address of every byte, is not called."""
MAX_CALL_S = 0.2
"""What one call may take of a contender that no worker would use; slower ones are left
out, so that the whole bench takes minutes."""

Rejected = Literal["all", "half"]


class PayloadCase(NamedTuple):
    """Slots of one step in the caches of some layers."""

    layout: str
    batch: int
    draft_length: int
    layers: int
    rejected: Rejected
    """``all`` drafts of each request; ``half``: 0 to K, equally likely."""


@dataclass(frozen=True)
class PayloadResult:
    """What was measured of a case."""

    case: PayloadCase
    zeroed_bytes: int
    num_rotations: int
    timings: dict[str, Timing]
    left_out: dict[str, str]
    """Why contenders were not timed, by name."""

    def gb_per_s(self, contender: str) -> Spread:
        """Zeroed bytes per second, in GB."""
        each = self.timings[contender].best_us.each
        return Spread.of([self.zeroed_bytes / us / 1e3 for us in each])

    def as_json(self, copy_gb_per_s: float) -> dict[str, Any]:
        """For the result file."""
        contenders = {}
        for name, timing in self.timings.items():
            gb_per_s = self.gb_per_s(name)
            contenders[name] = {
                **timing.as_json(),
                "gb_per_s": gb_per_s.median,
                "copy_fraction": gb_per_s.median / copy_gb_per_s,
            }
        return {
            **self.case._asdict(),
            "zeroed_bytes": self.zeroed_bytes,
            "num_rotations": self.num_rotations,
            "contenders": contenders,
            "left_out": self.left_out,
        }


def plan_cases(options: RollbackBenchOptions, layout: str) -> list[PayloadCase]:
    """Cases of one layout: each axis through the centre of the others."""
    batch, length = options.centre_batch, options.centre_draft_length
    layers = options.centre_layers
    cases = [PayloadCase(layout, b, length, layers, "all") for b in options.batches]
    cases += [
        PayloadCase(layout, batch, length, n, "all") for n in options.layers_to_scrub
    ]
    cases += [
        PayloadCase(layout, batch, k, layers, "all") for k in options.draft_lengths
    ]
    cases.append(PayloadCase(layout, batch, length, layers, "half"))
    return list(dict.fromkeys(cases))


class PayloadBench:
    """The caches of one layout, and what is measured on them.

    Args:
        layout: Of the caches.
        cases: All that will be measured; they decide how large the caches are.
        device: Where the caches lie.

    Raises:
        ConfigError: They do not fit into memory.
    """

    def __init__(
        self, layout: KVLayout, cases: Sequence[PayloadCase], device: torch.device
    ) -> None:
        self.layout = layout
        self.device = device
        num_layers = max(case.layers for case in cases)
        num_blocks = _num_blocks(layout, cases, device)
        self.caches = [layout.new_layer(num_blocks, device) for _ in range(num_layers)]
        self.num_slots = num_blocks * BLOCK_SIZE

    def measure(
        self, case: PayloadCase, backends: Sequence[Backend], num_repeats: int
    ) -> PayloadResult:
        """Check that all contenders zero the same bytes, then time them.

        Raises:
            ContendersDifferError: They do not.
        """
        caches = self.caches[: case.layers]
        rejected = _num_rejected(case)
        zeroed_bytes = int(rejected.sum()) * self.layout.slot_bytes * case.layers
        mappings = self._slot_mappings(case, zeroed_bytes)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        step = _Step(starts * (case.draft_length + 1), rejected.to(self.device))

        contenders, left_out = [], {}
        for backend in backends:
            if backend.name == "reference" and zeroed_bytes > MAX_REFERENCE_BYTES:
                left_out[backend.name] = f"{zeroed_bytes} bytes are too many for it"
                continue
            calls = self._scrub_calls(backend, caches, mappings, step)
            waits = backend.name == "reference"
            contenders.append(Contender(backend.name, calls, waits))
        indexing = [self._index_call(caches, step.rejected(m)) for m in mappings]
        contenders.append(Contender(TORCH_INDEXING, indexing))

        call_s = self._check_equal(caches, contenders)
        for name in [*call_s][1:]:
            if call_s[name] > MAX_CALL_S:
                left_out[name] = f"one call takes {call_s[name]:.2f} s"
        contenders = [each for each in contenders if each.name not in left_out]
        timings = measure(contenders, num_repeats, self.device)
        return PayloadResult(case, zeroed_bytes, len(mappings), timings, left_out)

    def _slot_mappings(
        self, case: PayloadCase, zeroed_bytes: int
    ) -> list[torch.Tensor]:
        """Slots of the step's rows, one mapping for each rotation.

        A request's rows lie side by side, requests lie anywhere; no slot is in two
        mappings.
        """
        length = case.draft_length + 1
        num_runs = (self.num_slots - BLOCK_SIZE) // length
        wanted = math.ceil(_working_set_bytes(self.device) / max(zeroed_bytes, 1))
        num_rotations = max(1, min(wanted, MAX_ROTATIONS, num_runs // case.batch))
        rng = torch.Generator().manual_seed(SEED)
        runs = torch.randperm(num_runs, generator=rng)[: num_rotations * case.batch]
        slots = BLOCK_SIZE + runs[:, None] * length + torch.arange(length)
        return list(slots.view(num_rotations, -1).to(self.device).unbind(0))

    def _scrub_calls(
        self,
        backend: Backend,
        caches: Sequence[LayerCache],
        mappings: Sequence[torch.Tensor],
        step: "_Step",
    ) -> list[Callable[[], object]]:
        storages = [layer.storage for layer in caches]
        planes = [p for c in caches for p in self.layout.planes(c.cache, mappings[0])]
        table = plane_table(planes, self.device)
        return [
            _scrub_call(backend, storages, mapping, _table_for(table, mapping), step)
            for mapping in mappings
        ]

    def _index_call(
        self, caches: Sequence[LayerCache], slots: torch.Tensor
    ) -> Callable[[], object]:
        indexed = [pair for c in caches for pair in self.layout.indexed(c.cache, slots)]

        def zero() -> None:
            for view, index in indexed:
                view[index] = 0

        return zero

    def _check_equal(
        self, caches: Sequence[LayerCache], contenders: Sequence[Contender]
    ) -> dict[str, float]:
        """Compare first calls, torch indexing's among them, in three layers.

        Returns:
            Seconds of one call, by name.
        """
        looked_at = [caches[0], caches[len(caches) // 2], caches[-1]]
        expected: torch.Tensor | None = None
        call_s = {}
        for contender in contenders:
            for layer in looked_at:
                layer.storage.fill_(FILL_BYTE)
            seconds = self._seconds(contender.calls[0])
            if expected is None:
                expected = looked_at[0].storage.clone()
            if seconds > MAX_CALL_S:  # it may have been compiled first
                seconds = self._seconds(contender.calls[0])
            call_s[contender.name] = seconds
            if not all(torch.equal(layer.storage, expected) for layer in looked_at):
                raise ContendersDifferError(
                    f"{contender.name} and {contenders[0].name} zero different bytes "
                    f"of {self.layout.name}; nothing was written"
                )
        return call_s

    def _seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


class _Step(NamedTuple):
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor
    # [num_reqs] int32
    num_rejected_tokens: torch.Tensor

    def rejected(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Rejected slots of a step."""
        num_reqs = self.num_rejected_tokens.shape[0]
        columns = slot_mapping.view(num_reqs, -1)
        length = columns.shape[1]
        first = length - self.num_rejected_tokens[:, None]
        return columns[torch.arange(length, device=first.device) >= first]


def _scrub_call(
    backend: Backend,
    storages: list[torch.Tensor],
    slot_mapping: torch.Tensor,
    table: torch.Tensor,
    step: _Step,
) -> Callable[[], object]:
    mappings = [slot_mapping]
    return lambda: backend.scrub_rejected_slots(storages, mappings, table, *step)


def _table_for(table: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    column = list(SlotPlane.__dataclass_fields__).index("slot_mapping_address")
    table = table.clone()
    table[:, column] = slot_mapping.data_ptr()
    return table


def _num_rejected(case: PayloadCase) -> torch.Tensor:
    if case.rejected == "all":
        return torch.full((case.batch,), case.draft_length, dtype=torch.int32)
    rng = torch.Generator().manual_seed(SEED)
    return torch.randint(
        0, case.draft_length + 1, (case.batch,), generator=rng, dtype=torch.int32
    )


def _working_set_bytes(device: torch.device) -> int:
    """Zeroed bytes after which a slot comes round again: twice the last cache."""
    if device.type == "cuda":
        return 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in CPU_CACHES.glob("index*/size")]
    caches = [1024 * int(size[:-1]) for size in sizes if size.endswith("K")]
    return 2 * max(caches, default=UNKNOWN_CPU_CACHE_BYTES)


def _num_blocks(
    layout: KVLayout, cases: Sequence[PayloadCase], device: torch.device
) -> int:
    """A block for each request if that is not too much memory, and the null block."""
    num_rows = max(case.batch * (case.draft_length + 1) for case in cases)
    num_layers = max(case.layers for case in cases)
    block_bytes = BLOCK_SIZE * layout.slot_bytes * num_layers
    needed = 1 + math.ceil(num_rows / BLOCK_SIZE)
    limit_bytes = _memory_limit_bytes(device)
    affordable = min(MAX_CACHE_BYTES[device.type], limit_bytes // 2) // block_bytes
    wanted = 1 + max(max(case.batch for case in cases), needed)
    num_blocks = max(needed, min(wanted, affordable))
    if num_blocks * block_bytes > limit_bytes:
        raise ConfigError(
            f"layers: {num_layers} is not allowed; caches of {layout.name} for "
            f"{num_rows} rows take {num_blocks * block_bytes / 2**30:.1f} GiB and must "
            f"fit into {limit_bytes / 2**30:.1f} GiB"
        )
    return num_blocks


def _memory_limit_bytes(device: torch.device) -> int:
    """What is free on a GPU; half of the machine's memory on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the layout before
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
