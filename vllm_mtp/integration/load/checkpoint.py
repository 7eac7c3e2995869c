"""Does the model have MTP layers, and does its checkpoint hold their weights?

Both questions are answered from ``config.json`` and the safetensors files, before a
weight is loaded: a checkpoint that lost its MTP weights otherwise serves with an
untrained drafter at 0 % acceptance, silently, or ends in a traceback after the target
has been read. Which weights there must be is asked of vLLM's model (`dry_load.py`).
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import (
    get_config,
    get_safetensors_params_metadata,
)

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.settings import PLAIN_DRAFT_KEY
from vllm_mtp.integration.load.weight_health import (
    DryLoad,
    Header,
    Problem,
    examine,
    read_headers,
)

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

INDEX = "model.safetensors.index.json"

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
    model_config: Any, options: Mapping[str, Any] | None = None
) -> int:
    """Number of MTP layers that the model's config promises.

    Args:
        model_config: vLLM's ``ModelConfig`` of the target.
        options: vLLM's speculative ones, which may name another checkpoint.

    Raises:
        ConfigError: the model has none.
    """
    draft_config = draft_hf_config(model_config, options)
    num_layers = getattr(draft_config, "n_predict", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(
            f"model {model_config.model!r} ({_architecture(model_config)}) has no MTP "
            f"layers: method {METHOD!r} needs a model that ships them, with at least "
            "one MTP layer in its config.json (for most families "
            "num_nextn_predict_layers >= 1), or, as Gemma 4 does, in an assistant "
            "checkpoint that speculative_config.model names."
        )
    return num_layers


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
    if tried.is_plain:
        logger.info("The MTP layers of %s are not quantized", draft.model)
        config.additional_config[PLAIN_DRAFT_KEY] = True
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


def try_loading(config: VllmConfig, headers: Mapping[str, Header]) -> DryLoad | str:
    """Ask vLLM's draft model which tensors it takes.

    Args:
        config: Finished, with a speculative config.
        headers: Of the draft model's checkpoint.

    Returns:
        Why vLLM could not be asked, where it could not.
    """
    tried = _try(config, headers)
    if config.quant_config is None or isinstance(tried, str) or tried.is_whole:
        return tried
    # Lists of layers that were not quantized name MTP layers as the checkpoint does,
    # and vLLM's model as layers after the target's.
    plain = copy.copy(config)
    plain.quant_config = None
    again = _try(plain, headers)
    if isinstance(again, str) or not again.is_whole:
        return tried
    return replace(again, is_plain=True)


def _try(config: VllmConfig, headers: Mapping[str, Header]) -> DryLoad | str:
    num_layers = config.model_config.get_total_num_hidden_layers()

    def ask() -> DryLoad:
        from vllm_mtp.integration.load.dry_build import draft_model_on_meta
        from vllm_mtp.integration.load.dry_load import dry_load

        return dry_load(draft_model_on_meta(config), headers, num_layers)

    return in_child(ask)


def find_headers(model: str, revision: str | None) -> dict[str, Header]:
    """Headers of the safetensors files that vLLM loads; empty if there are none.

    Args:
        model: Folder or hub name.
        revision: Of the hub's; None for the newest.

    Raises:
        ConfigError: A file of the index is missing, or one cannot be read.
    """
    if Path(model).is_dir():
        return read_headers(_listed_files(Path(model)))
    return {
        name: Header(str(each["dtype"]), tuple(each["shape"]), None)
        for name, each in get_safetensors_params_metadata(
            model, revision=revision
        ).items()
    }


def _listed_files(folder: Path) -> list[Path]:
    """What the index, where there is one, does not list is not loaded by vLLM."""
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        return files
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    listed = {folder / file for file in weight_map.values()}
    if lost := sorted(file.name for file in listed - {*files}):
        raise ConfigError(
            f"model {str(folder)!r}: {INDEX} lists {', '.join(lost)}, which the folder "
            "does not hold. Use a complete checkpoint."
        )
    return [file for file in files if file in listed]


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
    unlisted: dict[str, Header] = {}
    if tried.missing and Path(model).is_dir():
        files = set(Path(model).glob("*.safetensors")) - set(_listed_files(Path(model)))
        unlisted = read_headers(sorted(files))
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


def draft_hf_config(model_config: Any, options: Mapping[str, Any] | None = None) -> Any:
    """The config of the draft model that vLLM makes of a target's, or of the checkpoint
    that its speculative options name."""
    options = options or {}
    if options.get("model") is None:
        hf_config = copy.deepcopy(model_config.hf_config)
    else:
        hf_config = get_config(
            options["model"],
            trust_remote_code=model_config.trust_remote_code,
            revision=options.get("revision"),
            code_revision=options.get("code_revision"),
        )
    # vLLM rewrites the config in place into that of the draft model.
    return SpeculativeConfig.hf_config_override(hf_config)


def _architecture(model_config: Any) -> str:
    return ", ".join(model_config.architectures or ["unknown architecture"])
