"""The one seam on the way in: ``EngineArgs`` learns the method ``mtp_plus``.

vLLM's list of methods is closed, so the user's dict is divided here, once: vLLM gets
its own ``mtp`` (every ``method == "mtp"`` test inside it keeps working) and ours
travels in the official ``additional_config``. When the platform has resolved
everything, our worker and scheduler classes are named in the finished config.

Three functions of ``EngineArgs`` are wrapped. Each calls vLLM's original and hands its
result on untouched unless the method is ours.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.deep_gemm import native_next_n_supported

from vllm_mtp.config import (
    DEFAULT_DRAFT_LENGTH,
    METHOD,
    ConfigError,
    MTPPlusConfig,
)
from vllm_mtp.draft_lengths import (
    resolve_draft_length,
)
from vllm_mtp.drafting.vocabulary_list import (
    check_belongs,
    fingerprint,
    read_vocabulary_list,
)
from vllm_mtp.integration.load import checkpoint, compat
from vllm_mtp.integration.load.classes import WORKERS, name_our_classes
from vllm_mtp.integration.load.command_line import clear_exit
from vllm_mtp.integration.load.layer_types import restore_layer_types
from vllm_mtp.integration.load.settings import SETTINGS_KEY, Carried, settings_of
from vllm_mtp.integration.load.synthetic_acceptance import (
    announce,
    check_rates,
    check_synthetic,
)
from vllm_mtp.integration.load.wrapping import unwrap, wrap_once
from vllm_mtp.integration.worker.adapting import check_adapting
from vllm_mtp.integration.worker.draft_sampling import choose_methods
from vllm_mtp.split_options import (
    SplitOptions,
    split_options,
)

_FLAGS = {"spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Top-level aliases of vLLM for keys of the speculative config."""

_OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
"""What vLLM looks for in the path of a draft model, whatever method it was given."""

_REQUEST_METRICS = "per_request_spec_decode_metrics"


def install() -> None:
    """Wrap ``EngineArgs``; a second call changes nothing."""
    for name, wrap in _WRAPPERS.items():
        wrap_once(EngineArgs, name, wrap)


def uninstall() -> None:
    """Put vLLM's own functions back."""
    for name in _WRAPPERS:
        unwrap(EngineArgs, name)


def _wrap_create_engine_config(
    original: Callable[..., VllmConfig],
) -> Callable[..., VllmConfig]:
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if not _is_ours(self):
            return original(self, *args, **kwargs)
        # vLLM may ask the same EngineArgs again: leave it as it came.
        before = _snapshot(self)
        try:
            with clear_exit():
                compat.check({"core"})
                _refuse_user_classes(self)
                # Mistakes in the options, before the model's config is even read.
                _check_statistics(self, _split(self).own)
                _report_per_request(self)
                config = original(self, *args, **kwargs)
                _finish(config)
                return config
        finally:
            vars(self).update(before)

    return create_engine_config


def _wrap_create_speculative_config(
    original: Callable[..., SpeculativeConfig | None],
) -> Callable[..., SpeculativeConfig | None]:
    def create_speculative_config(
        self: EngineArgs, target_model_config: Any, target_parallel_config: Any
    ) -> SpeculativeConfig | None:
        if _is_ours(self):
            _hand_over_to_vllm(self, target_model_config, target_parallel_config)
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def _wrap_add_cli_args(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings:
                action.choices = [*action.choices, METHOD]
        return parser

    return add_cli_args


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "create_engine_config": _wrap_create_engine_config,
    "create_speculative_config": _wrap_create_speculative_config,
    "add_cli_args": _wrap_add_cli_args,
}


def _is_ours(args: EngineArgs) -> bool:
    options = args.speculative_config
    in_options = isinstance(options, dict) and options.get("method") == METHOD
    return in_options or args.spec_method == METHOD


def _snapshot(args: EngineArgs) -> dict[str, Any]:
    names = (
        "speculative_config",
        "additional_config",
        "spec_method",
        _REQUEST_METRICS,
        *_FLAGS,
    )
    return {name: getattr(args, name) for name in names}


def _split(args: EngineArgs) -> SplitOptions:
    """Divide the user's options; the aliases on the command line count as options."""
    options = dict(args.speculative_config or {})
    if options.setdefault("method", METHOD) != METHOD:
        raise ConfigError(
            f"--spec-method {METHOD} contradicts speculative_config.method="
            f"{options['method']!r}: give one of them."
        )
    for flag, key in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None and options.setdefault(key, value) != value:
            raise ConfigError(
                f"--{flag.replace('_', '-')} {value} contradicts "
                f"speculative_config.{key}={options[key]!r}: give one of them."
            )
    vllm_keys = frozenset(f.name for f in dataclasses.fields(SpeculativeConfig))
    split = split_options(options, vllm_keys)
    _check_name(split.passthrough.get("model"))
    check_synthetic(split.own)
    if split.own.lists_draft_vocab:
        read_vocabulary_list(split.own.draft_vocab)
    return split


