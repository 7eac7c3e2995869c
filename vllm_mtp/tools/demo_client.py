"""Talks to the servers: completions, chat, streaming, and the counters of /metrics."""

import time
from collections.abc import Iterator
from typing import NamedTuple, Self

from openai import DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from vllm_mtp.tools.demo_plan import SERVED_NAME

REQUEST_TIMEOUT_S = 300.0


class Completion(NamedTuple):
    """A continuation and what it cost.

    Attributes:
        text: Generated text.
        token_ids: Generated tokens.
        seconds: From sending the request to having the whole answer.
    """

    text: str
    token_ids: tuple[int, ...]
    seconds: float


class SpecCounters(NamedTuple):
    """Counters of a server since it started.

    Attributes:
        num_drafts: Steps of a request that verified draft tokens.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens accepted.
        accepted_per_position: Drafts of which the token at this position, and so all
            before it, was accepted; position 1 first.
        num_steps: Engine steps, prefills included.
        num_generated_tokens: Tokens committed.
        num_prompts: Prompts prefilled to their end.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    num_steps: int
    num_generated_tokens: int
    num_prompts: int

    def since(self, earlier: Self) -> "SpecCounters":
        """Difference to an earlier reading of the same server."""
        positions = max(
            len(self.accepted_per_position), len(earlier.accepted_per_position)
        )
        now, then = (
            each.accepted_per_position
            + (0,) * (positions - len(each.accepted_per_position))
            for each in (self, earlier)
        )
        return SpecCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(a - b for a, b in zip(now, then, strict=True)),
            self.num_steps - earlier.num_steps,
            self.num_generated_tokens - earlier.num_generated_tokens,
            self.num_prompts - earlier.num_prompts,
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens committed in a decoding step; None when there was none.

        Counted, not derived from acceptance, so it holds without speculation and for
        steps that drafted nothing. Requests must have run one at a time, each
        prefilled in one step, which commits its first token.
        """
        num_decode_steps = self.num_steps - self.num_prompts
        if num_decode_steps <= 0:
            return None
        return (self.num_generated_tokens - self.num_prompts) / num_decode_steps

    @property
    def survival(self) -> tuple[float, ...]:
        """Survival probability by position: the share of drafts accepted so far."""
        if self.num_drafts == 0:
            return ()
        return tuple(count / self.num_drafts for count in self.accepted_per_position)


def parse_counters(metrics: str) -> SpecCounters:
    """Read a server's counters, summed over its engines.

    Args:
        metrics: Text of its page /metrics.

    Returns:
        The counters; those of speculation are 0 when the server has none.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + sample.value
            else:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value

    def total(name: str) -> int:
        return int(totals.get(f"vllm:{name}", 0))

    return SpecCounters(
        num_drafts=total("spec_decode_num_drafts_total"),
        num_draft_tokens=total("spec_decode_num_draft_tokens_total"),
        num_accepted_tokens=total("spec_decode_num_accepted_tokens_total"),
        accepted_per_position=tuple(int(positions[key]) for key in sorted(positions)),
        num_steps=total("iteration_tokens_total_count"),
        num_generated_tokens=total("generation_tokens_total"),
        num_prompts=total("time_to_first_token_seconds_count"),
    )


class DemoClient:
    """Greedy requests to one server."""

    def __init__(self, url: str, max_tokens: int, max_prompt_tokens: int) -> None:
        """Prepare a client; nothing is sent.

        Args:
            url: Address of the server, without `/v1`.
            max_tokens: Tokens to generate per request.
            max_prompt_tokens: Longer prompts lose their beginning.
        """
        self._max_tokens = max_tokens
        self._extra = {
            "return_token_ids": True,
            "truncate_prompt_tokens": max_prompt_tokens,
        }
        # trust_env: a proxy for the world must not be asked about this machine.
        self._client = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
            http_client=DefaultHttpxClient(trust_env=False),
        )

    def complete(self, prompt: str) -> Completion:
        """Continue a text."""
        start = time.perf_counter()
        answer = self._client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=self._max_tokens,
            temperature=0.0,
            extra_body=self._extra,
        )
        seconds = time.perf_counter() - start
        choice = answer.choices[0]
        token_ids = (choice.model_extra or {})["token_ids"]
        return Completion(choice.text, tuple(token_ids), seconds)

    def stream(self, prompt: str) -> Iterator[str]:
        """Continue a text, piece by piece as it is committed."""
        pieces = self._client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=self._max_tokens,
            temperature=0.0,
            stream=True,
        )
        for piece in pieces:
            if piece.choices:
                yield piece.choices[0].text

    def chat(self, question: str) -> str:
        """Answer a message.

        Raises:
            openai.BadRequestError: The checkpoint has no chat template.
        """
        answer = self._client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": question}],
            max_tokens=self._max_tokens,
            temperature=0.0,
        )
        return answer.choices[0].message.content or ""
