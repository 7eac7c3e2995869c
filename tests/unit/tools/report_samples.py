"""A result of every kind: from docs/results, or made by the code that writes it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapting import AdaptingBench, summary
from benchmarks.checkouts import HERE, CheckoutsBench
from benchmarks.copying.bench import CopyingBench
from benchmarks.copying.copied import copied_share, count_copied
from benchmarks.copying.summary import summarise_cell
from benchmarks.drafting import DraftingBench
from benchmarks.graphs import GraphsBench
from benchmarks.grid.cells import Cell
from benchmarks.grid.journal import Journal
from benchmarks.grid.summary import summarise as summarise_grid
from benchmarks.harness import Measurement
from benchmarks.host import PARTS, HostBench, summarise
from benchmarks.launches import LaunchesBench
from benchmarks.step_split import LAUNCHES
from benchmarks.vocabulary import VocabularyBench
from tests.unit.benchmarks.grid_records import tiny_options, write_journal
from vllm_mtp.config import METHOD
from vllm_mtp.tools.compare import CompareOptions, compare
from vllm_mtp.tools.doctor_probe import LENGTHS, conclude
from vllm_mtp.tools.eval_file import EvalFile, PromptRecord
from vllm_mtp.tools.plan import PlanOptions, make_plan
from vllm_mtp.tools.plan_cost import H200, MOE_671B
from vllm_mtp.tools.plan_report import as_json
from vllm_mtp.tools.provenance import collect_provenance
from vllm_mtp.tools.verify import ITSELF
from vllm_mtp.tools.verify import summarise as summarise_verify
from vllm_mtp.tools.verify_options import HOSTILE, SAMPLED_SETTINGS, VerifyOptions

RESULTS = Path(__file__).parents[3] / "docs" / "results"
XEON = "intel-xeon-processor-2.10ghz.json"
COMMITTED = {
    "rollback": RESULTS / "rollback" / f"rollback-{XEON}",
    "steps": RESULTS / "rollback" / f"steps-{XEON}",
    "crossing": RESULTS / "control" / f"crossing-{XEON}",
    "off": RESULTS / "control" / f"off-{XEON}",
    "replay": RESULTS / "control" / "replay.json",
    "held-out": RESULTS / "control" / "held-out.json",
    "verify requests": RESULTS / "fuzz" / "v1-100.json",
    "http-fuzz": RESULTS / "fuzz" / "http.json",
    "soak": RESULTS / "fuzz" / "soak.json",
    "warm-start": RESULTS / "warm-start" / "warm-start-intel-xeon-processor.json",
}
"""Results of this repository, by name: a new one beside them changes no test."""
PROVENANCE = collect_provenance(["vllm-mtp", "sample"])
CATEGORIES = ("code", "math", "chat", "translation")
DRAFTS_PER_PROMPT = 90


def evaluation(
    seed: int = 0,
    acceptance: tuple[float, ...] = (0.87, 0.79, 0.72),
    categories: tuple[str, ...] = CATEGORIES,
    **change: Any,
) -> EvalFile:
    """Drafts of 48 prompts, some categories easier than others."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(48):
        ease = 1 - 0.06 * (number % len(categories))
        tested, accepted, reached = [], [], DRAFTS_PER_PROMPT
        for probability in acceptance:
            tested.append(reached)
            reached = int(rng.binomial(reached, probability * ease))
            accepted.append(reached)
        records.append(
            PromptRecord(
                id=f"p{number}",
                category=categories[number % len(categories)],
                num_tokens=DRAFTS_PER_PROMPT + sum(accepted),
                num_drafts=DRAFTS_PER_PROMPT,
                num_draft_tokens=len(acceptance) * DRAFTS_PER_PROMPT,
                tested=tuple(tested),
                accepted=tuple(accepted),
                seconds=1.0,
            )
        )
    fields: dict[str, Any] = {
        "model": "mimo-python",
        "prompts_sha256": "s",
        "draft_length": len(acceptance),
        "temperature": 0.0,
        "max_tokens": 256,
        "seconds": 60.0,
        "provenance": PROVENANCE,
    }
    return EvalFile(records=tuple(records), **(fields | change))


def _eval() -> Mapping[str, Any]:
    return evaluation().model_dump(mode="json")


def _compare() -> Mapping[str, Any]:
    worse = evaluation(1, (0.80, 0.79, 0.72))
    comparison = compare(evaluation(0), worse, CompareOptions())
    return comparison.as_json() | {"model": "mimo-python", "files": ["a.json"]}


