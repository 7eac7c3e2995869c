"""``MTPPlusConfig``: every option of ``mtp_plus``, said once.

Name, default, range and meaning of an option live on its field; the README's table
is printed from them (``vllm-mtp options``) and a test keeps the two equal. Keys that
vLLM's own speculative config knows and that make sense for MTP layers are not
repeated here: they pass through to vLLM as they are (see ``split_options``).
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

METHOD = "mtp_plus"
"""The value of ``method`` that users write."""

VLLM_METHOD = "mtp"
"""The method of vLLM that ``mtp_plus`` specialises."""

MAX_DRAFT_LENGTH = 16
"""Largest allowed ``num_speculative_tokens``. At a per-token probability of 0.9 the
17th draft token survives one step in six, and each one costs a draft step."""

DEFAULT_DRAFT_LENGTH = 8
"""Upper bound on the draft length when the user names none and K is chosen online.

Why 8: a controller uses it only where it pays, so the bound need not be a compromise.
Text that the MTP layers know well (code, boilerplate, structured output) accepts more
than 5 tokens in a row; at a per-token probability of 0.9 the eighth draft token still
survives in 43 % of the drafts, and beyond it little is left. The bound itself costs 8
reserved KV slots for a request while it drafts.
"""

DEFAULT_FIXED_DRAFT_LENGTH = 3
"""K when the user names none and it is the same for every step.

Why 3: models ship one MTP layer that was trained for one step, so later positions
decay (70/11/2 % in FastMTP; 81/56/36 % after tuning). With a per-token probability
of 0.8 the acceptance length is 1.80, 2.44, 2.95, 3.36 for K = 1, 2, 3, 4: the fourth
draft token adds 0.41 tokens where the first adds 0.80, and it costs a draft step, a
verified token and a reserved KV slot for every request. FastMTP, TensorRT-LLM and
SGLang publish their best MTP figures at 3.
"""


AUTO, FULL = "auto", "full"
"""Values of ``draft_vocab`` that are no file."""

SYNTHETIC = "synthetic"
"""The value of ``rejection_sample_method`` that is no verification."""


class ConfigError(ValueError):
    """A mistake of the user's: names the option, its value and what is allowed."""


