"""Model families whose random checkpoints the tests run, one file each."""

from tests.support.families import (
    deepseek_v3,
    ernie45_moe,
    glm4_moe,
    mimo,
    nemotron_h,
    qwen3_5,
    qwen3_next,
)
from tests.support.families.family import Family

ATTENTION_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        mimo.FAMILY,
        deepseek_v3.FAMILY,
        glm4_moe.FAMILY,
        ernie45_moe.FAMILY,
    )
}
"""By name: also the parameter ids of the tests."""

HYBRID_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (qwen3_next.FAMILY, qwen3_5.FAMILY, nemotron_h.FAMILY)
}
"""Those with recurrent states beside the KV cache."""

FAMILIES = ATTENTION_FAMILIES | HYBRID_FAMILIES
