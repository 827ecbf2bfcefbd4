"""Gradients, buffers and flags of a module, which its ``state_dict`` omits; and the content of tensors, compared.

A forward pass changes some of this state. The content of a tensor is compared by sums of its bits, without a copy.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_faulttolerant.state.packing import tensor_to_blob

SMALL_BYTES = 65_536
_NUM_COLUMNS, _ROWS_IN_CACHE = 257, 256  # an odd number: negated, all doubles of a row change its sum
_PLAIN = (Tensor, nn.Parameter)
LAZY = "not made yet"
"""Stands for the shape of a tensor that follows from the first batch, as in torch's lazy modules."""


def shard_of(tensor: object) -> Any:
    """Return this rank's part of a tensor that is spread over ranks (torch's ``DTensor``); any other as it is.

    The part shares its memory with the tensor, but not always its version counter.
    """
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):  # runs for every tensor at each capture
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def with_tensors(value: Any, change: Callable[[Tensor], object]) -> Any:
    """Return a copy of nested dicts and lists, with what `change` returns for each tensor in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_tensors(one, change) for key, one in value.items()}
    return [with_tensors(one, change) for one in value] if isinstance(value, list) else value


def gradients_state(module: nn.Module) -> dict[str, object]:
    """Return a copy of every existing gradient, by the parameter's name; for one in shards, this rank's part."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: _gradient_state(grad) for name, grad in grads.items() if grad is not None}


def load_gradients(module: nn.Module, state: Mapping[str, object]) -> None:
    """Set the gradients of `module` to those of `state`; a parameter that is not in it gets none."""
    for name, parameter in module.named_parameters():
        grad = state.get(name)
        parameter.grad = None if grad is None else _gradient(grad, parameter)


def _gradient_state(grad: Any) -> object:
    shard = shard_of(grad).detach().clone()
    return shard if shard_of(grad) is grad else {"shard": shard, "placements": [repr(p) for p in grad.placements]}


