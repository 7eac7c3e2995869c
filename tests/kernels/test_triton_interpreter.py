"""Triton without a GPU: its interpreter runs our tests, its compiler our kernels.

The interpreter must be chosen before Triton's kernels are defined and then holds for
the whole process, so it gets one of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mtp.kernels import triton_kernels, triton_ops

ROOT = Path(__file__).parents[2]
INTEGERS = {
    "*i64": {
        "slot_mapping",
        "out_slot_mapping",
        "planes",
        "target_token_ids",
        "positions",
        "logits_indices",
        "idx_mapping",
        "draft_tokens",
        "scores",
    },
    "*i1": {"discarded"},
    "i32": {
        "num_reqs",
        "vocab_size",
        "token_row_stride",
        "token_column_stride",
        "max_sampled",
        "num_rows",
        "field_stride",
        "request_stride",
        "num_padded_rows",
        "num_columns",
        "row_stride",
        "token_stride",
        "draft_stride",
        "num_drafts",
        "num_blocks",
        "max_model_len",
    },
    "*fp32": {"temperature", "top_p", "min_p"},
    "*bf16": {"logits"},
}
"""Types of arguments; others are ``*i32``, or what a case says."""
METADATA = {"PADDING": -1, "HAS_DRAFTS": True, "COLUMNS": 8, "ROWS": 1024}
PAD = {"PADDING": -1, "ROWS": 1024}
SCRUB = {"COLUMNS": 17, "WORDS": 512}
ACCEPT = {"NOTHING": -1, "COLUMNS": 8}
TRUNCATE = {"COLUMNS": 16384, "HALVINGS": 16, "SPAN": 32.0}
SCORE = {"MIN_MATCH": 3, "MAX_MATCH": 16, "PLACES": 1024}
CONTINUE = {"FILLER": 0, "COLUMNS": 8, "BLOCKS": 128}

pytestmark = pytest.mark.skipif(
    triton_ops.INTERPRETED, reason="this is the process with the interpreter"
)


def test_the_kernel_tests_pass_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    # Those of the CPU: a GPU runs compiled kernels, in the tests' own process.
    selection = ["-k", "triton-cpu", "-p", "no:cacheprovider", "-q", "-rs"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels", *selection],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout
    assert int(passed[1]) > 40, result.stdout
    assert "skipped" not in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("kernel", "constants", "other_types"),
    [
        ("rollback_metadata", METADATA, {}),
        ("rollback_metadata", METADATA, {"sampled_token_ids": "*i64"}),
        ("rollback_metadata", METADATA | {"HAS_DRAFTS": False, "COLUMNS": 1}, {}),
        ("pad_rejected_rows", PAD, {}),
        ("pad_rejected_rows", PAD, {"num_rejected_tokens": "*i64"}),
        ("scrub_rejected_slots", SCRUB, {}),
        ("scrub_rejected_slots", SCRUB, {"num_rejected_tokens": "*i64"}),
        ("accept_greedily", ACCEPT, {"sampled_token_ids": "*i64"}),
        (
            "accept_greedily",
            ACCEPT | {"COLUMNS": 1},
            {"sampled_token_ids": "*i64"},
        ),
        ("truncate_rows", TRUNCATE, {}),
        ("score_matches", SCORE, {}),
        ("continue_drafts", CONTINUE, {}),
    ],
)
def test_a_kernel_compiles_for_a_gpu(kernel, constants, other_types) -> None:
    """To PTX for Hopper, which needs no GPU; the interpreter accepts more."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_kernels, kernel)
    types = {name: kind for kind, names in INTEGERS.items() for name in names}
    types |= other_types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "*i32") for name in function.arg_names},
        constexprs={(function.arg_names.index(k),): v for k, v in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in compiled.asm["ptx"]
    if kernel == "scrub_rejected_slots":
        widths = {f"st.global.b{bits}" for bits in (8, 16, 32, 64)}
        assert all(width in compiled.asm["ptx"] for width in widths)
