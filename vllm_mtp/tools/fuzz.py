"""Random requests to engines with speculation, held to one without, token by token.

The reference answers each request once, undisturbed. Then each axis of `AXES` plays its
share of the plays, and every answer is compared. Ties are sorted out in `fuzz_ties.py`.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_mtp.config import DEFAULT_DRAFT_LENGTH
from vllm_mtp.tools.fuzz_axes import (
    ADAPTER_SLOTS,
    AXES,
    MAX_MODEL_LEN,
    axis_arguments,
    on_axis,
    reference_arguments,
)
from vllm_mtp.tools.fuzz_compare import (
    Difference,
    compare,
    exclusion,
)
from vllm_mtp.tools.fuzz_corpus import ANSWER_TOKENS, choose_openings, make_corpus
from vllm_mtp.tools.fuzz_engines import Player, Start
from vllm_mtp.tools.fuzz_options import V2_ONLY
from vllm_mtp.tools.fuzz_reference import Reference
from vllm_mtp.tools.fuzz_requests import Request, make_plays
from vllm_mtp.tools.fuzz_unseeded import REASON as UNSEEDED
from vllm_mtp.tools.fuzz_unseeded import check_alone, is_unseeded
from vllm_mtp.tools.provenance import gpu_names

MAX_REFERENCE_STARTS = 12
MAX_AXIS_STARTS = 6
Play = list[Request]


class Setting(NamedTuple):
    """What all engines of a run have in common.

    Attributes:
        model: Folder or hub name.
        speculative_config: The user's.
        engine_args: The user's.
        seed: Of the requests, and of what disturbs them.
    """

    model: str
    speculative_config: Mapping[str, Any]
    engine_args: Mapping[str, Any]
    seed: int


class Failure(NamedTuple):
    """A request that was not answered as by the reference.

    Attributes:
        axis: Name of the engine.
        play: All requests of the play.
        name: Of the request; empty where the engine died and nobody knows of which.
        difference: What differs.
    """

    axis: str
    play: Play
    name: str
    difference: Difference


@dataclass
class Findings:
    """What an axis, or all of them, came to."""

    num_requests: int = 0
    num_compared: int = 0
    failures: list[Failure] = field(default_factory=list)
    ties: list[Failure] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that both engines refuse, by the kind of error."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Requests that are played and not compared, by the reason."""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, steps and preemptions; see `Player.counts`."""


@dataclass
class Prepared:
    """Requests whose right answers are known.

    Attributes:
        setting: Of all engines.
        plays: All requests.
        reference: What knows the answers; its engine may have ended.
        adapted: The same with LoRA adapters; it is asked when they are needed.
    """

    setting: Setting
    plays: list[Play]
    reference: Reference
    adapted: Reference

    def reference_of(self, axis_name: str) -> Reference:
        """What knows the answers of an axis."""
        return self.adapted if AXES[axis_name].has_adapters else self.reference


@contextmanager
def prepared(
    setting: Setting,
    num_requests: int,
    start: Start,
    without: Collection[str] = (),
    plays: Sequence[Play] | None = None,
) -> Iterator[Prepared]:
    """Within: requests, and an engine without speculation that has answered them."""
    on_gpu = bool(gpu_names())
    arguments = reference_arguments(setting.model, setting.engine_args, on_gpu)
    player = Player(start, "reference", arguments, MAX_REFERENCE_STARTS)
    with_adapters = arguments | ADAPTER_SLOTS
    adapted = Player(start, "reference", with_adapters, MAX_REFERENCE_STARTS)
    try:
        if plays is None:
            plays = random_plays(player, setting, num_requests, without)
        reference = Reference(player)
        reference.learn([request for play in plays for request in play])
        yield Prepared(setting, list(plays), reference, Reference(adapted))
    finally:
        adapted.close()
        player.close()


def random_plays(
    player: Player,
    setting: Setting,
    num_requests: int,
    without: Collection[str] = (),
) -> list[Play]:
    """Requests made of what an engine without speculation says."""
    from vllm_mtp.tools.prompts import load_prompts

    texts = [prompt.plain_text for prompt in load_prompts(None, setting.model, 128)]
    token_ids = player.ask("tokenize", texts=texts)["token_ids"]
    facts = player.ask("facts")
    max_model_len = min(MAX_MODEL_LEN, facts["max_model_len"])
    openings = choose_openings(texts, token_ids, max_model_len, setting.seed)
    sampling = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}
    asked = [
        {"name": str(i), "chunks": [{"prompt": o.token_ids, "sampling": sampling}]}
        for i, o in enumerate(openings)
    ]
    answers = player.play(asked, is_undisturbed=True)["answers"]
    corpus = make_corpus(
        openings,
        [answers[request["name"]]["outputs"][0] for request in asked],
        facts["vocab_size"],
        max_model_len,
        setting.speculative_config.get("num_speculative_tokens", DEFAULT_DRAFT_LENGTH),
    )
    if not facts["is_v2"]:
        corpus = corpus._replace(refused=V2_ONLY)
    return make_plays(corpus, num_requests, setting.seed, without)


def find_differences(
    ready: Prepared,
    axis_name: str,
    plays: Sequence[Play],
    start: Start,
    max_failures: int = 5,
) -> Findings:
    """Play on one axis and compare."""
    player = axis_player(ready.setting, axis_name, start)
    plays = [on_axis(AXES[axis_name], play) for play in plays]
    reference = ready.reference_of(axis_name)
    reference.learn([request for play in plays for request in play])
    findings = Findings()
    try:
        for number, play in enumerate(plays):
            if len(findings.failures) >= max_failures or not player.can_play:
                break
            played = player.play(play, seed=ready.setting.seed + number)
            compare_play(reference, axis_name, play, played, findings)
        findings.counts.update(player.counts)
    finally:
        player.close()
    return findings


def axis_player(
    setting: Setting, axis_name: str, start: Start, max_starts: int = MAX_AXIS_STARTS
) -> Player:
    """An engine of an axis; it starts with its first play."""
    arguments = axis_arguments(
        AXES[axis_name],
        setting.model,
        setting.speculative_config,
        setting.engine_args,
        bool(gpu_names()),
    )
    return Player(start, axis_name, arguments, max_starts)


def compare_play(
    reference: Reference,
    axis_name: str,
    play: Play,
    played: Mapping[str, Any],
    findings: Findings,
) -> None:
    """Compare a play's answers with the reference's, and add up what is found."""
    findings.num_requests += len(play)
    lost = set(played["in_flight"]) if played["died"] else set()
    if played["died"]:
        death = Difference("engine died", None, played["died"])
        findings.failures.append(Failure(axis_name, play, "", death))
    for request in play:
        name = request["name"]
        found = played["answers"].get(name)
        if found is None or name in lost:
            continue
        if name in reference.died or name not in reference.answers:
            findings.excluded["the engine without speculation dies of it"] += 1
            continue
        reason = exclusion(request) or AXES[axis_name].exclusion(play, request)
        if reason is not None:
            findings.excluded[reason] += 1
            continue
        expected = reference.answers[name]
        if is_unseeded(request):
            findings.excluded[UNSEEDED] += 1
            difference = check_alone(request, expected, found)
        else:
            findings.num_compared += 1
            difference = compare(expected, found)
        if difference is not None:
            findings.failures.append(Failure(axis_name, play, name, difference))
        elif found["refused"]:
            findings.refused[found["refused"].split(":")[0]] += 1
