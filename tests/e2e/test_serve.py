"""The main job: ``vllm serve`` with ``mtp_plus`` answers an OpenAI client, losslessly.

Real processes (API server, engine core, worker), real HTTP, the real client.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Reference
from tests.support.engines import ENGINE_ARGUMENTS
from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.tools.server_process import Server, ServerGroup, free_ports, http_get

REAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TALKATIVE = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "1"}
WITH_PAGE = {"VLLM_PLUGINS": "mtp_plus"}
MODEL = "bundled"
KEY = "a-secret"


@pytest.fixture(scope="module")
def server(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """``vllm serve --spec-method mtp_plus``, up until the module is done."""
    (port,) = free_ports(1)
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(BUNDLED_CHECKPOINT),
        *("--served-model-name", MODEL),
        *("--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(64 * 2**20), "--enforce-eager"),
        *("--spec-method", "mtp_plus"),
        *("--speculative-config", json.dumps({"show_rounds": 4})),
        *("--api-key", KEY),
    ]
    log = tmp_path_factory.mktemp("serve") / "server.log"
    server = Server("mtp_plus", command, port, log)
    environ = os.environ | REAL_PROCESSES | TALKATIVE | WITH_PAGE
    with ServerGroup([server], environ) as group:
        group.wait_ready(timeout_s=300, report=lambda line: None)
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def texts(reference: Reference) -> list[str]:
    """What the target alone says to the first prompts, as text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))
    return [tokenizer.decode(c[:48]) for c in reference.continuations[:8]]


def test_completions_are_the_targets(
    client: OpenAI, reference: Reference, texts: list[str]
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[list(prompt) for prompt in reference.prompts[:8]],
        max_tokens=48,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8 * 48


def test_streamed_chunks_add_up_to_the_targets_text(
    client: OpenAI, reference: Reference, texts: list[str]
) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=list(reference.prompts[0]),
            max_tokens=48,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]


