"""What ``setup.py`` builds on this machine, and what it says where it cannot."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_LIBRARY = ROOT / "vllm_mtp/_C_cpu.abi3.so"
CUDA_LIBRARY = ROOT / "vllm_mtp/_C_cuda.abi3.so"
ARCHITECTURES = (80, 90, 100, 120)
NOT_BUILT = "not built: "

has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
has_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")

BUILD = """
import runpy, sys
hidden = sys.argv.pop(1)
if hidden:
    sys.modules[hidden] = None  # imports and searches then find nothing
runpy.run_path("setup.py", run_name="__main__")
"""

LOAD = """
import torch
from vllm_mtp.kernels import dispatch, schemas
registered = torch._C._dispatch_has_kernel_for_dispatch_key
ops = [f"vllm_mtp::{name}" for name in schemas.SCHEMAS]
assert not any(registered(op, "CPU") for op in ops), "registered before the load"
assert dispatch.choose(torch.device("cpu")).name == "native"
assert all(registered(op, "CPU") for op in ops), "not all registered"
"""


def python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
    """Run this interpreter in the repository, with nothing inherited that builds."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("CXX", "CUDA_HOME")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def build(
    into: Path, *, hidden: str = "", **environment: str
) -> tuple[list[str], list[str]]:
    """Build into a folder, from scratch; the libraries there and what was missing."""
    folders = ["--build-lib", into / "lib", "--build-temp", into / "temp"]
    command = ["-c", BUILD, hidden, "build_ext", "--force", *folders]
    result = python(*command, **environment)
    assert result.returncode == 0, result.stderr
    built = sorted(path.name for path in into.glob("lib/**/*.so"))
    return built, [line for line in result.stderr.splitlines() if NOT_BUILT in line]


def listed(option: str) -> str:
    """What ``cuobjdump`` finds in the CUDA library."""
    places: Sequence[str] = ()
    if (triton := find_spec("triton")) and triton.submodule_search_locations:
        places = [f"{triton.submodule_search_locations[0]}/backends/nvidia/bin"]
    path = os.pathsep.join([os.environ["PATH"], *places])
    if not (tool := shutil.which("cuobjdump", path=path)):
        pytest.skip("no cuobjdump")
    command = [tool, option, str(CUDA_LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@has_compiler
def test_the_cpu_library_registers_its_kernels_in_a_fresh_process():
    assert CPU_LIBRARY.exists(), "the installation did not build it"
    result = python("-c", LOAD)
    assert result.returncode == 0, result.stderr


@has_compiler
@has_nvcc
def test_the_cuda_library_has_code_for_every_architecture_that_nvcc_knows():
    assert CUDA_LIBRARY.exists(), "the installation did not build it"
    known = subprocess.check_output(["nvcc", "--list-gpu-arch"], text=True).split()
    expected = [arch for arch in ARCHITECTURES if f"compute_{arch}" in known]
    assert expected, f"nvcc knows none of {ARCHITECTURES}: {known}"
    machine_code = listed("--list-elf")
    for arch in expected:
        assert f".sm_{arch}." in machine_code


@has_compiler
@has_nvcc
def test_the_cuda_library_has_ptx_for_architectures_to_come():
    assert ".sm_80.ptx" in listed("--list-ptx")


@has_compiler
def test_without_nvcc_the_cpu_library_alone_is_built(tmp_path):
    built, missing = build(tmp_path, CUDA_HOME="/nonexistent")
    assert built == [CPU_LIBRARY.name]
    assert len(missing) == 1
    assert "no nvcc was found (tried /nonexistent/bin/nvcc)" in missing[0]


def test_without_a_compiler_nothing_is_built_and_the_reason_is_said_once(tmp_path):
    built, missing = build(tmp_path, PATH=str(tmp_path))
    assert built == []
    assert len(missing) == 1
    assert "no C++ compiler was found (tried c++, g++, clang++)" in missing[0]


def test_without_torch_nothing_is_built_and_the_way_to_get_it_is_said_once(tmp_path):
    built, missing = build(tmp_path, hidden="torch")
    assert built == []
    assert len(missing) == 1
    assert "torch is not installed here" in missing[0]
    assert "--no-build-isolation" in missing[0]


@pytest.mark.skipif(not shutil.which("false"), reason="no `false`")
def test_a_compiler_that_fails_does_not_fail_the_installation(tmp_path):
    built, missing = build(tmp_path, CXX="false")
    assert built == []
    assert any("false failed, see above" in line for line in missing)
