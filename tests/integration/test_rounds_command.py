"""``vllm-mtp rounds`` as a user runs it: one page with what an engine did."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.shared_engines import sharing_engines
from vllm_mtp.cli.main import app

PROGRAM = Path(sys.executable).with_name("vllm-mtp")
PROMPT = "# </script><b>\U0001f680</b>\ndef add(a, b):\n"


def test_the_page_holds_every_round_of_the_answer(tmp_path: Path) -> None:
    page = tmp_path / "rounds.html"
    options = ["--prompt", PROMPT, "--output", str(page), "--max-tokens", "24"]
    done = subprocess.run(
        [PROGRAM, "rounds", str(BUNDLED_CHECKPOINT), *options],
        env=sharing_engines(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert data["model"] == BUNDLED_CHECKPOINT.name
    assert str(BUNDLED_CHECKPOINT.parent) not in text
    (request,) = data["requests"]
    assert request["prompt"] == PROMPT
    rounds, sums = request["rounds"], request["sums"]
    assert {len(each["draft"]) for each in rounds[1:]} <= {1, 2, 3}
    accepted = sum(each["num_accepted"] for each in rounds)
    assert 0 < accepted == sums["num_accepted_tokens"]
    assert f"{accepted} of {sums['num_draft_tokens']} draft tokens" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], "prompt: ''"),
        (["--prompt", "a", "--draft-tokens", "17"], "draft-tokens: 17"),
        (["--prompt", "a", "--output", "/nowhere/page.html"], "output: "),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_code_2(
    options: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["rounds", str(BUNDLED_CHECKPOINT), *options])
    assert result.exit_code == 2
    assert words in result.stderr
