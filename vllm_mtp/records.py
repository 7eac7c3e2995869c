"""The records that the stages of a step exchange.

Imports nothing of the project, and torch only for type checkers, so that every stage
(the pure-Python controllers included) can use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class DecodeRequest(NamedTuple):
    """A request that will decode in the next step, as a controller sees it."""

    request_id: str
    num_context_tokens: int
    """Tokens whose KV the target reads when it verifies this request's drafts."""
    is_greedy: bool = True
    """Temperature 0. Sampled requests are estimated apart: they accept less."""
    pinned_draft_length: int | None = None
    """Draft length that the user fixed for this request, 0 for off; None leaves it to
    the controller."""
    num_pending_tokens: int = 0
    """Tokens that the MTP layers have to catch up on before they draft for it."""
    is_constrained: bool = False
    """Its tokens must be among listed ones, or follow a grammar. Estimated apart: it is
    known before the first draft, and such texts have little in common with others."""
    is_copying: bool = False
    """Its context has offered a continuation of its drafts lately."""


class DraftChances(NamedTuple):
    """What is believed of a request's draft tokens, each given those before it."""

    # [draft_depth]
    log_odds: Sequence[float]
    """Of acceptance at confidence 0."""
    slope: float
    """Log-odds for each unit of confidence."""
    # [draft_depth]
    unseen: Sequence[float]
    """Probability of acceptance while the confidence is unknown."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop drafting, and how many of a request's draft tokens to verify.

    All worth is in expected committed tokens.
    """

    chances: Mapping[str, DraftChances]
    """By request id; others get no draft."""
    # [draft_depth + 1]
    verify_prices: Sequence[float]
    """Of verifying 0, 1, .. draft_depth draft tokens of one request."""
    step_price: float
    """Of one more draft step."""
    # request id -> [number of tokens]
    copies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Survival of tokens that the request's context may offer after its draft, of which
    the first stands for the draft; others' drafts are not continued."""


class DraftDecision(NamedTuple):
    """How many draft tokens to propose now and to verify in the next step."""

    draft_depth: int
    """Draft steps that the MTP layers run for the whole batch, 0..K_max."""
    num_draft_tokens: Mapping[str, int]
    """Draft length K of each request, 0..draft_depth, by request id."""
    reason: str = ""
    """Why, in a word for logs and metrics: ``exploit``, ``probe``, ``fixed``, ..."""
    stop_rule: StopRule | None = None
    """Stops drafting earlier, where the worker can."""
    copy_lengths: Mapping[str, int] = {}
    """Draft length of a request whose context continues its draft, K to K_max, by
    request id; of others, and where it does not, K stays."""
    copy_acceptance: float = 0.0
    """Of a copied token, if those before it are accepted, in the mean."""
    copied_drafts: Mapping[str, int] = {}
    """Draft length, 0 to K_max, of a request whose context offers a draft before
    anything is drafted, by request id; of others, and where it does not, K stays."""


class RequestOutcome(NamedTuple):
    """What verification made of one request's draft."""

    request_id: str
    num_draft_tokens: int
    """Draft tokens the target verified; those that the grammar forbade are left out."""
    num_accepted_tokens: int
    confidences: tuple[float, ...] = ()
    """Of the draft tokens, and of those drafted beyond them, in order: logit of the
    proposal's first choice minus that of its second. Empty where unknown."""
    num_left_out: int = 0
    """Draft tokens after those, which were not verified for others' sake."""
    num_would_be_accepted: int = 0
    """Of those left out, by their confidences; 0 after a rejection."""
    num_forbidden: int = 0
    """Draft tokens that had rows and that a grammar forbade."""
    num_copied: int = 0
    """The last ones of the draft tokens, which are no MTP layer's: they were copied
    from the request's context, or stand where it was expected to go on."""

    @property
    def acceptance_length(self) -> int:
        """Tokens committed: accepted ones and the recovered or bonus token."""
        return self.num_accepted_tokens + 1