def _plan() -> Mapping[str, Any]:
    options = PlanOptions(
        acceptance=(0.85, 0.8, 0.7), model=MOE_671B, hardware=H200, num_gpus=8
    )
    return as_json(make_plan(options), options)


def _doctor() -> Mapping[str, Any]:
    def figures(draft_length: int) -> dict[str, Any]:
        per_step_s = 0.01 * (1 + 0.05 * draft_length) + 0.001 * draft_length
        return {
            "num_drafts": 200 if draft_length else 0,
            "accepted_per_position": [
                200 * 0.8 ** (j + 1) for j in range(draft_length)
            ],
            "decode_seconds": 200 * per_step_s,
            "decode_steps": 200,
            "draft_seconds": 200 * 0.001 * draft_length,
        }

    return {
        "is_healthy": True,
        "findings": [
            {"level": "ok", "topic": "vLLM", "text": "0.32.0 has everything"},
            {"level": "note", "topic": "kernels", "text": "rollback by reference"},
        ],
        "probe": conclude({k: [figures(k)] * 2 for k in LENGTHS}, []).as_json(),
        "provenance": PROVENANCE,
    }


def _verify() -> Mapping[str, Any]:
    options = VerifyOptions("m/m", num_samples=400)
    rng = np.random.default_rng(0)

    def engine() -> dict[str, Any]:
        found: dict[str, Any] = {
            setting: {
                "answers": [
                    {"token_ids": rng.integers(0, 6, 4).tolist()}
                    for _ in range(options.num_samples)
                ],
                "drafted": 300,
                "accepted": 200,
            }
            for setting in SAMPLED_SETTINGS
        }
        answer = {"token_ids": [7, 7, 7], "logprobs": [[[7, -0.5], [8, -0.6]]] * 3}
        greedy = {"answers": [answer], "drafted": 9, "accepted": 4}
        return {"greedy": greedy, **found}

    target = engine() | {ITSELF: engine()}
    answers = {"none": target, METHOD: engine(), HOSTILE: engine()}
    return summarise_verify(answers, options)


def _grid(folder: Path) -> Mapping[str, Any]:
    options = tiny_options(folder)
    journal = Journal(folder / "grid-test.jsonl")
    write_journal(journal, options)
    return summarise_grid(journal)


