"""Reading the KV cache of a running in-process engine back, slot by slot.

``SlotWatch`` looks after every step and says which slots are not as they should be.
What a request has committed and which blocks it owns it is told by the scheduler
(``scheduler_owners``) or, where the scheduler is ahead of the worker (async
scheduling), by the worker (``watch_on_worker``).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tests.support.engines import model_runner
from tests.support.watch import scheduler_of
from vllm_mtp.integration.worker import kv_layout
from vllm_mtp.kernels.reference import byte_offsets


class LayerBytes(NamedTuple):
    """Where one layer keeps its slots."""

    storage: torch.Tensor
    # [num_slots, slot_bytes] int64, into the storage
    offsets: torch.Tensor


class CacheReader:
    """Reads all slots of all layers through ``collective_rpc``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        (self._layers,) = llm.collective_rpc(_locate_slots)

    def read(self) -> dict[str, torch.Tensor]:
        """``[num_slots, slot_bytes]`` uint8 of each layer, a copy."""
        (content,) = self._llm.collective_rpc(self._read)
        return content

    def _read(self, worker: Any) -> dict[str, torch.Tensor]:
        return {name: s[offsets] for name, (s, offsets) in self._layers.items()}


def _locate_slots(worker: Any) -> dict[str, LayerBytes]:
    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context
    located = {}
    for group in worker.model_runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            (storage,) = kv_layout.storages([layers[name]])
            planes = kv_layout.slot_planes(
                layers,
                {name: torch.empty(1, dtype=torch.int64)},
                {name: 0},
                config.cache_config.cache_dtype,
            )
            slots = torch.arange(planes[0].num_slots)
            offsets = [
                byte_offsets(plane, slots).reshape(len(slots), plane.slot_bytes)
                + (plane.base_address - storage.data_ptr())
                for plane in planes
            ]
            located[name] = LayerBytes(storage, torch.cat(offsets, dim=1))
    return located


class Group(NamedTuple):
    """A layer's cache group, whose blocks have a size of their own."""

    number: int
    block_size: int


def _groups_of_layers(worker: Any) -> dict[str, Group]:
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    return {
        name: Group(number, group.kv_cache_spec.block_size)
        for number, group in enumerate(groups)
        for name in group.layer_names
    }


class Pending(NamedTuple):
    """What the MTP layers have not read because drafting was disabled."""

    layers: frozenset[str]
    # by request id, [num_tokens] int64 each
    positions: dict[str, torch.Tensor]

    def of(self, layer: str, request_id: str) -> torch.Tensor:
        """Positions of a request that have no KV in a layer yet."""
        nothing = torch.empty(0, dtype=torch.int64)
        return (
            self.positions.get(request_id, nothing) if layer in self.layers else nothing
        )


def _find_pending(worker: Any) -> Pending:
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None) or runner.speculator
    is_v1 = hasattr(drafter, "_draft_attn_layer_names")
    layers = (
        drafter._draft_attn_layer_names if is_v1 else drafter.draft_attn_layer_names
    )
    store = drafter.pending
    positions = {}
    if store is not None:
        owners = torch.from_numpy(store._owners)
        for request_id, number in store._numbers.items():
            rows = (owners == number).nonzero()[:, 0]
            positions[request_id] = store.positions[rows]
    return Pending(frozenset(layers), positions)


NULL_BLOCK = 0
"""In the place of blocks that a sliding window has left behind."""


class Owner(NamedTuple):
    """A running request between two steps."""

    blocks: tuple[tuple[int, ...], ...]
    """Of each cache group."""
    num_committed_tokens: int

    def still_has(self, blocks: tuple[int, ...], group: int) -> bool:
        """Whether these blocks are those that it has, or had until it left them."""
        pairs = zip(blocks, self.blocks[group], strict=False)
        return len(blocks) <= len(self.blocks[group]) and all(
            now in (NULL_BLOCK, then) for then, now in pairs
        )


