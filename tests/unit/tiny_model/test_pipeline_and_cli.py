"""From sources to a checkpoint folder, through the command line."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from examples.tiny_model.__main__ import app
from examples.tiny_model.checkpoint import load_model
from examples.tiny_model.corpus import collect_sources, split_by_file
from examples.tiny_model.expand import MTP_PREFIX
from examples.tiny_model.prompts import (
    MAX_PROMPT_TOKENS,
    MIN_PROMPT_TOKENS,
    cut_prompts,
    read_prompts,
)
from examples.tiny_model.tokenizer import load_tokenizer

RUNNER = CliRunner()
SMALL = shlex.split(
    "--vocab-size 300 --hidden-size 16 --intermediate-size 16 --num-hidden-layers 1 "
    "--num-heads 2 --num-kv-heads 1 --num-trunk-steps 4 --num-mtp-steps 2 "
    "--num-prompts 40 --num-measured-tokens 6"
)
FUNCTION = """def {name}_{index}(values, limit={index}):
    total = 0
    for value in values:
        if value > limit:
            total += value * {index}
    return total

"""


def run(command: str, *arguments: object, options: Sequence[str] = ()) -> None:
    result = RUNNER.invoke(app, [command, *map(str, arguments), *options])
    assert result.exit_code == 0, result.output


def refused(*arguments: object) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 files, of which about 20 are held out."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(700):
        text = "".join(
            FUNCTION.format(name=f"part{number}", index=index) for index in range(4)
        )
        (root / f"module{number}.py").write_text(text)
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("out") / "model"
    run("train", folder, "--corpus", corpus, options=SMALL)
    return folder


def test_training_writes_a_complete_checkpoint(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "heldout_prompts.jsonl",
        "PROVENANCE.json",
        "LICENSE-NOTE.md",
    }
    assert load_model(checkpoint).shape.hidden_size == 16


def test_provenance_tells_how_to_make_it_again(checkpoint: Path, corpus: Path) -> None:
    provenance = json.loads((checkpoint / "PROVENANCE.json").read_text())
    split = split_by_file(collect_sources(corpus))

    assert provenance["corpus"]["held_out_files"] == [f.name for f in split.held_out]
    assert provenance["plan"]["num_mtp_steps"] == 2
    assert provenance["seed"] == provenance["plan"]["seed"]
    replays = [entry for entry in provenance["measured"] if "drafts" in entry]
    assert [(entry["temperature"], entry["drafts"]) for entry in replays] == [
        (0.0, "greedy"),
        (1.0, "greedy"),
        (1.0, "probabilistic"),
    ]
    assert all(1 <= entry["acceptance_length"] <= 4 for entry in replays)


def test_training_twice_writes_the_same_weights(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    run("train", tmp_path / "again", "--corpus", corpus, options=SMALL)

    for name in ("model.safetensors", "tokenizer.json", "heldout_prompts.jsonl"):
        again = (tmp_path / "again" / name).read_bytes()
        assert again == (checkpoint / name).read_bytes(), name


def test_prompts_come_from_held_out_files_and_are_of_mixed_length(
    checkpoint: Path, corpus: Path
) -> None:
    prompts = read_prompts(checkpoint / "heldout_prompts.jsonl")
    tokenizer = load_tokenizer(checkpoint)
    held_out = {f.name: f.text for f in split_by_file(collect_sources(corpus)).held_out}
    lengths = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]

    assert len({prompt.id for prompt in prompts}) == len(prompts) == 40
    assert all(prompt.text in held_out[prompt.file] for prompt in prompts)
    assert min(lengths) >= MIN_PROMPT_TOKENS
    assert max(lengths) <= MAX_PROMPT_TOKENS
    assert max(lengths) > 2 * min(lengths)


def test_too_few_held_out_files_for_the_prompts_are_refused(
    checkpoint: Path, corpus: Path
) -> None:
    files = split_by_file(collect_sources(corpus)).held_out[:2]

    with pytest.raises(ValueError, match="9 prompts wanted, but 2 held-out"):
        cut_prompts(files, load_tokenizer(checkpoint), 9, seed=0)


def test_expand_writes_a_bigger_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--num-hidden-layers", "3", "--hidden-size", "32"]

    run("expand", checkpoint, tmp_path / "big", options=options)

    shape = load_model(tmp_path / "big").shape
    assert (shape.num_hidden_layers, shape.hidden_size, shape.num_heads) == (3, 32, 4)


def test_expand_can_shuffle_the_mtp_layer_and_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    size = ["--num-hidden-layers", "3"]

    run("expand", checkpoint, tmp_path / "good", options=size)
    run("expand", checkpoint, tmp_path / "bad", options=[*size, "--shuffle-mtp"])

    good, bad = (load_model(tmp_path / name).state_dict() for name in ("good", "bad"))
    moved = {name for name in good if not torch.equal(good[name], bad[name])}
    assert moved
    assert all(name.startswith(MTP_PREFIX) for name in moved)
    assert not any(
        name.startswith(MTP_PREFIX) and good[name].ndim == 2
        for name in good.keys() - moved
    )
    for name in moved:
        assert torch.equal(*(w[name].flatten().sort().values for w in (good, bad)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-size", "8"], "hidden_size: 8 is smaller"),
        (["--hidden-size", "24"], "hidden_size: 24 is not a multiple of 16"),
        (["--vocab-size", "0"], "vocab_size: 0: Input should be greater"),
        ([], "no size grows"),
        (["--vocab-size", "400", "--dtype", "int4"], "dtype: 'int4'; expected one of"),
        (
            ["--vocab-size", "400", "--hidden-size", "64", "--dtype", "float16"],
            "dtype: 'float16' cannot keep new tokens from being sampled",
        ),
    ],
)
def test_expand_refuses_bad_sizes_in_one_sentence(
    checkpoint: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    output = refused("expand", checkpoint, tmp_path / "big", *options)

    assert message in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "big").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-size", "30"], "30 is not a multiple of num_heads (4)"),
        (["--num-trunk-steps", "0"], "num_trunk_steps: 0: Input should be greater"),
        (["--corpus", "nowhere"], "nowhere is not a folder"),
        (["--dtype", "int4"], "dtype: 'int4'; expected one of"),
    ],
)
def test_train_refuses_bad_arguments_in_one_sentence(
    tmp_path: Path, options: list[str], message: str
) -> None:
    output = refused("train", tmp_path / "model", *options)

    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_train_does_not_write_into_a_used_folder(
    checkpoint: Path, corpus: Path
) -> None:
    assert "is not empty" in refused("train", checkpoint, "--corpus", corpus)


def test_extra_heads_are_trained_and_joined_to_their_trunk(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    heads, joined = tmp_path / "heads", tmp_path / "joined"
    options = ["--num-heads", "2", "--num-steps", "2", "--num-measured-tokens", "6"]

    run("train-heads", checkpoint, heads, "--corpus", corpus, options=options)
    run("join-heads", checkpoint, heads, joined)

    assert json.loads((heads / "PROVENANCE.json").read_text())["trunk"] == "model"
    config = json.loads((joined / "config.json").read_text())
    assert config["n_future_tokens"] == 3
    assert "num_nextn_predict_layers" not in config
    trunk, own = (
        load_file(path / name)
        for path, name in (
            (checkpoint, "model.safetensors"),
            (heads, "extra_heads.safetensors"),
        )
    )
    kept = {name: w for name, w in trunk.items() if not name.startswith(MTP_PREFIX)}
    weights = load_file(joined / "model.safetensors")
    assert weights.keys() == kept.keys() | own.keys()
    assert all(torch.equal(weights[name], w) for name, w in (kept | own).items())
    assert "is not empty" in refused("join-heads", checkpoint, heads, joined)
