"""Engines on a Ray cluster: each is an actor with one GPU, or one CPU without GPUs.

``ray.util.ActorPool`` gives orders to engines that are free. An engine that is lost
(its machine, its process) is not replaced: when the others have done the rest they are
given its order, so a result is missing only when no engine is left. Ray Data has actor
pools, too, but keeps an order on the actor that has begun it and starts that again:
without a spare machine the order waits.

Machines must see the model under the same path, and what an engine writes goes where
all of them see it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.engine_arguments import (
    EngineSize,
    engine_arguments,
    engine_variables,
)
from vllm_mtp.tools.engine_process import Commanded
from vllm_mtp.tools.ray_cluster import check_room, connected, has_gpus
from vllm_mtp.tools.server_process import ServerError, exit_on_signals, find_cause

Order = TypeVar("Order")
Result = TypeVar("Result")


def whole(order: Order) -> Order:
    """What is left of an order that leaves nothing behind when its engine is lost."""
    return order


class HostedEngine:
    """An engine in the process that this is made in: what an actor is."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start it.

        Args:
            arguments: Of vLLM's ``EngineArgs``.
        """
        from vllm_mtp.integration.commands.commanded_engine import CommandedEngine

        self._engine = CommandedEngine(arguments)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """See `EngineProcess.ask`."""
        answer: dict[str, Any] = getattr(self._engine, command)(**arguments)
        return answer

    def do(
        self, work: Callable[[Commanded, Order], Result], number: int, order: Order
    ) -> tuple[int, int, Result]:
        """Do an order.

        Returns:
            Its number, the id of this process, and what came of it.
        """
        return number, os.getpid(), work(self, order)


class RayEngines:
    """Engines that share orders."""

    def __init__(self, actors: Sequence[Any], report: Callable[[str], None]) -> None:
        """
        Args:
            actors: Handles of `HostedEngine`, which may still be starting.
            report: Told what the user should know.
        """
        from ray.util import ActorPool

        self._pool: Any = ActorPool(list(actors))
        self._num_engines, self._report = len(actors), report
        self.num_lost = 0
        self.last_pid = 0
        """Process of the engine that was the last to finish an order."""

    def results(
        self,
        work: Callable[[Commanded, Order], Result],
        orders: Sequence[Order],
        remaining: Callable[[Order], Order | None] = whole,
    ) -> Iterator[Result]:
        """Have orders done.

        Args:
            work: Does an order with an engine; it is pickled.
            orders: Each is done once, by whichever engine is free.
            remaining: What is left of an order whose engine was lost; None for nothing.

        Yields:
            Results in the order in which they come.

        Raises:
            ConfigError: An order was refused.
            ServerError: No engine is left, or one failed.
        """
        missing: dict[int, Order] = dict(enumerate(orders))
        is_again = False
        while missing:
            for number, order in list(missing.items()):
                left = remaining(order) if is_again else order
                if left is None:
                    del missing[number]
                else:
                    missing[number] = left
                    self._submit(work, number, left)
            while self._pool.has_next():
                done = self._next()
                if done is not None:
                    number, self.last_pid, result = done
                    del missing[number]
                    yield result
            is_again = True

    def _submit(self, work: Any, number: int, order: Any) -> None:
        self._pool.submit(
            lambda actor, each: actor.do.remote(work, *each), (number, order)
        )

    def _next(self) -> tuple[int, int, Any] | None:
        """The next result; None if it is lost."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

        try:
            done: tuple[int, int, Any] = self._pool.get_next_unordered()
        except ActorUnavailableError:
            return None  # it may come back; its order is given away in any case
        except ActorDiedError as error:
            self._lose(error)
            return None
        except RayTaskError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, ConfigError):
                raise ConfigError(str(cause)) from None
            what = f"{type(cause).__name__}: {cause}".splitlines()[0]
            raise ServerError(f"an engine on Ray failed with {what}") from error
        return done

    def _lose(self, error: Exception) -> None:
        self.num_lost += 1
        left = self._num_engines - self.num_lost
        lines = str(error).splitlines()
        reason = find_cause(lines) or lines[0]
        if left <= 0:
            raise ServerError(f"no engine on Ray is left; the last one: {reason}")
        self._report(f"an engine on Ray is lost ({reason}); {left} left do its part")


@contextmanager
def ray_engines(
    num_engines: int,
    size: EngineSize,
    config: Mapping[str, Any],
    report: Callable[[str], None],
    arguments: Mapping[str, Any],
    per_engine: Callable[[int], Mapping[str, Any]] = lambda number: {},
) -> Iterator[RayEngines]:
    """Engines that are gone when the block ends.

    Args:
        num_engines: So many, of one GPU each.
        size: Model and room for requests.
        config: Speculative config.
        report: Told what the user should know.
        arguments: Of vLLM's ``EngineArgs``; they win.
        per_engine: What an engine's speculative config has of its own, by its number.

    Raises:
        ConfigError: Ray is not installed, or its cluster too small.
    """
    with connected(), exit_on_signals():
        import ray

        on_gpu, is_local = has_gpus(), Path(size.model).is_dir()
        check_room(num_engines, "engines", on_gpu)
        actor: Any = ray.remote(HostedEngine).options(
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
            runtime_env={"env_vars": engine_variables(os.environ, is_local)},
        )
        start = partial(_arguments, size, config, on_gpu, arguments)
        actors = [actor.remote(start(per_engine(n))) for n in range(num_engines)]
        try:
            yield RayEngines(actors, report)
        finally:
            for each in actors:
                ray.kill(each)


def _arguments(
    size: EngineSize,
    config: Mapping[str, Any],
    on_gpu: bool,
    arguments: Mapping[str, Any],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    return engine_arguments(size, {**config, **own}, on_gpu) | dict(arguments)
