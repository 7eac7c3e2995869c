"""The bundled checkpoint in vLLM's own ``mtp``: it loads right and drafts well.

Everything else that is tested or measured without a GPU stands on this model, so this
module compares vLLM with the plain-torch model that made it, number by number.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from examples.tiny_model.checkpoint import load_model
from examples.tiny_model.corpus import is_held_out
from examples.tiny_model.evaluate import AcceptanceCount, replay_acceptance
from examples.tiny_model.expand import Expansion
from examples.tiny_model.grow import expand_checkpoint
from examples.tiny_model.model import MiMoModel
from tests.support.engines import engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

if TYPE_CHECKING:
    from vllm import LLM

K = 3
NUM_PROMPTS = 32
NEW_TOKENS = 64
MAX_CHECKPOINT_BYTES = 16 * 10**6
MIN_FIRST_ACCEPTANCE = 0.7
MIN_ACCEPTANCE_LENGTH = 2.3

ARGUMENTS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 * 2**20,
}
MTP = {"method": "mtp", "num_speculative_tokens": K}


class Decoded(NamedTuple):
    """What an engine wrote, and how its drafts fared."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    acceptance: AcceptanceCount

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their continuations."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [prompt + output for prompt, output in pairs]


def read_acceptance(llm: "LLM") -> AcceptanceCount:
    """vLLM's own counters since the engine started."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts: Any = metrics["vllm:spec_decode_num_drafts"]
    per_pos: Any = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return AcceptanceCount(int(drafts.value), tuple(map(int, per_pos.values)))


def decode(model: Path, num_prompts: int, **arguments: Any) -> Decoded:
    prompts = [list(prompt) for prompt in heldout_prompts(num_prompts, max_tokens=200)]
    with engine(model, speculative_config=MTP, **(ARGUMENTS | arguments)) as llm:
        outputs = greedy(llm, prompts, NEW_TOKENS)
        return Decoded(prompts, outputs, read_acceptance(llm))


@pytest.fixture(scope="module")
def torch_model() -> MiMoModel:
    return load_model(BUNDLED_CHECKPOINT)


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    return decode(BUNDLED_CHECKPOINT, NUM_PROMPTS)


def test_drafts_are_accepted_as_often_as_required(decoded: Decoded) -> None:
    acceptance = decoded.acceptance

    assert acceptance.acceptance_per_pos[0] >= MIN_FIRST_ACCEPTANCE, acceptance
    assert acceptance.acceptance_length >= MIN_ACCEPTANCE_LENGTH, acceptance


@torch.no_grad()
def test_vllm_picks_the_token_that_torch_finds_most_likely(
    decoded: Decoded, torch_model: MiMoModel
) -> None:
    for prompt, text in zip(decoded.prompts, decoded.texts, strict=True):
        logits = torch_model(torch.tensor([text]))[0, len(prompt) - 1 : -1]
        picked = torch.tensor(text[len(prompt) :])
        regret = logits.max(-1).values - logits.gather(1, picked[:, None])[:, 0]
        # Float32 sums in another order: a tie may fall to either side, no more.
        assert regret.max() < 1e-3


def test_vllm_accepts_what_the_torch_mtp_layer_would_have_drafted(
    decoded: Decoded, torch_model: MiMoModel
) -> None:
    replayed = replay_acceptance(
        torch_model,
        decoded.texts,
        [len(prompt) for prompt in decoded.prompts],
        num_steps=K,
        method="greedy",
        temperature=0,
    )

    # vLLM also counts the last drafts, which run past the end of the texts.
    counted = decoded.acceptance
    assert counted.num_drafts - replayed.num_drafts in range(K * NUM_PROMPTS)
    assert counted.acceptance_per_pos == pytest.approx(
        replayed.acceptance_per_pos, abs=0.04
    )


@torch.no_grad()
def test_log_probabilities_in_vllm_are_those_of_torch(torch_model: MiMoModel) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    (prompt,) = heldout_prompts(1, max_tokens=200)
    with engine(BUNDLED_CHECKPOINT, **ARGUMENTS) as llm:
        (output,) = llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt))],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )

    expected = torch_model(torch.tensor([prompt]))[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, token in enumerate(prompt[1:]):
        entry = output.prompt_logprobs[position + 1]
        assert entry is not None
        wanted = expected[position, token].item()
        assert entry[token].logprob == pytest.approx(wanted, abs=1e-3)


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expanded") / "model"
    expansion = Expansion(
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=16384 + 128,
    )
    expand_checkpoint(BUNDLED_CHECKPOINT, folder, expansion, dtype="bfloat16")
    return folder


def test_an_expanded_checkpoint_keeps_tokens_and_acceptance(
    expanded: Path, decoded: Decoded
) -> None:
    num_prompts = 8
    small = decode(BUNDLED_CHECKPOINT, num_prompts)
    big = decode(expanded, num_prompts)

    assert big.outputs == small.outputs == decoded.outputs[:num_prompts]
    assert big.acceptance == small.acceptance


def test_the_checkpoint_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in BUNDLED_CHECKPOINT.iterdir()}

    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "heldout_prompts.jsonl",
        "PROVENANCE.json",
        "LICENSE-NOTE.md",
    }
    assert sum(files.values()) <= MAX_CHECKPOINT_BYTES


def test_prompts_are_cut_from_files_that_training_never_saw() -> None:
    lines = (BUNDLED_CHECKPOINT / "heldout_prompts.jsonl").read_text().splitlines()
    provenance = json.loads((BUNDLED_CHECKPOINT / "PROVENANCE.json").read_text())
    held_out = provenance["corpus"]["held_out_files"]
    prompts = [json.loads(line) for line in lines]

    assert len({prompt["id"] for prompt in prompts}) == len(prompts) >= 96
    assert len({prompt["text"] for prompt in prompts}) == len(prompts)
    assert {prompt["file"] for prompt in prompts} <= set(held_out)
    assert all(is_held_out(name, 30) for name in held_out)


def test_the_provenance_names_what_made_the_checkpoint() -> None:
    provenance = json.loads((BUNDLED_CHECKPOINT / "PROVENANCE.json").read_text())
    temperatures = {
        entry["temperature"] for entry in provenance["measured"] if "drafts" in entry
    }

    assert provenance["command"].startswith("python -m examples.tiny_model train")
    assert provenance["seed"] == provenance["plan"]["seed"]
    assert {"python", "torch", "tokenizers"} <= set(provenance["versions"])
    assert len(provenance["corpus"]["sha256_train"]) == 64
    assert temperatures == {0.0, 1.0}


def test_the_chat_template_makes_a_prompt_of_known_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_CHECKPOINT)
    messages = [{"role": "user", "content": "import os"}]

    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt)["input_ids"]

    assert prompt.endswith("<|im_start|>assistant\n")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert tokenizer.eos_token == "<|endoftext|>"
