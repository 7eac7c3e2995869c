"""What an engine in a process of its own is given: arguments and variables. Pure."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS = 32

WANTED_FREE_GPU_SHARE = 0.05
"""What vLLM wants to find free before it starts an engine. Its default, nearly all of
the memory, is there for the first engine alone; what is used is the weights and the
KV cache, which is given in bytes."""

_KV_CACHE_MIB = 128
"""Where blocks are counted, and vLLM wants a size all the same."""
_ROOM = 2
"""Times what the running requests need: nobody is preempted, and prompts are kept."""


class EngineSize(NamedTuple):
    """What all engines of a comparison have in common.

    Attributes:
        model: Folder or hub name.
        max_model_len: Tokens of the longest request.
        max_num_seqs: Most requests at a time.
        dtype: Weights and arithmetic.
        kv_cache_mib: KV cache of each; None for as many blocks as requests need.
    """

    model: str
    max_model_len: int
    max_num_seqs: int
    dtype: str = "float32"
    kv_cache_mib: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of KV cache with which no request waits for another one."""
        return _ROOM * self.max_num_seqs * ceil(self.max_model_len / BLOCK_TOKENS)


def engine_arguments(
    size: EngineSize, config: Mapping[str, Any] | None, on_gpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``, the same for all engines but for one.

    Prefix caching is on, so that prompts cost little after the first time.

    Args:
        size: Model and room for requests.
        config: Speculative config; None without speculation.
        on_gpu: Let vLLM compile and capture graphs, and others use the GPU.
    """
    kv_cache_mib = size.kv_cache_mib or _KV_CACHE_MIB
    arguments: dict[str, Any] = {
        "model": size.model,
        "dtype": size.dtype,
        "max_model_len": size.max_model_len,
        "max_num_seqs": size.max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_mib * 2**20,
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": not on_gpu,
        "seed": 0,
        "disable_log_stats": False,
    }
    if size.kv_cache_mib is None:
        arguments["num_gpu_blocks_override"] = size.num_blocks
    if on_gpu:
        arguments["gpu_memory_utilization"] = WANTED_FREE_GPU_SHARE
    if config is not None:
        arguments["speculative_config"] = dict(config)
    return arguments


def engine_environ(
    environ: Mapping[str, str], scratch: Path, local_model: bool
) -> dict[str, str]:
    """Variables of an engine process.

    One thread each, unless the user says otherwise: idle neighbours on a shared
    machine make two threads slower than one.
    """
    variables = engine_variables(environ, local_model)
    return {**environ, **variables, "TMPDIR": str(scratch)}


def engine_variables(environ: Mapping[str, str], local_model: bool) -> dict[str, str]:
    """Those of them that are set for it, wherever it runs."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Weights in huge pages: otherwise equal engines differ by where small ones lie.
        "THP_MEM_ALLOC_ENABLE": "1",
        # By the clock: on a crowded machine a short pattern takes longer than 5 s.
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "60",
    }
    fixed = {
        # Engine and worker in the process itself: no other process takes part.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if local_model:
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    chosen = {name: environ.get(name, value) for name, value in defaults.items()}
    return chosen | fixed
