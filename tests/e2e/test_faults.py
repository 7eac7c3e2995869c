"""What breaks in drafting costs speed at most: never a wrong token, never a hang."""

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import Reference
from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import draft_counts, engine, greedy, model_runner
from tests.support.faults import break_call, counted_failures
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.watch import scheduler_of

NUM_PROMPTS, NUM_TOKENS = 6, 32
FIXED = {"method": "mtp_plus", "num_speculative_tokens": 3, "controller": "fixed"}
OFF_FOR_GOOD = "Drafting is disabled for good"


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    """What our logger says; vLLM's do not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.mtp_plus")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def wanted(reference: Reference) -> tuple[list[Any], list[list[int]]]:
    prompts = list(reference.prompts[:NUM_PROMPTS])
    return prompts, [c[:NUM_TOKENS] for c in reference.continuations[:NUM_PROMPTS]]


def assert_switched_off(llm: Any, part: str, said: list[logging.LogRecord]) -> None:
    (line,) = [each for each in said if OFF_FOR_GOOD in each.getMessage()]
    assert part in line.getMessage()
    assert line.exc_info is not None
    assert scheduler_of(llm)._switch.is_off
    assert counted_failures()[part] == 1


@pytest.mark.parametrize(
    ("name", "call", "runs_first"),
    [
        ("_sample_draft_tokens", 5, False),  # between two draft steps
        ("_sample_draft_tokens", 1, True),
        ("_update_positions_dependent_metadata", 4, True),
        ("build_per_group_and_layer_attn_metadata", 3, False),
    ],
)
def test_a_drafter_that_raises_is_switched_off(
    reference: Reference,
    said: list[logging.LogRecord],
    name: str,
    call: int,
    runs_first: bool,
) -> None:
    prompts, expected = wanted(reference)
    with engine(BUNDLED_CHECKPOINT, speculative_config=FIXED) as llm:
        drafter = model_runner(llm).drafter
        failures = break_call(drafter, name, call, runs_first)
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        assert failures == [1], "asked again"
        assert_switched_off(llm, "drafter", said)
        before = draft_counts(llm)
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        assert draft_counts(llm) == before, "no drafts are verified any more"


@pytest.mark.parametrize(
    ("name", "call", "rule"),
    [
        ("decide", 4, "fixed"),
        ("decide", 4, "goodput"),
        ("observe", 3, "goodput"),
        ("may_draft", 5, "goodput"),
        # Who asks the controller does not know its rule.
        pytest.param("observe", 3, "fixed", marks=pytest.mark.long),
        pytest.param("may_draft", 5, "fixed", marks=pytest.mark.long),
    ],
)
def test_a_controller_that_raises_is_switched_off(
    reference: Reference,
    said: list[logging.LogRecord],
    name: str,
    call: int,
    rule: str,
) -> None:
    prompts, expected = wanted(reference)
    config = FIXED | {"controller": rule}
    with engine(BUNDLED_CHECKPOINT, speculative_config=config) as llm:
        failures = break_call(scheduler_of(llm).controller, name, call)
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        pinned = {"extra_args": {"mtp_plus_k": 2}}
        assert greedy(llm, prompts, NUM_TOKENS, **pinned) == expected
        assert failures == [1], "asked again"
        assert_switched_off(llm, "controller", said)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("fixed", torch.nan),
        ("goodput", torch.nan),
        ("fixed", torch.inf),
        ("goodput", -torch.inf),
        # Each value and each rule is above.
        pytest.param("goodput", torch.inf, marks=pytest.mark.long),
        pytest.param("fixed", -torch.inf, marks=pytest.mark.long),
    ],
)
def test_draft_logits_that_are_no_numbers_change_nothing(
    reference: Reference, rule: str, value: float
) -> None:
    """Greedy requests, and sampled ones whose sampler has one choice."""
    prompts, expected = wanted(reference)
    config = FIXED | {"controller": rule}
    with engine(BUNDLED_CHECKPOINT, speculative_config=config) as llm:
        model = model_runner(llm).drafter.model
        compute_logits = model.compute_logits
        num_spoilt = [0]

        def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = compute_logits(*args, **kwargs)
            num_spoilt[0] += 1
            if logits.is_floating_point():
                # Some rows whole, some in part.
                logits[::2] = value
                logits[:, num_spoilt[0] % 7 :: 3] = value
            return logits

        model.compute_logits = spoilt
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        only_choice = {"temperature": 1.0, "top_k": 1}
        assert sampled_alone(llm, prompts, only_choice) == expected
        assert num_spoilt[0] > 2, "a controller may soon have enough of them"


def sampled_alone(llm: Any, prompts: Any, options: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["random bytes", "huge"])
def test_broken_mtp_weights_change_nothing(
    reference: Reference, tmp_path: Path, kind: str
) -> None:
    """Those that are numbers: with others it does not start."""
    prompts, expected = wanted(reference)
    broken = with_broken_mtp_layers(tmp_path / "broken", kind)
    with engine(broken, speculative_config=FIXED) as llm:
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        only_choice = {"temperature": 1.0, "top_k": 1}
        assert sampled_alone(llm, prompts, only_choice) == expected
        assert draft_counts(llm).num_draft_tokens > 0


def test_mtp_weights_that_become_nan_change_nothing(reference: Reference) -> None:
    prompts, expected = wanted(reference)
    config = {"method": "mtp_plus", "draft_weights": "same"}
    with engine(BUNDLED_CHECKPOINT, speculative_config=config) as llm:
        weights = dict(model_runner(llm).drafter.model.named_parameters())
        broken = [each for name, each in weights.items() if "mtp" in name]
        assert len(broken) > 3, sorted(weights)
        for each in broken:
            each.data.fill_(torch.nan)
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        only_choice = {"temperature": 1.0, "top_k": 1}
        assert sampled_alone(llm, prompts, only_choice) == expected
        assert draft_counts(llm).num_draft_tokens > 0


def with_broken_mtp_layers(folder: Path, kind: str) -> Path:
    """A copy of the bundled checkpoint whose MTP layers hold nonsense."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    generator = torch.Generator().manual_seed(0)
    num_broken = 0
    for name, tensor in tensors.items():
        if "mtp" not in name:
            continue
        num_broken += 1
        if kind == "huge":
            tensor.fill_(torch.finfo(tensor.dtype).max)
        else:
            raw = tensor.view(torch.uint8)
            raw.random_(0, 256, generator=generator)
            tensor.nan_to_num_()
    assert num_broken > 3, sorted(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_a_drafter_that_raises_is_switched_off_where_steps_overlap(
    reference: Reference, v2: bool
) -> None:
    """Async scheduling: drafts that the worker owes are verified as they are."""
    prompts, expected = wanted(reference)
    jobs = Jobs(
        str(BUNDLED_CHECKPOINT),
        [list(prompt) for prompt in prompts],
        NUM_TOKENS,
        [{"speculative_config": FIXED, "async_scheduling": True}],
        v2=v2,
        break_drafter_at=4,
    )
    (result,) = run_jobs(jobs)
    assert result.continuations == expected
    assert result.num_failures == 1
    jobs_sampled = Jobs(
        **(
            jobs.__dict__
            | {"settings": {"one": {"temperature": 1.0, "top_k": 1}}, "num_samples": 4}
        )
    )
    (result,) = run_jobs(jobs_sampled)
    assert set(result.samples["one"]) == {tuple(expected[0])}
    assert result.num_failures == 1


def test_draft_logits_that_are_no_numbers_change_nothing_on_v2(
    reference: Reference,
) -> None:
    prompts, expected = wanted(reference)
    jobs = Jobs(
        str(BUNDLED_CHECKPOINT),
        [list(prompts[0])],
        NUM_TOKENS,
        [{"speculative_config": FIXED, "async_scheduling": True}],
        v2=True,
        spoils_draft_logits=True,
        settings={
            "one choice": {"temperature": 1.0, "top_k": 1},
            "greedy": {"temperature": 0.0},
        },
        num_samples=3,
    )
    (result,) = run_jobs(jobs)
    assert set(result.samples["one choice"]) == {tuple(expected[0])}
    assert set(result.samples["greedy"]) == {tuple(expected[0])}
    assert result.counters["draft_tokens"] > 0


def test_a_killed_worker_fails_the_requests_and_ends_the_server(
    reference: Reference, tmp_path: Path
) -> None:
    """Within seconds, so that whoever supervises the server can start it again."""
    import httpx
    import psutil

    from vllm_mtp.tools.server_process import Server, ServerGroup, free_ports

    (port,) = free_ports(1)
    command = [str(Path(sys.executable).with_name("vllm")), "serve"]
    command += [str(BUNDLED_CHECKPOINT), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 * 2**20)]
    command += ["--speculative-config", json.dumps(FIXED)]
    server = Server("mtp_plus", command, port, tmp_path / "server.log")
    answers: list[Any] = []

    def ask() -> None:
        body = {"prompt": "def f", "max_tokens": 2000, "temperature": 0}
        body["ignore_eos"] = True
        try:
            url = f"{server.url}/v1/completions"
            answers.append(httpx.post(url, json=body, timeout=120).status_code)
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)

    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with ServerGroup([server], environ) as group:
        group.wait_ready(timeout_s=300, report=lambda line: None)
        assert server._process is not None
        family = psutil.Process(server._process.pid).children(recursive=True)
        names = [" ".join(each.cmdline()) for each in family]
        workers = [p for p, name in zip(family, names, strict=True) if "Worker" in name]
        engines = [p for p, name in zip(family, names, strict=True) if "Engine" in name]
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill((workers or engines)[0].pid, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a request hangs"
        server.wait(60)
        assert server._process.poll() is not None, "the server hangs"
    assert len(answers) == 3
    assert all(answer != 200 for answer in answers), answers
