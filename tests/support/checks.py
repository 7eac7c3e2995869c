"""What is checked of every tensor of a plan, and the error that names it."""

from typing import NoReturn

import torch

INTEGERS = (torch.int32, torch.int64)


class InvalidRollbackPlanError(ValueError):
    """A plan that no scheduler makes; the sentence names field, value and rule."""


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRollbackPlanError(
        f"{field} = {value} is not allowed; must be {allowed}"
    )


def check_tensor(
    field: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dims: int = 1,
) -> None:
    if tensor.dtype not in dtypes:
        refuse(f"{field}.dtype", tensor.dtype, " or ".join(map(str, dtypes)))
    if tensor.device != device:
        refuse(f"{field}.device", tensor.device, f"{device}, as of the other tensors")
    if tensor.dim() != dims:
        refuse(f"{field}.dim()", tensor.dim(), f"{dims}")


def check_dense(
    field: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dims: int = 1,
) -> None:
    check_tensor(field, tensor, dtypes, device, dims)
    if not tensor.is_contiguous():
        refuse(f"{field}.stride()", tensor.stride(), "contiguous")


def check_length(field: str, tensor: torch.Tensor, least: int, of: str) -> None:
    if tensor.shape[0] < least:
        refuse(f"{field}.shape[0]", tensor.shape[0], f"at least {least} ({of})")


def check_no_alias(
    outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> None:
    """No output overlaps an input or an earlier output, from first to last element."""
    seen = dict(inputs)
    for name, output in outputs.items():
        start, end = extent(output)
        for other, tensor in seen.items():
            other_start, other_end = extent(tensor)
            if max(start, other_start) < min(end, other_end):
                refuse(
                    f"{name}.data_ptr()",
                    hex(start),
                    f"memory that {other} has no part in",
                )
        seen[name] = output


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_starts(start_loc: torch.Tensor, field: str = "query_start_loc") -> list[int]:
    starts: list[int] = start_loc.tolist()
    if starts[0] != 0:
        refuse(f"{field}[0]", starts[0], "0")
    for index in range(1, len(starts)):
        if starts[index] < starts[index - 1]:
            refuse(
                f"{field}[{index}]",
                starts[index],
                f"at least {starts[index - 1]}, the value before it",
            )
    return starts


def check_rejected(
    counts: dict[str, torch.Tensor],
    device: torch.device,
    num_draft_tokens: torch.Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """First rows and rejected rows of each request."""
    query_start_loc, num_rejected_tokens = counts.values()
    check_dense("num_rejected_tokens", num_rejected_tokens, INTEGERS, device)
    check_dense("query_start_loc", query_start_loc, (torch.int32,), device)
    rejected: list[int] = num_rejected_tokens.tolist()
    check_length("query_start_loc", query_start_loc, len(rejected) + 1, "requests + 1")
    starts = check_starts(query_start_loc)
    if starts[-1] != starts[len(rejected)]:
        refuse(
            f"query_start_loc[{len(starts) - 1}]",
            starts[-1],
            f"{starts[len(rejected)]}, the end of the last request",
        )
    drafts = None if num_draft_tokens is None else num_draft_tokens.tolist()
    for request, count in enumerate(rejected):
        field = f"num_rejected_tokens[{request}]"
        rows = starts[request + 1] - starts[request]
        if not 0 <= count <= rows:
            refuse(field, count, f"0 to {rows}, the request's rows")
        if drafts is not None and count > drafts[request]:
            refuse(field, count, f"0 to {drafts[request]}, the request's draft tokens")
    return starts[: len(rejected) + 1], rejected