def test_chat_streams_what_it_answers_at_once(client: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "def fibonacci(n):"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert whole
    assert "".join(parts) == whole


def test_sampling_with_a_seed_is_answered_alike_twice(
    client: OpenAI, reference: Reference
) -> None:
    answers = {
        client.completions.create(
            model=MODEL,
            prompt=list(reference.prompts[1]),
            max_tokens=24,
            temperature=0.8,
            top_p=0.9,
            seed=11,
        )
        .choices[0]
        .text
        for _ in range(2)
    }
    assert len(answers) == 1


def test_min_p_and_biases_are_served_though_vllm_refuses_them_when_it_speculates(
    client: OpenAI, reference: Reference
) -> None:
    """A bias that leaves one token, and a ``min_p`` that does."""
    chosen = 300
    biased = client.completions.create(
        model=MODEL,
        prompt=list(reference.prompts[1]),
        max_tokens=8,
        temperature=1.0,
        logit_bias={str(chosen): 100},
        extra_body={"return_token_ids": True},
    )
    assert biased.choices[0].token_ids == [chosen] * 8
    greedy, nearly = (
        client.completions.create(
            model=MODEL,
            prompt=list(reference.prompts[1]),
            max_tokens=24,
            temperature=temperature,
            extra_body={"min_p": 1.0},
        )
        .choices[0]
        .text
        for temperature in (0.0, 1.0)
    )
    assert nearly == greedy


def test_the_server_reports_its_acceptance(server: Server, client: OpenAI) -> None:
    families = text_string_to_metric_families(http_get(f"{server.url}/metrics"))
    totals = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode")
        and "position" not in sample.labels
    }
    drafted = totals["vllm:spec_decode_num_draft_tokens_total"]
    accepted = totals["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < drafted


def test_our_metrics_reconcile_with_vllms(server: Server, client: OpenAI) -> None:
    """After the requests of the tests above, whatever they were, and these."""
    for k in (0, 2):
        client.completions.create(
            model=MODEL,
            prompt="import os",
            max_tokens=24,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": {"mtp_plus_k": k}},
        )
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(http_get(f"{server.url}/metrics")):
        for sample in family.samples:
            own = set(sample.labels.values()) - {MODEL, "0"}
            label = sample.labels.get("position") or (own.pop() if own else "")
            found.setdefault(sample.name, {})[label] = sample.value
    vllms = {name: sum(v.values()) for name, v in found.items()}
    ours = {
        name.removeprefix("vllm_mtp:"): values
        for name, values in found.items()
        if name.startswith("vllm_mtp:")
    }
    drafted = sum(ours["draft_tokens_total"].values())
    accepted = sum(ours["accepted_tokens_total"].values())
    assert drafted == vllms["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert accepted == vllms["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert (
        ours["accepted_tokens_total"]
        == found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    )
    steps = ours["request_steps_total"]
    num_drafts = sum(n for length, n in steps.items() if length not in ("", "0"))
    assert num_drafts == vllms["vllm:spec_decode_num_drafts_total"]
    assert sum(ours["rejected_slots_total"].values()) == drafted - accepted
    reasons = ours["request_steps_without_draft_total"]
    assert reasons["pinned"] >= 23, "the request with K = 0, but for its first token"
    seconds = ours["step_seconds_total"]
    assert min(seconds[part] for part in ("target", "draft", "prefill")) > 0
    tokens = sum(ours["decode_tokens_total"].values())
    beyond = 8 * vllms["vllm:request_success_total"]
    assert 0 < tokens <= vllms["vllm:generation_tokens_total"] + beyond
    assert 0 <= sum(ours["calibration_error"].values()) < 0.5
    assert ours["synthetic_acceptance"] == {"": 0.0}


def test_the_log_says_it_in_words(server: Server) -> None:
    switched_off = "because the request switched it off"
    deadline = time.monotonic() + 20
    said: list[str] = []
    while not any(switched_off in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
        lines = server.log.read_text().splitlines()
        said = [line for line in lines if "mtp_plus: K " in line]
    assert any("tokens/s in decode" in line for line in said)


def test_a_response_says_what_became_of_its_drafts(
    client: OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=list(reference.prompts[0]),
        max_tokens=48,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": {"mtp_plus_k": 3}},
    )
    assert answer.model_extra is not None
    drafts = answer.model_extra["metrics"]["speculative_decoding"]
    num_steps = drafts["num_spec_steps"]
    assert 0 < drafts["num_accepted_draft_tokens"] < drafts["num_draft_tokens"]
    assert drafts["num_draft_tokens"] == 3 * num_steps
    assert drafts["mean_draft_length"] == 3.0
    assert drafts["synthetic_acceptance"] is False
    histogram = drafts["acceptance_histogram"]
    assert sum(histogram) == num_steps
    assert histogram[4:] == [0] * (len(histogram) - 4)


def test_the_page_shows_the_rounds_of_a_request_to_who_has_the_key(
    server: Server, client: OpenAI
) -> None:
    import httpx

    url = f"{server.url}/v1/mtp_plus/rounds"
    assert "<title>mtp_plus" in http_get(f"{server.url}/mtp_plus")
    assert httpx.get(url).status_code == 401
    prompt = "<b>def</b> f(): # \U0001f680\n"
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=48,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": {"mtp_plus_k": 3}},
    )
    asking = httpx.Client(headers={"Authorization": f"Bearer {KEY}"})
    deadline = time.monotonic() + 60
    while True:  # statistics travel once a second
        newest, *others = asking.get(url).json()["requests"]
        if newest["name"].startswith(answer.id) and newest["has_ended"]:
            break
        assert time.monotonic() < deadline, newest
        time.sleep(0.2)
    assert len(others) <= 3
    found = asking.get(f"{url}/{newest['key']}").json()
    assert found["prompt"] == prompt
    told = ""
    for each in found["rounds"]:
        kept = [*each["draft"][: each["num_accepted"]], each["next"]]
        told += "".join(kept[: each["num_committed"]])
    assert told == answer.choices[0].text
    assert answer.model_extra is not None
    drafts = answer.model_extra["metrics"]["speculative_decoding"]
    assert found["sums"] == {
        "num_drafts": drafts["num_spec_steps"],
        "num_draft_tokens": drafts["num_draft_tokens"],
        "num_accepted_tokens": drafts["num_accepted_draft_tokens"],
        "num_committed_tokens": 48,
    }


def test_a_request_may_switch_its_drafts_off_and_a_bad_wish_is_status_400(
    client: OpenAI, reference: Reference, texts: list[str]
) -> None:
    def ask(k: Any) -> str:
        answer = client.completions.create(
            model=MODEL,
            prompt=list(reference.prompts[0]),
            max_tokens=48,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": {"mtp_plus_k": k}},
        )
        return answer.choices[0].text

    assert [ask(k) for k in (0, 2, "auto")] == [texts[0]] * 3
    for bad in (99, -1, "many"):
        with pytest.raises(BadRequestError, match=r"mtp_plus_k=.* is not allowed") as e:
            ask(bad)
        assert "'auto' or an integer from 0 to 8" in str(e.value)
    assert ask(1) == texts[0]


def test_async_llm_gives_the_targets_tokens(
    reference: Reference,
) -> None:
    """Its engine core is another process, with the worker in it."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    async def generate(llm: AsyncLLM, index: int) -> list[int]:
        prompt = TokensPrompt(prompt_token_ids=list(reference.prompts[index]))
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        async for output in llm.generate(prompt, params, request_id=str(index)):
            last = output
        return list(last.outputs[0].token_ids)

    async def run() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(BUNDLED_CHECKPOINT),
                speculative_config={"method": "mtp_plus"},
                **ENGINE_ARGUMENTS,
            )
        )
        try:
            return list(await asyncio.gather(*(generate(llm, i) for i in range(4))))
        finally:
            llm.shutdown()

    wanted = [tokens[:32] for tokens in reference.continuations[:4]]
    assert asyncio.run(run()) == wanted
