"""Model Runner V1: drafts that a request's grammar would let through.

vLLM keeps grammars in the scheduler, which cuts a draft at its first token that is not
allowed: the draft steps for the rest were for nothing. Here the worker follows the same
grammars, and masks each draft step with the state that the draft has reached. A token
that is the only one allowed is then drafted for sure. The scheduler still checks every
draft; if a grammar here is not ready, or not known, drafts are as they were.

Each draft token must be known on the host before the next step, so this is done where
that is cheap: on a CPU or eagerly, on one rank, with sync scheduling.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

# Below "vllm", so that vLLM's log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

_BITS = 32
_MAX_CACHED = 64
"""Grammars that are taken to be in xgrammar's cache: the last ones that were used."""


class _Follower:
    """A request's grammar; as much of vLLM's ``Request`` as compiling it asks for."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._on_failure = on_failure
        self.request_id = request_id
        self.sampling_params = params
        self.structured_output_request = StructuredOutputRequest.from_sampling_params(
            params
        )
        self.committed: list[int] = []
        """Tokens that the grammar has not taken yet: it is being compiled."""
        self.is_new = True
        """No draft has followed the grammar yet."""
        self.is_lost = False
        """The grammar did not take a token that the target did."""

    def grammar(self) -> Any:
        """Up to date; None while it is being compiled, and where it cannot be."""
        asked = self.structured_output_request
        if asked is None or self.is_lost or not asked.is_grammar_ready:
            return None
        grammar = asked.grammar
        if isinstance(grammar, Exception):
            self.fail(grammar)
            return None
        if grammar is None:
            self.is_lost = True
            return None
        if self.committed:
            self.is_lost = not grammar.accept_tokens(self.request_id, self.committed)
            self.committed = []
        return None if self.is_lost or grammar.is_terminated() else grammar

    def fail(self, cause: Exception) -> None:
        """The grammar cannot be compiled here."""
        self.is_lost = True
        self._on_failure(cause)


@dataclass
class _Row:
    """A request of the batch whose drafts are masked in this pass."""

    row: int
    grammar: Any
    num_taken: int = 0
    """Draft tokens that the grammar has taken."""
    is_void: bool = False
    """A draft token was not allowed: what follows it will be cut."""


def may_mask_drafts(vllm_config: Any) -> bool:
    """Whether this engine's drafts can follow grammars."""
    structured = vllm_config.structured_outputs_config
    return (
        not vllm_config.use_v2_model_runner
        and not vllm_config.scheduler_config.async_scheduling
        and vllm_config.parallel_config.world_size_across_dp == 1
        and (current_platform.is_cpu() or vllm_config.model_config.enforce_eager)
        and not vllm_config.model_config.skip_tokenizer_init
        # Before its end a request is free: only the scheduler knows where that is.
        and not structured.reasoning_parser
    )


