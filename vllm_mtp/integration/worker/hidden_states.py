"""Keeps what the trunk hands to the MTP layers, to tune them with.

The rows of a step that were verified are what the MTP layers are fed when they are
served, of whatever family. They are put together request by request and written in
shards (``tune/shards.py``) when requests end. Copies wait for the device: a server that
records is slower, its output the same.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.tune.shards import PATTERN, Text, write_shard

MAX_SHARD_BYTES = 2**28
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM makes names of requests unique."""


class StepRows(NamedTuple):
    """Rows of the target's pass, of any device."""

    request_ids: Sequence[str]
    starts: torch.Tensor
    """``[num_reqs + 1]``: of each request's rows."""
    num_valid: torch.Tensor
    """``[num_reqs]``: its first rows that were not rejected."""
    token_ids: torch.Tensor
    """``[num_rows]``."""
    positions: torch.Tensor
    """``[num_rows]``."""
    hidden: torch.Tensor
    """``[num_rows, hidden_size]``."""


class _Running:
    """A request under way."""

    def __init__(self, first_position: int) -> None:
        self.first_position = first_position
        self.num_tokens = 0
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        self.parts.append((token_ids, hidden))
        self.num_tokens += len(token_ids)

    def cut(self, num_tokens: int) -> None:
        """Keep the first ones."""
        token_ids, hidden = (
            torch.cat(each)[:num_tokens] for each in zip(*self.parts, strict=True)
        )
        self.parts, self.num_tokens = [(token_ids, hidden)], len(token_ids)


class Recorder:
    """Of one worker."""

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """
        Args:
            folder: For the shards; those in it are kept.
            max_shard_bytes: A shard is written when it is as large.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_shard_bytes = folder, max_shard_bytes
        names = (path.stem.partition("-")[2] for path in folder.glob(PATTERN))
        self._next_shard = max(map(int, names), default=-1) + 1
        self._running: dict[str, _Running] = {}
        self._ended: list[Text] = []
        self._ended_bytes = 0

    def record(self, rows: StepRows) -> None:
        """Add a step's rows."""
        starts, num_valid, positions = (
            each.tolist() for each in (rows.starts, rows.num_valid, rows.positions)
        )
        token_ids, hidden = rows.token_ids.cpu(), rows.hidden.cpu()
        for index, request_id in enumerate(rows.request_ids):
            first = starts[index]
            own = slice(first, first + num_valid[index])
            if num_valid[index] > 0:
                running = self._at(request_id, positions[first])
                running.add(token_ids[own].clone(), hidden[own].clone())

    def _at(self, request_id: str, position: int) -> _Running:
        """The request, ready for rows from a position on."""
        running = self._running.get(request_id)
        if running is not None:
            num_known = position - running.first_position
            if 0 < num_known <= running.num_tokens:
                if num_known < running.num_tokens:  # preempted: it is computed again
                    running.cut(num_known)
                return running
        # New, preempted, or with rows of the prefix cache between.
        self._running[request_id] = running = _Running(position)
        return running

    def end(self, request_ids: Collection[str]) -> None:
        """These get no more rows."""
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is None:
                continue
            running.cut(running.num_tokens)
            ((token_ids, hidden),) = running.parts
            name = _SUFFIX.sub("", request_id)
            self._ended.append(Text(name, token_ids, hidden, running.first_position))
            self._ended_bytes += hidden.numel() * hidden.itemsize
            if self._ended_bytes >= self._max_shard_bytes:
                self._write()

    def flush(self) -> None:
        """Write what there is, of requests under way, too."""
        self.end(list(self._running))
        self._write()

    def _write(self) -> None:
        if self._ended:
            write_shard(self._folder, self._next_shard, self._ended)
            self._next_shard += 1
            self._ended, self._ended_bytes = [], 0


class RecordsHiddenStates:
    """Mixin of drafters."""

    recorder: Recorder | None = None

    def record_ends(self, scheduler_output: Any) -> None:
        """A step is about to run."""
        if self.recorder is not None and scheduler_output.finished_req_ids:
            self.recorder.end(scheduler_output.finished_req_ids)


def recorder_of(vllm_config: Any, rank: int) -> Recorder | None:
    """What records on a rank.

    Args:
        vllm_config: With our options.
        rank: Of the worker within its engine; tensor-parallel ranks have the same
            hidden states, and of pipeline-parallel ones the last has them.
    """
    path = settings_of(vllm_config).hidden_states_path
    parallel = vllm_config.parallel_config
    if path is None or rank % parallel.tensor_parallel_size:
        return None
    folder = Path(path)
    if parallel.data_parallel_size > 1:
        folder /= f"rank{parallel.data_parallel_rank}"
    return Recorder(folder)
