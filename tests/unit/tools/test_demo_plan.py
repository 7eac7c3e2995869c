"""What the demo accepts, and the servers it would start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.demo_plan import (
    BUILT_IN_PROMPTS,
    DemoOptions,
    Prompt,
    ServerSettings,
    max_model_len_tokens,
    max_prompt_tokens,
    read_prompts,
    resolve_model,
    serve_command,
    serve_environ,
    speculative_config,
)

ON_CPU = ServerSettings("float32", num_servers=3, serve_args=(), on_gpu=False)


def write_checkpoint(folder: Path, **config: int) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("none", "eagle"), "methods: unknown 'eagle'"),
        (("mtp", "mtp_plus"), "must name 'none'"),
        (("none", "mtp", "mtp"), "each method once"),
    ],
)
def test_a_wrong_list_of_methods_is_refused_by_name(
    methods: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoOptions("m/m", methods=methods)


def test_a_missing_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*/nowhere.* is neither a folder"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* holds no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_name_is_left_to_vllm() -> None:
    assert resolve_model("XiaomiMiMo/MiMo-7B-RL") == "XiaomiMiMo/MiMo-7B-RL"


def test_prompts_come_from_the_checkpoint_in_their_order(tmp_path: Path) -> None:
    records = [{"id": i, "file": f"{i}.py", "text": f"text {i}"} for i in range(5)]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "heldout_prompts.jsonl").write_text(lines)
    assert read_prompts(str(tmp_path), 2) == [
        Prompt("0.py", "text 0"),
        Prompt("1.py", "text 1"),
    ]


def test_a_checkpoint_without_prompts_gets_the_built_in_ones(tmp_path: Path) -> None:
    assert read_prompts(str(tmp_path), 3) == list(BUILT_IN_PROMPTS[:3])


@pytest.mark.parametrize("line", ["not json", "[]", '{"id": 1}', '{"text": ""}'])
def test_a_broken_line_of_prompts_is_named(tmp_path: Path, line: str) -> None:
    good = '{"text": "x"}\n'
    (tmp_path / "heldout_prompts.jsonl").write_text(f"{good}{line}\n")
    with pytest.raises(ConfigError, match=r"heldout_prompts\.jsonl:2"):
        read_prompts(str(tmp_path), 6)


def test_the_context_is_never_longer_than_the_models_own(tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path, max_position_embeddings=300)
    assert max_model_len_tokens(short) == 300
    long = write_checkpoint(tmp_path, max_position_embeddings=100_000)
    assert max_model_len_tokens(long) == 1024


def test_tokens_that_leave_no_room_for_a_prompt_are_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, max_position_embeddings=100)
    assert max_prompt_tokens(model, DemoOptions("m/m", max_tokens=99)) == 1
    with pytest.raises(ConfigError, match="tokens: 100 leaves no room"):
        max_prompt_tokens(model, DemoOptions("m/m", max_tokens=100))


def test_only_the_speculative_config_differs_between_the_servers(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path)
    options = DemoOptions("m/m", baseline_draft_tokens=4)
    none, mtp, plus = (
        serve_command(model, speculative_config(method, options), 8000, ON_CPU)
        for method in ("none", "mtp", "mtp_plus")
    )
    assert mtp[:-2] == plus[:-2] == none
    assert json.loads(mtp[-1]) == {"method": "mtp", "num_speculative_tokens": 4}
    assert json.loads(plus[-1]) == {"method": "mtp_plus"}
    assert option(none, "--dtype") == "float32"


def test_further_arguments_come_last_and_win(tmp_path: Path) -> None:
    settings = replace(ON_CPU, serve_args=("--max-num-seqs", "2"))
    command = serve_command(write_checkpoint(tmp_path), None, 8000, settings)
    assert command[-2:] == ["--max-num-seqs", "2"]


def test_servers_on_one_gpu_share_its_memory(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    command = serve_command(model, None, 8000, replace(ON_CPU, on_gpu=True))
    assert 3 * float(option(command, "--gpu-memory-utilization")) <= 0.9
    assert "--enforce-eager" not in command


def test_the_hub_is_asked_only_for_models_that_are_not_here(tmp_path: Path) -> None:
    here = serve_environ({"PATH": "/bin"}, tmp_path, local_model=True, on_gpu=False)
    assert here["HF_HUB_OFFLINE"] == "1"
    assert here["PATH"] == "/bin"
    there = serve_environ({}, tmp_path, local_model=False, on_gpu=False)
    assert "HF_HUB_OFFLINE" not in there


def test_engine_and_worker_share_a_process_on_a_cpu_only(tmp_path: Path) -> None:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert serve_environ({}, tmp_path, local_model=True, on_gpu=False)[name] == "0"
    assert name not in serve_environ({}, tmp_path, local_model=True, on_gpu=True)
