"""``configs/gpu/pack.py``: machine code for other GPUs is overwritten, nothing else."""

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "configs" / "gpu" / "pack.py"
ENTRY_HEADER = 64


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(arch: int, code: bytes) -> bytes:
    header = bytearray(ENTRY_HEADER)
    struct.pack_into("<HHIQ", header, 0, 2, 0x101, ENTRY_HEADER, len(code))
    struct.pack_into("<I", header, 28, arch)
    return bytes(header) + code


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_code_of_one_architecture_is_kept(pack: ModuleType, tmp_path: Path) -> None:
    before = fat_binary(entry(80, b"eighty__"), entry(90, b"ninety__"))
    after = fat_binary(entry(80, bytes(8)), entry(90, b"ninety__"))
    # A number that looks like the beginning of one and is none.
    alike = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 2**40) + b"program"
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF" + before + b"host code" + alike + before)
    pack.keep_only(90, library)
    expected = b"\x7fELF" + after + b"host code" + alike + after
    assert library.read_bytes() == expected


def test_no_python_of_vllms_is_left_out(pack: ModuleType) -> None:
    """All of it is imported, what serves other models included."""
    assert not pack.LEFT_OUT.search("vllm/utils/deep_gemm.py")
    assert not pack.LEFT_OUT.search("vllm/third_party/deep_gemm/__init__.py")
    assert pack.LEFT_OUT.search("vllm/third_party/deep_gemm/_C_extension.abi3.so")
    assert pack.LEFT_OUT.search("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so")
    assert not pack.LEFT_OUT.search("vllm/_C_stable_libtorch.abi3.so")
