"""The package as a whole: light to import, and its papers agree with the code."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.cli.options import option_table

ROOT = Path(__file__).parents[2]


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_mtp.config, vllm_mtp.records, vllm_mtp.control.factory;"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "[]"


def test_the_readme_shows_the_option_table_of_the_code() -> None:
    assert option_table() in (ROOT / "README.md").read_text()


def test_the_options_command_prints_that_table() -> None:
    result = CliRunner().invoke(app, ["options"])
    assert result.exit_code == 0
    assert result.stdout == option_table()


def test_the_supported_vllm_is_the_one_that_pip_installs() -> None:
    from vllm_mtp.integration.compat import SUPPORTED_VLLM

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert {str(s) for s in required["vllm"]} == {str(s) for s in SUPPORTED_VLLM}
