"""What a decode step costs on machines we have: measured times over rows.

Like `RooflineCost` (``vllm_mtp/tools/plan_cost.py``), which is for machines we do not
have, a curve answers three questions, without noise: the seconds of verifying some
rows, of drafting some steps deep, and of the catch-up pass after a pause.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.control.trace_world import Points


@dataclass(frozen=True)
class TableCost:
    """Times over rows as they were measured; linear between and beyond the points."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    draft_step_s: float
    draft_row_s: float
    """Of one more request in a draft step."""
    catch_up_row_s: float
    """Of one token of the catch-up pass, which needs no head."""
    context_token_s: float = 0.0
    """Of one token of KV in a pass of the target."""

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        inside = np.interp(rows, self.rows, self.seconds)
        rise = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond = np.maximum(rows - self.rows[-1], 0) * rise
        result: Points = inside + beyond + context * self.context_token_s
        return result

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        return depth * (self.draft_step_s + num_requests * self.draft_row_s)

    def catch_up_s(self, num_tokens: int) -> float:
        return self.draft_step_s / 2 + num_tokens * self.catch_up_row_s


CPU_STEP_S = 9.0e-3

CPU_TABLE = TableCost(
    rows=(1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128),
    seconds=tuple(
        CPU_STEP_S * relative
        for relative in (
            1.00, 1.39, 1.33, 1.30, 1.36, 1.42, 1.48, 1.75, 2.0, 3.1, 5.2, 9.6,
        )
    ),
    draft_step_s=0.055 * CPU_STEP_S,
    draft_row_s=0.006 * CPU_STEP_S,
    catch_up_row_s=0.0025 * CPU_STEP_S,
    context_token_s=2e-7,
)  # fmt: skip
"""Two cores, 0.43B bfloat16 model: step times at K = 0, 1, 2, 3 were seen as 1.00,
1.45, 1.48, 1.56 of no speculation, a pass over two rows dearer than one over four.
Beyond 5 rows the times are extrapolated by hand toward the compute bound."""

CPU_CORE_TABLE = TableCost(
    rows=(1, 4, 8, 16, 32, 64, 128),
    seconds=(14.5e-3, 16.8e-3, 20e-3, 28.5e-3, 55e-3, 106e-3, 210e-3),
    draft_step_s=3e-3,
    draft_row_s=0.3e-3,
    catch_up_row_s=0.1e-3,
)
"""One core of an EPYC (Zen 5), 109M parameters in float32: beyond 16 rows a pass takes
in proportion to them, so that drafting for many requests loses whatever is accepted.
The times of draft steps are rounded estimates."""