class StepOutcome(NamedTuple):
    """What one engine step cost and brought."""

    requests: tuple[RequestOutcome, ...]
    """Requests that had draft tokens to verify."""
    num_requests: int
    """All requests of the step, those in prefill included."""
    num_scheduled_tokens: int
    """Rows of the target's forward pass."""
    step_time_s: float
    """Seconds from the step's start to its output. Where steps overlap (async
    scheduling): seconds since the output before it."""
    draft_depth: int = 0
    """Draft steps of the MTP layers whose time lies within ``step_time_s``: those at
    the end of this step, or, where the output is handed over before drafting (async
    scheduling on a GPU), those at the end of the step before."""
    num_decode_requests: int = 0
    """Requests that decoded, those without draft tokens included."""
    num_prefill_tokens: int = 0
    """Rows of requests in prefill. Such steps tell nothing about the cost of K."""
    num_context_tokens: int = 0
    """Tokens in the KV cache of the requests that decoded, summed."""
    num_backfill_tokens: int = 0
    """Tokens that the MTP layers had not seen while drafting was off, and saw in this
    step before they drafted."""

    is_greedy: bool = True
    """No request was sampled. What verifying and drafting take beside the passes
    differs: the likeliest token of a row is found at once."""
    shadow_drafts: tuple[RequestOutcome, ...] = ()
    """Requests that had a draft of which nothing was verified (K = 0): one token each,
    accepted if it is the one that the target then sampled or, where it was drawn, if it
    stood verification's test against the row that was sampled from. This tells as much
    as a verification, for no rows. Known where drafts come back to the scheduler (sync
    scheduling)."""
    copies: tuple[RequestOutcome, ...] = ()
    """Continuations that contexts offered, verified or not: tokens that could be
    compared with what was committed in their place, and how many were the same. The
    draft that a context agreed with counts as the first of them."""
    copied_drafts: tuple[RequestOutcome, ...] = ()
    """The same of what they offered where nothing was drafted."""

    @property
    def num_draft_tokens(self) -> int:
        return sum(request.num_draft_tokens for request in self.requests)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(request.num_accepted_tokens for request in self.requests)


class StepEstimate(NamedTuple):
    """What a cost model thinks of a step that only decodes."""

    # seconds
    target_s: float
    """Of the same batch without speculation."""
    verify_s: float
    """Of verifying its draft tokens."""
    draft_s: float
    """Of its draft steps."""
    goodput: float
    """Committed tokens per second that the plan in force promises."""


class RejectedSlots(NamedTuple):
    """Where verification left KV of tokens that were never committed.

    Rejected slots are the last ``num_rejected_tokens[i]`` rows of request ``i``::

        rows of request i      | committed rows        | rejected rows       |
        query_start_loc[i] ->  |                       |  <- num_rejected -> |
    """

    # [num_reqs] int32 (V1) or int64 (V2), on the worker's device
    num_rejected_tokens: "torch.Tensor"
    # [num_reqs + 1] int32: first row of each request; None where the rows are not
    # known yet when the count is (Model Runner V2 observes before it drafts)
    query_start_loc: "torch.Tensor | None"
    # [num_tokens] int64: KV slot of each row, padding is -1
    slot_mapping: "torch.Tensor | None"


class RollbackPlan(NamedTuple):
    """What a step verified: the input of the metadata rollback.

    Request ``i`` owns rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]`` of the
    step. A request in prefill, or decoding without drafts, has 0 draft tokens; one
    without rows is the padding of a CUDA graph.
    """

    # [num_reqs, max_sampled] int32 or int64, any row stride; -1 where not sampled
    sampled_token_ids: "torch.Tensor"
    # [num_reqs] int32, inclusive running sum; None where no request had drafts
    cu_num_draft_tokens: "torch.Tensor | None"
    # [num_reqs] bool: sampled tokens are thrown away (the prompt goes on)
    discarded: "torch.Tensor"
    # [num_reqs] int32: next token where none was sampled
    backup_next_token_ids: "torch.Tensor"
    # [num_reqs + 1] int32
    query_start_loc: "torch.Tensor"
    # [num_reqs] int32, the step's rows included
    seq_lens: "torch.Tensor"
    # [num_rows] int64: KV slot of each row
    slot_mapping: "torch.Tensor"
    vocab_size: int


class GreedyStep(NamedTuple):
    """What a step of greedy requests alone is verified by, on the worker's device.

    A row is a token whose successor the target has chosen. Request ``i`` owns rows
    ``cu_num_logits[i]`` to ``cu_num_logits[i + 1]``: that of its newest token, then
    those of its draft tokens.
    """

    # [num_rows] int64: the target's choice after each row
    target_token_ids: "torch.Tensor"
    # [num_tokens] int32: the step's tokens, and int64: their positions
    input_ids: "torch.Tensor"
    positions: "torch.Tensor"
    # [num_rows] int64: which of those tokens a row is
    logits_indices: "torch.Tensor"
    # [num_reqs + 1] int32
    cu_num_logits: "torch.Tensor"
    # [num_reqs or more] int32, the step's tokens included
    seq_lens: "torch.Tensor"
    # [num_reqs] int64: where in `prefill_len` each request is
    idx_mapping: "torch.Tensor"
    # [max_num_reqs] int32: tokens that are computed before the first is sampled
    prefill_len: "torch.Tensor"


class RolledBack(NamedTuple):
    """What remains of a step when its rejected draft tokens are gone."""

    # [num_reqs] int32 each, rows of one tensor in this order
    next_token_ids: "torch.Tensor"
    num_sampled_tokens: "torch.Tensor"
    """Accepted tokens and the recovered or bonus token; 0 where discarded."""
    num_accepted_tokens: "torch.Tensor"
    num_rejected_tokens: "torch.Tensor"
    last_valid_rows: "torch.Tensor"
    """Row of the last token that is final; its output proposes the next draft."""
    seq_lens: "torch.Tensor"
    """Without the rejected tokens: the committed length before the next token."""