class SlotWatch:
    """After each step: rejected slots are zero and committed slots are unchanged.

    In the MTP layers pending tokens count as not committed until the KV backfill.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._reader = CacheReader(llm)
        (self._groups,) = llm.collective_rpc(_groups_of_layers)
        self._before = self._reader.read()
        self._pending = self._pending_before = Pending(frozenset(), {})
        self._owners: dict[str, Owner] = {}
        # What lay in a block when its owner got it: a former owner's tokens.
        self._inherited: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.violations: list[str] = []
        self.num_checked_slots = 0
        """Slots at or above a committed length that were looked at."""
        self.num_committed_slots = 0
        self.num_inherited_slots = 0
        """Of the checked ones, those that a former owner filled."""
        self.num_backfilled_slots = 0
        """Slots of the MTP layers that were filled later, when drafting resumed."""

    def after_step(self, owners: dict[str, Owner]) -> None:
        """Compare the cache with what it was and with who owns what now."""
        now = self._reader.read()
        (self._pending,) = self._llm.collective_rpc(_find_pending)
        for request_id, owner in owners.items():
            self._check_committed(request_id, owner, now)
            self._check_rejected(request_id, owner, now)
        self._owners = owners
        self._before = now
        self._pending_before = self._pending
        owned = {
            (name, block)
            for name, owner in owners.items()
            for blocks in owner.blocks
            for block in blocks
        }
        self._inherited = {k: v for k, v in self._inherited.items() if k in owned}

    def _slots(self, blocks: Iterable[int], name: str) -> torch.Tensor:
        block_size = self._groups[name].block_size
        first = torch.tensor(list(blocks), dtype=torch.int64)[:, None]
        return (first * block_size + torch.arange(block_size)).flatten()

    def _is_kept(self, slots: torch.Tensor, name: str) -> torch.Tensor:
        return slots // self._groups[name].block_size != NULL_BLOCK

    def _check_committed(
        self, request_id: str, owner: Owner, now: dict[str, torch.Tensor]
    ) -> None:
        last = self._owners.get(request_id)
        if last is None:
            return
        for name, content in now.items():
            group = self._groups[name].number
            if not owner.still_has(last.blocks[group], group):
                continue  # preempted in between: nothing is kept
            blocks = owner.blocks[group][: len(last.blocks[group])]
            committed = self._slots(blocks, name)[: last.num_committed_tokens]
            read = self._read_by(name, request_id, len(committed))
            slots = committed[read & self._is_kept(committed, name)]
            self.num_committed_slots += len(slots)
            if not content[slots].any(1).all():
                self._report(request_id, name, "a committed slot is empty")
            filled = self._pending_before.of(name, request_id)
            filled = committed[filled[filled < len(committed)]]
            self.num_backfilled_slots += int(torch.isin(slots, filled).sum())
            old = slots[~torch.isin(slots, filled)]
            if not torch.equal(content[old], self._before[name][old]):
                self._report(request_id, name, "a committed slot changed")

    def _read_by(self, name: str, request_id: str, num_tokens: int) -> torch.Tensor:
        """``[num_tokens]`` bool: committed positions that a layer has run over."""
        read = torch.ones(num_tokens, dtype=torch.bool)
        pending = self._pending.of(name, request_id)
        read[pending[pending < num_tokens]] = False
        return read

    def _check_rejected(
        self, request_id: str, owner: Owner, now: dict[str, torch.Tensor]
    ) -> None:
        for block in {block for blocks in owner.blocks for block in blocks}:
            if (request_id, block) not in self._inherited:
                self._inherited[request_id, block] = {
                    name: content[self._slots([block], name)]
                    for name, content in self._before.items()
                }
        for name, content in now.items():
            blocks = owner.blocks[self._groups[name].number]
            slots = self._slots(blocks, name)
            kept = ~self._is_kept(slots, name)
            kept[: owner.num_committed_tokens] |= self._read_by(
                name, request_id, owner.num_committed_tokens
            )
            free = slots[~kept]
            inherited = torch.cat(
                [self._inherited[request_id, block][name] for block in blocks]
            )[~kept]
            self.num_checked_slots += len(free)
            self.num_inherited_slots += int(inherited.any(1).sum())
            written = content[free].any(1) & (content[free] != inherited).any(1)
            if written.any():
                places = (~kept).nonzero()[:, 0].to(written.device)[written.bool()]
                self._report(
                    request_id,
                    name,
                    f"positions {places.tolist()} are not committed "
                    f"({owner.num_committed_tokens} tokens are) or pending, "
                    "and not zero",
                )

    def _report(self, request_id: str, layer: str, what: str) -> None:
        self.violations.append(f"request {request_id}, layer {layer}: {what}")


def scheduler_owners(llm: Any) -> dict[str, Owner]:
    """Running requests as the scheduler sees them after a step (sync scheduling)."""
    scheduler = scheduler_of(llm)
    owners = {}
    for request in scheduler.running:
        blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        owners[request.request_id] = Owner(
            tuple(map(tuple, blocks)), request.num_computed_tokens
        )
    return owners


def watch_on_worker(llm: Any) -> SlotWatch:
    """A watch that looks at the end of every step, told by the worker's own state."""
    watch = SlotWatch(llm)
    runner = model_runner(llm)
    drafter = getattr(runner, "drafter", None) or runner.speculator
    rejected: list[Any] = []
    drafter.on_rejected_slots = rejected.append
    sample_tokens = runner.sample_tokens

    def sample_tokens_then_check(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        output = sample_tokens(grammar_output)
        if state is not None:
            counts = rejected.pop().num_rejected_tokens if rejected else None
            watch.after_step(_worker_owners(runner, state, counts))
        return output

    runner.sample_tokens = sample_tokens_then_check
    return watch


def _worker_owners(
    runner: Any, state: Any, num_rejected: torch.Tensor | None
) -> dict[str, Owner]:
    if hasattr(state, "input_batch"):  # Model Runner V2
        request_ids = state.input_batch.req_ids
        seq_lens = state.input_batch.seq_lens[: len(request_ids)]
        table = runner.block_tables.input_block_tables[0]
    elif state.spec_decode_common_attn_metadata is None:  # no MTP layers run
        request_ids = runner.input_batch.req_ids
        seq_lens = runner.optimistic_seq_lens_cpu[: len(request_ids)]
        table = runner.input_batch.block_table[0].get_device_tensor(len(request_ids))
    else:
        request_ids = runner.input_batch.req_ids
        seq_lens = state.spec_decode_common_attn_metadata.seq_lens
        table = state.spec_decode_common_attn_metadata.block_table_tensor
    committed = seq_lens if num_rejected is None else seq_lens - num_rejected
    # The scheduler reserves this much for every request of a step, and more.
    lookahead = runner.speculative_config.num_speculative_tokens
    block_size = runner.cache_config.block_size
    return {
        request_id: Owner(
            (tuple(table[row, : -(-(length + lookahead) // block_size)].tolist()),),
            length,
        )
        for row, (request_id, length) in enumerate(
            zip(request_ids, committed.tolist(), strict=True)
        )
    }


def generate_watched(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    watch: SlotWatch | None,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[int, list[int]]:
    """Greedy continuations, by index, with the watch looking after every step.

    Args:
        llm: in-process engine.
        prompts: token ids.
        max_tokens: of each continuation.
        watch: looks after every step; None for nobody.
        before_step: called with the step's number, e.g. to abort requests.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = llm.llm_engine
    for index, prompt in enumerate(prompts):
        core.add_request(
            str(index),
            TokensPrompt(prompt_token_ids=list(prompt)),
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
    outputs: dict[int, list[int]] = {}
    step = 0
    while core.has_unfinished_requests():
        before_step(step)
        for output in core.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        if watch is not None:
            watch.after_step(scheduler_owners(llm))
        step += 1
    return dict(sorted(outputs.items()))
