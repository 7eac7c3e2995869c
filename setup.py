"""Build script: compiles the native kernels of ``csrc/`` where it can.

Metadata lives in ``pyproject.toml``. Two libraries, neither required::

    vllm_mtp/_C_cpu.abi3.so    needs a C++ compiler and torch's headers
    vllm_mtp/_C_cuda.abi3.so   needs nvcc, too

Both use PyTorch's stable ABI and no Python: ``torch.ops.load_library`` loads them, into
any torch from ``TORCH_TARGET_VERSION`` on, CPU builds of torch included (which is why
nvcc is driven here and not by torch's ``CUDAExtension``, which refuses without CUDA).
What cannot be built is said once, and the package runs on Triton or plain torch.
"""

import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CPU, CUDA = "vllm_mtp._C_cpu", "vllm_mtp._C_cuda"
SOURCES = {
    CPU: ["csrc/bindings.cpp", "csrc/greedy_cpu.cpp", "csrc/rollback_cpu.cpp"],
    CUDA: ["csrc/bindings.cpp", "csrc/greedy_cuda.cu", "csrc/rollback_cuda.cu"],
}
HEADERS = ["csrc/greedy.h", "csrc/rollback.h"]

# 2.10: the first whose stable ABI passes lists of tensors.
TORCH_TARGET_VERSION = "0x020a000000000000"
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden"]
# Machine code for what serves models; PTX for what comes after. sm_80 also runs on 86
# and 89, sm_100 on 103.
SASS_ARCHITECTURES = (80, 90, 100, 120)
PTX_ARCHITECTURE = 80


class CannotBuild(Exception):
    """Something that a library needs is missing; one clause, for the user."""


def say(text: str) -> None:
    """Print a line about the build; standard output belongs to the build backend."""
    print(f"vllm-mtp: {text}", file=sys.stderr, flush=True)


def run(command: list[str]) -> str:
    """Run a tool and return its standard output.

    Raises:
        CannotBuild: It failed; what it wrote has been printed.
    """
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        print(shlex.join(command), result.stdout, result.stderr, file=sys.stderr)
        raise CannotBuild(f"{command[0]} failed, see above")
    return result.stdout


def torch_directory() -> Path:
    """Folder of torch's headers and libraries, found without the import's seconds.

    Raises:
        CannotBuild: There is no torch, or one without the stable ABI.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild(
            "torch is not installed here (pip builds in isolation unless it is told "
            "--no-build-isolation)"
        )
    directory = Path(spec.submodule_search_locations[0])
    if not (directory / "include/torch/csrc/stable/tensor.h").exists():
        raise CannotBuild(f"{directory} has no headers of the stable ABI (torch 2.10)")
    return directory


def cxx() -> list[str]:
    """The C++ compiler: ``CXX``, or the first of the usual names.

    Raises:
        CannotBuild: There is none.
    """
    wanted = os.environ.get("CXX")
    names = [shlex.split(wanted)] if wanted else [["c++"], ["g++"], ["clang++"]]
    for command in names:
        if shutil.which(command[0]):
            return command
    tried = ", ".join(command[0] for command in names)
    raise CannotBuild(f"no C++ compiler was found (tried {tried})")


def nvcc() -> str:
    """CUDA's compiler: of ``CUDA_HOME``, else on the path or where CUDA puts it.

    Raises:
        CannotBuild: There is none.
    """
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise CannotBuild(f"no nvcc was found (tried {', '.join(candidates)})")


def architecture_flags(compiler: str) -> list[str]:
    """``-gencode`` options for those of our architectures that this nvcc knows."""
    known = set(run([compiler, "--list-gpu-arch"]).split())
    wanted = [(arch, f"sm_{arch}") for arch in SASS_ARCHITECTURES]
    wanted.append((PTX_ARCHITECTURE, f"compute_{PTX_ARCHITECTURE}"))
    return [
        f"-gencode=arch=compute_{arch},code={code}"
        for arch, code in wanted
        if f"compute_{arch}" in known
    ]


def compile_bindings(torch: Path, folder: Path, *macros: str) -> str:
    """Compile ``bindings.cpp`` for one device; returns the object's path."""
    target = str(folder / "bindings.o")
    stable_abi = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"
    # -isystem: warnings in torch's headers are not ours to mend.
    include = ["-isystem", str(torch / "include")]
    options = [*CXX_FLAGS, stable_abi, *macros, *include]
    run([*cxx(), *options, "-c", "csrc/bindings.cpp", "-o", target])
    return target


