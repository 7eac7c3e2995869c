"""The draft vocabulary: kept by a worker, for the next server to begin with.

All ranks of an engine must have the same rows, while another server may replace the
file between two reads. So one rank reads, and hands over what it has read.
"""

from pathlib import Path
from typing import Any

from pydantic import Field
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_mtp.drafting.vocabulary import DraftVocabulary
from vllm_mtp.drafting.vocabulary_policy import VocabularyPolicy
from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.warm_start.identity import file_name, identity_of
from vllm_mtp.integration.warm_start.state_file import State, StateFile

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

MAX_TOKEN_IDS = 2**16
"""That are kept: four times as many as a vocabulary has rows unless a user says so."""


class VocabularyState(State):
    """Which tokens were worth a row."""

    num_rows: int = Field(ge=1)
    is_active: bool
    token_ids: list[int] = Field(max_length=MAX_TOKEN_IDS)
    """The more worth a row the earlier."""


class KeptVocabulary:
    """A draft vocabulary, in a file."""

    def __init__(
        self, folder: Path, identity: dict[str, str], policy: VocabularyPolicy
    ) -> None:
        """Let the vocabulary begin with what is there. All ranks call it together."""
        self._policy, self._identity = policy, identity
        self._num_passes = 0
        name = file_name(identity, "vocabulary")
        self._file = StateFile(folder, name, VocabularyState, identity)
        ranks = get_tp_group()
        self._writes = ranks.is_first_rank
        state = self._file.read() if self._writes else None
        state = ranks.broadcast_object(state, src=0)
        if state is not None:
            self._restore(state)

    def _restore(self, state: VocabularyState) -> None:
        vocabulary = self._policy.vocabulary
        wrong = [i for i in state.token_ids if not 0 <= i < vocabulary.vocab_size]
        if wrong or len(set(state.token_ids)) != len(state.token_ids):
            self._file.ignore(f"token_ids: {wrong[:1] or 'twice the same'}")
            return
        self._policy.begin_with(state.token_ids, state.num_rows, state.is_active)
        logger.info("mtp_plus starts warm: %s", self._file.path)

    def save_if_due(self) -> None:
        """Called where a draft pass begins. Waits for the device, when it saves."""
        self._num_passes += 1
        if self._writes:
            self._file.save_if_due(self._num_passes, self._take)

    def _take(self) -> VocabularyState:
        vocabulary: DraftVocabulary = self._policy.vocabulary
        return VocabularyState.model_construct(
            identity=self._identity,
            num_rows=vocabulary.num_rows,
            is_active=self._policy.is_active,
            token_ids=vocabulary.ranked_token_ids(MAX_TOKEN_IDS),
        )


def keep(policy: VocabularyPolicy, vllm_config: Any) -> KeptVocabulary | None:
    """Begin warm, and keep what is learned, where the user has named a folder."""
    own = settings_of(vllm_config)
    if own.warm_start_path is None or own.lists_draft_vocab:
        return None
    return KeptVocabulary(Path(own.warm_start_path), identity_of(vllm_config), policy)
