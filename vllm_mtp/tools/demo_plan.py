"""What a demo runs: the methods, the prompts and the `vllm serve` commands.

Pure: files are read and checked here, nothing is started.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, METHOD, VLLM_METHOD, ConfigError

NO_SPECULATION = "none"
METHODS = (NO_SPECULATION, VLLM_METHOD, METHOD)

PROMPTS_FILE = "heldout_prompts.jsonl"

SERVED_NAME = "demo"
MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE_BYTES = 1024**3
"""KV cache of one server. One request at a time needs little; without a figure each of
three servers would measure the memory while the others take it."""

GPU_MEMORY_SHARE = 0.9
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Prompt(NamedTuple):
    """A text to be continued, and where it came from."""

    source: str
    text: str


BUILT_IN_PROMPTS = (
    Prompt("built-in 1", 'def fibonacci(n):\n    """Return the n-th number."""\n'),
    Prompt("built-in 2", "The three most important rules of testing software are"),
    Prompt("built-in 3", "import json\n\n\ndef load_config(path):\n"),
    Prompt("built-in 4", "class Stack:\n    def __init__(self):\n"),
    Prompt("built-in 5", "Once upon a time, in a small village by the sea,"),
    Prompt("built-in 6", "Water boils at a lower temperature on a mountain because"),
)


@dataclass(frozen=True)
class DemoOptions:
    """What the user of the demo chose.

    Attributes:
        model: Folder with a checkpoint or a hub name.
        methods: Of `METHODS`; no speculation always comes first, it is the baseline.
        num_prompts: Prompts per pass.
        max_tokens: Tokens generated for each prompt.
        num_repeats: Timed passes over the prompts.
        baseline_draft_tokens: K of vLLM's own `mtp`; `mtp_plus` chooses for itself.
        dtype: Weights and arithmetic of the servers.
        start_timeout_s: How long the servers may take to answer.
        serve_args: Further arguments of every `vllm serve`.
    """

    model: str
    methods: tuple[str, ...] = METHODS
    num_prompts: int = 6
    max_tokens: int = 64
    num_repeats: int = 3
    baseline_draft_tokens: int = DEFAULT_FIXED_DRAFT_LENGTH
    dtype: str = "float32"
    start_timeout_s: float = 600.0
    serve_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the methods.

        Raises:
            ConfigError: A method is unknown, named twice, or the baseline is missing.
        """
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ConfigError(
                f"methods: unknown {unknown[0]!r}; known are {', '.join(METHODS)}"
            )
        if self.methods.count(NO_SPECULATION) != 1 or len(set(self.methods)) != len(
            self.methods
        ):
            raise ConfigError(
                f"methods: {','.join(self.methods)!r} must name {NO_SPECULATION!r}, "
                "which the others are compared with, and each method once"
            )


def resolve_model(model: str) -> str:
    """Find the checkpoint before servers are started for it.

    Args:
        model: Folder or hub name.

    Returns:
        What `vllm serve` is given.

    Raises:
        ConfigError: The folder is missing or holds no checkpoint.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: {folder} holds no config.json")
        return str(folder.resolve())
    if HUB_NAME.fullmatch(model):
        return model
    raise ConfigError(
        f"model: {str(folder)!r} is neither a folder with a checkpoint nor a name "
        "on the hub (owner/name)"
    )


def read_prompts(model: str, num_prompts: int) -> list[Prompt]:
    """First prompts that the checkpoint brings, which it has not been trained on.

    Args:
        model: Folder or hub name.
        num_prompts: How many at most.

    Returns:
        Prompts of the checkpoint, or the built-in ones when it brings none.

    Raises:
        ConfigError: A line of the file is not a prompt.
    """
    path = Path(model) / PROMPTS_FILE
    if not path.is_file():
        return list(BUILT_IN_PROMPTS[:num_prompts])
    return read_prompt_file(path, num_prompts, "model")


def read_prompt_file(path: Path, num_prompts: int, field: str) -> list[Prompt]:
    """First prompts of a file.

    Args:
        path: One JSON object with a `text` a line.
        num_prompts: How many at most.
        field: What the user gave, for the sentence about a mistake.

    Raises:
        ConfigError: The file cannot be read, or a line of it is not a prompt.
    """
    prompts: list[Prompt] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(prompts) == num_prompts:
                    break
                prompts.append(_parse_prompt(line, f"{field}: {path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ConfigError(f"{field}: {path} cannot be read: {reason}") from None
    if not prompts:
        raise ConfigError(f"{field}: {path} holds no prompt")
    return prompts


def _parse_prompt(line: str, place: str) -> Prompt:
    try:
        record = json.loads(line)
        text = record["text"]
        source = str(record.get("file", record.get("id", place)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{place} is no prompt; expected an object with id, file and text"
        ) from None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{place}: text is {text!r}; expected a text")
    return Prompt(source, text)


def max_model_len_tokens(model: str) -> int:
    """Context of the servers: short, but no longer than the checkpoint's own."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return MAX_MODEL_LEN_TOKENS
    own = json.loads(config.read_text()).get("max_position_embeddings")
    return min(MAX_MODEL_LEN_TOKENS, own) if own else MAX_MODEL_LEN_TOKENS


