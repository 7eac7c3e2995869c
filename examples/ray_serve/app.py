"""The application: N replicas of a model with `mtp_plus` behind one OpenAI endpoint.

On a cluster, from a clone that every node can import (or copy this file)::

    serve run examples.ray_serve.app:build model=XiaomiMiMo/MiMo-7B-RL max_replicas=4

A changed argument and the same command again is a rolling update.
"""

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.tools import ray_cluster
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option

SERVED_NAME = "m"
"""What clients call the model."""
APPLICATION, DEPLOYMENT = "llm", f"LLMServer:{SERVED_NAME}"
MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE_BYTES = 2**28
"""Both on a CPU: replicas share the memory of a machine."""


@dataclass(frozen=True)
class AppOptions(Options):
    """What an application is made of."""

    model: str = argument(MODEL_HELP)
    head: str | None = option(
        None, "Checkpoint with other MTP layers, by vllm-mtp tune."
    )
    min_replicas: int = option(1, "Replicas that always run.", 1, 1000)
    max_replicas: int = option(1, "Replicas under load.", 1, 1000)
    requests_at_once: int = option(16, "Of each replica.", 1, 4096)
    warm_start_path: str | None = option(
        None, "Folder that all nodes share, where replicas keep what they learn."
    )
    cpu: bool = option(False, "Run on CPU cores, one for each replica.")
    dtype: str = option("auto", "Of the model.")
    autoscaling: dict[str, Any] = option({}, "More for Serve's autoscaling (JSON).")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max-replicas: {self.max_replicas} is not allowed; expected "
                f"min-replicas ({self.min_replicas}) or more"
            )

    @property
    def speculative_config(self) -> dict[str, Any]:
        """All that makes it a server with `mtp_plus`."""
        given = {"model": self.head, "warm_start_path": self.warm_start_path}
        return {"method": METHOD} | {k: v for k, v in given.items() if v is not None}


def llm_config(options: AppOptions) -> dict[str, Any]:
    """What ``ray.serve.llm.LLMConfig`` is made of.

    Raises:
        ConfigError: The model is neither a checkpoint's folder nor a name on the hub.
    """
    return {
        "model_loading_config": {
            "model_id": SERVED_NAME,
            "model_source": resolve_model(options.model),
        },
        "engine_kwargs": _engine_arguments(options),
        "deployment_config": {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.requests_at_once / 2,
                "upscale_delay_s": 10,
                "downscale_delay_s": 120,
                **options.autoscaling,
            },
            # More wait at the router: what has not begun is not lost with a replica.
            "max_ongoing_requests": options.requests_at_once,
            "health_check_period_s": 2,
            # A rolling update lets answers end that have begun.
            "graceful_shutdown_timeout_s": 120,
            # A replica on a CPU is one core: that of its engine.
            **({"ray_actor_options": {"num_cpus": 0}} if options.cpu else {}),
        },
        **_hardware(options.cpu),
        **({"callback_config": _LOCAL} if Path(options.model).is_dir() else {}),
    }


_LOCAL = {"callback_class": "examples.ray_serve.local_model:LocalModel"}


def _hardware(cpu: bool) -> dict[str, Any]:
    """Ray Serve LLM takes a GPU for each rank unless told otherwise."""
    if not cpu:
        return {}
    return {
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
    }


def _engine_arguments(options: AppOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "speculative_config": options.speculative_config,
        "dtype": options.dtype,
        "max_num_seqs": options.requests_at_once,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    if options.cpu:
        arguments |= {
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN_TOKENS,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
        }
    return arguments


def require_ray() -> None:
    """Check that the extra is installed.

    Raises:
        ConfigError: It is not.
    """
    ray_cluster.require_ray()
    if find_spec("jsonref") is None:  # `ray.serve.llm` wants it
        raise ConfigError("jsonref: it is not installed; pip install 'vllm-mtp[ray]'")


def make_application(options: AppOptions) -> Any:
    """The application, for ``serve.run``.

    Raises:
        ConfigError: Ray is not installed.
    """
    require_ray()
    config = llm_config(options)
    from ray.serve.llm import LLMConfig, build_openai_app

    ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    if not options.cpu:
        ingress = {}
    return build_openai_app(
        {
            "llm_configs": [LLMConfig(**config)],
            "ingress_deployment_config": ingress,
        }
    )


def build(arguments: dict[str, str]) -> Any:
    """For ``serve run``: options by their names.

    Raises:
        ConfigError: An option is unknown, or its value is not allowed.
    """
    types: dict[str, Any] = {each.name: each.type for each in fields(AppOptions)}
    values = {}
    for name, value in arguments.items():
        if name not in types:
            raise ConfigError(f"{name}: no such option; expected {', '.join(types)}")
        kind: TypeAdapter[Any] = TypeAdapter(types[name])
        is_json = value.startswith("{")
        try:
            values[name] = (
                kind.validate_json(value) if is_json else kind.validate_python(value)
            )
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise ConfigError(f"{name}: {value!r} is not allowed: {why}") from None
    if "model" not in values:
        raise ConfigError("model: is missing; expected a folder or a hub name")
    return make_application(AppOptions(**values))
