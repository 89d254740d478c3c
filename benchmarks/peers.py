"""What others offer in the place of these layers, and the formulas that people write by hand."""

import copy
from collections.abc import Callable, Sequence

import aft_pytorch
import torch
from contest import Entry
from modules import DotProduct, layer, of_module
from torch import Tensor, nn

from aft.benchmark import work
from aft.benchmark.gate import judge
from aft.benchmark.work import Work, normal_inputs
from aft.layers import AFTFull, AFTLocal, AFTSimple
from aft.layers.base import AFTLayer

HEADS, WINDOW = 8, 32
LARGE, SHORT = 100.0, 256  # exp of keys of that scale overflows in float32, at any length
LONGEST_LOOP = 1024  # positions: aft-pytorch's AFTLocal copies its T x T table by a loop in Python, each call
_LENGTH = "a sequence may not be longer than max_seqlen"
_NOTES = {
    "AFTFull": [_LENGTH],
    "AFTLocal": [_LENGTH, "each call makes a new parameter, so that its bias never learns"],
}
_THEIR_NAMES = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "project"}


def entries(batch: int, length: int, width: int) -> list[Entry]:
    """Peers, and the layers of this library that they are compared to."""

    def own(name: str, causal: bool) -> Entry:
        def make(length: int, scale: float) -> Work:
            module = _ours(name, length, width, causal)
            _enlarge(module.k_proj, scale)
            return layer(_label(name, causal), module, _input(batch, length, width))

        return _at_both_scales(make, length)

    def theirs(name: str) -> Entry:
        def make(length: int, scale: float) -> Work:
            module = _of_aft_pytorch(name, length, width)
            _enlarge(module.to_k, scale)
            return _judged_by(module, _ours(name, length, width, False), f"aft-pytorch {name}", batch, length)

        notes = ["not causal", *_NOTES.get(name, [])]
        return _at_both_scales(make, length, _label(name, False), notes)

    names = ("AFTSimple", "AFTLocal", "AFTFull")
    found = [own(name, causal) for name in names for causal in (True, False)]
    found += [theirs(name) for name in names if name != "AFTLocal" or length <= LONGEST_LOOP]
    found += [
        Entry(each, relative_to="AFTSimple", is_peer=True, note="another function")
        for each in _other_functions(batch, length, width)
    ]
    return found + _composed(batch, length, width)


def _other_functions(batch: int, length: int, width: int) -> list[Work]:
    x = _input(batch, length, width)
    attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    options = {"need_weights": False, "attn_mask": mask, "is_causal": True}
    return [
        of_module("nn.MultiheadAttention", _Calls(attention, lambda m, x: m(x, x, x, **options)[0]), x),
        of_module("nn.GRU", nn.GRU(width, width, batch_first=True), x, lambda given: given[0]),
        of_module("dot product layer", DotProduct(width, HEADS), x),
    ]


def _ours(name: str, length: int, width: int, causal: bool) -> AFTLayer:
    match name:
        case "AFTSimple":
            return AFTSimple(width, causal=causal)
        case "AFTLocal":
            return AFTLocal(width, length, WINDOW, causal=causal)
    return AFTFull(width, length, causal=causal)


def _of_aft_pytorch(name: str, length: int, width: int) -> nn.Module:
    window = {"s": WINDOW} if name == "AFTLocal" else {}
    return getattr(aft_pytorch, name)(length, width, hidden_dim=width, **window)


def _label(name: str, causal: bool) -> str:
    return name if causal else f"{name}, not causal"


def _input(batch: int, length: int, width: int) -> Tensor:
    return normal_inputs(batch, length, width)["q"]


class _Calls(nn.Module):
    """A module that is called in its own way."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.module, x)


def _at_both_scales(
    make: Callable[[int, float], Work],
    length: int,
    relative_to: str | None = None,
    notes: Sequence[str] = (),
) -> Entry:
    """An entry whose verdict also counts keys a hundred times as large, of a short sequence.

    ``make`` is given a length and the scale of keys. What is relative to something is a peer.
    """
    plain, notes = make(length, 1.0), list(notes)
    verdict, large = judge(plain), judge(make(min(length, SHORT), LARGE))
    if verdict.passed and not large.passed:
        notes.append(f"wrong at keys of scale {LARGE:g}")
    if verdict.passed:
        verdict = large if not large.passed else max(verdict, large, key=lambda one: one.error)
    is_peer = relative_to is not None
    return Entry(plain, relative_to=relative_to, verdict=verdict, is_peer=is_peer, note="; ".join(notes))


def _judged_by(theirs: nn.Module, ours: AFTLayer, name: str, batch: int, length: int) -> Work:
    """Their module, with our layer of the same weights to say what is right."""
    x = _input(batch, length, ours.embed_dim)
    for own, other in _THEIR_NAMES.items():
        getattr(ours, own).load_state_dict(getattr(theirs, other).state_dict())
    if hasattr(theirs, "wbias"):
        with torch.no_grad():
            ours.position_bias.copy_(theirs.wbias)

    def variant(impl: str, dtype: torch.dtype) -> Work:
        same = copy.deepcopy(ours).to(dtype)
        same.impl = impl
        exact = of_module(name, same, x.to(dtype), lambda given: given[0])
        leaves = {_their_name(label): leaf for label, leaf in exact.leaves.items()}
        return Work(name, leaves, exact.call, variant)

    return of_module(name, theirs, x, variant=variant, pairs=batch * length**2 * ours.embed_dim)


def _their_name(label: str) -> str:
    module, _, parameter = label.partition(".")
    return (
        f"{_THEIR_NAMES[module]}.{parameter}" if parameter else {"position_bias": "wbias"}.get(label, label)
    )


def _enlarge(projection: nn.Linear, scale: float) -> None:
    with torch.no_grad():
        projection.weight.mul_(scale)


def _composed(batch: int, length: int, width: int) -> list[Entry]:
    """Causal AFT-simple by hand, beside the operation that it is compared to."""

    def operation(length: int, scale: float) -> Work:
        drawn = normal_inputs(batch, length, width)
        return work.simple(drawn | {"k": drawn["k"] * scale})

    def by_hand(name: str, formula: Callable[..., Tensor]) -> Entry:
        def make(length: int, scale: float) -> Work:
            exact = operation(length, scale)
            leaves = exact.leaves
            return Work(name, leaves, lambda: formula(*leaves.values()), exact.variant, exact.pairs)

        return _at_both_scales(make, length, "AFT-simple")

    return [
        _at_both_scales(operation, length),
        by_hand("composed: exp, cumsum", _by_cumsum),
        by_hand("composed: logcumsumexp", _by_logcumsumexp),
    ]


def _by_cumsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(k)
    return torch.sigmoid(q) * torch.cumsum(weights * v, 1) / torch.cumsum(weights, 1)


def _by_logcumsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positive and negative values apart, as a logarithm asks for."""
    tiny = torch.finfo(v.dtype).tiny
    whole = torch.logcumsumexp(k, 1)
    above, below = (torch.logcumsumexp(k + x.clamp(min=tiny).log(), 1) for x in (v, -v))
    return torch.sigmoid(q) * (torch.exp(above - whole) - torch.exp(below - whole))
