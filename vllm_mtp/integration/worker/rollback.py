"""Rollback on one worker: which kernels run, and the tables of its KV cache.

Shared by the V1 and the V2 adapter; imports neither.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.worker import kv_layout
from vllm_mtp.kernels import dispatch
from vllm_mtp.kernels.planes import plane_table
from vllm_mtp.kernels.reference import NUM_OUTPUTS
from vllm_mtp.records import RollbackPlan, RolledBack

# Below "vllm", so that vLLM's log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus.rollback")


class Rollback:
    """The rollback kernels of a worker's device, and the tables they need.

    Payload rollback happens twice in a step, so that every slot at or above a
    committed length is zero when it ends::

        verification -> rejected slots, all layers; their rows are padded, so that
                        the MTP layers' first pass does not write them again
        drafting     -> draft slots, MTP layers: what draft steps wrote for themselves

    The second is not left to the next verification: by then a request may be gone
    and its blocks be another's.

    Attributes:
        kernels: backend in use (``dispatch.Backend``).
        scrubs: whether payload rollback is on.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.kernels = dispatch.choose(device)
        self.scrubs = settings_of(vllm_config).kv_rollback == "scrub"
        self._all_layers: _PayloadTables | None = None
        self._mtp_layers: _PayloadTables | None = None
        self._device = device
        _log_choice(self.kernels.name, device)

    def bind_kv_caches(
        self, vllm_config: Any, kv_cache_config: Any, mtp_layers: Collection[str]
    ) -> None:
        """Scrub mode: learn the layout of the caches that the worker just made.

        Args:
            vllm_config: of the worker.
            kv_cache_config: as the worker received it.
            mtp_layers: names of the attention layers that only drafting writes.

        Raises:
            ConfigError: a layer's layout is not known.
        """
        layers = vllm_config.compilation_config.static_forward_context
        # Block 0 is vLLM's null block, whatever size of block a kernel sees.
        num_null_slots = {
            name: group.kv_cache_spec.block_size
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
            if kv_layout.is_slot_addressed(layers[name])
        }
        cache_dtype = vllm_config.cache_config.cache_dtype
        self._all_layers = _PayloadTables(
            layers, num_null_slots, cache_dtype, self._device
        )
        of_mtp = {n: slots for n, slots in num_null_slots.items() if n in mtp_layers}
        self._mtp_layers = _PayloadTables(layers, of_mtp, cache_dtype, self._device)

    def metadata(
        self,
        plan: RollbackPlan,
        # [num_rows or more] int64, mutated
        slot_mapping: torch.Tensor,
    ) -> RolledBack:
        """Metadata rollback of a step, one launch."""
        # Fresh each step: vLLM still copies the last step's counts on another stream.
        per_request = torch.empty(
            (NUM_OUTPUTS, plan.discarded.shape[0]),
            dtype=torch.int32,
            device=slot_mapping.device,
        )
        self.kernels.rollback_metadata(plan, per_request, slot_mapping)
        return RolledBack(*per_request.unbind(0))

    def scrub_rejected(
        self,
        slot_mappings: Mapping[str, torch.Tensor],
        # [num_reqs + 1] int32
        query_start_loc: torch.Tensor,
        # [num_reqs] int32 or int64
        num_rejected_tokens: torch.Tensor,
    ) -> None:
        """Zero the rejected slots of a step in every layer, then pad their rows.

        Args:
            slot_mappings: each layer's slots of this step, mutated.
            query_start_loc: first row of each request.
            num_rejected_tokens: rejected rows at the end of each request.
        """
        assert self._all_layers is not None, "bind_kv_caches comes first"
        self._scrub(
            self._all_layers, slot_mappings, query_start_loc, num_rejected_tokens
        )
        for slot_mapping in self._all_layers.slot_mappings:
            self.kernels.pad_rejected_rows(
                slot_mapping, query_start_loc, num_rejected_tokens
            )

    def scrub_drafted(
        self,
        slot_mappings: Mapping[str, torch.Tensor],
        # [num_reqs + 1] int32
        query_start_loc: torch.Tensor,
        # [num_reqs] int32
        num_drafted_tokens: torch.Tensor,
    ) -> None:
        """Zero the slots that draft steps wrote in the MTP layers.

        Args:
            slot_mappings: slots of the draft steps, by MTP layer at least.
            query_start_loc: first row of each request in them.
            num_drafted_tokens: rows to zero at the end of each request's.
        """
        assert self._mtp_layers is not None, "bind_kv_caches comes first"
        self._scrub(
            self._mtp_layers, slot_mappings, query_start_loc, num_drafted_tokens
        )

    def _scrub(
        self,
        tables: "_PayloadTables",
        slot_mappings: Mapping[str, torch.Tensor],
        query_start_loc: torch.Tensor,
        num_rows: torch.Tensor,
    ) -> None:
        tables.follow(slot_mappings)
        self.kernels.scrub_rejected_slots(
            tables.storages,
            tables.slot_mappings,
            tables.planes,
            query_start_loc,
            num_rows,
        )


class _PayloadTables:
    """The plane table of a worker's KV caches, rebuilt when their memory moves."""

    _addresses: tuple[int, ...]

    def __init__(
        self,
        layers: Mapping[str, Any],
        num_null_slots: Mapping[str, int],
        cache_dtype: str,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._num_null_slots = num_null_slots
        self._cache_dtype = cache_dtype
        self._device = device
        # Before the first step, to refuse a layout when the server starts.
        nowhere = torch.empty(1, dtype=torch.int64)
        self._build(dict.fromkeys(num_null_slots, nowhere))
        self._addresses = ()  # no step has this one

    def follow(self, slot_mappings: Mapping[str, torch.Tensor]) -> None:
        """Point at this step's slot mappings and at the caches as they lie now.

        vLLM keeps both in place, so this compares a few addresses and is done.
        """
        self.slot_mappings = [slot_mappings[name] for name in self._one_per_group]
        if self._addresses != self._current_addresses():
            self._build(slot_mappings)

    def _current_addresses(self) -> tuple[int, ...]:
        return (
            *(mapping.data_ptr() for mapping in self.slot_mappings),
            *(self._layers[name].kv_cache.data_ptr() for name in self._one_per_group),
        )

    def _build(self, slot_mappings: Mapping[str, torch.Tensor]) -> None:
        planes = kv_layout.slot_planes(
            self._layers, slot_mappings, self._num_null_slots, self._cache_dtype
        )
        names = self._num_null_slots.keys()
        by_group = {slot_mappings[name].data_ptr(): name for name in names}
        self._one_per_group = list(by_group.values())
        self.slot_mappings = [slot_mappings[name] for name in self._one_per_group]
        """Of this step, one per cache group."""
        self.storages = kv_layout.storages(self._layers[name] for name in names)
        self.planes = plane_table(planes, self._device)
        self._addresses = self._current_addresses()


def _log_choice(name: str, device: torch.device) -> None:
    missing = dispatch.available(device)["native"]
    if missing is None:
        logger.info_once("KV rollback runs on the %s kernels.", name)
    else:
        logger.warning_once(
            "KV rollback runs on the %s kernels, not on the native ones: %s",
            name,
            missing,
        )
