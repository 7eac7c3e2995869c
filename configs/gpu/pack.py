"""Pack vLLM's GPU build for a GPU machine that reaches no package index.

    python configs/gpu/pack.py bundle.tar.xz [--arch 90] [--python 3.12]

and there, which takes seconds::

    mkdir /tmp/site && tar xJf bundle.tar.xz -C /tmp/site
    PYTHONPATH=/tmp/site VLLM_USE_FLASHINFER_SAMPLER=0 configs/gpu/run engines

That machine must have torch with CUDA, Triton and transformers. About 43 MiB for one
architecture, after ten minutes: most of vLLM's gigabyte is machine code for others,
which is overwritten with zeros, and libraries that no dense model on one GPU loads.
With one made like this engines ran on an H100, with Python 3.12 and torch 2.11 (vLLM
0.32 asks for 2.13). Where what can be carried at once is bounded, ``split -b 30M``
parts it and ``cat parts* | xz -dc | tar x -C /tmp/site`` unpacks it there: so it was
in use on 2026-11-27, with this tree beside one half.
"""

import argparse
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
LEFT_OUT = re.compile(
    r"_vllm_fa2_C|/deep_gemm/.*\.so|_flashkda|_deepselect|_flashmla_C|_qutlass|vllm-rs$"
    r"|third_party/.*/include/|tvm_ffi/include/|mistral_common/data/|__pycache__"
)
"""Never `.py` files of vLLM's own: it imports most of them."""

FAT_BINARY = struct.pack("<I", 0xBA55ED50)
FAT_HEADER = 16
"""Bytes: magic, version and header size (2 each), size of what follows (8)."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, help="the archive to write")
    parser.add_argument("--arch", type=int, default=90, help="of the GPU: 90 is Hopper")
    parser.add_argument("--python", default="3.12", help="version on that machine")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install(site, chosen.python)
        prune(site)
        for library in site.rglob("*.so"):
            keep_only(chosen.arch, library)
        archive(site, chosen.bundle)
    print(f"{chosen.bundle}: {chosen.bundle.stat().st_size / 2**20:.1f} MiB")


def install(site: Path, python: str) -> None:
    """Unpack the wheels of `PACKAGES`, for that machine and not for this one."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--no-compile", "--implementation", "cp"]
    command += ["--target", str(site), "--python-version", python]
    for minor in GLIBC_MINORS:
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64"]
    subprocess.run([*command, "-r", str(PACKAGES)], check=True)


def prune(site: Path) -> None:
    """Remove what an engine of a dense model on one GPU never loads."""
    for path in [p for p in site.rglob("*") if p.is_file()]:
        if LEFT_OUT.search(path.relative_to(site).as_posix()):
            path.unlink()
    shutil.rmtree(site / "bin", ignore_errors=True)


def keep_only(arch: int, library: Path) -> None:
    """Overwrite machine code for other GPUs with zeros, which take no room packed.

    The driver picks the entry of its own architecture by its header; those stay.
    """
    code = bytearray(library.read_bytes())
    start = code.find(FAT_BINARY)
    while start >= 0:
        version, header, size = struct.unpack_from("<HHQ", code, start + 4)
        entry, end = start + FAT_HEADER, start + FAT_HEADER + size
        if (version, header) != (1, FAT_HEADER) or end > len(code):
            end = entry = start + len(FAT_BINARY)  # looks like one and is none
        while entry < end:
            entry_header, length = struct.unpack_from("<IQ", code, entry + 4)
            (entry_arch,) = struct.unpack_from("<I", code, entry + 28)
            first = entry + entry_header
            if entry_arch != arch:
                code[first : first + length] = bytes(length)
            entry = first + length
        start = code.find(FAT_BINARY, end)
    library.write_bytes(code)


def archive(site: Path, bundle: Path) -> None:
    """Pack small rather than fast: it is carried more often than it is made."""
    preset = 9 | lzma.PRESET_EXTREME
    with tarfile.open(bundle, "w:xz", preset=preset) as file:
        file.add(site, arcname=".")


if __name__ == "__main__":
    main()
