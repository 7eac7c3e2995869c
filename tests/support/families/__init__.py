"""Model families whose random checkpoints the tests run, one file each."""

from tests.support.families import (
    deepseek_v3,
    deepseek_v32,
    ernie45_moe,
    exaone_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    hy_v3,
    longcat_flash,
    mimo,
    mimo_v2,
    nemotron_h,
    openpangu,
    qwen3_5,
    qwen3_next,
    step3p5,
)
from tests.support.families.family import Family

ATTENTION_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        mimo.FAMILY,
        deepseek_v3.FAMILY,
        glm4_moe.FAMILY,
        ernie45_moe.FAMILY,
        step3p5.FAMILY,
        mimo_v2.FLASH,
        mimo_v2.PRO,
        gemma4.FAMILY,
        longcat_flash.FAMILY,
        glm4_moe_lite.FAMILY,
        exaone_moe.FAMILY,
        hy_v3.FAMILY,
        openpangu.FAMILY,
    )
}
"""By name: also the parameter ids of the tests."""

HYBRID_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (qwen3_next.FAMILY, qwen3_5.FAMILY, nemotron_h.FAMILY)
}
"""Those with recurrent states beside the KV cache."""

FAMILIES = ATTENTION_FAMILIES | HYBRID_FAMILIES
NOT_RUN: dict[str, Family] = {deepseek_v32.FAMILY.name: deepseek_v32.FAMILY}
"""Their kernels are for GPUs only: weights and config are tested, by headers."""
