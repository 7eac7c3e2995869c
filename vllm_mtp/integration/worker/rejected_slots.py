"""Where both runners announce the rejected slots of a step.

Shared by the V1 and the V2 adapter; imports neither.
"""

from collections.abc import Callable

from vllm_mtp.records import RejectedSlots


class AnnouncesRejectedSlots:
    """Mixin of our drafters: announces the slots that verification rejected.

    Called after verification and before the MTP layers run, on the worker, with
    device tensors: a listener must not wait for the device. Nothing is computed for it
    when there is none.
    """

    on_rejected_slots: Callable[[RejectedSlots], None] | None = None