def written(bench: Measurement, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """As `run_bench` writes it."""
    return {**found, "options": bench.as_json(), "provenance": PROVENANCE}


def _drafting(folder: Path) -> Mapping[str, Any]:
    bench = DraftingBench(output=folder, concurrency=(1, 8))
    rng = np.random.default_rng(0)

    def figures(name: str) -> dict[str, Any]:
        speed = {"none": 1.0, "mtp": 1.6}.get(name, 1.9)
        return {
            "full_tokens": 100,
            "full_seconds": 5 / speed * float(rng.normal(1, 0.02)),
            "decode_tokens": 100,
            "decode_request_steps": 40,
            "drafted_per_position": [] if name == "none" else [40, 40, 40],
            "accepted_per_position": [] if name == "none" else [36, 20, 4],
            "texts_sha256": "same",
        }

    rounds = [{name: figures(name) for name in bench.contenders} for _ in range(5)]
    return written(bench, bench.summarise({1: rounds, 8: rounds}))


def _checkouts(folder: Path) -> Mapping[str, Any]:
    """This checkout is a tenth slower with code, as fast elsewhere."""
    bench = CheckoutsBench(output=folder, other=HERE, concurrency=(1,))

    def figures(name: str, cell: Cell) -> dict[str, Any]:
        is_slower = name.startswith("after") and cell.workload == "code"
        seconds = 4.0 if name == "none" else 2.0 / (0.9 if is_slower else 1.0)
        return {"full_tokens": 100, "full_seconds": seconds, "texts_sha256": "same"}

    rounds = {
        cell.name: [{n: figures(n, cell) for n in bench.contenders}] * 2
        for cell in bench.cells
    }
    return written(bench, bench.summarise(rounds))


def _vocab_build() -> Mapping[str, Any]:
    counts = [round(100_000 / rank) for rank in range(1, 1025)]
    return {
        "format": "vllm-mtp draft vocabulary 1",
        "vocab_size": 16384,
        "tokenizer_sha256": "s",
        "token_ids": list(range(1024)),
        "counts": counts,
        "num_counted": round(1.03 * sum(counts)),
        "source": {key: PROVENANCE[key] for key in ("time_utc", "command", "versions")},
    }


def _vocab_compare(folder: Path) -> Mapping[str, Any]:
    options = VocabularyBench(
        output=folder, concurrency=1, request_tokens=10, learning_tokens=20
    )
    lengths = {
        name: [
            factor * (2.8 if domain == "code" else 1.9) for domain in options.domains
        ]
        for name, factor in {"full": 1.0, "auto": 0.985, "list": 0.99}.items()
    }
    return written(options, options.summarise(lengths, 1024))


def _host() -> Any:
    """Two turns of two batches."""
    turn = {"schedule": 100.0, "update": 50.0, "acceptance_length": 2.0}
    bench = HostBench()
    cell = summarise({name: [turn, turn] for name in bench.contenders})
    return written(bench, {"cells": {"1": cell, "32": cell}, "parts": PARTS})


def _launches() -> Any:
    """Two rounds of one batch."""
    bench = LaunchesBench()
    counts = dict.fromkeys(LAUNCHES, 640.0)
    figures = {
        "decode_steps": 20,
        "decode_seconds": 0.1,
        "decode_split_seconds": counts,
    }
    rounds = [dict.fromkeys(bench.contenders, figures)] * 2
    return written(bench, bench.summarise({1: rounds}))


def _graphs() -> Any:
    figures = {"graph_seconds": 9.5, "graph_bytes": 2**30}
    counts = {"num_graphs": 1400, "num_full_graphs": 128}
    bench = GraphsBench()
    return written(bench, {"graphs": dict.fromkeys(bench.contenders, figures | counts)})


def _adapting() -> Any:
    """Two rounds, and one without drafts."""
    rounds = [
        {
            "domain": "prose",
            "is_plain": is_plain,
            "is_trained": True,
            "num_tokens": 100 * number,
            "head": number,
            "is_equal": True,
            "seconds": {"frozen": 1.0, "adapting": 1.01},
            "lengths": {
                "frozen": [] if is_plain else [1.5, 2.0],
                "adapting": [] if is_plain else [1.8, 2.5],
            },
        }
        for number, is_plain in enumerate((False, False, True))
    ]
    return written(AdaptingBench(), {"rounds": rounds, **summary(rounds)})


def _copying() -> Any:
    """Two rounds of one load."""
    bench = CopyingBench()

    def figures(name: str) -> dict[str, Any]:
        seconds = {"none": 4.0, "mtp_plus alone": 2.0}.get(name, 1.0)
        return {
            "full_tokens": 100,
            "full_seconds": seconds,
            "decode_tokens": 100,
            "decode_request_steps": 25,
            "request_steps": 25,
            "drafted_per_position": [25, 25, 25],
        }

    rounds = [{name: figures(name) for name in bench.contenders}] * 2
    load = {
        "prompt_tokens": 5.0,
        "copied": copied_share([count_copied([1, 2, 3, 4, 5, 1, 2, 3, 4], [5, 6])]),
        "num_equal": 1,
        "num_requests": 1,
    }
    cell = {"load": "edits", "concurrency": 1}
    cell |= summarise_cell(rounds, tuple(bench.contenders))
    found = {"engines": bench.contenders, "loads": {"edits": load}, "cells": [cell]}
    return written(bench, {**found, "identical_texts": True})


MADE: dict[str, Callable[[], Mapping[str, Any]]] = {
    "eval": _eval,
    "compare": _compare,
    "plan": _plan,
    "doctor": _doctor,
    "verify": _verify,
    "host": _host,
    "launches": _launches,
    "graphs": _graphs,
    "adapting": _adapting,
    "copying": _copying,
    "vocab build": _vocab_build,
}
MADE_IN_A_FOLDER: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    "grid": _grid,
    "checkouts": _checkouts,
    "drafting": _drafting,
    "vocabulary": _vocab_compare,
}


def sample(kind: str, folder: Path) -> dict[str, Any]:
    """What a result of a kind holds, as it is read from its file."""
    if kind in COMMITTED:
        content: Any = json.loads(COMMITTED[kind].read_text())
        return dict(content)
    made = MADE[kind]() if kind in MADE else MADE_IN_A_FOLDER[kind](folder)
    return dict(json.loads(json.dumps(made)))


def write_sample(kind: str, folder: Path) -> Path:
    """The same as a file."""
    path = folder / f"{kind.replace(' ', '-')}.json"
    path.write_text(json.dumps(sample(kind, folder)))
    return path
