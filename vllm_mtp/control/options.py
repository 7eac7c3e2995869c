"""What an engine can do, as far as the choice of draft lengths depends on it."""

from typing import NamedTuple

from vllm_mtp.control.step_times import CostPrior


class GoodputOptions(NamedTuple):
    """Set once, at start."""

    max_token_latency_s: float | None = None
    """Latency mode: no request may be expected to wait longer for a token."""
    depths: tuple[int, ...] | None = None
    """Allowed depths, rising: those with CUDA graphs, or the one that data-parallel
    ranks agree on. None for all up to the bound."""
    max_graph_rows: int = 0
    """Rows of the longest step that is one CUDA graph if all of its requests have
    equally many draft tokens. Where a batch can have such steps it has no others: out
    of the graph every layer waits for the host."""
    sees_shadow_drafts: bool = False
    """Shadow drafts need no verification."""
    draws_drafts: bool = False
    """Drafts of sampled requests are drawn: two draws from flat distributions hardly
    ever agree but are nearly always accepted, so shadow drafts must be verified."""
    stops_early: bool = False
    """The worker can follow a `StopRule`."""
    copies: bool = False
    """Drafts may be continued from contexts."""
    copies_drafts: bool = False
    """Or be copied from them altogether: contexts are searched before anything is
    drafted."""
    cost_prior: CostPrior = CostPrior()
    seed: int = 0
    """Of Thompson sampling."""

    def may_mix(self, num_requests: int) -> bool:
        """Whether requests of a batch may have unequal draft lengths."""
        return 2 * num_requests > self.max_graph_rows
