"""MTP weights in other places and under other names than vLLM expects: loaded all the
same, with the same drafts, or refused in a sentence."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import DraftCounts, draft_counts, engine, greedy, worker_of
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.quantized_checkpoints import write_quantized
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from tests.support.weight_layouts import MODEL_FILE, WAYS, put_into_head, save, split
from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.doctor import weight_facts

PROMPTS = random_prompts(6)
HELDOUT = [list(prompt) for prompt in heldout_prompts(8, max_tokens=48)]
FIXED: dict[str, Any] = {"method": "mtp_plus", "controller": "fixed"}


class Answers(NamedTuple):
    texts: list[list[int]]
    counts: DraftCounts


def answers(llm: Any) -> Answers:
    before = draft_counts(llm)
    texts = greedy(llm, PROMPTS, 20)
    after = draft_counts(llm)
    return Answers(
        texts, DraftCounts(*(b - a for a, b in zip(before, after, strict=True)))
    )


def speculation(head: Path | None) -> dict[str, Any]:
    return FIXED if head is None else FIXED | {"model": str(head)}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the model as vLLM expects it."""
    model = write_checkpoint(tmp_path_factory.mktemp("usual"), "mimo")
    with engine(model, speculative_config=FIXED) as llm:
        found = answers(llm)
    assert 0.2 < found.counts.acceptance_rate < 0.95
    return found


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_the_same_and_after_a_reload(
    way: str, usual: Answers, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", "mimo")
    head = WAYS[way](model)
    with engine(model, speculative_config=speculation(head)) as llm:
        assert answers(llm) == usual
        drafter = worker_of(llm)._drafter.model
        for each in drafter.model.mtp_layers.parameters():
            each.data.zero_()
        if head is None:
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
            assert answers(llm) == usual


def accepted(model: Path, head: Path) -> float:
    """Share of draft tokens; in bfloat16, which vLLM's int8 kernels want."""
    jobs = Jobs(
        model=str(model),
        prompts=HELDOUT,
        max_tokens=40,
        engines=[
            {
                "speculative_config": speculation(head),
                "dtype": "bfloat16",
                "max_num_seqs": 8,
                "max_model_len": 128,
            }
        ],
    )
    (result,) = run_jobs(jobs)
    counts = result.counters
    return float(counts["accepted_tokens"] / counts["draft_tokens"])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in 8 bits without MTP layers, and its MTP layers alone, in 8 bits."""
    folder = tmp_path_factory.mktemp("int8") / "model"
    return folder, put_into_head(write_quantized(folder, "int8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same, not quantized."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    return folder, put_into_head(folder)


def test_a_plain_head_drafts_for_a_quantized_model(
    quantized: tuple[Path, Path], plain: tuple[Path, Path]
) -> None:
    assert accepted(quantized[0], plain[1]) > 0.6
    facts = weight_facts(str(quantized[0]), 1, str(plain[1]))
    assert not isinstance(facts, str)
    assert (facts.problems, facts.layout) == ([], "not quantized, unlike the model")


def test_a_quantized_head_drafts_for_a_plain_model(
    quantized: tuple[Path, Path], plain: tuple[Path, Path]
) -> None:
    assert accepted(plain[0], quantized[1]) > 0.6
    facts = weight_facts(str(plain[0]), 1, str(quantized[1]))
    assert not isinstance(facts, str)
    assert (facts.problems, facts.layout) == ([], "quantized unlike the model")


def test_the_doctor_says_which_file_each_weight_came_from(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mimo")
    trunk, own = split(model)
    moved = {name: own.pop(name) for name in [*own][:3]}
    WAYS["unlisted file"](model)
    save(moved, model / "mtp.safetensors")
    save(trunk | own, model / MODEL_FILE)
    facts = weight_facts(str(model), 1)
    assert not isinstance(facts, str)
    assert facts.problems == []
    assert facts.num_by_file == {MODEL_FILE: len(own), "mtp.safetensors": 3}
    assert facts.layout == "also in mtp.safetensors, not listed"


def refusal(model: Path, head: str) -> str:
    """What a start says of a head."""
    with pytest.raises(ConfigError) as caught:
        EngineArgs(
            model=str(model),
            max_model_len=64,
            speculative_config={"method": "mtp_plus", "model": head},
        ).create_engine_config()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_head_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mimo")
    other = refusal(model, str(BUNDLED_CHECKPOINT))
    assert "has hidden_size 128: must be 64, that of" in other
    missing = refusal(model, str(tmp_path / "nowhere"))
    assert missing.startswith(f"speculative_config.model='{tmp_path}/nowhere' cannot")
    named = write_checkpoint(tmp_path / "my-eagle3-head", "mimo")
    assert "vLLM takes a path with 'eagle3' for" in refusal(model, str(named))
    bare = write_checkpoint(tmp_path / "bare", "mimo", num_mtp_layers=0)
    assert f"model '{bare}' (MiMoMTPModel) has no MTP layers" in refusal(
        model, str(bare)
    )
    damaged = write_checkpoint(tmp_path / "lost", "mimo", mtp_weights="missing")
    assert f"model '{damaged}' promises 1 MTP layer(s)" in refusal(model, str(damaged))


def test_drafts_with_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "mimo")
    trunk, own = split(model)
    # In the random model the head is the embedding, moved by a row.
    trunk["model.embed_tokens.weight"] = trunk.pop("lm_head.weight")
    save(trunk | own, model / MODEL_FILE)
    config = json.loads((model / "config.json").read_text())
    tied = config | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(tied))
    with engine(model) as llm:
        texts = greedy(llm, PROMPTS, 20)
    found = {}
    for vocab in ({"draft_vocab": "full"}, {"draft_vocab_size": 256}):
        with engine(model, speculative_config=FIXED | vocab) as llm:
            answers(llm)  # until the draft vocabulary knows the text
            found[str(vocab)] = answers(llm)
    full, few = found.values()
    assert full.texts == few.texts == texts
    assert full.counts.num_accepted_tokens > 0
    assert few.counts.acceptance_rate > full.counts.acceptance_rate - 0.1
