"""Requests whose next token depends on how many tokens the last step committed.

Many kinds in one batch, answered by several engines in one fork.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.support.heldout import BUNDLED_CHECKPOINT

PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n",
    "class Foo:\n    def __init__(self",
    "for i in range(",
    "try:\n    x = {",
)
START, END = "self", "return"
"""What begins and ends reasoning here: words that the model writes often."""
REGEX = r" ?[0-9]{2}(, [0-9]{1,3}){1,4}"
CHOICES = ["return None", "yield from iterable", "raise ValueError"]
NUM_TOKENS = 12
ALONE = "alone"
"""Names of requests that are answered one by one begin with it."""
V2_ALONE = "prompt_logprobs listed"
"""Model Runner V1 refuses it, with and without speculation."""
ENGINE: dict[str, Any] = {
    "max_num_seqs": 12,
    "max_model_len": 96,
    # Prompts are cut in chunks beside requests that decode.
    "max_num_batched_tokens": 48,
    "max_logprobs": 8,
    "reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END},
    "structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": "words"},
}


def answer_all(order: dict[str, Any]) -> None:
    """Answer all requests with each engine; in a fork.

    Args:
        order: arguments of the engines, the first without speculation, and the file
            for the answers.
    """
    from tests.support.engine_jobs import let_the_cpu_schedule_async
    from tests.support.engines import counters, engine, model_runner
    from vllm_mtp.integration.v1.reference import answer_as_if_alone

    register_reasoning_parser()
    results, plain = [], None
    # Those that differ by their pin alone are one engine.
    for common, alike in groupby(order["engines"], _without_pin):
        arguments = dict(common)
        if arguments.pop("async_scheduling", False):
            let_the_cpu_schedule_async()
        with engine(BUNDLED_CHECKPOINT, **(ENGINE | arguments)) as llm:
            plain = plain or _plain_texts(llm)
            kinds = dict(kinds_of(llm.get_tokenizer(), plain))
            is_v2 = llm.llm_engine.vllm_config.use_v2_model_runner
            if not is_v2:
                del kinds[V2_ALONE]
                if "speculative_config" not in arguments:
                    answer_as_if_alone(model_runner(llm))
            for each in alike:
                assert llm.reset_prefix_cache()
                before = _totals(counters(llm))
                answers = _answers(llm, kinds, each.get("pin"))
                after = _totals(counters(llm))
                results.append(
                    {
                        "answers": answers,
                        "counters": {k: after[k] - before.get(k, 0) for k in after},
                        "listed_dims": _listed_dims(llm) if is_v2 else None,
                    }
                )
    Path(order["result"]).write_text(json.dumps(results))


def _without_pin(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "pin"}


def _totals(counters: dict[str, Any]) -> dict[str, Any]:
    """Without those of single positions."""
    return {k: v for k, v in counters.items() if not isinstance(v, list)}


def kinds_of(
    tokenizer: Any, plain: list[list[int]]
) -> Iterator[tuple[str, tuple[list[int], dict[str, Any]]]]:
    """Name, prompt and sampling parameters of each request.

    Args:
        tokenizer: of the bundled checkpoint.
        plain: what the target says to ``PROMPTS``, greedily.
    """
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    thinking = [p + tokenizer.encode(START, add_special_tokens=False) for p in prompts]

    def words(i: int, *spans: tuple[int, int]) -> list[str]:
        return [tokenizer.decode(plain[i][slice(*span)]) for span in spans]

    counts = Counter(token for text in plain for token in text)
    stops = [token for token, _ in counts.most_common(8)]
    for i, budget in ((2, 0), (2, 3), (0, 2), (1, 5), (3, 4)):
        yield f"thinking {budget}", (thinking[i], {"thinking_token_budget": budget})
    for i, minimum in enumerate((1, 2, 3, 5)):
        sampling = {"min_tokens": minimum, "stop_token_ids": stops}
        yield f"min_tokens {minimum}", (prompts[i], sampling | {"ignore_eos": False})
    # Its last steps have no drafts, and nobody else's are verified.
    for i, count in ((1, 12), (4, 4), (4, 7), (1, 9), (2, 7), (4, 5)):
        sampling = {"min_tokens": count, "max_tokens": count, "stop_token_ids": stops}
        yield f"{ALONE} min_tokens {i} {count}", (prompts[i], sampling)
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4}
    yield "penalties 1", (prompts[0], {"repetition_penalty": 1.4})
    yield "penalties 2", (prompts[2], penalties)
    # Of two and three tokens.
    spans = (2, 4), (5, 8), (8, 10)
    for i in (0, 1, 4):
        yield f"bad_words {i}", (prompts[i], {"bad_words": words(i, *spans)})
    biases = {i: 2.0 if i % 3 else -4.0 for i in range(300, 500)}
    yield "logit_bias", (prompts[2], {"logit_bias": biases})
    allowed = {"allowed_token_ids": list(range(10, 400)), "min_tokens": 4}
    yield "allowed", (prompts[0], allowed | {"stop_token_ids": stops[:1]})
    seeded = {"temperature": 0.8, "seed": 4}
    yield "seeded min_p", (prompts[1], seeded | {"min_p": 0.05})
    yield "seeded top_k", (prompts[2], seeded | {"top_k": 20, "top_p": 0.9, "n": 2})
    yield "one choice", (prompts[3], {"temperature": 0.7, "min_p": 1.0})
    stop = words(1, (3, 5), (7, 8))
    yield "stop 1", (prompts[1], {"stop": stop, "logprobs": 1})
    yield "stop 2", (prompts[1], {"stop": stop, "min_tokens": 6})
    yield "max_tokens", (prompts[0], {"max_tokens": 7})
    yield "max_model_len", (prompts[4] * 11, {"max_tokens": None})
    yield "logprobs", (prompts[2], {"logprobs": 2, "frequency_penalty": 0.3})
    for i, listed in ((0, [5, 9]), (1, [7])):
        yield f"listed {i}", (prompts[i], {"logprob_token_ids": listed})
    both = {"logprobs": 3, "logprob_token_ids": [5, 9, 300]}
    yield "listed both", (prompts[2], both)
    yield "prompt_logprobs", (prompts[2], {"prompt_logprobs": 1, "logprobs": 0})
    rows = [[5, 9 + i] for i in range(len(prompts[2]) - 3)]
    scored = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": 2}
    yield V2_ALONE, (prompts[2], scored)
    repetition = RepetitionDetectionParams(max_pattern_size=4, min_count=2)
    yield "repetition", (prompts[2], {"repetition_detection": repetition})
    for name, i, grammar in (
        ("regex", 0, {"regex": REGEX}),
        ("choice", 1, {"choice": CHOICES}),
        ("choice min_tokens", 3, {"choice": CHOICES}),
    ):
        sampling = {"structured_outputs": StructuredOutputsParams(**grammar)}
        minimum = 8 if "min_tokens" in name else 0
        free = {"ignore_eos": False, "min_tokens": minimum}
        yield f"grammar {name}", (prompts[i], sampling | free)
    for i, budget in ((2, 5), (0, 2)):
        sampling = {"structured_outputs": StructuredOutputsParams(regex=REGEX)}
        free = {"ignore_eos": False, "thinking_token_budget": budget}
        yield f"reasoning {budget}", (thinking[i], sampling | free)


def register_reasoning_parser() -> None:
    """Make the reasoning parser ``words`` known to vLLM."""
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    class Words(ReasoningParser):
        """Reasoning goes from ``START`` to ``END``."""

        reasoning_start_str = START
        reasoning_end_str = END

        def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(tokenizer, *args, **kwargs)
            (self._start,) = tokenizer.encode(START, add_special_tokens=False)
            (self._end,) = tokenizer.encode(END, add_special_tokens=False)

        def is_reasoning_end(self, input_ids: Any) -> bool:
            marks = [i for i in input_ids if i in (self._start, self._end)]
            return not marks or marks[-1] == self._end

        def is_reasoning_end_streaming(self, input_ids: Any, delta_ids: Any) -> bool:
            return self._end in delta_ids

        def extract_content_ids(self, input_ids: Any) -> Any:
            return input_ids

        def extract_reasoning(self, *args: Any) -> Any:
            return None, None

        def extract_reasoning_streaming(self, *args: Any) -> Any:
            return None

    ReasoningParserManager.register_module("words", module=Words)


def _plain_texts(llm: Any) -> list[list[int]]:
    from tests.support.engines import greedy

    tokenizer = llm.get_tokenizer()
    return greedy(llm, [tokenizer.encode(prompt) for prompt in PROMPTS], NUM_TOKENS)


def _answers(llm: Any, kinds: dict[str, Any], pin: int | None) -> dict[str, Any]:
    """What each request got, with a draft length if there is one."""
    batches = [[name for name in kinds if not name.startswith(ALONE)]]
    batches += [[name] for name in kinds if name.startswith(ALONE)]
    answers = {}
    for names in batches:
        answers |= _answers_of_batch(llm, {name: kinds[name] for name in names}, pin)
    return answers


def _answers_of_batch(llm: Any, kinds: dict[str, Any], pin: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    own = {} if pin is None else {"extra_args": {"mtp_plus": {"k": pin}}}
    usual = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | own
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in kinds.values()],
        [SamplingParams(**(usual | sampling)) for _, sampling in kinds.values()],
        use_tqdm=False,
    )
    return {name: _all_of(o) for name, o in zip(kinds, outputs, strict=True)}


def _listed_dims(llm: Any) -> Any:
    """How many logprobs vLLM gathers from ranks for a request that lists two tokens."""
    import numpy as np

    from tests.support.engines import model_runner

    sampler = model_runner(llm).sampler
    sampler.logprob_token_ids_state.num_token_ids.np[0] = 2
    return sampler.get_logprobs_dims(np.array([0]), include_token_ids=False)


def _all_of(output: Any) -> list[Any]:
    scores = output.prompt_token_id_logprobs
    return [
        [
            [
                list(o.token_ids),
                o.text,
                o.finish_reason,
                o.stop_reason,
                _rows(o.logprobs),
            ]
            for o in output.outputs
        ],
        _rows(output.prompt_logprobs),
        None if scores is None else [[round(float(s), 3) for s in r] for r in scores],
    ]


def _rows(logprobs: Any) -> Any:
    """Token, logprob and rank, sorted, of each position."""
    if logprobs is None:
        return None
    return [
        row and sorted([i, round(e.logprob, 3), e.rank] for i, e in row.items())
        for row in logprobs
    ]