class MTPPlusConfig(BaseModel):
    """Options of ``--speculative-config '{"method": "mtp_plus", ...}'``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DRAFT_LENGTH,
        description=(
            "Upper bound on the draft length K of a request in one step. Unset: "
            f"{DEFAULT_DRAFT_LENGTH} ({DEFAULT_FIXED_DRAFT_LENGTH} with the `fixed` "
            "controller, for hybrid models and for DeepSeek-V3.2 on Hopper), and for a "
            "model with several MTP layers at most one token of each. With data "
            f"parallelism at most {DEFAULT_FIXED_DRAFT_LENGTH}."
        ),
    )
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = Field(
        default="auto",
        description=(
            "How draft tokens of sampled requests are chosen; greedy requests get the "
            "most likely one. `greedy`: that, too. `probabilistic`: drawn from the "
            "draft distribution, which accepts more and keeps a row of it for each "
            "draft token. `auto`: drawn on Model Runner V1; on V2, which keeps rows of "
            "all requests that could run, where they take at most 1 % of the memory: "
            "0.27 GB for 1024 requests and K = 8."
        ),
    )
    draft_vocab: str = Field(
        default=AUTO,
        min_length=1,
        description=(
            "Tokens that the MTP layers may propose; verification always uses the "
            "whole vocabulary. `auto`: those committed lately and those of the prompts "
            "that run, as long as they cover what is committed. `full`: all. A file: "
            "the list in it, made by `vllm-mtp vocab build`."
        ),
        json_schema_extra={"allowed": "'auto' or 'full' or a file"},
    )
    draft_vocab_size: int | None = Field(
        default=None,
        ge=128,
        le=2**20,
        description=(
            "Rows of the draft head; rounded up to a multiple of 128 for each rank. "
            "Unset: a quarter of the vocabulary, at most 16384, none below 1024, and "
            "on Model Runner V1 fewer while they cover 99.8 % of what is committed; "
            "with a file as many as it has."
        ),
    )
    draft_weights: Literal["auto", "same", "int8"] = Field(
        default="auto",
        description=(
            "Weights that draft. `int8`: large matrices of the MTP layers and the "
            "draft head are quantized to 8 bits at start and take a third to three "
            "fifths of the time (without AVX512-VNNI: for up to 8 requests, a quarter "
            "to four fifths); the output is the same. `same`: as the model has them. "
            "`auto`: `int8` on x86 CPUs with AVX2 and without AMX (never tried there), "
            "unless the model is quantized."
        ),
    )
    verify_head: Literal["auto", "prefiltered", "whole"] = Field(
        default="auto",
        description=(
            "How the likeliest tokens of greedy requests are found. `prefiltered`: a "
            "copy of the target's head in 8 bits rules out all tokens but a few, by "
            "bounds that always hold, and the head itself decides between those; the "
            "output is the same. `whole`: the head scores every token. `auto`: "
            "`prefiltered` on x86 CPUs with AVX2 and without AMX (without AVX512-VNNI: "
            "for up to 8 rows), for heads of 8 million weights or more, unless the "
            "model is quantized."
        ),
    )
    rejection_sample_method: Literal["auto", "standard", "block", "synthetic"] = Field(
        default="auto",
        description=(
            "Verification of sampled requests. `standard` tests draft tokens one by "
            "one, `block` jointly, which keeps at least as many. `auto`: `block` on "
            "Model Runner V2 and on a CPU, `standard` on V1 with a GPU. `synthetic`: "
            "none, for benchmarks alone: of all requests as many are accepted as the "
            "next two options ask for, and the text is not the target's "
            "([benchmarking.md](benchmarking.md))."
        ),
    )
    synthetic_acceptance_rates: list[float] | None = Field(
        default=None,
        description=(
            "With `synthetic`: how often the first draft token, the first two, ... are "
            "all accepted."
        ),
        json_schema_extra={
            "allowed": "K_max numbers from 0 to 1, none above the one before, or unset"
        },
    )
    synthetic_acceptance_length: float | None = Field(
        default=None,
        description=(
            "With `synthetic`, instead: tokens of a step in the mean if it verifies "
            "K_max draft tokens, with as little variance as possible."
        ),
        json_schema_extra={"allowed": "a number from 1 to K_max + 1 or unset"},
    )
    kv_rollback: Literal["metadata", "scrub"] = Field(
        default="metadata",
        description=(
            "What is undone of rejected draft tokens. `metadata`: counts, lengths and "
            "slot mapping; their keys and values stay until they are overwritten. "
            "`scrub` zeroes those, too, in every layer. The output is the same."
        ),
    )
    controller: Literal["goodput", "threshold", "fixed", "random"] = Field(
        default="goodput",
        description=(
            "Who chooses K. `goodput`: the draft depth of each step and each request's "
            "K that promise the most committed tokens per second, from measured "
            "acceptance and step times. `threshold`: one K for all, shorter below 60 % "
            "acceptance. `fixed`: always the upper bound. `random`: any K, to test "
            "that the output does not depend on it."
        ),
    )
    early_stop: bool = Field(
        default=True,
        description=(
            "End a draft where the next token is too unlikely to be accepted, by what "
            "the MTP layers say of it (`goodput`; `random` ends it anywhere). Where "
            "drafts come back to the "
            "scheduler and steps run eagerly: Model Runner V1 with sync scheduling, on "
            "a CPU or with `--enforce-eager`, one rank, no trace."
        ),
    )
    copy_from_context: bool = Field(
        default=True,
        description=(
            "Continue drafts by copying: where a request's own tokens (prompt or "
            "answer) hold its last tokens and the draft of the MTP layers, what "
            "followed there is proposed next, up to `num_speculative_tokens`, as often "
            "as such copies have been right. With the controllers `goodput` and "
            "`random`, for models with one MTP layer, on Model Runner V2 and on V1 "
            "with sync scheduling; there a copy behind a longer match takes the place "
            "of a draft."
        ),
    )
    max_tpot_ms: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description=(
            "Latency mode of `goodput`: no request may be expected to wait longer than "
            "this for a token (step time over its own acceptance length). Unset: the "
            "most tokens per second over all requests."
        ),
    )
    trace_path: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "File for a trace of every step (decision, acceptance, sizes, time), to be "
            "replayed with `python -m benchmarks trace replay`. Unset: none."
        ),
    )
    hidden_states_path: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Folder for the tokens and the trunk's hidden states of every request, to "
            "tune MTP layers with. Slower; the output is the same. Unset: none."
        ),
    )
    warm_start_path: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Folder where a server keeps what it learns (acceptance, step times, draft "
            "vocabulary), so that the next one begins with it; replicas may share it. "
            "What is of another model, other options or hardware is not used. Unset: "
            "none."
        ),
    )
    adapt: bool = Field(
        default=False,
        description=(
            "Train the MTP layers on what is served, in a process of its own, and "
            "serve them as soon as they draft better for requests that they were not "
            "trained on. The output is the same. Requests may refuse "
            "(`mtp_plus_record`); texts stay in memory."
        ),
    )
    adapt_device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description=(
            "Where `adapt` trains: an eighth of the cores, behind everything else, or "
            "a GPU that nothing else uses."
        ),
        json_schema_extra={"allowed": "'cpu' or 'cuda:N'"},
    )
    adapt_memory_mib: int = Field(
        default=1024,
        ge=64,
        le=2**24,
        description="Of texts in `/dev/shm`, and at most half of what is free.",
    )
    adapt_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Of the time that `adapt` may train.",
    )
    show_rounds: int = Field(
        default=0,
        ge=0,
        le=64,
        description=(
            "Keep prompt, draft tokens and output of so many recent requests, up to 4 "
            "of those that run at the same time, for the page `/mtp_plus` to show. In "
            "memory; requests may refuse (`mtp_plus_record`). 0: none, and no token "
            "leaves the engine for it."
        ),
    )
    controller_seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="Seed of the `random` controller.",
    )

    @property
    def lists_draft_vocab(self) -> bool:
        """Whether the draft vocabulary is in a file."""
        return self.draft_vocab not in (AUTO, FULL)


OWN_KEYS = frozenset(MTPPlusConfig.model_fields)


def parse_own_options(options: Mapping[str, Any]) -> MTPPlusConfig:
    """Validate our own options.

    Raises:
        ConfigError: one sentence for the first mistake.
    """
    try:
        return MTPPlusConfig.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise ConfigError(
            f"speculative_config.{key}={first['input']!r} is not allowed: "
            f"must be {allowed_values(key)}."
        ) from None


def allowed_values(key: str) -> str:
    """What an option of ours accepts, in words, derived from its field."""
    schema = MTPPlusConfig.model_json_schema()["properties"][key]
    if "allowed" in schema:
        return str(schema["allowed"])
    branches = schema.get("anyOf", [schema])
    return " or ".join(_describe_branch(branch) for branch in branches)


def _describe_branch(branch: Mapping[str, Any]) -> str:
    if "enum" in branch:
        return " or ".join(repr(value) for value in branch["enum"])
    if branch["type"] == "integer":
        if branch["maximum"] >= 2**62:
            return f"an integer >= {branch['minimum']}"
        return f"an integer from {branch['minimum']} to {branch['maximum']}"
    if branch["type"] == "number":
        return (
            f"a number above {branch['exclusiveMinimum']:g}, at most "
            f"{branch['maximum']:g}"
        )
    words = {"null": "unset", "string": "a text that is not empty"}
    return words.get(branch["type"], str(branch["type"]))
