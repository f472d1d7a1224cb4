"""What a peer must know of a problem of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class AttentionSizes(Protocol):
    """The attributes of an attention problem that decide whether and how a peer computes it."""

    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_k(self) -> int: ...
    @property
    def heads_q(self) -> int: ...
    @property
    def heads_kv(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def varlen(self) -> bool: ...
    @property
    def window(self) -> str: ...
    @property
    def softcap(self) -> float: ...
    @property
    def bounds(self) -> tuple[int | None, int | None]: ...


def by_autograd(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of `forward`, a differentiable function of q, k and v, whose graph is built at
    the first launch on these inputs."""
    import torch

    graphs: dict[int, Any] = {}

    def launch(q: Any, k: Any, v: Any, o: Any, do: Any, *rest: Any) -> tuple[Any, ...]:
        if q.data_ptr() not in graphs:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = forward(*leaves)
            graphs[q.data_ptr()] = leaves, out[0] if isinstance(out, tuple) else out
        leaves, out = graphs[q.data_ptr()]
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    return launch
