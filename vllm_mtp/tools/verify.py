"""Does a server with speculation answer as it would without? Asked of whole engines.

One engine after the other, so that a model that fills the machine can be verified:
the target alone, the server's own configuration, and the same with random draft
lengths. Greedy texts must be equal token for token; where they are not, the target's
own probabilities tell a tie, which rounding may turn either way, from a defect. Sampled
texts must follow one distribution: the joint one of their first tokens is compared by
chi-square, setting by setting; the target is also compared with itself.

Report (JSON)::

    is_exact                     neither a defect, nor nothing verified
    greedy.<engine>              num_texts, num_tokens, ties, defects
    sampled.<engine>             comparisons; min_p_value and the alpha it must exceed
    verified.<engine>            drafted and accepted tokens
    options, provenance
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import (
    NO_SPECULATION,
    START_TIMEOUT_S,
    EngineGroup,
    EngineProcess,
)
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder
from vllm_mtp.tools.verify_compare import compare_samples, greedy_differences
from vllm_mtp.tools.verify_options import SAMPLED_SETTINGS, SEATS, VerifyOptions

PROMPT_TOKENS = 128
KV_CACHE_MIB = 512
NUM_LIKELIEST = 5
SAMPLED_PROMPT = 0
ITSELF = f"{NO_SPECULATION}, again"


def run_verification(options: VerifyOptions, console: Console) -> dict[str, Any]:
    """Let all engines answer, compare, print and write.

    Returns:
        The report as it was written.

    Raises:
        ConfigError: The prompts cannot be read.
        ServerError: An engine failed.
    """
    model = resolve_model(options.model)
    texts = _read_texts(model, options)
    longest = PROMPT_TOKENS + max(options.max_tokens, options.sampled_tokens)
    size = EngineSize(model, longest, SEATS, options.dtype, KV_CACHE_MIB)
    answers = {}
    with log_folder() as logs, exit_on_signals():
        for name, config in options.contenders.items():
            with EngineGroup() as group:
                engine = group.launch(name, config, size, logs, **options.engine_args)
                engine.answer(START_TIMEOUT_S)
                answers[name] = _ask(engine, texts, options, console)
    report = summarise(answers, options)
    if options.output is not None:
        write_json(options.output, report)
    print_report(report, options, console)
    return report


def _read_texts(model: str, options: VerifyOptions) -> list[str]:
    found = load_prompts(options.prompts, model, options.num_prompts)
    return [prompt.plain_text for prompt in found]


def _ask(
    engine: EngineProcess,
    texts: Sequence[str],
    options: VerifyOptions,
    console: Console,
) -> dict[str, Any]:
    """Answers to all greedy and sampled requests, by name of the setting."""
    is_target = engine.name == NO_SPECULATION
    tokenized = engine.ask("tokenize", texts=list(texts))["token_ids"]
    prompts = [ids[:PROMPT_TOKENS] for ids in tokenized if ids]
    if not prompts:
        raise ConfigError("prompts: all of them are empty")
    greedy = {"temperature": 0.0, "max_tokens": options.max_tokens}
    if is_target:
        greedy["logprobs"] = NUM_LIKELIEST
    asked = {"greedy": [{"prompt": prompt, "sampling": greedy} for prompt in prompts]}
    length = {"max_tokens": options.sampled_tokens}
    for setting, sampling in SAMPLED_SETTINGS.items():
        request = {"prompt": prompts[SAMPLED_PROMPT], "sampling": sampling | length}
        asked[setting] = [request] * options.num_samples
    answers = {}
    for setting, requests in asked.items():
        console.print(f"{engine.name}: {setting}", highlight=False)
        answers[setting] = engine.ask("generate", requests=requests)
    if is_target:
        console.print(f"{ITSELF}: sampled texts", highlight=False)
        answers[ITSELF] = {
            setting: engine.ask("generate", requests=asked[setting])
            for setting in SAMPLED_SETTINGS
        }
    return answers


def summarise(
    answers: Mapping[str, Mapping[str, Any]], options: VerifyOptions
) -> dict[str, Any]:
    """The report, from what each engine answered."""
    target = answers[NO_SPECULATION]
    others = {name: found for name, found in answers.items() if name != NO_SPECULATION}
    sampled = {ITSELF: target[ITSELF], **others}
    most = len(sampled) * len(SAMPLED_SETTINGS) * options.sampled_tokens
    alpha = options.false_alarm_rate / most
    greedy = {
        name: _greedy_report(target["greedy"], found["greedy"], options.tolerance)
        for name, found in others.items()
    }
    compared = {
        name: _sampled_report(target, found, options.sampled_tokens, alpha)
        for name, found in sampled.items()
    }
    verified = {
        name: {
            what: sum(answer[what] for answer in found.values())
            for what in ("drafted", "accepted")
        }
        for name, found in others.items()
    }
    return {
        "is_exact": _is_exact(greedy, compared, verified),
        "greedy": greedy,
        "sampled": compared,
        "verified": verified,
        "options": options.as_json() | {"tie_tolerance": options.tolerance},
        "provenance": collect_provenance(sys.argv),
    }


def _is_exact(
    greedy: Mapping[str, Any], sampled: Mapping[str, Any], verified: Mapping[str, Any]
) -> bool:
    """Neither a defect nor another distribution, and something was put to the test."""
    return (
        not any(each["defects"] for each in greedy.values())
        and all(
            each["comparisons"] and each["min_p_value"] > each["alpha"]
            for each in sampled.values()
        )
        and any(each["accepted"] for each in verified.values())
    )


def _greedy_report(
    expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float
) -> dict[str, Any]:
    differences = greedy_differences(expected["answers"], found["answers"])
    return {
        "num_texts": len(expected["answers"]),
        "num_tokens": sum(len(each["token_ids"]) for each in expected["answers"]),
        "ties": [d._asdict() for d in differences if d.is_tie(tolerance)],
        "defects": [d._asdict() for d in differences if not d.is_tie(tolerance)],
    }


def _sampled_report(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    max_tokens: int,
    alpha: float,
) -> dict[str, Any]:
    comparisons = [
        comparison
        for setting in SAMPLED_SETTINGS
        for comparison in compare_samples(
            setting,
            expected[setting]["answers"],
            found[setting]["answers"],
            max_tokens,
            alpha,
        )
    ]
    return {
        "comparisons": [comparison._asdict() for comparison in comparisons],
        "min_p_value": min((c.p_value for c in comparisons), default=0.0),
        "alpha": alpha,
    }


def print_report(
    report: Mapping[str, Any], options: VerifyOptions, console: Console
) -> None:
    """Tables, and a sentence."""
    console.print(_greedy_table(report, options))
    console.print(_sampled_table(report))
    for name, counts in report["verified"].items():
        console.print(
            f"{name}: {counts['accepted']} of {counts['drafted']} draft tokens kept",
            highlight=False,
        )
    console.print(verdict(report), highlight=False)
    if options.output is not None:
        console.print(f"Written: {options.output}", markup=False)


def verdict(report: Mapping[str, Any]) -> str:
    """What the report says, in a sentence."""
    if report["is_exact"]:
        ties = sum(len(each["ties"]) for each in report["greedy"].values())
        but = f", but for {ties} near-ties that rounding decides" if ties else ""
        return f"Exact: the output is the target's{but}."
    if not any(each["accepted"] for each in report["verified"].values()):
        return "NOT SHOWN: no draft token was accepted, so nothing was put to the test."
    if not all(each["comparisons"] for each in report["sampled"].values()):
        return "NOT SHOWN: too few samples (--samples) to compare distributions."
    return "NOT EXACT: see the tables above."


def _greedy_table(report: Mapping[str, Any], options: VerifyOptions) -> Table:
    table = Table(title=f"Greedy ({options.dtype}), against no speculation")
    for column in ("engine", "texts", "tokens", "near-ties", "defects"):
        table.add_column(column)
    for name, each in report["greedy"].items():
        counts = (
            each["num_texts"],
            each["num_tokens"],
            *map(len, (each["ties"], each["defects"])),
        )
        table.add_row(name, *map(str, counts))
    return table


def _sampled_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="Sampled: chi-square against no speculation")
    for column in ("engine", "setting", "tokens", "outcomes", "p", "would notice"):
        table.add_column(column)
    for name, each in report["sampled"].items():
        for comparison in each["comparisons"]:
            p_value = comparison["p_value"]
            table.add_row(
                name,
                comparison["setting"],
                str(comparison["num_tokens"]),
                str(comparison["num_outcomes"]),
                f"{p_value:.3g}" + ("" if p_value > each["alpha"] else " !"),
                f"{comparison['finds']:.1%}",
            )
    return table
