"""A mixture of experts: right against float64, forward and backward, whatever the routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutex
from cutex import ops
from cutex.compile import compile
from cutex.kernels.mixture.combine import TOGETHER, Combine, CombineConfig
from cutex.kernels.mixture.gate import Gate, GateConfig
from cutex.kernels.mixture.spread import PART, Spread, SpreadConfig
from cutex.ops.mixture.routing import route

bf16 = torch.bfloat16
TOKENS, D, HIDDEN, EXPERTS = 37, 64, 48, 5


@pytest.fixture
def place(device: str, arch: str) -> Iterator[str]:
    """The device of torch's tensors: the GPU, or the CPU within the simulator."""
    with ops.simulated(arch) if device == "sim" else nullcontext():
        yield "cpu" if device == "sim" else "cuda"


def layer(
    place: str,
    dtype: torch.dtype = bf16,
    per_token: int = 2,
    transposed: bool = True,
    seed: int = 0,
) -> list[Tensor]:
    """x, router_weights, expert_ids, w_up, w_down; some ids are of no expert, one has no tokens."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype).to(place)

    ids = torch.randint(0, EXPERTS, (TOKENS, per_token), generator=g)
    ids[ids == 2] = 3
    ids[4, 0], ids[5], ids[6] = -1, EXPERTS, 2**31 - 1
    weights = torch.rand((TOKENS, per_token), generator=g)
    up, down = (EXPERTS, D, 2 * HIDDEN), (EXPERTS, HIDDEN, D)
    if transposed:
        w = [normal(e, n, k).mT for e, k, n in (up, down)]
    else:
        w = [normal(*shape) for shape in (up, down)]
    x = normal(TOKENS, D) * D**0.5
    return [x, weights.to(place), ids.to(place), *w]


def reference(x: Tensor, weights: Tensor, ids: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The layer in the dtype of its arguments, token by token."""
    out = []
    for t in range(x.shape[0]):
        total = 0 * x[t]
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if 0 <= e < w_up.shape[0]:
                g = x[t] @ w_up[e]
                total = total + weights[t, j] * ((F.silu(g[0::2]) * g[1::2]) @ w_down[e])
        out.append(total)
    return torch.stack(out)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_90a", bf16), pytest.param("sm_100a", torch.float16, marks=pytest.mark.slow)],
)
def test_a_layer_is_the_sum_over_its_experts(arch: str, place: str, dtype: torch.dtype) -> None:
    given = layer(place, dtype, transposed=dtype is bf16)
    y = cutex.moe(*given)
    want = reference(*wide(given))
    unit = 2.0**-7 if dtype is bf16 else 2.0**-10
    assert y.dtype == dtype
    assert float((y.double() - want).abs().max()) <= unit * float(want.abs().max())
    assert not y[[5, 6]].any()
    assert torch.equal(y, cutex.moe(*given)), "deterministic"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_x_begins_anywhere(arch: str, place: str) -> None:
    given = layer(place)
    x = torch.cat([given[0].new_zeros(1), given[0].view(-1)])[1:].view(TOKENS, D)
    assert torch.equal(cutex.moe(*given), cutex.moe(x, *given[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_gradients_of_a_layer(arch: str, place: str, transposed: bool) -> None:
    given = layer(place, per_token=3, transposed=transposed, seed=1)
    ours, theirs = (
        [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        for tensors in (given, wide(given))
    )
    y = cutex.moe(*ours)
    g = torch.Generator().manual_seed(2)
    dy = torch.randn(y.shape, generator=g).to(y.dtype).to(place)
    y.backward(dy)
    reference(*theirs).backward(dy.double())
    for found, want in zip(ours, theirs, strict=True):
        if want.grad is None:
            continue
        assert found.grad is not None and found.grad.shape == want.grad.shape
        assert found.grad.dtype == found.dtype
        worst = float((found.grad.double() - want.grad).abs().max())
        assert worst <= 2**-6 * float(want.grad.abs().max())
    assert not ours[3].grad[2].any(), "an expert without tokens"
    assert not ours[1].grad[5].any() and not ours[0].grad[5].any(), "a token without experts"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_gradients_of_one_expert_a_token_whose_weights_are_a_column(arch: str, place: str) -> None:
    """As of the first column of a router's probabilities."""
    x, weights, ids, w_up, w_down = layer(place, per_token=3, seed=3)
    found = []
    for tensors in ((x, weights, w_up, w_down), wide([x, weights, w_up, w_down])):
        x_, weights_, up, down = (t.detach().requires_grad_() for t in tensors)
        call = cutex.moe if x_.dtype == x.dtype else reference
        y = call(x_, weights_[:, 1:2], ids[:, 1:2], up, down)
        found.append(torch.autograd.grad(y.double().square().sum(), (x_, weights_, up, down)))
    for one, other in zip(*found, strict=True):
        worst = float((one.double() - other).abs().max())
        assert worst <= 2**-5 * float(other.abs().max())


def test_rows_are_sorted_by_expert_in_the_order_of_tokens() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [-1, 0], [9, 2]])
    with ops.simulated("sm_90a"):
        routing = route(ids, 3)
    assert routing.offs.tolist() == [3, 3, 6] and routing.offs.dtype == torch.int32
    assert routing.tokens.tolist() == [0, 1, 2, 0, 1, 3, 2, 3]
    assert routing.places.tolist() == [[3, 0], [1, 4], [6, 2], [7, 5]]
    assert routing.order.tolist() == [1, 2, 5, 0, 3, 7, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "per_token", "experts", "kind"),
    [
        (1, 1, 1, "any"),
        (70, 3, 31, "any"),
        (70, 3, 32, "hot"),
        (600, 8, 130, "any"),
        (40, 2, 1024, "none"),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_a_sort_by_counting_is_torch_s_stable_one(
    device: str, arch: str, tokens: int, per_token: int, experts: int, kind: str
) -> None:
    """Ids of any size, one expert that has nearly all, or none; int32 and int64, with strides."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, experts + 2, (tokens, per_token), generator=g)
    if kind == "hot":
        ids[torch.rand(ids.shape, generator=g) < 0.95] = experts - 1
    if kind == "none":
        ids[:] = experts
    ids[0, 0] = 2**32  # an expert's number, were it cut to 32 bits
    given = ids if tokens % 4 else ids.clamp(max=experts).int().mT.contiguous().mT
    with ops.simulated(arch, order="random", seed=1) if device == "sim" else nullcontext():
        found = route(given if device == "sim" else given.cuda(), experts)
    flat = given.reshape(-1).long()
    known, order = torch.where((flat < 0) | (flat >= experts), experts, flat).sort(stable=True)
    assert torch.equal(found.order.cpu().long(), order)
    assert torch.equal(found.tokens.cpu().long(), order // per_token)
    assert torch.equal(found.places.cpu().view(-1)[order].long(), torch.arange(len(order)))
    assert found.offs.tolist() == [int((known <= e).sum()) for e in range(experts)]


@pytest.mark.parametrize(("weighted", "terms"), [(True, 2), (False, TOGETHER + 1)])
def test_rows_of_no_group_are_not_read_when_rows_are_combined(weighted: bool, terms: int) -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn((6, 24), generator=g).to(bf16)
    z[4:] = torch.nan
    places = torch.randint(0, 6, (3, terms), generator=g, dtype=torch.int32)
    places[2] = 4
    offs, weights = torch.tensor([2, 4], dtype=torch.int32), torch.rand((3, terms), generator=g)
    weights[2] = torch.inf
    out = torch.full((3, 24), torch.nan, dtype=bf16)
    compiled = compile(Combine(CombineConfig(terms, weighted)), "bf16", "sm_90a")
    rest = (weights,) if weighted else ()
    assert not cutex.simulate(compiled, z, places, offs, out, *rest).findings
    there = (places < 4)[..., None]
    factors = weights[..., None] if weighted else torch.ones(3, terms, 1)
    want = torch.where(there, z[places.long()].float() * factors, 0).sum(1)
    assert torch.allclose(out.float(), want, rtol=2**-8, atol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fifo", "starved", "random"])
@pytest.mark.parametrize(("tokens", "columns"), [(7, PART + 8), (900, 64), (1, 8)])
def test_rows_are_spread_to_all_places_of_groups(tokens: int, columns: int, order: str) -> None:
    g = torch.Generator().manual_seed(tokens)
    x, terms = torch.randn((tokens, columns), generator=g).to(bf16), 3
    x[tokens // 2] = torch.inf
    places = torch.randperm(terms * tokens, generator=g).int().view(tokens, terms)
    offs = torch.tensor([1, terms * tokens - 2], dtype=torch.int32)
    out = torch.full((terms * tokens, columns), torch.nan, dtype=bf16)
    compiled = compile(Spread(SpreadConfig(terms)), "bf16", "sm_90a")
    assert not cutex.simulate(compiled, x, places, offs, out, order=order, seed=3).findings
    want = torch.full_like(out, torch.nan)
    want[places.long().flatten()] = x.repeat_interleave(terms, 0)
    want[offs[-1] :] = torch.nan
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_the_gate_leaves_rows_of_no_group_alone_and_takes_any_values() -> None:
    h = torch.tensor([0.0, -60.0, 60.0, -2.0, 3.0, 100.0, -100.0, 0.5]).repeat(3, 4).to(bf16)
    h[2] = torch.nan
    y = torch.full((3, 16), torch.nan, dtype=bf16)
    offs = torch.tensor([2, 2], dtype=torch.int32)
    compiled = compile(Gate(GateConfig()), "bf16", "sm_90a")
    assert not cutex.simulate(compiled, h, y, offs).findings
    want = F.silu(h[:2, 0::2].double()) * h[:2, 1::2].double()
    assert torch.allclose(y[:2].double(), want, rtol=2**-7, atol=1e-20)
    assert y[2].isnan().all()


def test_a_layer_without_tokens() -> None:
    x, weights, ids, *w = layer("cpu")
    with ops.simulated("sm_90a"):
        assert cutex.moe(x[:0], weights[:0], ids[:0], *w).shape == (0, D)


GIVEN = layer("cpu")
BAD: dict[str, tuple[type[Exception], str, int, Any]] = {
    "x": (TypeError, "x must be bfloat16 or float16", 0, GIVEN[0].float()),
    "vector": (ValueError, "x must have 2 dimensions", 0, GIVEN[0][0]),
    "weights": (ValueError, "router_weights and expert_ids must be alike", 1, GIVEN[1][:, :1]),
    "whole weights": (TypeError, "router_weights must be of floats", 1, GIVEN[2]),
    "ids": (TypeError, "expert_ids must be int32 or int64", 2, GIVEN[1]),
    "tokens": (ValueError, r"expert_ids must be \(T, J\) with T=37", 2, GIVEN[2][1:]),
    "w_up": (ValueError, r"w_up must be \(E, D, 2 F\) with D=64", 3, GIVEN[3].mT),
    "w_down": (ValueError, r"w_down must be \(E, F, D\) = \(5, 48, 64\)", 4, GIVEN[4].mT),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name: str) -> None:
    error, sentence, place, wrong = BAD[name]
    arguments: list[Any] = [*GIVEN[:place], wrong, *GIVEN[place + 1 :]]
    with ops.simulated("sm_90a"), pytest.raises(error, match=sentence):
        cutex.moe(*arguments)


def test_sizes_that_are_no_units_of_16_bytes_are_refused() -> None:
    x, weights, ids, w_up, w_down = GIVEN
    with ops.simulated("sm_90a"), pytest.raises(ValueError, match="multiples of 8, got 64 and 47"):
        cutex.moe(x, weights, ids, w_up[..., :94], w_down[:, :47])


def test_shapes_are_known_without_memory() -> None:
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t).requires_grad_(t.is_floating_point()) for t in GIVEN]
        y = cutex.moe(*given)
        assert (y.shape, y.dtype) == (GIVEN[0].shape, bf16)
        y.sum().backward()
    for t in given:
        if t.requires_grad:
            assert t.grad is not None and t.grad.shape == t.shape and t.grad.dtype == t.dtype


@pytest.mark.slow
def test_torch_compile_takes_it_as_a_whole() -> None:
    compiled = torch.compile(cutex.moe, backend="aot_eager", fullgraph=True)
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in GIVEN]
    with ops.simulated("sm_90a"):
        want = cutex.moe(*given)
        want.float().sum().backward()
        wanted = [t.grad for t in given]
        for t in given:
            t.grad = None
        y = compiled(*given)
        y.float().sum().backward()
    assert torch.equal(y, want)
    for t, w in zip(given, wanted, strict=True):
        assert (t.grad is None) == (w is None) and (w is None or torch.equal(t.grad, w))


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
def test_a_model_runs_on_our_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from cutex.ops.mixture import experts

    assert experts.register()
    gated: list[Tensor] = []  # by our kernel, not the model's own gate
    ours = experts.gated_rows

    def counted(h: Tensor, offs: Tensor) -> Tensor:
        gated.append(h)
        return ours(h, offs)

    monkeypatch.setattr(experts, "gated_rows", counted)
    sizes = {"num_local_experts" if name == "Mixtral" else "num_experts": 4}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=32, intermediate_size=24, moe_intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts_per_tok=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager", dtype=bf16
    )
    tokens = torch.arange(12)[None]
    found = {}
    for kind in ("eager", "cutex"):
        model.config._experts_implementation = kind
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = kind
        model.zero_grad()
        with ops.simulated("sm_90a"):
            logits = model(tokens).logits
            logits.float().square().sum().backward()
        up = next(p for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj"))
        found[kind] = logits.detach().float(), up.grad.float()
        assert bool(gated) == (kind == "cutex")
    for ours, theirs in zip(found["cutex"], found["eager"], strict=True):
        assert float((ours - theirs).abs().max()) <= 2**-5 * float(theirs.abs().max())


@pytest.mark.gpu
def test_a_graph_is_replayed_with_another_routing() -> None:
    x, weights, ids, *w = layer("cuda")
    cutex.moe(x, weights, ids, *w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cutex.moe(x, weights, ids, *w)
    for other in (ids.clone(), torch.zeros_like(ids), ids.flip(0)):
        ids.copy_(other)
        graph.replay()
        assert torch.equal(y, cutex.moe(x, weights, other, *w))


# ---- weights of fp8


def quantized(seed: int, tokens: int = 37) -> tuple[list[Tensor], list[Any]]:
    """A layer of D = F = 128, with weights quantized by blocks; and the same with what they, and x,
    are as fp8."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, 128), generator=g).to(bf16)
    ids = torch.randint(-1, 4, (tokens, 2), generator=g)
    ids[ids == 1] = 2
    weights = torch.rand(ids.shape, generator=g)
    shapes = (3, 256, 128), (3, 128, 128)
    w = [cutex.quantize(torch.randn(s, generator=g).to(bf16) / 11, "fp8_128x128") for s in shapes]
    plain = [cutex.dequantize(each, torch.float64).mT for each in w]
    as_fp8 = cutex.dequantize(cutex.quantize(x, "fp8_1x128"), torch.float64)
    return [as_fp8, weights.double(), ids, *plain], [x, weights, ids, *w]


@pytest.mark.slow
def test_a_layer_of_fp8_weights_is_what_its_parts_are() -> None:
    """Each token's terms from the same elements; the gated product is quantized as in the layer, so
    that only roundings of what it is quantized from are left: rarely one of 16 steps."""
    with ops.simulated("sm_90a"):
        (x, weights, ids, up, down), given = quantized(0)
        got = cutex.moe(*given).double()
        want = torch.zeros_like(got)
        for t, j in ((ids >= 0) & (ids < 3)).nonzero().tolist():
            h = x[t] @ up[ids[t, j]]
            y = (F.silu(h[0::2]) * h[1::2]).to(bf16)[None]
            y = cutex.dequantize(cutex.quantize(y, "fp8_1x128"), torch.float64)
            want[t] += weights[t, j] * (y @ down[ids[t, j]])[0]
    assert float((got - want).norm() / want.norm()) < 0.01  # in 16 bits all along: 0.04


UNFIT = {
    "one alone": (lambda x, r, i, up, down: (x, r, i, up, down.data), TypeError, "w_down"),
    "another format": (
        lambda x, r, i, up, down: (x, r, i, up._replace(format="mxfp8"), down), ValueError, "mxfp8",
    ),
    "other sizes": (
        lambda x, r, i, up, down: (x, r, i, down, down), ValueError, r"w_down must be \(E, F, D\)",
    ),
    "a gradient": (
        lambda x, r, i, up, down: (x.requires_grad_(), r, i, up, down), ValueError, "gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_fp8_weights_that_do_not_fit_are_refused(case: str) -> None:
    change, error, sentence = UNFIT[case]
    with ops.simulated("sm_90a"):
        _, given = quantized(0, tokens=3)
        with pytest.raises(error, match=sentence):
            cutex.moe(*change(*given))
