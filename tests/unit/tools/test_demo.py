"""What the demo accepts, what it starts, and what it makes of what it measured."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.demo import (
    DemoOptions,
    bench_command,
    max_model_len_tokens,
    print_demo,
    serve_command,
    summarise,
)

OPTIONS = DemoOptions("owner/name", draft_tokens=4)


def measured(tokens_per_s: float, *texts: str, **figures: Any) -> dict[str, Any]:
    return {
        "completed": len(texts),
        "failed": 0,
        "output_throughput": tokens_per_s,
        "mean_tpot_ms": 1e3 / tokens_per_s,
        "generated_texts": list(texts),
        "unknown": "left out",
        **figures,
    }


ACCEPTED = {
    "spec_decode_acceptance_length": 2.8,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.6, 0.3],
}
MEASURED = {
    "none": measured(100.0, "a", "b"),
    "mtp": measured(155.0, "a", "b", **ACCEPTED),
    "mtp_plus": measured(180.0, "a", "b", **ACCEPTED),
}


def printed(found: dict[str, dict[str, Any]], options: DemoOptions = OPTIONS) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_demo(summarise(options, found), ["x = y", "z"], found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_table_shows_speed_and_acceptance_in_80_columns() -> None:
    rows = [line.replace("│", " ").split() for line in printed(MEASURED).splitlines()]
    assert ["mtp", "155.0", "1.55x", "2.80", "90", "60", "30"] in rows
    assert ["none", "100.0", "1.00x", "-", "-"] in rows


def test_equal_texts_are_counted() -> None:
    result = summarise(OPTIONS, MEASURED)
    assert result["is_exact"]
    assert "unknown" not in result["methods"]["mtp"]
    assert "Same greedy text: yes, 4 of 4." in printed(MEASURED)


def test_the_verdict_names_what_differs() -> None:
    found = MEASURED | {"mtp_plus": measured(180.0, "a", "c")}
    result = summarise(OPTIONS, found)
    assert not result["is_exact"]
    assert result["differences"] == [{"method": "mtp_plus", "prompt": 1}]
    assert "Same greedy text: NO, 1 of 4" in printed(found)
    assert "mtp_plus, prompt 2" in printed(found)
    assert "rounding" not in printed(found)
    assert "(In bfloat16 rounding" in printed(found, replace(OPTIONS, dtype="bfloat16"))


def test_generated_text_is_printed_as_it_is_whatever_it_looks_like() -> None:
    text = f"[bold][0] :smile: {'long ' * 40}"
    found = {
        name: each | {"generated_texts": [text]} for name, each in MEASURED.items()
    }
    assert f"x = y{text}\n" in printed(found)


def test_the_result_can_be_written_as_json() -> None:
    result = summarise(replace(OPTIONS, output=Path("x.json")), MEASURED)
    assert json.loads(json.dumps(result)) == result


def test_the_context_is_never_longer_than_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 300}')
    assert max_model_len_tokens(str(tmp_path), 299) == 300
    with pytest.raises(ConfigError, match="tokens: 300 leaves no room"):
        max_model_len_tokens(str(tmp_path), 300)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100000}')
    assert max_model_len_tokens(str(tmp_path), 64) == 1024
    assert max_model_len_tokens("owner/name", 64) == 1024


def test_only_the_speculative_config_differs_between_the_servers() -> None:
    none, mtp, plus = (
        serve_command("owner/name", config, 8000, OPTIONS, on_gpu=False)
        for config in OPTIONS.configs.values()
    )
    assert mtp[:-2] == plus[:-2] == none
    assert json.loads(mtp[-1]) == {"method": "mtp", "num_speculative_tokens": 4}
    assert json.loads(plus[-1]) == {"method": "mtp_plus"}
    assert option(none, "--dtype") == "float32"
    assert "--enforce-eager" in none
    assert "--enforce-eager" not in serve_command("m/m", None, 1, OPTIONS, on_gpu=True)


def test_further_arguments_come_last_and_win() -> None:
    options = replace(OPTIONS, serve_args="--max-num-seqs 2")
    command = serve_command("owner/name", None, 8000, options, on_gpu=False)
    assert command[-2:] == ["--max-num-seqs", "2"]


def test_the_client_trusts_remote_code_where_the_server_does() -> None:
    trusting = replace(OPTIONS, serve_args="--trust-remote-code")
    path = Path("/s/none.json")
    assert "--trust-remote-code" in bench_command("m/m", 1, path, trusting)
    assert "--trust-remote-code" not in bench_command("m/m", 1, path, OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/folder",), "error: model: '/no/such/folder' is neither"),
        (("m/m", "--output", "/no/such/folder/x.json"), "error: output: "),
        (("m/m", "--tokens", "0"), "error: tokens: 0 is not allowed"),
        (("m/m", "--prompts", "0"), "error: prompts: 0 is not allowed"),
        (("m/m", "--draft-tokens", "99"), "error: draft-tokens: 99 is not allowed"),
        (("m/m", "--serve-args", "'open"), 'error: serve-args: "\'open"'),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