def compile_kernels(compiler: list[str], name: str, folder: Path) -> list[str]:
    """Compile a library's sources but for the bindings; returns the objects' paths."""
    objects = []
    for source in SOURCES[name][1:]:
        objects.append(str(folder / f"{Path(source).stem}.o"))
        run([*compiler, "-c", source, "-o", objects[-1]])
    return objects


def build_cpu(folder: Path) -> Path:
    """Build the CPU library in ``folder`` and return its path."""
    library = folder / "library.so"
    torch = torch_directory()
    bindings = compile_bindings(torch, folder)
    kernels = compile_kernels([*cxx(), *CXX_FLAGS], CPU, folder)
    link = [f"-L{torch / 'lib'}", "-ltorch_cpu"]
    run([*cxx(), "-shared", bindings, *kernels, *link, "-o", str(library)])
    return library


def build_cuda(folder: Path) -> Path:
    """Build the CUDA library in ``folder`` and return its path.

    It names ``libtorch``, which brings ``libtorch_cuda`` where torch has CUDA; the
    symbols from there stay open here, so that torch's CPU build will do to link it.
    """
    library = folder / "library.so"
    compiler, torch = nvcc(), torch_directory()
    bindings = compile_bindings(torch, folder, "-DUSE_CUDA")
    options = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    # --threads 0: one process per architecture.
    architectures = ["--threads", "0", *architecture_flags(compiler)]
    kernels = compile_kernels([compiler, *options, *architectures], CUDA, folder)
    # Static and hidden: the runtime must not meet another version in torch's process.
    link = ["-cudart=static", "-Xlinker=--exclude-libs,ALL", f"-L{torch / 'lib'}"]
    link += ["-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu", "-o", str(library)]
    run([compiler, "-shared", *architectures, bindings, *kernels, *link])
    return library


class BuildNative(build_ext):
    """Builds what the machine can build, and lets the installation go on."""

    def run(self) -> None:
        """Build each library; then say, in one line each, which are missing."""
        missing = {ext.name: self._try(ext) for ext in self.extensions}
        # The rest of the installation handles only what exists.
        self.extensions = [ext for ext in self.extensions if not missing[ext.name]]
        if self.inplace:
            self.copy_extensions_to_source()
        for reason in dict.fromkeys(filter(None, missing.values())):
            names = ", ".join(name for name in missing if missing[name] == reason)
            say(
                f"native kernels {names} not built: {reason}. Triton or plain torch "
                "replaces them. To build them: pip install --no-build-isolation with "
                "torch, a C++ compiler and, for CUDA, nvcc installed"
            )

    def _try(self, ext: Extension) -> str | None:
        """Build one library; returns why there is none."""
        file_name = self.get_ext_filename(ext.name)
        target, in_tree = Path(self.build_lib) / file_name, ROOT / file_name
        # Of an older build, made from other sources.
        target.unlink(missing_ok=True)
        if self.inplace and not is_current(in_tree):
            in_tree.unlink(missing_ok=True)
        try:
            self._build(ext.name, target, in_tree)
        except CannotBuild as error:
            return str(error)
        return None

    def _build(self, name: str, target: Path, in_tree: Path) -> None:
        folder = Path(self.build_temp) / name
        for path in (folder, target.parent):
            path.mkdir(parents=True, exist_ok=True)
        require_tools(name)
        if not self.force and is_current(in_tree):
            library = in_tree
        else:
            library = {CPU: build_cpu, CUDA: build_cuda}[name](folder.resolve())
        shutil.copy2(library, target)


def require_tools(name: str) -> None:
    """Raise ``CannotBuild`` where a library's tools are missing, built or not."""
    torch_directory()
    cxx()
    if name == CUDA:
        nvcc()


def is_current(library: Path) -> bool:
    """Whether a library is newer than all that it is made of."""
    if not library.exists():
        return False
    sources = {*HEADERS, *(path for paths in SOURCES.values() for path in paths)}
    inputs = [Path(__file__), *(ROOT / path for path in sources)]
    return library.stat().st_mtime > max(path.stat().st_mtime for path in inputs)


setup(
    ext_modules=[
        Extension(name, SOURCES[name], depends=HEADERS, py_limited_api=True)
        for name in (CPU, CUDA)
    ],
    cmdclass={"build_ext": BuildNative},
    # The libraries know no Python; the package asks for 3.11.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
