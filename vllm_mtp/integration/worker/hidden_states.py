"""Keeps what the trunk hands to the MTP layers, to tune them with.

The rows of a step that were verified are what the MTP layers are fed when they are
served, of whatever family. They are put together request by request and written in
shards (``tune/shards.py``) when requests end. No step waits for the copy of its rows:
it is looked at when a later one is recorded, or when one of its requests has ended.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.request_options import is_recorded
from vllm_mtp.tune.shards import PATTERN, Text, write_shard

MAX_SHARD_BYTES = 2**28
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM makes names of requests unique."""
_MAX_PENDING = 4
"""Steps whose rows may be on their way to the host."""


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


class _Copied(NamedTuple):
    """Rows of some requests, on the host once the device has come as far."""

    request_ids: Sequence[str]
    num_rows: Sequence[int]
    """Of each that were copied, rejected ones behind the others."""
    skipped: Sequence[int]
    """Rows of each before those."""
    num_valid: torch.Tensor
    """Of all its rows."""
    positions: torch.Tensor
    token_ids: torch.Tensor
    hidden: torch.Tensor
    is_here: torch.cuda.Event | None


class _Running:
    """A request under way."""

    def __init__(self, first_position: int) -> None:
        self.first_position = first_position
        self.num_tokens = 0
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        self.parts.append((token_ids, hidden))
        self.num_tokens += len(token_ids)

    def cut(self, start: int, end: int) -> None:
        """Keep these."""
        token_ids, hidden = (
            torch.cat(each)[start:end] for each in zip(*self.parts, strict=True)
        )
        self.parts, self.num_tokens = [(token_ids, hidden)], len(token_ids)
        self.first_position += start


