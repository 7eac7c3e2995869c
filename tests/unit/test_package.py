"""The package as a whole: light to import, and its papers agree with the code."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.cli.options import option_table
from vllm_mtp.cli.program import TOOLS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> list[str]:
    return [Requirement(each).name for each in requirements]


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    """Nor do the commands, before they need it."""
    code = (
        "import sys, vllm_mtp.config, vllm_mtp.records, vllm_mtp.control.factory;"
        "import vllm_mtp.cli.main;"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "[]"


def test_the_readme_shows_the_option_table_of_the_code() -> None:
    assert option_table() in (ROOT / "docs" / "options.md").read_text()


def test_the_options_command_prints_that_table() -> None:
    result = CliRunner().invoke(app, ["options"])
    assert result.exit_code == 0
    assert result.stdout == option_table()


def test_the_supported_vllm_is_the_one_that_pip_installs() -> None:
    from vllm_mtp.integration.load.compat import SUPPORTED_VLLM

    required = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert {str(s) for s in required["vllm"]} == {str(s) for s in SUPPORTED_VLLM}


def test_serving_requires_no_tools_and_a_clone_has_them_all() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not set(names(PROJECT["dependencies"])) & set(TOOLS)
    assert tuple(names(extras["tools"])) == TOOLS
    assert "vllm-mtp[tools]" in extras["tune"]
    assert "vllm-mtp[ray,tune]" in extras["dev"]
    installed = (ROOT / "configs" / "environment" / "dev.txt").read_text().splitlines()
    listed = names([line for line in installed if not line.startswith("#")])
    assert set(TOOLS) <= set(listed)


def test_the_wheel_has_every_file_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    package = ROOT / "vllm_mtp"
    patterns = settings["setuptools"]["package-data"][package.name]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    made_here = {".py", ".pyc", ".so"}
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in made_here}
    assert files <= packed


@pytest.mark.parametrize("missing", TOOLS)
def test_without_a_tool_the_program_names_the_extra_and_ends_with_code_2(
    missing: str,
) -> None:
    module, _, function = PROJECT["scripts"]["vllm-mtp"].partition(":")
    # None in sys.modules: as if it were not installed.
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({[missing]}))\n"
        f"from {module} import {function}; {function}()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "options"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"vllm-mtp: needs {missing}; install vllm-mtp[tools]\n"
    assert done.stdout == ""


def test_with_all_tools_the_program_runs_the_command() -> None:
    module, _, function = PROJECT["scripts"]["vllm-mtp"].partition(":")
    code = f"from {module} import {function}; {function}()"
    done = subprocess.run(
        [sys.executable, "-c", code, "options"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, option_table())
