"""How news come from a worker to the scheduler: of the draft vocabulary, and of drafts.

With a step's output: in subclasses of the objects in which vLLM itself sends it. Only
now and then is there anything to tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


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


class _AsyncNewsOutput(AsyncModelRunnerOutput):
    """An output that is still being copied to the host, and the news."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        news: VocabularyNews | None,
        verdicts: Mapping[str, bool],
    ) -> None:
        self._inner, self._news, self._verdicts = inner, news, verdicts

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = with_news(
            self._inner.get_output(), self._news, self._verdicts
        )
        return output


def with_news(
    output: Any, news: VocabularyNews | None, verdicts: Mapping[str, bool]
) -> Any:
    """The same output with news, if there are any and it can carry them.

    Args:
        output: What a runner returns from ``sample_tokens``; None on ranks that sample
            nothing.
        news: Of the draft vocabulary.
        verdicts: Whether drafts that were not verified would have been accepted, by
            request id.
    """
    if news is None and not verdicts:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _AsyncNewsOutput(output, news, verdicts)
    if not isinstance(output, ModelRunnerOutput):
        return output
    known = {field.name: getattr(output, field.name) for field in fields(output)}
    told = {"vocabulary_news": news, "verdicts": verdicts}
    return NewsModelRunnerOutput(**known | told)


def verdicts_of(output: Any) -> Mapping[str, bool]:
    """Those in an output; empty if there are none."""
    return getattr(output, "verdicts", {})


def news_of(output: Any) -> VocabularyNews | None:
    """The news in an output, if there are any."""
    return getattr(output, "vocabulary_news", None)
