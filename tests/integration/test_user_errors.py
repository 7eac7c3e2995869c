"""Every mistake gets one sentence that names the field and what is allowed.

Through ``EngineArgs``, which is what the server, ``LLM`` and ``AsyncLLM`` all build:
the engine config is refused before a weight is loaded. Two of them also through the
command line, for the exit code and the absence of a traceback.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.engine_jobs import V1
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.random_checkpoints import write_checkpoint
from tests.support.vocabulary import write_list
from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load import compat, engine_args
from vllm_mtp.integration.load.compat import CompatibilityError

LENGTH = "synthetic_acceptance_length"
SYNTHETIC = {"rejection_sample_method": "synthetic", LENGTH: 2.5}


@pytest.fixture(scope="module", autouse=True)
def seam() -> None:
    engine_args.install()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def mimo(folder: Path) -> Path:
    return write_checkpoint(folder / "mimo", "mimo")


def refusal(model: Path, spec: dict[str, Any] | None, **arguments: Any) -> str:
    """The sentence with which an engine config is refused."""
    spec = {"method": "mtp_plus"} | spec if spec is not None else None
    with pytest.raises((ConfigError, CompatibilityError)) as caught:
        EngineArgs(
            model=str(model), speculative_config=spec, max_model_len=64, **arguments
        ).create_engine_config()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"draft_len": 3}, ["draft_len", "num_speculative_tokens", "quantization"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "from 1 to 16"]),
        ({"num_speculative_tokens": 17}, ["num_speculative_tokens=17", "1 to 16"]),
        ({"num_speculative_tokens": "3"}, ["num_speculative_tokens='3'", "integer"]),
        (
            {"controller": ["fixed"]},
            ["controller", "'goodput' or 'threshold' or 'fixed' or 'random'"],
        ),
        (
            {"rejection_sample_method": "synthetic"},
            ["rejection_sample_method='synthetic'", "exactly one of synthetic_accept"],
        ),
        (
            {"synthetic_acceptance_length": 2.5},
            ["synthetic_acceptance_length=2.5", "rejection_sample_method='synthetic'"],
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [0.9] * 8},
            ["rejection_sample_method='synthetic'", "exactly one of"],
        ),
        (
            SYNTHETIC | {"num_speculative_tokens": 3} | {LENGTH: 4.5},
            ["synthetic_acceptance_length=4.5", "a number from 1 to 4"],
        ),
        (
            SYNTHETIC | {LENGTH: None, "synthetic_acceptance_rates": [0.5, 0.9]},
            ["synthetic_acceptance_rates=[0.5, 0.9]", "8 numbers from 0 to 1"],
        ),
        (
            SYNTHETIC
            | {"num_speculative_tokens": 2}
            | {LENGTH: None, "synthetic_acceptance_rates": [0.5, 0.9]},
            ["2 numbers from 0 to 1, none above the one before"],
        ),
        (SYNTHETIC | {"adapt": True}, ["adapt=True", "the text is not the target's"]),
        (
            SYNTHETIC | {"hidden_states_path": "states"},
            ["hidden_states_path='states'", "the text is not the target's"],
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            ["num_speculative_tokens_per_batch_size", "chooses the draft length"],
        ),
        ({"parallel_drafting": True}, ["parallel_drafting", "another speculative"]),
        (
            {"draft_vocab": "/nowhere.json"},
            ["draft_vocab='/nowhere.json'", "no such file", "'auto', 'full'"],
        ),
        ({"draft_vocab": ""}, ["draft_vocab=''", "'auto' or 'full' or a file"]),
        ({"draft_vocab_size": 1}, ["draft_vocab_size=1", "from 128 to 1048576"]),
        ({"draft_vocab_size": 8192}, ["draft_vocab_size=8192", "at most 512"]),
        ({"draft_weights": "int4"}, ["draft_weights='int4'", "'same' or 'int8'"]),
        ({"verify_head": "int8"}, ["verify_head='int8'", "'prefiltered' or 'whole'"]),
        ({"kv_rollback": "off"}, ["kv_rollback='off'", "'metadata' or 'scrub'"]),
    ],
)
def test_options(mimo: Path, spec: dict[str, Any], words: list[str]) -> None:
    sentence = refusal(mimo, spec)
    assert "speculative_config." in sentence
    assert all(word in sentence for word in words), sentence


def test_weights_in_8_bits_where_there_is_no_kernel(mimo: Path) -> None:
    sentence = refusal(mimo, {"draft_weights": "int8"}, dtype="float16")
    assert "speculative_config.draft_weights='int8'" in sentence
    assert "float32 or bfloat16, not quantized; leave it unset" in sentence


def test_a_prefiltered_head_where_there_is_no_kernel(mimo: Path) -> None:
    sentence = refusal(mimo, {"verify_head": "prefiltered"}, dtype="float16")
    assert "speculative_config.verify_head='prefiltered'" in sentence
    assert "float32 or bfloat16, not quantized; leave it unset" in sentence


def test_a_draft_vocabulary_of_another_model(mimo: Path, tmp_path: Path) -> None:
    listed = write_list(tmp_path / "list.json", [1, 2, 3])
    sentence = refusal(mimo, {"draft_vocab": listed})
    assert "a vocabulary of 16384 tokens, and the model's has 512" in sentence


def test_a_draft_vocabulary_of_another_tokenizer(tmp_path: Path) -> None:
    listed = write_list(tmp_path / "list.json", [1, 2, 3], tokenizer_sha256="0" * 64)
    sentence = refusal(BUNDLED_CHECKPOINT, {"draft_vocab": listed})
    assert "was made with another tokenizer" in sentence
    assert "`vllm-mtp vocab build`" in sentence


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ({"scheduler_cls": "my.Scheduler"}, "--scheduler-cls='my.Scheduler'"),
        ({"worker_cls": "my.Worker"}, "--worker-cls='my.Worker'"),
    ],
)
def test_classes_of_the_user(mimo: Path, argument: dict[str, str], option: str) -> None:
    sentence = refusal(mimo, {}, **argument)
    assert option in sentence
    assert "remove --" in sentence


def test_rounds_without_the_statistics_that_carry_them(mimo: Path) -> None:
    sentence = refusal(mimo, {"show_rounds": 4}, disable_log_stats=True)
    assert "speculative_config.show_rounds=4" in sentence
    assert "remove --disable-log-stats" in sentence


def test_scrubbing_across_pipeline_stages(mimo: Path) -> None:
    sentence = refusal(
        mimo,
        {"kv_rollback": "scrub"},
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert "kv_rollback='scrub'" in sentence
    assert "pipeline_parallel_size=2" in sentence


def test_two_methods_at_once(mimo: Path) -> None:
    with pytest.raises(ConfigError, match=r"contradicts speculative_config\.method"):
        EngineArgs(
            model=str(mimo),
            spec_method="mtp_plus",
            speculative_config={"method": "ngram"},
        ).create_engine_config()


def test_two_draft_lengths_at_once(mimo: Path) -> None:
    sentence = refusal(mimo, {"num_speculative_tokens": 3}, spec_tokens=4)
    assert "--spec-tokens 4 contradicts" in sentence


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "glm4_moe", "ernie45_moe"])
def test_a_model_without_mtp_layers(family: str, folder: Path) -> None:
    model = write_checkpoint(folder / f"{family}-none", family, num_mtp_layers=0)
    sentence = refusal(model, {})
    assert "has no MTP layers" in sentence
    assert "num_nextn_predict_layers" in sentence


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "glm4_moe", "ernie45_moe"])
def test_promised_mtp_layers_whose_weights_are_missing(
    family: str, folder: Path
) -> None:
    model = write_checkpoint(folder / f"{family}-lost", family, mtp_weights="missing")
    sentence = refusal(model, {})
    assert "promises 1 MTP layer" in sentence
    assert "from its safetensors files: missing: model." in sentence


def test_dummy_weights_need_no_checkpoint(folder: Path) -> None:
    model = write_checkpoint(folder / "dummy", "mimo", mtp_weights="missing")
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        max_model_len=64,
        speculative_config={"method": "mtp_plus"},
    ).create_engine_config()
    assert "MTPPlus" in config.parallel_config.worker_cls


def test_a_model_of_another_kind(folder: Path) -> None:
    model = write_checkpoint(folder / "llama", "mimo", num_mtp_layers=0)
    config = (model / "config.json").read_text()
    config = config.replace("MiMoForCausalLM", "Qwen2ForCausalLM")
    (model / "config.json").write_text(config)
    assert "Qwen2ForCausalLM" in refusal(model, {})


@pytest.mark.parametrize(
    ("version", "word"), [("0.31.2", "too old"), ("0.34.0", "too new")]
)
def test_a_vllm_outside_the_tried_range(
    version: str, word: str, mimo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: version)
    sentence = refusal(mimo, {})
    assert f"vllm {version} is {word}" in sentence
    assert "0.32" in sentence
    assert "0.34" in sentence


def test_the_engine_args_can_be_asked_twice(mimo: Path) -> None:
    args = EngineArgs(
        model=str(mimo), spec_method="mtp_plus", max_model_len=64, spec_tokens=2
    )
    before = dict(vars(args))
    first, second = args.create_engine_config(), args.create_engine_config()
    for config in (first, second):
        assert config.speculative_config.method == "mtp"
        assert config.speculative_config.num_speculative_tokens == 2
        assert "MTPPlus" in config.parallel_config.worker_cls
    for name in ("speculative_config", "additional_config", "spec_method"):
        assert vars(args)[name] == before[name]


def is_one_sentence(errors: str) -> bool:
    last = errors.strip().splitlines()[-1]
    return "Traceback" not in errors and last.startswith("vllm: error: ")


def test_the_command_line_says_one_sentence_and_exits_with_2(mimo: Path) -> None:
    vllm = Path(sys.executable).with_name("vllm")
    option = '{"method":"mtp_plus","num_speculative_tokens":17}'
    done = subprocess.run(
        [vllm, "serve", str(mimo), "--speculative-config", option],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert is_one_sentence(done.stderr)


def test_a_class_of_the_user_is_refused_on_the_command_line(
    mimo: Path, tmp_path: Path
) -> None:
    log, words = tmp_path / "log", ["--spec-method", "mtp_plus"]
    words = ["serve", str(mimo), *words, "--worker-cls", "my.Worker"]
    V1.run("tests.support.command_line:vllm_refuses", words, log, timeout_s=120)
    assert is_one_sentence(log.read_text())