def _check_name(head: str | None) -> None:
    for word in _OTHER_METHODS:
        if head is not None and word in head.lower():
            raise ConfigError(
                f"speculative_config.model={head!r}: vLLM takes a path with {word!r} "
                "for a drafter of another method; rename it."
            )


def _hand_over_to_vllm(
    args: EngineArgs, target_model_config: Any, target_parallel_config: Any
) -> None:
    """Replace our options in ``args`` by vLLM's ``mtp``, once the model is known."""
    split = _split(args)
    head, revision = (split.passthrough.get(key) for key in ("model", "revision"))
    num_layers = checkpoint.count_mtp_layers(target_model_config, head, revision)
    draft_length = resolve_draft_length(
        split.own,
        num_layers,
        is_small=_drafts_briefly(target_model_config),
        is_common=target_parallel_config.data_parallel_size > 1,
    )
    _check_draft_vocab(split.own, target_model_config)
    check_rates(split.own, draft_length)
    args.speculative_config = split.vllm_options(draft_length, num_layers)
    args.spec_method = args.spec_model = args.spec_tokens = None
    args.additional_config = {
        **args.additional_config,
        SETTINGS_KEY: Carried(split.own.model_dump(mode="json")),
    }


def _drafts_briefly(model_config: Any) -> bool:
    """Whether a large K_max costs more than it brings.

    A hybrid model keeps 1 + K_max recurrent states for each request, so fewer requests
    fit. And where the kernel of a sparse indexer (DeepSeek-V3.2) does not take as many
    rows of a request, every step goes a slower way, at K = 0 too.
    """
    has_indexer = hasattr(model_config.hf_text_config, "index_topk")
    return bool(
        model_config.is_hybrid
        or (has_indexer and not native_next_n_supported(1 + DEFAULT_DRAFT_LENGTH))
    )


def _report_per_request(args: EngineArgs) -> None:
    """Responses say what became of their drafts, unless more is asked for.

    Which costs a count for each verified draft; "none" is vLLM's default and cannot be
    told from a user's wish.
    """
    if getattr(args, _REQUEST_METRICS) == "none":
        setattr(args, _REQUEST_METRICS, "summary")


def _check_statistics(args: EngineArgs, own: MTPPlusConfig) -> None:
    """Refuse what travels with statistics where there are none."""
    if own.show_rounds and args.disable_log_stats:
        raise ConfigError(
            f"speculative_config.show_rounds={own.show_rounds} is not allowed without "
            "statistics, with which rounds travel: remove --disable-log-stats (of "
            "vllm.LLM: give disable_log_stats=False)."
        )


def _check_draft_vocab(own: MTPPlusConfig, model_config: Any) -> None:
    """Refuse a draft vocabulary that does not fit the model, before it is loaded."""
    vocab_size = model_config.get_vocab_size()
    if own.draft_vocab_size is not None and own.draft_vocab_size > vocab_size:
        raise ConfigError(
            f"speculative_config.draft_vocab_size={own.draft_vocab_size} is not "
            f"allowed: must be at most {vocab_size}, the size of the vocabulary."
        )
    if own.lists_draft_vocab:
        tokenizer = (
            None
            if model_config.skip_tokenizer_init
            else cached_tokenizer_from_config(model_config)
        )
        sha256 = tokenizer and fingerprint(tokenizer.get_vocab())
        check_belongs(own.draft_vocab, vocab_size, sha256)


def _finish(config: VllmConfig) -> None:
    if config.parallel_config.worker_cls in WORKERS.values():
        return  # by a wrapper of ours that a decorator around it has hidden
    if SETTINGS_KEY not in config.additional_config:
        raise ConfigError(
            f"model {config.model_config.model!r} brings its own speculative config "
            f"(a speculators checkpoint): method {METHOD!r} cannot replace it; serve "
            "the target model itself."
        )
    if settings_of(config).adapt:
        check_adapting(config)
    choose_methods(config)
    restore_layer_types(config)
    name_our_classes(config)
    checkpoint.check_mtp_weights(config)
    announce(config)


def _refuse_user_classes(args: EngineArgs) -> None:
    for option, value, default in (
        ("--scheduler-cls", args.scheduler_cls, None),
        ("--worker-cls", args.worker_cls, "auto"),
    ):
        if value != default:
            raise ConfigError(
                f"{option}={value!r} cannot be combined with method {METHOD!r}, which "
                f"brings its own: remove {option}."
            )
