"""Does the model have MTP layers, and does its checkpoint hold their weights?

Both questions are answered from ``config.json`` and the safetensors files, before a
weight is loaded: a checkpoint that lost its MTP weights otherwise serves with an
untrained drafter at 0 % acceptance, silently, or ends in a traceback after the target
has been read. Which weights there must be is asked of vLLM's model (`dry_load.py`).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_config, get_hf_text_config

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.integration.load.headers import (
    INDEX,
    find_headers,
    unlisted_headers,
)
from vllm_mtp.integration.load.layout import USUAL
from vllm_mtp.integration.load.settings import set_layout
from vllm_mtp.integration.load.trial import try_loading
from vllm_mtp.integration.load.weight_health import (
    DryLoad,
    Header,
    Problem,
    examine,
)

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

_READABLE_LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})
"""Load formats that read the checkpoint's own names (``dummy`` needs no weights)."""

_FATAL = frozenset({"missing", "wrong shape", "unknown", "not finite"})
"""vLLM cannot load them, or drafts made of them are noise. What else looks odd may be
meant so, and costs no more than drafts."""

_MAX_BYTES_AT_START = 2**16
"""Of each weight that are read before an engine starts, as long as they look right:
tens of MB of the largest MTP layers, which have a thousand weights."""

_MAX_NAMED = 8
"""Weights with one fault that a sentence names."""


def count_mtp_layers(
    model_config: Any, head: str | None = None, revision: str | None = None
) -> int:
    """Number of MTP layers that a config promises.

    Args:
        model_config: vLLM's ``ModelConfig`` of the target.
        head: Another checkpoint that has them, folder or hub name; None for the
            target's own.
        revision: Of that checkpoint.

    Raises:
        ConfigError: There are none, or they are of another model.
    """
    draft_config = draft_hf_config(model_config, head, revision)
    num_layers = getattr(draft_config, "n_predict", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        name = model_config.model if head is None else head
        architecture = ", ".join(draft_config.architectures or ["unknown architecture"])
        raise ConfigError(
            f"model {name!r} ({architecture}) has no MTP "
            f"layers: method {METHOD!r} needs a model that ships them, with at least "
            "one MTP layer in its config.json (for most families "
            "num_nextn_predict_layers >= 1), or, as Gemma 4 does, in an assistant "
            "checkpoint that speculative_config.model names."
        )
    if head is not None:
        _check_fits(model_config, head, draft_config)
    return num_layers


def _check_fits(model_config: Any, head: str, draft_config: Any) -> None:
    text_config = get_hf_text_config(draft_config)
    # Gemma 4's assistant has a width of its own.
    width = getattr(draft_config, "backbone_hidden_size", text_config.hidden_size)
    for name, found, wanted in (
        ("hidden_size", width, model_config.get_hidden_size()),
        ("vocab_size", text_config.vocab_size, model_config.get_vocab_size()),
    ):
        if found != wanted:
            raise ConfigError(
                f"speculative_config.model={head!r} has {name} {found}: must be "
                f"{wanted}, that of {model_config.model!r}."
            )


def check_mtp_weights(config: VllmConfig) -> None:
    """Refuse a checkpoint without the weights that vLLM's draft model needs.

    Checkpoints in another format than safetensors or without readable headers are left
    to vLLM's loader, and to what is checked after it. So are draft models that cannot
    be built without memory. Suspicious numbers are only warned about.

    Args:
        config: Finished.

    Raises:
        ConfigError: names the weights.
    """
    speculative = config.speculative_config
    assert speculative is not None
    draft = speculative.draft_model_config
    load_config = speculative.draft_load_config or config.load_config
    if load_config.load_format not in _READABLE_LOAD_FORMATS:
        return
    headers = find_headers(draft.model, draft.revision)
    if not headers:
        return
    tried = try_loading(config, headers)
    if isinstance(tried, str):
        logger.info("MTP weights are only checked when they are loaded: %s", tried)
        return
    if tried.layout != USUAL:
        logger.info("MTP weights of %s: %s", draft.model, tried.layout.describe())
        set_layout(config, tried.layout)
    problems = list(examine_weights(draft.model, tried, headers, _MAX_BYTES_AT_START))
    if fatal := [each for each in problems if each.kind in _FATAL]:
        num_layers = getattr(draft.hf_config, "n_predict", 1)
        raise ConfigError(
            f"model {draft.model!r} promises {num_layers} MTP layer(s) in config.json, "
            f"but vLLM's {tried.model} cannot take their weights from its safetensors "
            f"files: {'; '.join(describe(fatal))}. Use a checkpoint that kept them."
        )
    if problems:
        text = "; ".join(describe(problems))
        logger.warning("MTP weights of %s look damaged: %s.", draft.model, text)


def examine_weights(
    model: str, tried: DryLoad, headers: Mapping[str, Header], max_bytes: int
) -> Iterator[Problem]:
    """Everything that is wrong with MTP weights, kind by kind.

    - *missing*: vLLM's model has a parameter for it;
    - *wrong shape*: another one than that parameter's;
    - *unknown*: vLLM's loader raises, for want of a place for it;
    - what `weight_health` finds in the numbers of those that are there.

    Args:
        model: Folder or hub name.
        tried: What vLLM's model takes.
        headers: Of the whole checkpoint.
        max_bytes: See `weight_health.examine`.
    """
    unlisted: Mapping[str, Header] = {}
    if tried.missing:
        unlisted = unlisted_headers(model)
    elif tried.layout.files:
        headers = {**headers, **unlisted_headers(model, tried.layout.files)}
    for name in tried.missing:
        file = unlisted[name].file if name in unlisted else None
        detail = f"in {file.name}, which {INDEX} does not list" if file else ""
        yield Problem("missing", name, detail)
    for name in tried.nameless:
        yield Problem("missing", name, "as vLLM calls it")
    for kind, details in (
        ("wrong shape", tried.wrong_shape),
        ("unknown", tried.unknown),
    ):
        for name, detail in details.items():
            yield Problem(kind, name, detail)
    sound = [name for name in tried.own if name not in tried.wrong_shape]
    numbers = examine(headers, sound, max_bytes)
    yield from sorted(numbers, key=attrgetter("kind"))


def describe(problems: Sequence[Problem]) -> Iterator[str]:
    """``kind: weight (detail), weight (detail)`` for each kind."""
    for kind, each in groupby(problems, attrgetter("kind")):
        texts = [f"{p.weight} ({p.detail})" if p.detail else p.weight for p in each]
        if len(texts) > _MAX_NAMED:
            texts[_MAX_NAMED:] = [f"and {len(texts) - _MAX_NAMED} more"]
        yield f"{kind}: {', '.join(texts)}"


def draft_hf_config(
    model_config: Any, head: str | None = None, revision: str | None = None
) -> Any:
    """The config of the draft model that vLLM makes of a target's, or of a head's.

    Raises:
        ConfigError: The head's cannot be read.
    """
    # vLLM rewrites the config in place into that of the draft model.
    override = SpeculativeConfig.hf_config_override
    if head is None:
        return override(copy.deepcopy(model_config.hf_config))
    try:
        return get_config(
            head,
            model_config.trust_remote_code,
            revision,
            hf_overrides_fn=override,
        )
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"speculative_config.model={head!r} cannot be read: {reason}"
        ) from None
