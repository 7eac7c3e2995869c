"""A scheduler of vLLM and a device that answers at once: what scheduling costs alone.

Steps take the time that they would on a fast GPU, by a clock that this file moves, so
that whoever learns from times sees a server's.
"""

import random
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_mtp.integration.scheduler import step_records
from vllm_mtp.integration.scheduler.scheduler import MTPPlusAsyncScheduler

STEP_S, ROW_S = 3e-3, 10e-6
"""Of a step, and of each row beyond the first: a small model on an H100."""
BLOCK_SIZE, NUM_BLOCKS = 16, 65536
PROMPT_TOKENS = 16


class Modelless:
    """A scheduler with async scheduling, always with as many requests."""

    def __init__(
        self,
        model: str,
        speculative_config: dict[str, Any] | None,
        num_requests: int,
        request_tokens: int,
        acceptance: float,
    ) -> None:
        """Begin; nothing is scheduled yet.

        Args:
            model: Folder or hub name, of which only the config is read.
            speculative_config: As users give it.
            num_requests: At a time.
            request_tokens: Of every answer.
            acceptance: Chance of each draft token to be accepted.
        """
        arguments = EngineArgs(
            model,
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(8192, 16 * num_requests),
            max_model_len=PROMPT_TOKENS + request_tokens + 16,
            speculative_config=speculative_config,
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
        )
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.scheduler_config.async_scheduling = True
        is_ours = "mtp_plus" in config.additional_config
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        self.scheduler = (MTPPlusAsyncScheduler if is_ours else AsyncScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.now_s = 0.0
        self.seconds = {"schedule": 0.0, "update": 0.0}
        self.num_steps = self.num_tokens = 0
        self._num_requests, self._request_tokens = num_requests, request_tokens
        self._acceptance, self._random = acceptance, random.Random(5)
        self._next_id = 0

    def run(self, num_steps: int) -> None:
        """Schedule and take up so many steps of decoding requests; others do not count.

        A step is scheduled while the one before it is under way.
        """
        until = self.num_steps + num_steps
        with self._clock():
            before = self._schedule()
            while self.num_steps < until:
                after = self._schedule()
                self._update(before)
                before = after
            self._update(before)

    def timed(self, num_steps: int) -> dict[str, float]:
        """Microseconds of this thread for each part of a step, and tokens of each."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.num_steps = self.num_tokens = 0
        self.run(num_steps)
        parts = {part: 1e6 * s / self.num_steps for part, s in self.seconds.items()}
        tokens = self.num_tokens / self.num_steps / self._num_requests
        return parts | {"acceptance_length": tokens}

    def _schedule(self) -> Any:
        while len(self.scheduler.requests) < self._num_requests:
            self._add_request()
        begin = time.thread_time()
        output = self.scheduler.schedule()
        self._count("schedule", time.thread_time() - begin, output)
        return output

    def _update(self, scheduled: Any) -> None:
        rows = scheduled.total_num_scheduled_tokens
        self.now_s += STEP_S + rows * ROW_S
        answer = self._answer(scheduled)
        begin = time.thread_time()
        self.scheduler.update_from_output(scheduled, answer)
        self._count("update", time.thread_time() - begin, scheduled)
        if _decodes(scheduled):
            self.num_steps += 1
            self.num_tokens += sum(map(len, answer.sampled_token_ids))

    def _count(self, part: str, seconds: float, scheduled: Any) -> None:
        if _decodes(scheduled):
            self.seconds[part] += seconds

    def _answer(self, scheduled: Any) -> ModelRunnerOutput:
        request_ids = list(scheduled.num_scheduled_tokens)
        drafts = scheduled.scheduled_spec_decode_tokens
        sampled = []
        for request_id in request_ids:
            num_accepted, most = 0, len(drafts.get(request_id, ()))
            while num_accepted < most and self._random.random() < self._acceptance:
                num_accepted += 1
            sampled.append([7] * (1 + num_accepted))
        places = {request_id: i for i, request_id in enumerate(request_ids)}
        return ModelRunnerOutput(
            req_ids=request_ids, req_id_to_index=places, sampled_token_ids=sampled
        )

    def _add_request(self) -> None:
        # Of different lengths, so that not all end together.
        tokens = self._request_tokens - self._next_id % (self._request_tokens // 2)
        parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = [self._random.randrange(1000) for _ in range(PROMPT_TOKENS)]
        request = Request(f"r{self._next_id}", prompt, parameters, None)
        self._next_id += 1
        self.scheduler.add_request(request)

    def _clock(self) -> AbstractContextManager[Any]:
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        return mock.patch.object(step_records, "time", clock)


def _decodes(scheduled: Any) -> bool:
    """Whether a step has no prompt."""
    return bool(scheduled.num_scheduled_tokens) and not scheduled.scheduled_new_reqs
