"""The engines of the grid benchmark: one process each, told what to do.

See ``integration/bench_engine.py`` for the other end. Each process leads a session of
its own, so Ctrl-C reaches only the benchmark, which then stops them all; an engine
also ends by itself when the benchmark is gone.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from vllm_mtp.lab.demo_plan import BUNDLED_MODEL, read_prompts
from vllm_mtp.lab.demo_servers import LOG_TAIL_LINES, ServerError, find_cause
from vllm_mtp.lab.engine_start import start_engine_process
from vllm_mtp.lab.grid_cells import Prompts, make_prompts
from vllm_mtp.lab.grid_options import GridOptions
from vllm_mtp.lab.grid_prose import PROSE
from vllm_mtp.lab.grid_turns import TURN_S, take_turns, turn_cores

Timed = Literal["parts", "host"]
"""Parts of a step, or the CPU time of the thread that does it all: what an engine can
time apart in a round. It costs a little."""

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0

BLOCK_TOKENS = 32

MAX_CODE_PROMPTS = 128

WANTED_FREE_GPU_SHARE = 0.05
"""What vLLM wants to find free before it starts an engine. Its default, nearly all of
the memory, is there for the first contender alone; what is used is the weights and the
KV cache, which is given in bytes."""


def engine_arguments(
    model: str,
    speculative_config: dict[str, Any] | None,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_mib: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``, the same for all contenders but for one.

    Prefix caching is on, so that a round's prompts cost little after the first one.

    Args:
        model: Folder or hub name.
        speculative_config: Of the contender; None without speculation.
        dtype: Weights and arithmetic.
        max_model_len: Tokens of the longest request.
        max_num_seqs: Requests at a time.
        kv_cache_mib: KV cache.
        on_gpu: Let vLLM compile and capture graphs, and others use the GPU.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_mib * 2**20,
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": not on_gpu,
        "seed": 0,
        "disable_log_stats": False,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = WANTED_FREE_GPU_SHARE
    if speculative_config is not None:
        arguments["speculative_config"] = speculative_config
    return arguments


def engine_environ(
    environ: Mapping[str, str], scratch: Path, local_model: bool
) -> dict[str, str]:
    """Variables of an engine process.

    One thread each, unless the user says otherwise: idle neighbours on a shared
    machine make two threads slower than one.

    Args:
        environ: Variables to start from.
        scratch: Folder for temporary files: vLLM leaves sockets behind.
        local_model: The model is a folder, so the hub need not be asked.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Weights in huge pages: in small ones two engines that do the same differ by
        # 2 % for as long as they live, depending on where their pages happen to lie.
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
        "TMPDIR": str(scratch),
    }
    if local_model:
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**defaults, **environ, **fixed}


class EngineProcess:
    """One engine and the pipe to it."""

    def __init__(self, name: str, log: Path, environ: Mapping[str, str]) -> None:
        """Start the process; its engine is not started yet.

        Args:
            name: Of the contender.
            log: File for what vLLM prints.
            environ: Variables of the process.
        """
        self.name = name
        self.log = log
        self._process, self._connection = start_engine_process(log, environ)

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting.

        Raises:
            ServerError: The process has ended.
        """
        try:
            self._connection.send({"command": command, **arguments})
        except OSError:
            raise self._error("has ended") from None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """What it says to the last command.

        Raises:
            ServerError: It has ended, failed, or took too long.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise self._error(f"did not answer within {timeout_s:.0f} s")
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise self._error("has ended") from None
        if "error" in answer:
            raise self._error(f"failed with {answer['error']}")
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self.tell(command, **arguments)
        return self.answer()

    def cut_prompts(self, vocab_size: int, options: GridOptions) -> Prompts:
        """Prompts of all workloads, cut with this engine's tokenizer."""
        code = [p.text for p in read_prompts(str(BUNDLED_MODEL), MAX_CODE_PROMPTS)]
        *code_ids, prose_ids = self.ask("tokenize", texts=[*code, PROSE])["token_ids"]
        return make_prompts(code_ids, prose_ids, vocab_size, options)

    def request_stop(self) -> None:
        """Ask it to end; it may still be at work."""
        self._signal(signal.SIGTERM)

    def ensure_stopped(self) -> None:
        """Wait a little, then end it."""
        self._process.join(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.join()
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and to what it has started."""
        if self._process.pid is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if self._process.is_alive():  # and leads no session yet
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _error(self, what: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()
        cause = find_cause(lines)
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return ServerError(
            f"the engine of {self.name!r} {what}"
            + (f", after {cause!r}" if cause else "")
            + f"; the end of {self.log}:\n{tail}"
        )


class EngineGroup:
    """All engines; they are stopped together, whatever happens."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineProcess] = {}

    def __enter__(self) -> Self:
        """Begin with none."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all; a second Ctrl-C cannot prevent it."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for engine in self.engines.values():
                engine.request_stop()
            for engine in self.engines.values():
                engine.ensure_stopped()
        finally:
            signal.signal(signal.SIGINT, previous)

    def add(self, engine: EngineProcess) -> None:
        """Take responsibility for a process."""
        self.engines[engine.name] = engine

    def play_together(
        self,
        names: Sequence[str],
        waves: Sequence[Sequence[Mapping[str, Any]]],
        concurrency: int,
        timed: Timed | None = None,
        cached: Sequence[Sequence[int]] | None = None,
        turn_s: float = TURN_S,
    ) -> dict[str, dict[str, Any]]:
        """A round of several engines in turns of a few steps; see ``grid_turns.py``.

        Args:
            names: Of the engines; the first begins.
            waves: Requests, see ``integration/bench_engine.py``.
            concurrency: Requests at a time.
            timed: What of a step to time apart.
            cached: All that the prefix caches hold when it begins; None: what they do.
            turn_s: Seconds of a turn.

        Returns:
            What each engine counted, by name.
        """
        for name in names:
            self.engines[name].ask(
                "begin",
                waves=waves,
                concurrency=concurrency,
                timed=timed,
                cached=cached,
            )
        players = {name: self.engines[name] for name in names}
        take_turns(players, turn_cores(), turn_s)
        return {name: self.engines[name].ask("result") for name in names}