def _gradient(state: Any, parameter: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone().to(parameter.device)
    shard = state["shard"].detach().clone().to(shard_of(parameter).device)
    like = {"shape": parameter.shape, "stride": parameter.stride()}
    placements = _placements(state["placements"], parameter)
    return type(parameter.data).from_local(shard, parameter.device_mesh, placements, run_check=False, **like)


def _placements(names: list[str], parameter: Any) -> list[object]:
    """Return how a gradient is spread: like its parameter, or as a sum that is not reduced yet."""
    if names == [repr(p) for p in parameter.placements]:
        return list(parameter.placements)
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415, RUF100 - takes a second to import

    known: dict[str, object] = {repr(p): p for p in (Replicate(), *(Shard(dim) for dim in range(8)))}
    known.update({repr(p): p for p in (Partial(op) for op in ("sum", "avg"))})
    return [known[name] for name in names]


def buffers_state(module: nn.Module, *, persistent: bool | None = None) -> dict[str, Tensor]:
    """Return a copy of the module's buffers by name.

    Args:
        module: Searched with all its children.
        persistent: Only buffers that are (or are not) in the ``state_dict``; ``None`` for all.
    """
    buffers = buffers_of(module, persistent=persistent)
    return {name: shard_of(buffer).detach().clone() for name, buffer in buffers.items()}


def buffers_of(module: nn.Module, *, persistent: bool | None = None) -> dict[str, Tensor]:
    """Return the module's buffers themselves by name; the arguments are those of `buffers_state`."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    if persistent is None:
        return buffers
    left_out = set(_non_persistent(module))
    return {name: buffer for name, buffer in buffers.items() if (name not in left_out) == persistent}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that belong to the ``state_dict``: parameters and persistent buffers, by name."""
    parameters = {name: one for name, one in module.named_parameters() if not is_lazy(one)}
    return {**parameters, **buffers_of(module, persistent=True)}


def _non_persistent(module: nn.Module) -> Iterator[str]:
    # torch has no public way to get this; a state_dict shows it, but runs the users' hooks and takes 100 times as long.
    for prefix, child in module.named_modules():
        yield from (f"{prefix}.{name}" if prefix else name for name in child._non_persistent_buffers_set)


def kinds_of_buffers(module: nn.Module, *, persistent: bool = False) -> dict[str, str]:
    """Return type and shape of each buffer by name, ``None`` for one that does not exist yet.

    Args:
        module: Searched with all its children.
        persistent: The buffers in the ``state_dict``, rather than those outside it.
    """
    found = {}
    for prefix, child in module.named_modules():
        left_out, buffers = child._non_persistent_buffers_set, dict(child._buffers.items())  # not a dict if scripted
        for own in buffers.keys() - left_out if persistent else left_out:
            found[f"{prefix}.{own}" if prefix else own] = _kind(buffers.get(own))
    return found


def _kind(buffer: Any) -> str:
    return "None" if buffer is None else LAZY if is_lazy(buffer) else f"{buffer.dtype} {list(buffer.shape)}"


def make_room(
    module: nn.Module, state: Mapping[str, Tensor], *, began: Mapping[str, str], here: Mapping[str, str]
) -> None:
    """Create buffers for `load_buffers` that training has created or resized, with the shapes in `state`.

    Args:
        module: The buffers' module.
        state: The buffers to create, by name.
        began: `kinds_of_buffers` at the start of the saved fit.
        here: The same at the start of this fit. A buffer that started differently is left as it is.
    """
    now, modules = kinds_of_buffers(module), dict(module.named_modules())
    for name, value in state.items():
        prefix, _, own = name.rpartition(".")
        owner = modules.get(prefix)
        if owner is None or now.get(name) == _kind(value) or began.get(name) != here.get(name):
            continue
        if name in now or not hasattr(owner, own):
            owner.register_buffer(own, room_for(value, owner, module), persistent=False)


def room_for(value: Tensor, owner: nn.Module, module: nn.Module) -> Tensor:
    """Return a tensor that `value` can be loaded into, on the device of the part of `module` that will own it."""
    near = (*owner.parameters(), *owner.buffers(), *module.parameters())
    return torch.empty_like(value, device=next((tensor.device for tensor in near), value.device))


@torch.no_grad()
def load_buffers(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Copy `state` into the module's buffers and parameters in place; return the names of others, or other shapes."""
    buffers = {name: shard_of(one) for name, one in {**weights_of(module), **buffers_of(module)}.items()}
    missing = [name for name, value in state.items() if name not in buffers or buffers[name].shape != value.shape]
    for name in state.keys() - set(missing):
        buffers[name].copy_(state[name])
    return missing


@contextlib.contextmanager
def buffers_replaced(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the module's buffers other values for the length of a block, in the middle of a step.

    Their version counters don't move: a backward pass that is still to come must not take them for changed.

    Args:
        module: The buffers' module.
        state: The values, by name. Those without a buffer of that shape are left out.
    """
    buffers = {name: shard_of(buffer) for name, buffer in buffers_of(module).items()}
    found = {name: buffers[name] for name in state if name in buffers and buffers[name].shape == state[name].shape}
    now = {name: buffer.detach().clone() for name, buffer in found.items()}
    try:
        for name, buffer in found.items():
            buffer.data.copy_(state[name])
        yield
    finally:
        for name, buffer in found.items():
            buffer.data.copy_(now[name])


def extra_state(module: nn.Module) -> dict[str, object]:
    """Return a copy of the ``state_dict``'s entries besides parameters and buffers, by key.

    Empty, without a call, if no module adds any: a call runs users' code.
    """
    if not has_own_state_dict(module):
        return {}
    known = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    added = ((key, value) for key, value in module.state_dict().items() if key not in known)
    return {key: copy.deepcopy(value) for key, value in added if not is_lazy(value)}


def has_own_state_dict(module: nn.Module) -> bool:
    """Return whether code of other classes than torch's may change what the ``state_dict`` has."""
    return any(_adds_to_state_dict(child) for child in module.modules())


def _adds_to_state_dict(module: nn.Module) -> bool:
    names = ("state_dict", "get_extra_state", "_save_to_state_dict")
    overrides = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return overrides or bool(module._state_dict_hooks) or bool(module._state_dict_pre_hooks)


def flags_state(module: nn.Module) -> dict[str, list[str]]:
    """Return the modules in evaluation mode, the norms that track nothing, and the frozen parameters."""
    return {
        "evaluating": [name for name, child in module.named_modules() if not child.training],
        "untracked": [name for name, child in _norms(module) if not child.track_running_stats],
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
    }


def load_flags(module: nn.Module, state: Mapping[str, list[str]]) -> None:
    """Restore each module's ``training``, each norm's tracking and each parameter's ``requires_grad``."""
    evaluating, untracked, frozen = (set(state[name]) for name in ("evaluating", "untracked", "frozen"))
    for name, child in module.named_modules():
        child.training = name not in evaluating
    for name, norm in _norms(module):
        if norm.track_running_stats == (name in untracked):  # in a scripted module it is a constant
            norm.track_running_stats = name not in untracked
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)


def _norms(module: nn.Module) -> Iterator[tuple[str, Any]]:
    # Freezing a batch norm, as Lightning's BaseFinetuning does, also stops its running statistics.
    return ((name, child) for name, child in module.named_modules() if hasattr(child, "track_running_stats"))


class TensorMarks:
    """Marks that show later whether any of some tensors has changed, without a copy of them.

    A tensor has changed if it is another object or storage, if its version counter moved, or if the sums of its bits
    changed: ``p.data.mul_()`` moves no version counter. The sums stay on the tensors' device until they are compared.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if not is_lazy(tensor)]
        self._marks = [mark_of(t) for t in self._tensors]
        self._sums = [quick_sums(t) for t in self._tensors]

    def unmoved(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether `tensors` are the marked ones, unchanged."""
        now = [tensor for tensor in tensors if not is_lazy(tensor)]
        if len(now) != len(self._tensors) or any(a is not b for a, b in zip(now, self._tensors, strict=True)):
            return False
        if [mark_of(t) for t in now] != self._marks:
            return False
        return all(torch.equal(quick_sums(t), s) for t, s in zip(now, self._sums, strict=True))


def sums_of_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a sum of each tensor's bits, for one in shards only of this rank's part: much cheaper than a copy.

    Tensors that have drifted apart differ in it, unless their differences happen to cancel out.
    """
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        sums.setdefault(tensor.device, {})[name] = _sum_of_bits(tensor)
    found: dict[str, int] = {}
    for own in sums.values():  # one wait for each device
        found.update(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
    return found


@torch.no_grad()
def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = bytes_of(tensor, alignment=8)
    num_whole = flat.numel() // 8 * 8
    total = flat[:num_whole].view(torch.int64).sum()
    return total if num_whole == flat.numel() else total + flat[num_whole:].sum(dtype=torch.int64)


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """Return a mark that changes when the tensor is changed by torch's own functions."""
    # A tensor that was made in inference mode has no counter.
    return shard_of(tensor).data_ptr(), 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def quick_sums(tensor: Tensor) -> Tensor:
    """Return sums of a tensor's bits, which differ if its content differs, even if elements only swap places.

    The tensor is split into rows of 8-byte words. The sums are those of each column and of each row, modulo 2**64: the
    words are not widened. Two signs that flip would cancel out in a sum. So the sums of rows are of each word combined
    with itself, moved by one bit: what a sign changes there depends on the bit next to it.
    """
    flat = bytes_of(tensor, alignment=8)
    num_whole = flat.numel() // 8 * 8
    words = flat[:num_whole].view(torch.int64)
    rows = words[: words.numel() // _NUM_COLUMNS * _NUM_COLUMNS].view(-1, _NUM_COLUMNS)
    columns, by_row = _sums_in_blocks(rows) if words.device.type == "cpu" else (rows.sum(0), _mixed(rows).sum(1))
    return torch.cat([columns, by_row, words[rows.numel() :], flat[num_whole:]])


def _mixed(words: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.bitwise_right_shift(words, 1, out=out).bitwise_xor_(words)


def _sums_in_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of columns and rows. A few rows at a time stay in the CPU's cache, and no memory is allocated."""
    blocks = torch.split(rows, _ROWS_IN_CACHE)
    columns, by_row, mixed = rows.new_empty(len(blocks), rows.shape[1]), rows.new_empty(len(rows)), blocks[0].clone()
    for block, of_columns, of_rows in zip(blocks, columns, torch.split(by_row, _ROWS_IN_CACHE), strict=True):
        torch.sum(block, 0, out=of_columns)
        torch.sum(_mixed(block, mixed[: len(block)]), 1, out=of_rows)
    return columns.sum(0), by_row


@torch.no_grad()
def content_hash(tensor: Tensor) -> int:
    """Return a hash of a tensor's bits, in this process, of this rank's part if it is in shards."""
    shard = shard_of(tensor)
    content = bytes_of(shard, alignment=8) if shard.nbytes <= SMALL_BYTES else quick_sums(shard)
    return hash(tensor_to_blob(content.cpu()))


def bytes_of(tensor: Tensor, *, alignment: int) -> Tensor:
    """Return the bytes of a tensor, of this rank's part if it is in shards. They begin at a multiple of `alignment`."""
    flat: Tensor = shard_of(tensor).detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.stride() != (1,):  # a single element, of an expanded tensor
        flat = flat.as_strided(flat.shape, (1,))
    flat = flat.view(torch.uint8)
    return flat.clone() if flat.storage_offset() % alignment else flat


def plain_copy(value: Tensor) -> Tensor:
    """Return a copy of a logged value, as a plain tensor even if a library has its own class (MONAI's)."""
    if type(value).__module__.partition(".")[0] == "torch":
        return value.detach().clone()
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().clone().as_subclass(Tensor)


def tensor_mark(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that returns whether a tensor is unchanged, or no longer exists."""
    tensor_ref = weakref.ref(tensor)
    place = tensor_place(tensor)
    content = content_hash(tensor) if is_readable(tensor) else None

    def is_same() -> bool:
        now = tensor_ref()
        if now is None:
            return True  # it no longer exists: there is nothing to carry
        if tensor_place(now) != place:
            return False
        return content is None or content_hash(now) == content  # `x.data.mul_(2)` does not count as a version

    return is_same


def tensor_place(tensor: Tensor) -> tuple[object, ...]:
    """Return the memory, shape, and version of a tensor, and of its gradient; they show most changes."""
    grad = tensor.grad if tensor.is_leaf else None
    state = _version(tensor), tensor.requires_grad, None if grad is None else (id(grad), _version(grad))
    if not is_readable(tensor):
        return id(tensor), state
    return (shard_of(tensor).data_ptr(), tuple(tensor.shape), tensor.dtype), state


def _version(tensor: Tensor) -> int:
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def is_readable(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` can be compared: it is dense, has one shape, and its memory exists."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not tensor.is_meta and not tensor.is_quantized and not is_lazy(tensor) and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its own memory. A subclass that wraps other tensors has none, as in torchao."""
    shard = shard_of(tensor)
    try:
        return shard.numel() == 0 or (shard.data_ptr() != 0 and _fits(shard))
    except RuntimeError:  # torch's FakeTensor, and what `torch.func` passes to a function
        return False


def _fits(tensor: Tensor) -> bool:
    """Return whether the storage is as large as the tensor: it may be freed, and reading it would crash."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return num_bytes <= tensor.untyped_storage().nbytes()


def array_content(array: Any) -> object:
    """Return a value that differs if the contents of two arrays differ; for a large one, the sums of its bits."""
    place = (array.shape, array.dtype)
    if array.nbytes <= SMALL_BYTES:
        return place, array.tobytes()
    flat = (array if array.flags.c_contiguous else array.copy(order="C")).reshape(-1).view("uint8")
    return place, content_hash(torch.from_numpy(flat))