def max_prompt_tokens(model: str, options: DemoOptions) -> int:
    """What the context of the servers leaves for a prompt.

    Raises:
        ConfigError: Nothing.
    """
    context = max_model_len_tokens(model)
    if options.max_tokens >= context:
        raise ConfigError(
            f"tokens: {options.max_tokens} leaves no room for a prompt; expected less "
            f"than the servers' context of {context} tokens"
        )
    return context - options.max_tokens


def speculative_config(method: str, options: DemoOptions) -> dict[str, Any] | None:
    """Value of `--speculative-config`; None without speculation."""
    if method == NO_SPECULATION:
        return None
    if method == METHOD:
        return {"method": METHOD}
    return {
        "method": VLLM_METHOD,
        "num_speculative_tokens": options.baseline_draft_tokens,
    }


@dataclass(frozen=True)
class ServerSettings:
    """What all servers of one measurement have in common.

    Attributes:
        dtype: Weights and arithmetic.
        num_servers: That run at the same time.
        serve_args: Further arguments of every `vllm serve`.
        on_gpu: Share one GPU's memory, and let vLLM compile and capture graphs.
    """

    dtype: str
    num_servers: int
    serve_args: tuple[str, ...]
    on_gpu: bool


def serve_command(
    model: str, config: dict[str, Any] | None, port: int, settings: ServerSettings
) -> list[str]:
    """`vllm serve` with one speculative config.

    Prefix caching is off, so that every repetition does the same work.

    Args:
        model: Folder or hub name.
        config: Value of `--speculative-config`; None without speculation.
        port: On the loopback interface.
        settings: Of all servers.

    Returns:
        Program and arguments.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", SERVED_NAME, "--dtype", settings.dtype]
    command += ["--max-model-len", str(max_model_len_tokens(model))]
    command += ["--no-enable-prefix-caching", "--max-num-seqs", "8"]
    command += ["--disable-uvicorn-access-log"]
    command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    if settings.on_gpu:
        share = GPU_MEMORY_SHARE / settings.num_servers
        command += ["--gpu-memory-utilization", f"{share:.3f}"]
    else:
        command += ["--enforce-eager"]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    return [*command, *settings.serve_args]


def serve_environ(
    environ: Mapping[str, str], scratch: Path, local_model: bool, on_gpu: bool
) -> dict[str, str]:
    """Variables of a server: quick to start, quiet, and nothing sent anywhere.

    `VLLM_ENABLE_V1_MULTIPROCESSING=0` keeps engine and worker in one process on a
    CPU: with three servers on two cores the import of vLLM is most of the start, and
    this saves a third of it. It is the same for all methods.

    Args:
        environ: Variables to start from.
        scratch: Folder for temporary files: vLLM leaves sockets behind.
        local_model: The model is a folder, so the hub need not be asked.
        on_gpu: The servers use a GPU.

    Returns:
        A new mapping.
    """
    added = {"VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(scratch)}
    if not on_gpu:
        added["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if local_model:
        added |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**environ, **added}
