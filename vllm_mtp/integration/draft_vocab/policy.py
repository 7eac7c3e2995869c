"""The draft vocabulary of an engine: made when its draft model is loaded.

Shared by the drafters of both runners. They report what was committed, and when a draft
pass begins; from then on to the end of the pass it does not change whether logits are
of the draft vocabulary.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_mtp.config import FULL
from vllm_mtp.drafting.vocabulary import (
    DraftVocabulary,
    choose_num_rows,
)
from vllm_mtp.drafting.vocabulary_list import listed_token_ids
from vllm_mtp.drafting.vocabulary_policy import VocabularyPolicy
from vllm_mtp.integration.cpu.int8_drafts import drafts_in_int8
from vllm_mtp.integration.draft_vocab.head import (
    DraftHead,
    DraftLogits,
    replace_logits_processors,
    shards_of,
)
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.scheduler.messages import VocabularyState
from vllm_mtp.integration.warm_start.vocabularies import KeptVocabulary, keep
from vllm_mtp.integration.worker.draft_sampling import draws_drafts

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")


_STEPS_COUNTED_AT_ONCE = 64
"""Small tensors are kept as long; choosing rows asks for all of them before."""


class VocabularyDrafting:
    """Draft heads, the vocabulary behind them, and whether it is in use."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        """Nothing is known of the head yet: it is the model that hands it over."""
        self._config = vllm_config
        self._device = device
        self._heads: dict[int, DraftHead | None] = {}
        self._committed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Of steps that are not counted yet, see `observe`."""
        self._knows_all_heads = True
        self._largest_tp_size = 1
        self._policy: VocabularyPolicy | None = None
        self._is_full = settings_of(vllm_config).draft_vocab == FULL
        self._kept: KeptVocabulary | None = None
        self.is_active = False
        self._reported = VocabularyState(None, False)
        self.takes_top_tokens = False
        self.grammars: Any = None
        """``DraftGrammars``, where drafts follow grammars."""
        self.constraints: Any = None
        """``DraftConstraints``, where drafts know what requests forbid."""
        self.reduces_top_tokens = False
        """Whether ranks can exchange their best choices instead of all logits."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """None where drafting goes over the whole head for good."""
        return None if self._policy is None else self._policy.vocabulary

    def install(self, model: Any) -> None:
        """Put draft heads into a draft model whose weights are loaded.

        Args:
            model: vLLM's draft model.
        """
        replaced = replace_logits_processors(
            model, lambda theirs: DraftLogits(theirs, self)
        )
        if not replaced:
            return
        # Called once for each layer so that heads are known, and their copies made,
        # before vLLM measures what memory is left.
        draft = self._config.speculative_config.draft_model_config
        hidden = torch.zeros(
            1, draft.get_hidden_size(), dtype=draft.dtype, device=self._device
        )
        num_layers = getattr(draft.hf_config, "n_predict", None) or 1
        for layer in range(num_layers):
            model.compute_logits(hidden, **({"spec_step_idx": layer} if layer else {}))
        self.reduces_top_tokens = (
            self._largest_tp_size > 1
            and self._knows_all_heads
            and all(each.scale > 0 for each in replaced)
        )

    @contextmanager
    def top_tokens(self) -> Iterator[None]:
        """Within: a draft model's logits are its best choices, ``[num_rows]`` int64."""
        self.takes_top_tokens = True
        try:
            yield
        finally:
            self.takes_top_tokens = False

    def begin_pass(self) -> None:
        """A draft pass begins: rows may move now, and at no other time."""
        if self._policy is None:
            return
        vocabulary = self._policy.vocabulary
        warning = self._policy.before_drafting(lambda: self._count(vocabulary))
        if warning is not None:
            logger.warning("%s", warning)
        self.is_active = self._policy.is_active
        if self._kept is not None:
            self._kept.save_if_due()

    def take_state(self) -> VocabularyState | None:
        """What has become of it, if that has changed since the last call."""
        coverage = None if self._policy is None else self._policy.known_coverage
        state = VocabularyState(coverage, self.is_active)
        if state == self._reported:
            return None
        self._reported = state
        return state

    def to_target(
        self,
        # any shape, int64: what draft logits were sampled to
        choices: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids."""
        if not self.is_active or self.vocabulary is None:
            return choices
        return self.vocabulary.to_target(choices)

    def whole_logits(
        self,
        # [num_requests, rows of the draft vocabulary], or of the whole one
        logits: torch.Tensor,
        vocab_size: int,
    ) -> torch.Tensor:
        """``[num_requests, vocab_size]``: what cannot be proposed is impossible."""
        if logits.shape[1] == vocab_size or self.vocabulary is None:
            return logits
        return self.vocabulary.spread(logits, -torch.inf)

    def observe(
        self,
        # [num_requests, max_sampled], -1 where there is none
        token_ids: torch.Tensor,
        # [num_requests or more]: of each request so many count, the others may be
        # anything; None where all do that are not -1
        num_sampled: torch.Tensor | None = None,
    ) -> None:
        """A step has committed these tokens; counted a few steps at a time."""
        if self.vocabulary is None:
            return
        self._committed.append((token_ids, num_sampled))
        if len(self._committed) == _STEPS_COUNTED_AT_ONCE:
            self._count(self.vocabulary)

    def _count(self, vocabulary: DraftVocabulary) -> None:
        if self._committed:
            vocabulary.observe(committed_tokens(self._committed))
            self._committed.clear()

    def expect_requests(self, requests: Collection[Any]) -> None:
        """These requests are about to run.

        Args:
            requests: vLLM's ``NewRequestData``.
        """
        if self._policy is not None:
            for request in requests:
                # A prompt of embeddings has no token ids.
                if request.prompt_token_ids:
                    self._policy.expect(torch.tensor(request.prompt_token_ids))

    def head_for(self, head: Any) -> DraftHead | None:
        """See ``HeadChoice``."""
        if id(head) not in self._heads:
            self._meet(head)
        return self._heads[id(head)] if self.is_active else None

    def copy_anew(self) -> None:
        """The weights of the model have changed: the draft heads follow."""
        for head in self._heads.values():
            if head is not None:
                head.copy_anew()

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """See ``HeadChoice``."""
        if self.grammars is None and self.constraints is None:
            return logits
        vocabulary = self.vocabulary if self.is_active else None
        masked = logits
        if self.constraints is not None:
            masked = self.constraints.apply(logits, vocabulary)
        if self.grammars is not None:
            token_ids = None if vocabulary is None else vocabulary.token_ids
            masked = self.grammars.mask(masked, token_ids)
        if masked is logits:
            return logits
        # Nothing is left where the draft vocabulary has none of what may come: any
        # draft will do, but its distribution must be one.
        is_empty = masked.amax(dim=-1, keepdim=True) == -torch.inf
        return torch.where(is_empty, logits, masked)

    def _meet(self, head: Any) -> None:
        if not isinstance(head, VocabParallelEmbedding):
            self._knows_all_heads = False
            self._draft_from_all()
        else:
            self._largest_tp_size = max(self._largest_tp_size, head.tp_size)
        if not self._is_full and self._policy is None:
            self._policy = self._make_policy(head)
            self.is_active = self._policy is not None and self._policy.is_active
        if self._policy is None:
            self._draft_from_all()
            self._heads[id(head)] = None
        else:
            # It holds on to the head, whose id is not another's then.
            self._heads[id(head)] = DraftHead(
                head, self._policy.vocabulary, drafts_in_int8(self._config)
            )

    def _draft_from_all(self) -> None:
        """There is a head of which no rows can be taken, or too few."""
        self._is_full, self._policy, self.is_active = True, None, False

    def _has_fixed_columns(self) -> bool:
        """Whether draft logits have as many columns for good: in CUDA graphs, and
        where V2 keeps proposals."""
        is_v2 = self._config.use_v2_model_runner
        return drafts_in_full_graphs(self._config) or (
            is_v2 and draws_drafts(self._config)
        )

    def _make_policy(self, head: VocabParallelEmbedding) -> VocabularyPolicy | None:
        """None where the head has too few rows for a draft vocabulary to pay."""
        own, shards = settings_of(self._config), shards_of(head)
        listed = listed_token_ids(own)
        num_rows = choose_num_rows(own, listed, shards[-1].end, len(shards))
        fewest = min(shard.end - shard.first for shard in shards) * len(shards)
        if num_rows is None or num_rows > fewest:
            return None
        vocabulary = DraftVocabulary(
            num_rows, shards, end_token_ids(self._config), self._device
        )
        if listed is not None:
            vocabulary.prefer(listed)
        policy = VocabularyPolicy(
            vocabulary,
            is_fixed=listed is not None,
            may_switch=not self._has_fixed_columns(),
            may_resize=own.draft_vocab_size is None
            and not self._config.use_v2_model_runner,
        )
        self._kept = keep(policy, self._config)
        return policy


def committed_tokens(
    steps: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> torch.Tensor:
    """``[num_tokens]``: what steps have committed, and -1.

    On a GPU small operations take the host's time, so steps of one shape are done at
    once.

    Args:
        steps: Of each the arguments of `VocabularyDrafting.observe`.
    """
    flat = [token_ids.flatten() for token_ids, counts in steps if counts is None]
    alike = defaultdict(list)
    for token_ids, counts in steps:
        if counts is not None:
            alike[token_ids.shape].append((token_ids, counts[: len(token_ids)]))
    for (_, max_sampled), members in alike.items():
        # [steps, num_requests, max_sampled] and [steps, num_requests]
        token_ids, counts = map(torch.stack, zip(*members, strict=True))
        places = torch.arange(max_sampled, device=token_ids.device)
        none = places >= counts[..., None]
        flat.append(token_ids.masked_fill(none, -1).flatten())
    return torch.cat(flat)


def end_token_ids(vllm_config: Any) -> set[int]:
    """Token ids that end a text of the target."""
    model = vllm_config.model_config
    sources = (model.hf_text_config.to_dict(), model.try_get_generation_config())
    found = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return found


def drafts_in_full_graphs(vllm_config: Any) -> bool:
    """Whether whole draft steps, head included, are replayed from CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    is_eager = vllm_config.model_config.enforce_eager or mode is None
    return (
        vllm_config.use_v2_model_runner and not is_eager and mode.has_full_cudagraphs()
    )
