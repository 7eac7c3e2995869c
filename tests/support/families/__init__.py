"""Model families whose random checkpoints the tests run, one file each."""

from tests.support.families import deepseek_v3, ernie45_moe, glm4_moe, mimo
from tests.support.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        mimo.FAMILY,
        deepseek_v3.FAMILY,
        glm4_moe.FAMILY,
        ernie45_moe.FAMILY,
    )
}
"""By name: also the parameter ids of the tests."""
