"""What stands in the way of serving a model with its MTP layers, found before serving.

Report (JSON)::

    is_healthy                no finding is a problem
    findings[]                level ("ok", "note" or "problem"), topic, text
    probe                     null, or what was tried (`doctor_probe`)
    provenance
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.drafting.vocabulary import default_num_rows
from vllm_mtp.integration.load.checkpoint import describe
from vllm_mtp.integration.load.doctor import (
    GraphFacts,
    MachineFacts,
    ModelFacts,
    WeightFacts,
    graph_facts,
    machine_facts,
    model_facts,
    weight_facts,
)
from vllm_mtp.integration.worker.drafting_disabled import MAX_PENDING_BYTES
from vllm_mtp.tools.doctor_probe import NEXT_TO_NOTHING, ProbeResult, run_probe
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.provenance import collect_provenance

TRIED_FAMILIES = frozenset(
    {
        "DeepSeekMTPModel",
        "ErnieMTPModel",
        "ExaoneMoeMTP",
        "ExtraHeads",
        "Gemma4MTPModel",
        "Glm4MoeLiteMTPModel",
        "Glm4MoeMTPModel",
        "HYV3MTPModel",
        "LongCatFlashMTPModel",
        "MiMoMTPModel",
        "MiMoV2MTPModel",
        "NemotronHMTPModel",
        "OpenPanguMTPModel",
        "Qwen3NextMTP",
        "Qwen3_5MTP",
        "Step3p5MTP",
    }
)
"""Draft architectures that this repository's tests run; others are expected to work."""

Level = Literal["ok", "note", "problem"]
COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


class ProbeOptions(NamedTuple):
    """How drafts are tried."""

    dtype: str = "auto"
    concurrency: int = 1


class Finding(NamedTuple):
    """One thing that the doctor looked at."""

    level: Level
    topic: str
    text: str


def run_doctor(
    model: str,
    probing: ProbeOptions | None,
    console: Console | None,
    head: str | None = None,
) -> dict[str, Any]:
    """Examine a model and this machine.

    Args:
        model: Folder or hub name.
        probing: How to try drafts; None for not at all.
        console: Where to print; None for nowhere.
        head: Checkpoint that has the MTP layers; None for the model's own.

    Raises:
        ConfigError: There is no such model.
        ServerError: The engine of the probe failed.
    """
    name = resolve_model(model)
    findings = [*_of_machine(machine_facts()), *_of_model(name, head)]
    probe = None
    # What is broken need not be tried.
    if probing is not None and _is_healthy(findings):
        config = {"method": METHOD} | ({"model": head} if head else {})
        probe = run_probe(name, config, probing.dtype, probing.concurrency, console)
        findings += _of_probe(probe)
    report = {
        "is_healthy": _is_healthy(findings),
        "findings": [each._asdict() for each in findings],
        "probe": probe and probe.as_json(),
        "provenance": collect_provenance(sys.argv),
    }
    if console is not None:
        print_findings(findings, console)
    return report


def _of_machine(facts: MachineFacts) -> Iterator[Finding]:
    if facts.vllm_problems:
        yield from (Finding("problem", "vLLM", each) for each in facts.vllm_problems)
    else:
        text = f"{facts.vllm_version} has everything that {METHOD} is built on"
        yield Finding("ok", "vLLM", text)
    usable = [name for name, why in facts.kernels.items() if why is None]
    text = f"rollback on {facts.device} by {', '.join(usable)}"
    if usable == ["reference"]:
        reasons = "; ".join(f"{n}: {why}" for n, why in facts.kernels.items() if why)
        yield Finding("note", "kernels", f"{text} alone ({reasons})")
    else:
        yield Finding("ok", "kernels", text)


def _of_model(name: str, head: str | None) -> Iterator[Finding]:
    try:
        facts = model_facts(name, head)
    except ConfigError as error:
        yield Finding("problem", "model", str(error))
        return
    layers = f"{facts.num_mtp_layers} MTP layer(s)"
    text = f"{facts.architecture} with {layers}, drafted by {facts.draft_architecture}"
    yield Finding("ok", "model", text)
    if facts.refusal:
        yield Finding("problem", "model", facts.refusal)
    yield _of_family(facts)
    yield from _of_weights(name, head, facts)