class Recorder:
    """Of one worker."""

    def __init__(
        self,
        folder: Path,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        max_text_tokens: int | None = None,
        admits: Callable[[Any], bool] = lambda request: True,
    ) -> None:
        """
        Args:
            folder: For the shards; those in it are kept.
            max_shard_bytes: A shard is written when it is as large.
            max_text_tokens: The last ones of a request are kept, at least so many and
                less than twice as many. None: all.
            admits: Whether a request that comes (vLLM's ``NewRequestData``) is
                recorded; asked of those that did not refuse.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_shard_bytes = folder, max_shard_bytes
        self._max_text_tokens = max_text_tokens or 2**62
        self._admits = admits
        names = (path.stem.partition("-")[2] for path in folder.glob(PATTERN))
        self._next_shard = max(map(int, names), default=-1) + 1
        self._recorded: set[str] = set()
        """Requests under way that are, ..."""
        self._left_out: set[str] = set()
        """... and that are not."""
        self._num_scheduled: Mapping[str, int] = {}
        self._copied: deque[_Copied] = deque()
        self._running: dict[str, _Running] = {}
        self._ended: list[Text] = []
        self._ended_bytes = 0

    @property
    def num_running(self) -> int:
        """Requests under way that are recorded."""
        return len(self._recorded)

    @property
    def num_ended(self) -> int:
        """Texts that wait to be written."""
        return len(self._ended)

    def begin_step(self, scheduler_output: Any) -> None:
        """A step is about to run: requests have ended, others come."""
        if scheduler_output.finished_req_ids:
            self.end(scheduler_output.finished_req_ids)
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        for request in scheduler_output.scheduled_new_reqs:
            name = request.req_id
            if name not in self._recorded and name not in self._left_out:
                extra = getattr(request.sampling_params, "extra_args", None)
                may = is_recorded(extra) and _has_plain_tokens(request)
                admitted = may and self._admits(request)
                (self._recorded if admitted else self._left_out).add(name)

    def record(self, rows: StepRows) -> None:
        """Add the rows of the step that has been announced."""
        while self._copied and (
            len(self._copied) == _MAX_PENDING or _is_here(self._copied[0])
        ):
            self._add(self._copied.popleft())
        wanted = [
            index
            for index, request_id in enumerate(rows.request_ids)
            if request_id in self._recorded
        ]
        if wanted:
            self._copied.append(self._copy(rows, wanted))

    def _copy(self, rows: StepRows, wanted: Sequence[int]) -> _Copied:
        """Rows of these requests; the host knows at most how many they are."""
        names = [rows.request_ids[index] for index in wanted]
        most = [self._num_scheduled.get(name, 0) for name in names]
        num_rows = [min(each, self._max_text_tokens) for each in most]
        skipped = [a - b for a, b in zip(most, num_rows, strict=True)]
        within = torch.cat(
            [
                torch.arange(first, first + number)
                for first, number in zip(skipped, num_rows, strict=True)
            ]
        )
        places = torch.tensor(wanted).repeat_interleave(torch.tensor(num_rows))
        device = rows.hidden.device
        starts = rows.starts.to(device, non_blocking=True)
        index = starts[places.to(device, non_blocking=True)]
        index = index + within.to(device, non_blocking=True)
        # Rows that a step has left out are rows of others: they are not valid.
        index = index.clamp(max=len(rows.hidden) - 1)
        return _Copied(
            names,
            num_rows,
            skipped,
            _to_host(rows.num_valid, torch.tensor(wanted)),
            _to_host(rows.positions, index),
            _to_host(rows.token_ids, index),
            _to_host(rows.hidden, index),
            _now(device),
        )

    def _add_all(self) -> None:
        while self._copied:
            self._add(self._copied.popleft())

    def _add(self, copied: _Copied) -> None:
        if copied.is_here is not None:
            copied.is_here.synchronize()
        first = 0
        for request_id, number, skipped, num_valid in zip(
            copied.request_ids,
            copied.num_rows,
            copied.skipped,
            copied.num_valid.tolist(),
            strict=True,
        ):
            own = slice(first, first + min(number, num_valid - skipped))
            if own.stop > own.start:
                running = self._at(request_id, int(copied.positions[first]))
                running.add(copied.token_ids[own].clone(), copied.hidden[own].clone())
                if running.num_tokens >= 2 * self._max_text_tokens:
                    running.cut(
                        running.num_tokens - self._max_text_tokens, running.num_tokens
                    )
            first += number

    def _at(self, request_id: str, position: int) -> _Running:
        """The request, ready for rows from a position on."""
        running = self._running.get(request_id)
        if running is not None:
            num_known = position - running.first_position
            if 0 < num_known <= running.num_tokens:
                if num_known < running.num_tokens:  # preempted: it is computed again
                    running.cut(0, num_known)
                return running
        # New, preempted, or with rows of the prefix cache between.
        self._running[request_id] = running = _Running(position)
        return running

    def end(self, request_ids: Collection[str]) -> None:
        """These get no more rows."""
        if not self._recorded.isdisjoint(request_ids):
            self._add_all()
        self._left_out.difference_update(request_ids)
        for request_id in request_ids:
            self._recorded.discard(request_id)
            running = self._running.pop(request_id, None)
            if running is None:
                continue
            running.cut(0, running.num_tokens)
            ((token_ids, hidden),) = running.parts
            name = _SUFFIX.sub("", request_id)
            self._ended.append(Text(name, token_ids, hidden, running.first_position))
            self._ended_bytes += hidden.numel() * hidden.itemsize
            if self._ended_bytes >= self._max_shard_bytes:
                self.write()

    def flush(self) -> None:
        """Write what there is, of requests under way, too."""
        self._add_all()
        self.end(list(self._running))
        self.write()

    def write(self) -> None:
        """Write texts of requests that have ended."""
        if self._ended:
            write_shard(self._folder, self._next_shard, self._ended)
            self._next_shard += 1
            self._ended, self._ended_bytes = [], 0


def _has_plain_tokens(request: Any) -> bool:
    """Whether what the MTP layers are fed is told by token ids and the target alone."""
    return not (
        request.mm_features
        or request.lora_request is not None
        or request.prompt_embeds is not None
    )


def _to_host(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    rows = tensor[index.to(tensor.device, non_blocking=True)]
    return rows.to("cpu", non_blocking=True)


def _now(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU has done what it was given until now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _is_here(copied: _Copied) -> bool:
    return copied.is_here is None or copied.is_here.query()


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
