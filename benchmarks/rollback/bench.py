"""Rollback measured: metadata beside vLLM's chain, payload beside copy bandwidth.

All contenders of a case work on the same step, are compared before they are timed, and
take turns: every repeat measures each once, and who begins rotates. All of a run is one
process. Spreads are ``{median, quartiles, each}`` over the repeats.

Result (JSON)::

    options, centre       what was asked for, and where the sweeps cross
    definitions           what the figures mean, in words
    device                type, name, num_threads, l2_bytes
    backends.chosen       the one that a worker would use here
            .left_out     why others were not measured, by name
    layouts.measured      titles by name; .left_out as above
    metadata[]            batch, draft_length, num_rows
            .contenders.<name>      host_us, device_us (spreads), why_no_device_us
                                    names: <backend> is its kernel alone,
                                    <backend>_as_called our drafter's hooks with it,
                                    vllm_chain vLLM's own functions
            .as_called_over_chain   spread of the host times' ratio, paired by repeat
    payload[]             layout, batch, draft_length, layers, rejected, zeroed_bytes,
                          num_rotations, left_out (contenders too slow for it)
            .contenders.<name>      as above, and gb_per_s, copy_fraction (medians)
                                    names: <backend>, torch_indexing
    copy_bandwidth        num_bytes, gb_per_s (spread)
    targets[]             name, comparison, limit, value, passed, why_not_judged
    provenance            time, command, git, versions, hardware
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.options import hardware_slug
from benchmarks.rollback import vllm_chain
from benchmarks.rollback.layouts import KVLayout, layouts_for
from benchmarks.rollback.metadata import (
    CHAIN,
    MetadataCase,
    MetadataResult,
    measure_metadata,
)
from benchmarks.rollback.options import RollbackBenchOptions
from benchmarks.rollback.payload import PayloadBench, PayloadResult, plan_cases
from benchmarks.rollback.report import print_report, write_plot
from benchmarks.rollback.targets import judge
from benchmarks.rollback.timing import measure_copy
from benchmarks.spread import Spread
from vllm_mtp.kernels import dispatch
from vllm_mtp.kernels.dispatch import Backend
from vllm_mtp.tools.provenance import collect_provenance, write_json

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}

DEFINITIONS = {
    "host_us": "calls issued back to back, one synchronisation at the end, per call",
    "device_us": "the calls replayed as a CUDA graph, between two events, per call",
    "as_called": "our drafter's hooks between verification and the MTP layers' pass, "
    "their CommonAttentionMetadata included",
    "vllm_chain": "vLLM's prepare_next_token_ids_padded, prepare_inputs_padded, "
    "_get_slot_mapping and (K > 1) seq_lens -= num_rejected",
    "torch_indexing": "view[index] = 0 layer by layer; it is given the rejected slots "
    "and need not find them",
    "gb_per_s": "zeroed bytes per second, from device_us, or host_us without a GPU",
    "copy_bandwidth": "copy_ of num_bytes: bytes read and bytes written, per second",
    "copy_fraction": "gb_per_s of zeroing (writes only) over that of the copy",
    "num_rotations": "sets of slots, each with a slot mapping and a plane table of its "
    "own, that calls take in turns, so that as many bytes as "
    "twice the device's last cache holds (at most 512 sets, and as many as the caches "
    "have room for) are zeroed before a slot comes round again",
    "rejected": "all: every draft token; half: 0 to K of each request, equally likely",
}


class Measured(NamedTuple):
    """Everything that was timed."""

    metadata: list[MetadataResult]
    payload: list[PayloadResult]
    copy_gb_per_s: Spread


def run_rollback_bench(
    options: RollbackBenchOptions, console: Console
) -> dict[str, Any]:
    """Measure, print and write.

    Returns:
        The result as it was written.

    Raises:
        ConfigError: An option does not fit this machine; nothing was written.
        ContendersDifferError: Contenders gave different results; nothing was written.
    """
    device = options.torch_device
    provenance = collect_provenance(sys.argv)
    session = _Session(options, device, console)
    result = {
        **session.run(_device_facts(device, provenance)),
        "provenance": provenance,
    }
    stem = options.output / f"rollback-{hardware_slug(result['device']['name'])}"
    paths = [Path(f"{stem}.png"), Path(f"{stem}.json")]
    write_plot(result, paths[0])
    write_json(paths[1], result)
    print_report(result, console)
    console.print(f"Written: {paths[1]} and {paths[0].name}", markup=False)
    return result


class _Session:
    """One run."""

    def __init__(
        self, options: RollbackBenchOptions, device: torch.device, console: Console
    ) -> None:
        self.options = options
        self.device = device
        self.console = console
        self.backends, self.missing_backends = _backends(device)
        self.layouts, self.missing_layouts = layouts_for(device)

    def run(self, device_facts: dict[str, Any]) -> dict[str, Any]:
        """Measure all cases; the result without its provenance."""
        measured = self._measure()
        chosen = self.backends[0].name
        copy = measured.copy_gb_per_s
        targets = judge(
            chosen,
            measured.metadata,
            measured.payload,
            copy.median,
            device_facts["name"],
            device_facts["type"],
        )
        options = self.options
        return {
            "options": {
                **asdict(options),
                "layers": options.layers_to_scrub,
                "output": str(options.output),
            },
            "centre": {
                "batch": options.centre_batch,
                "draft_length": options.centre_draft_length,
                "layers": options.centre_layers,
            },
            "definitions": DEFINITIONS,
            "device": device_facts,
            "backends": {"chosen": chosen, "left_out": self.missing_backends},
            "layouts": {
                "measured": {each.name: each.title for each in self.layouts},
                "left_out": self.missing_layouts,
            },
            "metadata": [each.as_json(chosen) for each in measured.metadata],
            "payload": [each.as_json(copy.median) for each in measured.payload],
            "copy_bandwidth": {
                "num_bytes": COPY_BYTES[self.device.type],
                "gb_per_s": copy.as_json(),
            },
            "targets": [each.as_json() for each in targets],
        }

    def _measure(self) -> Measured:
        options = self.options
        metadata_cases = [
            MetadataCase(batch, length)
            for batch in options.batches
            for length in options.draft_lengths
        ]
        num_payload = sum(len(plan_cases(options, x.name)) for x in self.layouts)
        with _Steps(self.console, len(metadata_cases) + num_payload + 2) as steps:
            copies = [*self._measure_copy(steps)]
            metadata = []
            for case in metadata_cases:
                steps.begin(f"metadata, batch {case.batch}, K={case.draft_length}")
                metadata.append(self._measure_metadata(case))
            payload = [each for x in self.layouts for each in self._payload(x, steps)]
            copies += self._measure_copy(steps)
        return Measured(metadata, payload, Spread.of(copies))

    def _measure_copy(self, steps: "_Steps") -> tuple[float, ...]:
        steps.begin("copy bandwidth")
        num_bytes = COPY_BYTES[self.device.type]
        return measure_copy(num_bytes, self.options.num_repeats, self.device)

    def _measure_metadata(self, case: MetadataCase) -> MetadataResult:
        repeats = self.options.num_repeats
        return measure_metadata(case, self.backends, repeats, self.device)

    def _payload(self, layout: KVLayout, steps: "_Steps") -> Iterator[PayloadResult]:
        cases = plan_cases(self.options, layout.name)
        bench = PayloadBench(layout, cases, self.device)
        for case in cases:
            steps.begin(
                f"{layout.name}, batch {case.batch}, K={case.draft_length}, "
                f"{case.layers} layers, {case.rejected} rejected"
            )
            yield bench.measure(case, self.backends, self.options.num_repeats)


class _Steps:
    """Progress, drawn between measurements only: a drawing thread would disturb them.

    Outside a terminal a line now and then.
    """

    LINE_EVERY = 20

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._num_begun = 0

    def __enter__(self) -> "_Steps":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, text: str) -> None:
        """Say what is measured now."""
        self._bar.update(self._task, completed=self._num_begun, description=text)
        self._bar.refresh()
        if not self._console.is_terminal and self._num_begun % self.LINE_EVERY == 0:
            total = self._bar.tasks[0].total or 0
            line = f"  {self._num_begun}/{total:.0f} {text}"
            self._console.print(line, markup=False, highlight=False)
        self._num_begun += 1


def _backends(device: torch.device) -> tuple[list[Backend], dict[str, str]]:
    """Those that run on a device, the chosen one first; why the others do not."""
    available = dispatch.available(device)
    left_out = {name: reason for name, reason in available.items() if reason}
    if reason := vllm_chain.why_unavailable(device):
        left_out[CHAIN] = reason
    chosen = dispatch.choose(device)
    others = [
        dispatch.choose(device, name)
        for name, reason in available.items()
        if reason is None and name != chosen.name
    ]
    return [chosen, *others], left_out


def _device_facts(device: torch.device, provenance: dict[str, Any]) -> dict[str, Any]:
    name, l2_bytes = provenance["hardware"]["cpu"], None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, l2_bytes = properties.name, int(properties.L2_cache_size)
    return {
        "type": device.type,
        "name": name,
        "num_threads": torch.get_num_threads(),
        "l2_bytes": l2_bytes,
    }
