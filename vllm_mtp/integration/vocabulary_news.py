"""How news of the draft vocabulary come from a worker to the scheduler.

With a step's output: in subclasses of the objects in which vLLM itself sends it. Only
now and then is there anything to tell.
"""

from dataclasses import dataclass, fields
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


class _AsyncNewsOutput(AsyncModelRunnerOutput):
    """An output that is still being copied to the host, and the news."""

    def __init__(self, inner: AsyncModelRunnerOutput, news: VocabularyNews) -> None:
        self._inner, self._news = inner, news

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = with_news(self._inner.get_output(), self._news)
        return output


def with_news(output: Any, news: VocabularyNews | None) -> Any:
    """The same output with news, if there are any and it can carry them.

    Args:
        output: What a runner returns from ``sample_tokens``; None on ranks that sample
            nothing.
        news: Of the draft vocabulary.
    """
    if news is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _AsyncNewsOutput(output, news)
    if not isinstance(output, ModelRunnerOutput):
        return output
    known = {field.name: getattr(output, field.name) for field in fields(output)}
    return NewsModelRunnerOutput(**known | {"vocabulary_news": news})


def news_of(output: Any) -> VocabularyNews | None:
    """The news in an output, if there are any."""
    return getattr(output, "vocabulary_news", None)
