"""Answers an evaluation's prompts with engines on a Ray cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import Commanded
from vllm_mtp.tools.eval_backends import (
    DRAFT_METRICS,
    Answer,
    EngineBackend,
    Sampling,
)
from vllm_mtp.tools.prompts import Prompt
from vllm_mtp.tools.ray_engines import RayEngines, ray_engines


class RayBackend:
    """Several engines: each answers as many prompts at a time as a single one would."""

    def __init__(
        self, engines: RayEngines, sampling: Sampling, size: EngineSize
    ) -> None:
        """The engines may still be starting."""
        self.engines = engines
        self._concurrency = size.max_num_seqs
        self._work = partial(_answers, sampling, size.max_num_seqs, size.max_model_len)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        """See `Backend`."""
        step = self._concurrency
        orders = [prompts[i : i + step] for i in range(0, len(prompts), step)]
        for found in self.engines.results(self._work, orders):
            yield from found


def _answers(
    sampling: Sampling,
    concurrency: int,
    limit: int,
    engine: Commanded,
    prompts: Sequence[Prompt],
) -> list[tuple[Prompt, Answer]]:
    backend = EngineBackend(engine, sampling, concurrency, limit)
    return list(backend.answers(prompts))


@contextmanager
def started_ray_engines(
    num_engines: int,
    size: EngineSize,
    config: Mapping[str, Any],
    sampling: Sampling,
    report: Callable[[str], None],
) -> Iterator[RayBackend]:
    """Engines that are gone when the block ends; like `started_engine`.

    Raises:
        ConfigError: Ray is not installed, or its cluster too small.
    """
    with ray_engines(num_engines, size, config, report, DRAFT_METRICS) as engines:
        yield RayBackend(engines, sampling, size)