class DraftGrammars:
    """The grammars of all running requests, and how far this pass has taken them."""

    def __init__(self, vllm_config: Any) -> None:
        """Nothing is compiled before a request asks for it."""
        self._config = vllm_config
        self._manager: StructuredOutputManager | None = None
        self._followers: dict[str, _Follower] = {}
        self._cached: dict[Any, None] = {}
        """Grammars that were compiled here, the last used at the end."""
        self._rows: list[_Row] = []
        self._has_warned = False
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._bitmask = torch.zeros(1, -(-vocab_size // _BITS), dtype=torch.int32)

    def meet(
        self, requests: Iterable[Any], finished_request_ids: Iterable[str]
    ) -> None:
        """These requests are about to run, and those are over.

        Args:
            requests: vLLM's ``NewRequestData``.
            finished_request_ids: May name requests without a grammar.
        """
        for request_id in finished_request_ids:
            self._followers.pop(request_id, None)
        for request in requests:
            # A streaming session comes back with other parameters.
            self._followers.pop(request.req_id, None)
            params = request.sampling_params
            if params is None or params.structured_outputs is None:
                continue
            follower = _Follower(request.req_id, params, self._warn)
            if follower.structured_output_request is not None:
                self._compile(follower)
                self._followers[request.req_id] = follower

    def _compile(self, follower: _Follower) -> None:
        """Beside the engine's steps, or at once where it is in xgrammar's cache.

        A thread of its own gets its turn late on a busy machine, and the request's
        first drafts would know no grammar for the sake of a fraction of a millisecond.
        """
        if self._manager is None:
            self._manager = StructuredOutputManager(self._config)
        asked = follower.structured_output_request
        assert asked is not None
        if asked.structured_output_key not in self._cached:
            self._manager.grammar_init(follower)
            return
        try:
            asked.grammar = self._manager._create_grammar(follower)
        except Exception as error:
            # The scheduler has the same grammar, and it is the one that counts.
            follower.fail(error)

    def _warn(self, cause: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a grammar could not be compiled for drafts, of which the scheduler "
                "will cut more: %r (further failures are not reported)",
                cause,
            )

    def _remember(self, follower: _Follower) -> None:
        """That this grammar was compiled."""
        asked = follower.structured_output_request
        if asked is None or asked.params._backend != "xgrammar":
            return
        key = asked.structured_output_key
        self._cached.pop(key, None)
        self._cached[key] = None
        if len(self._cached) > _MAX_CACHED:
            del self._cached[next(iter(self._cached))]

    def commit(
        self,
        request_ids: Sequence[str],
        # [num_requests, max_sampled], -1 where there is none
        token_ids: torch.Tensor,
    ) -> None:
        """A step has committed these tokens."""
        if not self._followers:
            return
        for row, request_id in enumerate(request_ids):
            follower = self._followers.get(request_id)
            if follower is not None:
                sampled = token_ids[row].tolist()
                follower.committed += [token for token in sampled if token >= 0]

    def begin_pass(self, request_ids: Sequence[str]) -> None:
        """A draft pass for these requests begins."""
        self._rows = []
        if not self._followers:
            return
        for row, request_id in enumerate(request_ids):
            follower = self._followers.get(request_id)
            grammar = follower and follower.grammar()
            if follower is not None and grammar is not None:
                if follower.is_new:
                    self._remember(follower)
                    follower.is_new = False
                self._rows.append(_Row(row, grammar))

    def end_pass(self) -> None:
        """The pass is over: what the target will say is not known yet."""
        for each in self._rows:
            if each.num_taken:
                each.grammar.rollback(each.num_taken)
        self._rows = []

    def mask(
        self,
        # [num_requests, number of columns]
        logits: torch.Tensor,
        # [number of columns] int64; None: columns are token ids
        token_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits without tokens that may not come; those given stay as they are.

        Where no column may come the row stays: the scheduler will cut the draft.
        """
        if self._rows:
            logits = logits.clone()
        for each in self._rows:
            if each.is_void or each.grammar.is_terminated():
                continue
            each.grammar.fill_bitmask(self._bitmask, 0)
            is_allowed = _unpack(self._bitmask[0], token_ids, logits.shape[1])
            if is_allowed.any():
                is_forbidden = ~is_allowed.to(logits.device)
                logits[each.row].masked_fill_(is_forbidden, -torch.inf)
        return logits

    def take(
        self,
        # [num_requests] int64
        choices: torch.Tensor,
    ) -> None:
        """These are the draft tokens of a step."""
        if not self._rows:
            return
        token_ids = choices.tolist()
        for each in self._rows:
            if each.is_void or each.grammar.is_terminated():
                continue
            draft = [token_ids[each.row]]
            each.is_void = not each.grammar.validate_tokens(draft)
            if not each.is_void:
                each.grammar.accept_tokens("", draft)
                each.num_taken += 1


def _unpack(
    # [ceil(vocab_size / 32)] int32
    bitmask: torch.Tensor,
    # [number of columns] int64
    token_ids: torch.Tensor | None,
    num_columns: int,
) -> torch.Tensor:
    """``[number of columns]`` bool."""
    ids = torch.arange(num_columns) if token_ids is None else token_ids.cpu()
    return (bitmask[ids // _BITS] >> (ids % _BITS)) & 1 == 1
