"""Hidden states that are recorded while drafting are those of the text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from vllm_mtp.tune.shards import Text, Texts

PROMPTS = [list(range(100, 170)), *random_prompts(5)]
NUM_TOKENS, MAX_DRAFT_LENGTH = 24, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "mimo")


def recorded(
    model: Path, folder: Path, prompts: list[list[int]], max_tokens: int, **more: Any
) -> tuple[list[list[int]], list[Text]]:
    """Answers, and what was recorded in the order of requests."""
    engine = {
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "mtp_plus",
            "controller": "random",
            "num_speculative_tokens": MAX_DRAFT_LENGTH,
            "hidden_states_path": str(folder),
        },
        **more.pop("engine", {}),
    }
    jobs = Jobs(str(model), prompts, max_tokens, [engine], **more)
    (result,) = run_jobs(jobs)
    assert (result.num_preemptions > 0) == ("num_gpu_blocks_override" in engine)
    texts = Texts(folder)
    found = [texts.read(place, 0, 10**6) for place in texts.places]
    return result.continuations, sorted(found, key=lambda text: int(text.name))


@pytest.fixture(scope="module")
def computed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What prompts' hidden states are where nothing is drafted."""

    def ask(prompts: list[list[int]]) -> list[torch.Tensor]:
        folder = tmp_path_factory.mktemp("computed")
        _, texts = recorded(model, folder, prompts, 1)
        return [text.hidden for text in texts]

    return ask


# Five blocks of 32 tokens: requests are preempted.
SCARCE = {"num_gpu_blocks_override": 7, "max_model_len": 128}


@pytest.mark.parametrize(
    ("is_v2", "engine"),
    [
        (False, {}),
        (False, SCARCE | {"max_num_batched_tokens": 40}),
        (True, {"async_scheduling": True, "max_model_len": 128}),
    ],
    ids=["v1", "preempted", "v2"],
)
def test_recorded_hidden_states_are_those_of_the_text(
    is_v2: bool, engine: dict[str, Any], model: Path, tmp_path: Path, computed: Any
) -> None:
    answers, texts = recorded(
        model, tmp_path, PROMPTS, NUM_TOKENS, engine=engine, v2=is_v2
    )
    whole = [[*p, *answer][:-1] for p, answer in zip(PROMPTS, answers, strict=True)]
    most = MAX_DRAFT_LENGTH + is_v2 * (MAX_DRAFT_LENGTH + 1)
    for text, ids, hidden in zip(texts, whole, computed(whole), strict=True):
        # The last step may have verified tokens beyond the answer's end, and where
        # scheduling is async another step was under way.
        assert 0 <= len(text.token_ids) - len(ids) <= most
        assert text.token_ids[: len(ids)].tolist() == ids
        assert len(text.hidden) == len(text.token_ids)
        torch.testing.assert_close(
            text.hidden[: len(ids)], hidden, rtol=1e-4, atol=1e-4
        )
