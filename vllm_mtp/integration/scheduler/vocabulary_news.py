"""How news come from a worker to the scheduler: of the draft vocabulary, and of drafts.

With a step's output: in subclasses of the objects in which vLLM itself sends it. Only
now and then is there anything to tell. A worker's first output comes in such an object
anyhow: that it arrives is how the scheduler knows that news would.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_mtp.integration.scheduler.messages import warn_lost


class VocabularyNews(NamedTuple):
    """What has become of the draft vocabulary."""

    coverage: float | None
    """Share of the tokens committed lately that it holds; None while unknown."""
    is_in_use: bool


@dataclass
class NewsModelRunnerOutput(ModelRunnerOutput):
    """A step's output, and the news."""

    vocabulary_news: VocabularyNews | None = None
    # Whether drafts that were not verified would have been accepted, by request id
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    drafting_failure: str | None = None
    """The part of drafting that has just failed."""


class _AsyncNewsOutput(AsyncModelRunnerOutput):
    """An output that is still being copied to the host, and the news."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        news: VocabularyNews | None,
        verdicts: Mapping[str, bool],
        failure: str | None,
    ) -> None:
        self._inner, self._told = inner, (news, verdicts, failure)

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = with_news(
            self._inner.get_output(), *self._told, is_first=True
        )
        return output


def with_news(
    output: Any,
    news: VocabularyNews | None,
    verdicts: Mapping[str, bool],
    failure: str | None = None,
    is_first: bool = False,
) -> Any:
    """The same output with news, if there are any and it can carry them.

    Args:
        output: What a runner returns from ``sample_tokens``; None on ranks that sample
            nothing.
        news: Of the draft vocabulary.
        verdicts: Whether drafts that were not verified would have been accepted, by
            request id.
        failure: The part of drafting that has just failed.
        is_first: Carry no news rather than be plain.
    """
    if news is None and not verdicts and failure is None and not is_first:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _AsyncNewsOutput(output, news, verdicts, failure)
    if not isinstance(output, ModelRunnerOutput):
        return output
    known = {field.name: getattr(output, field.name) for field in fields(output)}
    told: dict[str, Any] = {"vocabulary_news": news, "verdicts": verdicts}
    told["drafting_failure"] = failure
    return NewsModelRunnerOutput(**known | told)


def check_first(output: ModelRunnerOutput) -> None:
    """Say so if a worker's first output has lost what its news would come in."""
    if not isinstance(output, NewsModelRunnerOutput):
        warn_lost(NewsModelRunnerOutput)


def verdicts_of(output: Any) -> Mapping[str, bool]:
    """Those in an output; empty if there are none."""
    return getattr(output, "verdicts", {})


def news_of(output: Any) -> VocabularyNews | None:
    """The news in an output, if there are any."""
    return getattr(output, "vocabulary_news", None)


def failure_of(output: Any) -> str | None:
    """The part of drafting that has just failed, if any."""
    return getattr(output, "drafting_failure", None)
