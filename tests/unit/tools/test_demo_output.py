"""What a person sees: tables, verdicts, progress, result files, exit codes."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from vllm_mtp.cli.demo import demo
from vllm_mtp.tools.demo import DemoResult, result_as_json
from vllm_mtp.tools.demo_client import SpecCounters
from vllm_mtp.tools.demo_measure import Difference, Measurement
from vllm_mtp.tools.demo_plan import DemoOptions
from vllm_mtp.tools.demo_table import (
    Progress,
    build_table,
    print_continuation,
    print_verdict,
)
from vllm_mtp.tools.provenance import collect_provenance, git_state, write_json

SPECULATING = SpecCounters(100, 300, 180, (90, 60, 30), 110, 290, 10)
PLAIN = SpecCounters(0, 0, 0, (), 290, 290, 10)
RESULTS = {
    "none": Measurement((100.0, 110.0, 90.0), (1.0, 1.0, 1.0), PLAIN),
    "mtp": Measurement((150.0, 170.0, 140.0), (1.5, 1.55, 1.56), SPECULATING),
}


@pytest.fixture
def console() -> Console:
    """Prints into a string, 80 columns, not a terminal."""
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_cli(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(demo)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_the_table_shows_median_and_extremes_uncut_in_80_columns(
    console: Console,
) -> None:
    console.print(build_table(RESULTS, baseline_draft_tokens=3))
    rows = [line.split() for line in printed(console).splitlines()]
    speed = ["150", "[140..170]", "1.55x", "[1.50..1.56]", "2.80", "90", "60", "30"]
    assert ["vLLM's", "mtp,", "K=3", *speed] in rows
    plain = ["100", "[90..110]", "1.00x", "[1.00..1.00]", "1.00", "-"]
    assert ["no", "speculation", *plain] in rows


def test_the_verdict_counts_what_was_compared(console: Console) -> None:
    print_verdict(console, [], 72)
    assert "Same greedy text: yes, in all 72 continuations." in printed(console)


def test_the_verdict_names_what_differs(console: Console) -> None:
    print_verdict(console, [Difference("mtp_plus", "a.py", 7)], 72)
    assert "Same greedy text: NO, 1 of 72" in printed(console)
    assert "mtp_plus, prompt a.py: from generated token 7 on" in printed(console)


def test_generated_text_is_printed_as_it_is_whatever_it_looks_like(
    console: Console,
) -> None:
    long = "long " * 40
    pieces = print_continuation(
        console, "t", "x = y", ["[bold]", "", f"[0] :smile: {long}"]
    )
    assert f"x = y[bold][0] :smile: {long}\n" in printed(console)
    assert pieces == 2


def test_progress_outside_a_terminal_is_a_line_now_and_then(console: Console) -> None:
    progress = Progress(console)
    for text in ("first", "second", "third"):
        progress(text)
    progress.close()
    assert printed(console) == "  first\n"


def test_the_result_file_holds_every_single_figure() -> None:
    result = DemoResult(RESULTS, [Difference("mtp", "a.py", 7)], 72)
    content = result_as_json(DemoOptions("m/m", num_repeats=3), "folder", result)
    assert json.loads(json.dumps(content)) == {
        "model": "folder",
        "options": json.loads(json.dumps(vars(DemoOptions("m/m", num_repeats=3)))),
        "methods": {
            name: {
                "tokens_per_s": content["methods"][name]["tokens_per_s"],
                "tokens_per_s_of_each_pass": list(each.tokens_per_s),
                "speedup": content["methods"][name]["speedup"],
                "speedup_of_each_pass": list(each.speedup),
                "tokens_per_step": each.counters.tokens_per_step,
                "survival": list(each.counters.survival),
                "counters": json.loads(json.dumps(each.counters._asdict())),
            }
            for name, each in RESULTS.items()
        },
        "num_compared": 72,
        "differences": [{"method": "mtp", "prompt": "a.py", "position": 7}],
    }
    assert content["methods"]["mtp"]["tokens_per_s"] == {
        "median": 150.0,
        "minimum": 140.0,
        "maximum": 170.0,
    }


def test_a_result_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_provenance_names_command_versions_and_machine() -> None:
    facts = collect_provenance(["/somewhere/bin/vllm-mtp", "demo"])
    assert facts["command"] == ["vllm-mtp", "demo"]
    assert facts["versions"]["torch"]
    assert facts["hardware"]["num_cores"] >= 1
    assert json.loads(json.dumps(facts)) == facts


def test_the_state_of_git_is_commit_and_dirt(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) == {"commit": None, "is_dirty": False}
    git("commit", "-q", "--allow-empty", "-m", "empty")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": False}
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: model: '/no/such/folder' is neither"),
        (("--methods", "none,eagle"), "error: methods: unknown 'eagle'"),
        (("--json", "/no/such/folder/x.json"), "error: json: the folder of"),
        (("--tokens", "0"), "--tokens"),
        (("--serve-args", "'open"), 'error: serve-args: "\'open"'),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    model = "owner/name" if arguments else "/no/such/folder"
    exit_code, output = run_cli(model, *arguments)
    assert exit_code == 2
    assert message in output
    assert "Traceback" not in output