def _of_family(facts: ModelFacts) -> Finding:
    family = facts.draft_architecture
    if family in TRIED_FAMILIES:
        return Finding("ok", "family", f"{family} is run by this package's tests")
    text = f"{family} is expected to work; no test of this package runs it"
    return Finding("note", "family", text)


def _of_weights(name: str, head: str | None, facts: ModelFacts) -> Iterator[Finding]:
    try:
        weights = weight_facts(name, facts.num_mtp_layers, head)
    except ConfigError as error:
        yield Finding("problem", "weights", str(error))
        return
    if isinstance(weights, str):
        yield Finding("note", "weights", f"not looked at: {weights}")
        return
    for text in describe(weights.problems):
        yield Finding("problem", "weights", text)
    if not weights.problems:
        text = "all that vLLM loads are there, with sound numbers"
        yield Finding("ok", "weights", f"{text}: {_places(weights)}")
    yield _of_memory(facts, weights.num_bytes)
    if not weights.problems:
        yield _of_graphs(graph_facts(name, head))


def _places(weights: WeightFacts) -> str:
    files = (f"{number} in {file}" for file, number in weights.num_by_file.items())
    text = ", ".join(files)
    return f"{text} ({weights.layout})" if weights.layout else text


def _of_graphs(facts: GraphFacts | str) -> Finding:
    if isinstance(facts, str):
        return Finding("ok", "CUDA graphs", facts)
    return Finding(
        "ok",
        "CUDA graphs",
        f"{facts.num_for_any_mix} full ones where attention replays unequal draft "
        f"lengths, otherwise {facts.num_for_equal_lengths}; vLLM measures their memory "
        "at start and says it",
    )


def _of_memory(facts: ModelFacts, mtp_bytes: int) -> Finding:
    own = mtp_bytes / 2**20
    rows = default_num_rows(facts.vocab_size, 1) or 0
    # Two of them on a CPU: plain, to change single rows, and packed, to multiply by.
    copies = 2 * rows * facts.hidden_size * facts.dtype_bytes / 2**20
    waiting = MAX_PENDING_BYTES / 2**20
    share = facts.num_mtp_layers / facts.num_hidden_layers
    return Finding(
        "ok",
        "memory",
        f"{own:.0f} MiB of MTP weights, up to {copies:.0f} MiB for the draft "
        f"vocabulary, at most {waiting:.0f} MiB while drafting rests; the KV cache of "
        f"a token grows by {share:.1%}",
    )


def _of_probe(probe: ProbeResult) -> Iterator[Finding]:
    shares = " ".join(f"{each:.2f}" for each in probe.survival)
    first = probe.survival[0]
    if first < NEXT_TO_NOTHING:
        yield Finding(
            "problem",
            "acceptance",
            f"{first:.1%} of first draft tokens were accepted: MTP weights that were "
            "lost, damaged or exchanged look like this",
        )
    else:
        text = f"survival by position, of {probe.num_drafts} drafts: {shares}"
        yield Finding("ok", "acceptance", text)
    base, best = probe.lengths[0], probe.best
    yield Finding(
        "ok",
        "cost",
        f"a step without drafts takes {base.step_seconds * 1e3:.1f} ms, a draft step "
        f"{probe.draft_cost:.1%} of that",
    )
    if not best.draft_length:
        text = "no draft length pays at this concurrency: drafting will rest"
        yield Finding("note", "prediction", text)
        return
    relative = best.step_seconds / base.step_seconds
    yield Finding(
        "ok",
        "prediction",
        f"best K {best.draft_length}: {best.acceptance_length:.2f} tokens in "
        f"{relative:.2f} steps, {best.predicted_speedup:.2f} times as fast as without "
        f"({best.interval.lower:.2f} to {best.interval.upper:.2f})",
    )


def _is_healthy(findings: Sequence[Finding]) -> bool:
    return all(each.level != "problem" for each in findings)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """A line for each, and a sentence."""
    for each in findings:
        line = Text.assemble(
            (f"{each.level:8}", COLOURS[each.level]), f"{each.topic}: {each.text}"
        )
        console.print(line)
    num_problems = sum(each.level == "problem" for each in findings)
    if num_problems:
        console.print(f"{num_problems} problem(s): see above.", highlight=False)
    else:
        console.print(f"Ready for {METHOD}.", highlight=False)
