"""
Every architecture of every model_*.py, a user's own files included: sizes, initial weights, function, gradients, limits.
Each property is a function check_*; beside it a broken twin that it is shown to catch.
Run alone: python -m pytest -q tests/test_models.py          NANODEPTH_SLOW=1: every name at n_layer 512 and compiled
"""
import ast
import dataclasses
import itertools
import math
import os
import shutil
import subprocess
import sys
from types import MethodType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from train import HERE, TrainConfig, build, find_models, load_module, speed_up

MODELS = find_models()
NAMES = list(MODELS)
STREAMS = [n for n in NAMES if "n_streams" in load_module(MODELS[n][0]).GPTConfig.__dataclass_fields__]
OURS = {"model_preln.py", "model_norms.py", "model_hc.py", "model_mhc.py", "model_attnres.py", "model_moda.py", "model_layerrope.py", "model_mgr.py"}
FIRST = list({path: n for n, (path, _) in reversed(MODELS.items())}.values()) # one name of each file
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=16, d_ff=32, vocab_size=32, block_size=8)
each_model = pytest.mark.parametrize("name", NAMES)

@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1) # tiny tensors
    yield
    torch.set_num_threads(threads)

class Double:
    # FP64 from the constructor on: also constants that are computed there
    def __enter__(self):
        torch.set_default_dtype(torch.float64)
    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)

def tiny(name, seed=0, random=True, dtype=torch.float64, **fields):
    # a small model; random: every parameter moved off its initial value, so that nothing hides behind a zero
    torch.manual_seed(seed)
    with Double():
        m = build(name, **{**TINY, **fields})
    if random:
        with torch.no_grad():
            for n, p in m.named_parameters():
                p.add_((0.2 if n.endswith(m.MATRIX) else 0.5) * torch.randn(p.shape, dtype=p.dtype))
    return m.to(dtype)

def tokens(m, B=3, T=8, seed=1):
    return torch.randint(m.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed)) # (B, T)

def error(a, b):
    return (a - b).abs().max().item()

def patch(module, **methods):
    for k, f in methods.items():
        setattr(module, k, MethodType(f, module))
    return module

# -----------------------------------------------------------------------------
# sizes: parameters and FLOPs, on meta tensors

# n_layer, n_embd, d_ff, then totals: Pre-LN, and what AttnRes, Sandwich-LN, KEEL, HC, mHC (n = 4), MoDA (MHA) add to it
TABLE = [
    (16, 1216, 3248, 406534336, 77824, 38912, 37696, 234304, 3736416, 44359680),
    (20, 1120, 2992, 414087520, 89600, 44800, 43680, 269840, 4301880, 47667200),
    (24, 1024, 2736, 405406720, 98304, 49152, 48128, 296160, 4719888, 48234496),
    (28, 960, 2560, 406249920, 107520, 53760, 52800, 324016, 5162472, 49766400),
    (32, 896, 2400, 399358848, 114688, 57344, 56448, 345728, 5506752, 49774592),
    (42, 800, 2144, 404151200, 134400, 67200, 66400, 405384, 6453468, 52480000),
    (70, 640, 1712, 409229440, 179200, 89600, 88960, 541240, 8605380, 56524800),
]
COLUMN = {"preln": None, "attnres": 0, "sandwich": 1, "keel": 2, "hc": 3, "mhc": 4, "moda": 5}

def meta(name, **fields):
    with torch.device("meta"), mock.patch("torch.nn.init.kaiming_uniform_"), mock.patch("torch.nn.init.trunc_normal_"): # nothing to draw
        return build(name, **fields)

def extra_params(name, c):
    # what an architecture adds to Pre-LN, by formula
    L, d, n, K = c.n_layer, c.n_embd, getattr(c, "n_streams", 0), 2 * c.n_layer
    d_kv = c.n_kv_head * d // c.n_head
    if name in ("preln", "postln", "lns", "deepnorm"):
        return 0
    if name in ("sandwich", "keel"):
        return 2 * L * d if name == "sandwich" else (2 * L - 1) * d
    if name in ("hc", "hc_static"):
        return K * (n * (n + 2) + (d * (n + 1) + d + 2) * (name == "hc"))
    if name in ("mhc", "mhc_lite"):
        m = 2 * n + (n * n if name == "mhc" else math.factorial(n))
        return K * (n * d * m + m + 3)
    if name.startswith("attnres"):
        return 4 * L * d
    if name.startswith("moda"):
        return (L - 1) * 2 * d * d_kv
    if name.startswith("layerrope"):
        scalars = 8 if name in ("layerrope_mag", "layerrope_rot") else 16
        return 4 * d * (L if name == "layerrope_free" else 1) + scalars - 2 * L * d
    b = n + (name == "mgr")
    return K * (d + b) if n == 1 else K * d if n > K else (n - 2) * d + (K - n + 1) * (2 * d + b) + d

def extra_flops(name, c, T):
    # Appendix D of DepthBench, and the same convention for what it leaves out: 2 for a multiplication and addition
    L, d, n, K = c.n_layer, c.n_embd, getattr(c, "n_streams", 0), 2 * c.n_layer
    if name in ("hc", "hc_static"):
        return K * (2 * T * n * d * (n + 1) * (name == "hc") + 2 * T * n * d + 2 * T * n * (n + 1) * d + 2 * T * n * d)
    if name in ("mhc", "mhc_lite"):
        m = 2 * n + (n * n if name == "mhc" else math.factorial(n))
        return K * (2 * T * n * d * m + 2 * T * n * d + 2 * T * n * n * d + 2 * T * n * d)
    if name == "attnres":
        return 4 * T * d * L * (2 * L + 3)
    if name == "attnres_block":
        b = math.ceil(K / 8)
        return 4 * T * d * (sum(2 + k // b for k in range(1, K)) + 1 + math.ceil(K / b))
    if name.startswith("moda"):
        return 4 * T * d * (c.n_kv_head * d // c.n_head) * (L - 1) + 4 * T * d * L * (L - 1)
    if name.startswith("mgr"):
        pooled = sum(s for s in [min(k + 1, n) for k in range(K + 1)] if s > 1) # streams that each consumer, and the readout, pools
        return 4 * T * d * pooled + 4 * T * d * n * max(0, K - n + 1)
    return 0

def preln_flops(c, T):
    d_kv = c.n_kv_head * c.n_embd // c.n_head
    return c.n_layer * (4 * T * c.n_embd**2 + 4 * T * c.n_embd * d_kv + 6 * T * c.n_embd * c.d_ff + 2 * T**2 * c.n_embd) + 2 * T * c.n_embd * c.vocab_size

def check_sizes(name, m):
    c, T = m.config, 2048
    d_kv = c.n_kv_head * c.n_embd // c.n_head
    preln = 2 * c.vocab_size * c.n_embd + c.n_layer * (2 * c.n_embd**2 + 2 * c.n_embd * d_kv + 3 * c.n_embd * c.d_ff + 2 * c.n_embd) + c.n_embd
    assert m.num_params() == sum(p.numel() for p in m.parameters()) == preln + extra_params(name, c)
    assert m.flops(T) == preln_flops(c, T) + extra_flops(name, c, T)
    return preln

@pytest.mark.parametrize("name", [n for n in NAMES if MODELS[n][0].name in OURS])
def test_sizes(name):
    shapes = TABLE if name in COLUMN else TABLE[:1]
    for L, d, d_ff, total, *more in shapes:
        m = meta(name, n_layer=L, n_embd=d, vocab_size=50280)
        assert m.config.d_ff == d_ff and check_sizes(name, m) == total
        if name in COLUMN:
            assert m.num_params() == total + (more[COLUMN[name]] if COLUMN[name] is not None else 0)
    # GQA: one of the 1.6B shapes, with few blocks; and small shapes with every number of streams, more streams than sub-layers included
    check_sizes(name, meta(name, n_layer=3, n_embd=2048, n_kv_head=8, d_ff=6144, vocab_size=50280))
    for n, L in itertools.product((1, 2, 3, 4, 8), (1, 2, 7)) if name in STREAMS else ():
        if name != "mhc_lite" or n <= 4:
            check_sizes(name, meta(name, **{**TINY, "n_layer": L, "n_streams": n}))
    for L in (1, 4, 5, 21): # Block AttnRes: last source short, or one sub-layer each
        check_sizes(name, meta(name, **{**TINY, "n_layer": L}))

def test_sizes_of_1_6b():
    for L, d, total in ((28, 2048, 1615349760), (40, 1728, 1607179968), (54, 1504, 1617192544)):
        m = meta("preln", n_layer=L, n_embd=d, n_kv_head=8, d_ff=3 * d, vocab_size=50280)
        assert check_sizes("preln", m) == m.num_params() == total
    assert meta("moda", n_layer=36, n_embd=1024, n_kv_head=8, vocab_size=50280).num_params() - meta("preln", n_layer=36, n_embd=1024, n_kv_head=8, vocab_size=50280).num_params() == 36700160

def test_sizes_broken():
    m = meta("attnres", **TINY)
    m.h[0].res_attn = type(m.h[0].res_mlp)(m.config) # a query on the first attention: 2d too many
    with pytest.raises(AssertionError):
        check_sizes("attnres", m)
    m = patch(meta("hc", **TINY), depth_flops=lambda self, T: 192 * T * self.config.n_embd) # once, not per block
    with pytest.raises(AssertionError):
        check_sizes("hc", m)

def test_learning_rates_and_literal_variants():
    rates = dict(preln=2e-3, sandwich=2e-3, keel=2e-3, moda=2e-3, attnres=2e-3, attnres_block=2e-3, hc=2e-3, mhc=2e-3, lns=1e-2, deepnorm=1e-3, moda_postln=1e-3,
                 hc_static=2e-3, mhc_lite=2e-3, mgr=2e-3, mgr_independent=2e-3, postln=5e-4)
    for name, (path, overrides) in MODELS.items():
        if path.name in OURS:
            assert overrides["learning_rate"] == (8e-3 if name.startswith("layerrope") else rates[name]), name
        own = set(load_module(path).GPTConfig.__dataclass_fields__)
        flags = {f.name for f in dataclasses.fields(TrainConfig)}
        assert not own & flags and set(overrides) <= own | flags, name

# -----------------------------------------------------------------------------
# initial weights

def rescaled(name, key, m):
    # what the papers rescale after the shared draw, as a factor for each row
    c, one = m.config, 1.0
    if name in ("hc", "hc_static", "mhc", "mhc_lite") and key.endswith(("attn.wo.weight", "mlp.w2.weight")):
        return c.n_streams ** -0.5
    if name == "deepnorm" and key.endswith(("attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight")):
        return (8 * c.n_layer) ** -0.25
    if name == "deepnorm" and key.endswith("attn.wqkv.weight"):
        v = torch.ones(m.get_parameter(key).size(0), 1) # (rows, 1)
        v[-c.n_kv_head * c.n_embd // c.n_head:] = (8 * c.n_layer) ** -0.25
        return v
    return one

def check_shared_weights(name, m):
    torch.manual_seed(3)
    want, got = dict(build("preln", **TINY).named_parameters()), dict(m.named_parameters())
    shared = [k for k in want if k in got and got[k].shape == want[k].shape]
    assert len([k for k in shared if k.endswith(m.MATRIX)]) == 4 * m.config.n_layer and {"wte.weight", "lm_head.weight", "norm_f.weight"} <= set(shared)
    for k in shared:
        factor = rescaled(name, k, m)
        if MODELS[name][0].name not in OURS: # a rescaling that this test cannot know: one number for the tensor
            factor = ((want[k] * got[k]).sum() / want[k].square().sum()).item()
            assert error(got[k], want[k] * factor) < 1e-6 * want[k].abs().max(), k
        else:
            assert error(got[k] / factor, want[k]) <= (0 if isinstance(factor, float) and factor == 1 else 2e-8), k

@each_model
def test_shared_weights_are_those_of_preln(name):
    torch.manual_seed(3)
    check_shared_weights(name, build(name, **TINY))
    torch.manual_seed(3)
    again = build(name, **TINY)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), build(name, **TINY).parameters()))

def test_shared_weights_broken(monkeypatch):
    block = load_module(MODELS["preln"][0]).Block
    draw = block.__init__
    monkeypatch.setattr(block, "__init__", lambda self, config, l: (draw(self, config, l), torch.randn(l)) and None) # one more draw in block 1
    torch.manual_seed(3)
    m = build("preln", **TINY)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_shared_weights("preln", m)

def check_param_groups(m):
    groups = m.param_groups()
    assert list(groups) == ["embed", "head", "matrix", "other", "no_decay"]
    assert sorted(id(p) for g in groups.values() for p in g) == sorted(id(p) for p in m.parameters())
    ids = {id(p): n for n, p in m.named_parameters()}
    names = {k: {ids[id(p)] for p in g} for k, g in groups.items()}
    assert names["embed"] == {"wte.weight"} and names["head"] == {"lm_head.weight"}
    ends = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight", "kv_mlp.weight")
    assert names["matrix"] == {n for n in ids.values() if n.endswith(ends)} and all(p.dim() == 2 for p in groups["matrix"]) # no queries, no mixing tables
    return {n.split(".")[-1] for n in names["no_decay"]}

NO_DECAY = {"hc": {"A", "B"}, "hc_static": {"A", "B"}, "mhc": {"b", "alpha"}, "mhc_lite": {"b", "alpha"}, "mgr": {"c"}, "mgr_independent": {"c"},
            **{n: {"alpha", "beta", "alpha_rot", "beta_rot"} for n in NAMES if n.startswith("layerrope")},
            "layerrope_mag": {"alpha", "beta"}, "layerrope_rot": {"alpha_rot", "beta_rot"}}

@each_model
def test_param_groups(name):
    no_decay = check_param_groups(meta(name, **TINY))
    if MODELS[name][0].name in OURS:
        assert no_decay == NO_DECAY.get(name, set())

def test_param_groups_broken():
    m = meta("hc", **TINY)
    for change in (lambda g: g["other"].pop(), lambda g: g["no_decay"].append(g["other"][0]), lambda g: g["matrix"].append(g["other"].pop())):
        groups = m.param_groups()
        change(groups)
        twin = patch(meta("hc", **TINY), param_groups=lambda self: groups)
        twin.parameters, twin.named_parameters = m.parameters, m.named_parameters
        with pytest.raises(AssertionError):
            check_param_groups(twin)

# -----------------------------------------------------------------------------
# function

def check_causal(m):
    idx = tokens(m)
    a = m(idx)[0]
    for t in (1, 4, 7):
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % m.config.vocab_size
        b = m(other)[0]
        assert error(a[:, :t], b[:, :t]) < 1e-12, "a later token is seen"
        assert (a[:, t:] - b[:, t:]).abs().amax(dim=(0, 2)).min() > 1e-9, "an earlier token is not seen"

def check_batch(m):
    idx, order = tokens(m), torch.tensor([2, 0, 1])
    a = m(idx)[0]
    assert error(a[order], m(idx[order])[0]) < 1e-12 and error(a[:1], m(idx[:1])[0]) < 1e-12
    assert error(a[:, :5], m(idx[:, :5])[0]) < 1e-12 # and a shorter sequence

def flatten(state):
    return [state] if torch.is_tensor(state) else [t for s in state for t in flatten(s)] if isinstance(state, (tuple, list)) else []

def check_state(m):
    # hooks: the trunk is the plain loop, state is a value, hidden is (B, T, *), loss and logits belong together
    idx = tokens(m)
    x = m.embed(idx)
    state, kept = m.begin(x), x.clone()
    for l, block in enumerate(m.h):
        before = flatten(state)
        copies, versions = [t.clone() for t in before], [t._version for t in before]
        hidden = m.hidden(state, l)
        assert hidden.shape[:2] == idx.shape and hidden.dim() == 3
        new = block(state)
        assert all(torch.equal(a, b) for a, b in zip(flatten(new), flatten(block(state)))), "a block is not a function of its input"
        assert len(before) == len(flatten(state)) and all(torch.equal(a, b) and a._version == v for a, b, v in zip(before, copies, versions)), "a block changed its input"
        assert torch.equal(hidden, m.hidden(state, l))
        state = new
    assert torch.equal(x, kept)
    x = m.readout(state)
    assert torch.equal(x, m.trunk(idx)) and torch.equal(x, m.readout(state)) and x.shape == (*idx.shape, m.config.n_embd)
    assert m.hidden(state, len(m.h)).shape[:2] == idx.shape
    logits, none = m(idx)
    assert none is None and logits.shape == (*idx.shape, m.config.vocab_size) and torch.equal(logits, m.head(x)[0])
    targets = tokens(m, seed=2)
    targets[0, :3] = -1
    none, loss = m(idx, targets)
    assert none is None and error(loss, F.cross_entropy(logits[targets >= 0], targets[targets >= 0])) < 1e-12

@each_model
def test_function(name):
    m = tiny(name)
    with torch.no_grad():
        check_causal(m)
        check_batch(m)
        check_state(m)

def test_function_broken(monkeypatch):
    with torch.no_grad():
        attention = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, is_causal, **k: attention(*a, **k))
        with pytest.raises(AssertionError, match="later token"):
            check_causal(tiny("preln"))
        monkeypatch.undo()
        m = tiny("preln")
        patch(m.h[0].attn, forward=lambda self, x: torch.zeros_like(x))
        patch(m.h[1].attn, forward=lambda self, x: torch.zeros_like(x))
        with pytest.raises(AssertionError, match="earlier token"):
            check_causal(m)
        m = tiny("hc")
        m.h[1].register_forward_hook(lambda mod, args, out: (out[0].roll(1, 0), *out[1:])) # streams folded into the batch, unfolded wrongly
        with pytest.raises(AssertionError):
            check_batch(m)
        m = tiny("preln")
        def forward(self, x):
            x += self.attn(self.norm_attn(x)) # (B, T, C)
            return x + self.mlp(self.norm_mlp(x)) # (B, T, C)
        patch(m.h[1], forward=forward)
        with pytest.raises(AssertionError, match="input"):
            check_state(m)
        m = tiny("preln")
        patch(m, trunk=lambda self, idx: self.h[0](self.embed(idx)))
        with pytest.raises(AssertionError):
            check_state(m)

# -----------------------------------------------------------------------------
# gradients

def objective(m):
    # loss plus a random cotangent on the logits: the sum of a softmax has no gradient, this has
    idx, targets = tokens(m), tokens(m, seed=2)
    x = m.trunk(idx)
    logits = m.head(x)[0]
    return m.head(x, targets)[1] + (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(logits.dtype)).mean()

def check_gradient(m):
    # one random direction per parameter tensor: central difference against autograd
    objective(m).backward()
    torch.manual_seed(5)
    h, largest = 1e-5, max(p.grad.norm().item() for p in m.parameters())
    with torch.no_grad():
        for n, p in m.named_parameters():
            u = torch.randn_like(p) / p.numel() ** 0.5
            value = []
            for step in (h, -2 * h, h): # ends where it began
                p.add_(step * u)
                value.append(objective(m).item() if step != h or not value else 0)
            numeric, exact = (value[0] - value[1]) / (2 * h), (p.grad * u).sum().item()
            assert abs(numeric - exact) < 1e-6 * abs(exact) + 1e-8 * largest, f"{n}: {numeric} and {exact}"

@each_model
def test_gradient_is_that_of_finite_differences(name):
    check_gradient(tiny(name))

def test_gradient_broken():
    m = tiny("preln")
    m.h[0].register_forward_hook(lambda mod, args, out: out / 2 + out.detach() / 2) # same function, half the gradient
    with pytest.raises(AssertionError, match="wte"):
        check_gradient(m)

def check_every_parameter(name, m):
    # none unused (DDP), none with a vanishing gradient but where it is zero by construction
    objective(m).backward()
    assert not [n for n, p in m.named_parameters() if p.grad is None], "no gradient"
    largest = max(p.grad.abs().max().item() for p in m.parameters())
    for n, p in m.named_parameters():
        if m.config.n_layer == 1 and n.startswith("depth.") and n.endswith((".beta", ".beta_rot")):
            assert p.grad.abs().max() == 0 # times ln 1
        else:
            assert p.grad.abs().max() > 1e-6 * largest, n
            assert p.grad.isfinite().all(), n

@each_model
def test_every_parameter_has_a_gradient(name):
    for L in (1, 2, 7):
        check_every_parameter(name, tiny(name, n_layer=L))

def test_every_parameter_broken():
    m = tiny("moda")
    m.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64)) # as the key-value projection of a last MLP would be
    with pytest.raises(AssertionError, match="no gradient"):
        check_every_parameter("moda", m)
    m = tiny("hc")
    with torch.no_grad():
        m.h[1].hc_mlp.s_a.zero_() # cuts W_a off
    with pytest.raises(AssertionError, match="W_a"):
        check_every_parameter("hc", m)

# -----------------------------------------------------------------------------
# limits

def check_step(m, lr=1e-3):
    # starts, and a step of gradient descent lowers the loss
    idx, targets = tokens(m, T=min(8, m.config.block_size)), tokens(m, T=min(8, m.config.block_size), seed=2)
    loss = m(idx, targets)[1]
    loss.backward()
    assert abs(loss.item() - math.log(m.config.vocab_size)) < 0.5
    grads = [p.grad for p in m.parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)
    size = math.sqrt(sum(g.square().sum().item() for g in grads))
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(lr * p.grad / size)
        assert m(idx, targets)[1] < loss

@each_model
@pytest.mark.parametrize("n_layer", [1, 2, 7, 70])
def test_number_of_blocks(name, n_layer):
    torch.manual_seed(0)
    check_step(build(name, **{**TINY, "n_layer": n_layer}))

def test_number_of_blocks_broken():
    m = build("preln", **TINY)
    m.h[0].mlp.register_full_backward_hook(lambda mod, grad_in, grad_out: (grad_in[0] * float("nan"),))
    with pytest.raises(AssertionError):
        check_step(m)
    with pytest.raises(AssertionError):
        check_step(build("preln", **TINY), lr=-1e-3)

@pytest.mark.parametrize("name", NAMES if os.environ.get("NANODEPTH_SLOW") else ["postln"])
def test_very_deep(name):
    # 512 blocks of width 16; not all by default: attnres and moda take a minute or two
    torch.manual_seed(0)
    m = build(name, n_layer=512, n_embd=16, n_head=1, d_ff=16, vocab_size=32, block_size=2)
    check_step(m)

@pytest.mark.parametrize("name", STREAMS)
def test_number_of_streams(name):
    for n in (1, 2, 3, 4, 8):
        try:
            m = tiny(name, n_streams=n)
        except ValueError as e:
            assert n > 4 and "n_streams" in str(e) # mHC-lite: n! permutations
            continue
        assert not (name == "mhc_lite" and n > 4)
        with torch.no_grad():
            check_causal(m)
            check_batch(m)
            check_state(m)
        check_every_parameter(name, m) if n > 1 else objective(m).backward() # at n = 1 the mixing of one stream has nothing to learn
        assert not [k for k, p in m.named_parameters() if p.grad is None]
    if name == "mhc_lite":
        with pytest.raises(ValueError, match="n_streams.*(1 to 4|4)"):
            tiny(name, n_streams=5)

@each_model
def test_bad_values_are_refused(name):
    bad = [("n_embd", dict(n_embd=64, n_head=5)), ("n_head", dict(n_head=0)), ("n_head", dict(n_head=-2)), ("n_embd", dict(n_embd=0)), ("n_layer", dict(n_layer=0)),
           ("vocab_size", dict(vocab_size=0)), ("block_size", dict(block_size=0)), ("n_kv_head", dict(n_kv_head=3)), ("n_kv_head", dict(n_kv_head=-1)),
           ("d_ff", dict(d_ff=-1)), ("norm_eps", dict(norm_eps=-1e-6)), ("rope_base", dict(rope_base=1.0)), ("odd", dict(n_embd=50, n_head=2, n_kv_head=2))]
    own = load_module(MODELS[name][0]).GPTConfig.__dataclass_fields__
    bad += [(f, {f: v}) for f, v in (("n_streams", 0), ("n_streams", -1), ("source_block", -1), ("sinkhorn_iters", -1), ("norm", "nonsense")) if f in own]
    for word, fields in bad:
        with pytest.raises(ValueError, match=word) as e:
            build(name, **{**TINY, **fields})
        assert all(str(v) in str(e.value) for v in fields.values() if fields != bad[-1][1] or len(fields) == 1), e.value
    build(name, **{**TINY, "norm_eps": 0.0})

@each_model
def test_head_sizes(name):
    for head_size in (2, 8, 34, 38, 54, 94, 108) if name in ("preln", "moda") else (2, 54, 94): # the two texts of attention
        check_head_size(name, dict(n_head=2, n_kv_head=1, n_embd=2 * head_size, d_ff=48))

def check_head_size(name, fields, change=lambda m: None):
    # bit-equal from call to call, and FP32 within 1e-5 of FP64, forward and backward
    m, ref = tiny(name, random=False, dtype=torch.float32, **fields), tiny(name, random=False, **fields)
    change(m)
    a, b = m(tokens(m))[0], ref(tokens(m))[0]
    assert torch.equal(a, m(tokens(m))[0]) and error(a, b) < 1e-5
    objective(m).backward()
    objective(ref).backward()
    largest = max(p.grad.abs().max() for p in ref.parameters())
    for (n, p), q in zip(m.named_parameters(), ref.parameters()):
        assert error(p.grad, q.grad) < 1e-5 * max(1, largest), n

def test_head_size_broken():
    def change(m): # reads the first 64 columns of a head only
        patch(m.h[0].attn.rotary, forward=lambda self, x: F.pad(x[..., :64], (0, x.size(-1) - 64)))
    with pytest.raises(AssertionError):
        check_head_size("preln", dict(n_head=2, n_kv_head=1, n_embd=188, d_ff=48), change)

def repeat_heads(w, m, heads, blocks):
    # rows of a fused weight: the first `heads` heads as they are, then blocks of key or value heads, each twice
    D = m.config.n_embd // m.config.n_head
    rest = w[heads * D:].view(blocks, -1, D, w.size(1)).repeat_interleave(2, dim=1) # (blocks, 2 Hkv, D, C)
    return torch.cat((w[:heads * D], rest.flatten(0, 2)))

@each_model
def test_grouped_query_attention(name):
    # two query heads on one key head compute what they do on two equal key heads
    m, full = tiny(name, n_layer=3), tiny(name, n_layer=3, n_kv_head=4)
    weights = {}
    for k, w in m.state_dict().items():
        if w.shape != full.state_dict()[k].shape:
            w = repeat_heads(w, m, 4, 2) if k.endswith("wqkv.weight") else repeat_heads(w, m, 0, 2) if k.endswith("kv_mlp.weight") else w
        weights[k] = w
    full.load_state_dict(weights)
    with torch.no_grad():
        assert error(m(tokens(m))[0], full(tokens(m))[0]) < 1e-12
        full.h[0].attn.wqkv.weight[-1].add_(1) # the comparison can fail
        assert error(m(tokens(m))[0], full(tokens(m))[0]) > 1e-6

def check_autocast(m):
    idx, targets = tokens(m), tokens(m, seed=2)
    loss = m(idx, targets)[1]
    with torch.autocast("cpu", torch.bfloat16):
        low = m(idx, targets)[1]
        state = m.begin(m.embed(idx))
        for block in m.h:
            state = block(state)
    assert low.dtype == torch.float32 and abs(low.item() - loss.item()) < 1e-2
    assert m.readout(state).dtype == torch.bfloat16, "streams and sources are BF16"
    assert all(t.dtype == torch.bfloat16 for t in flatten(state) if t.size(-1) == m.config.n_embd)
    low.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in m.parameters())

@each_model
def test_bf16_autocast(name):
    torch.manual_seed(0)
    check_autocast(build(name, **{**TINY, "n_layer": 7, "n_embd": 32}))

def test_bf16_autocast_broken():
    torch.manual_seed(0)
    m = build("preln", **{**TINY, "n_layer": 7, "n_embd": 32})
    patch(m, embed=lambda self, idx: self.wte(idx)) # streams stay FP32
    with pytest.raises(AssertionError, match="BF16"):
        check_autocast(m)
    m = build("preln", **TINY)
    m.register_forward_hook(lambda mod, args, out: (None, out[1] * (1.01 if torch.is_autocast_enabled("cpu") else 1)))
    with pytest.raises(AssertionError):
        check_autocast(m)

# -----------------------------------------------------------------------------
# torch.compile, counted with a backend that compiles nothing

def check_graphs(m):
    counter, compile = CompileCounter(), nn.Module.compile
    want = m(tokens(m), tokens(m, seed=2))[1]
    torch._dynamo.reset()
    with mock.patch.object(nn.Module, "compile", lambda self: compile(self, backend=counter)):
        speed_up(m, SimpleNamespace(fused="off", compile=True, device="cpu"))
    got = m(tokens(m), tokens(m, seed=2))[1]
    got.backward()
    torch._dynamo.reset()
    assert 1 <= counter.frame_count <= 3 and error(got, want) < 1e-6

@pytest.mark.parametrize("name", NAMES if os.environ.get("NANODEPTH_SLOW") else [*FIRST, "keel"])
def test_graphs(name):
    torch.manual_seed(0)
    check_graphs(build(name, **{**TINY, "n_layer": 12}))

def test_graphs_broken(monkeypatch):
    m = build("preln", **{**TINY, "n_layer": 12})
    for l, block in enumerate(m.h):
        block.depth = l + 1 # a Python number: a graph for every block, up to the limit of eight
    monkeypatch.setattr(type(m.h[0]), "forward", lambda self, x: x + self.mlp(self.norm_mlp(x) / self.depth))
    with pytest.raises(AssertionError):
        check_graphs(m)

# -----------------------------------------------------------------------------
# a file of one's own

USER = """
import sys
import torch
import test_models
from train import build, find_models
models = find_models()
assert "mine" in test_models.NAMES and models["mine"][0].name == "model_mine.py", models
assert set(NAMES) <= set(models) and "broken" not in models
torch.manual_seed(0)
test_models.check_step(build("mine", **test_models.TINY))
test_models.test_function("mine")
test_models.test_shared_weights_are_those_of_preln("mine")
test_models.check_param_groups(build("mine", **test_models.TINY))
build("preln", **test_models.TINY)
try:
    build("fails", **test_models.TINY)
except SystemExit:
    print("the others work")
"""

def start_early(tmp):
    if "hc" not in NAMES:
        return ()
    for path in [HERE / "train.py", *(p for p, _ in MODELS.values())]:
        shutil.copy(path, tmp)
    shutil.copy(__file__, tmp)
    text = MODELS["hc"][0].read_text(encoding="utf-8")
    line = next(n for n in ast.parse(text).body if isinstance(n, ast.Assign) and n.targets[0].id == "VARIANTS")
    lines = text.split("\n")
    lines[line.lineno - 1:line.end_lineno] = ['VARIANTS = {"mine": {}}']
    (tmp / "model_mine.py").write_text("\n".join(lines), encoding="utf-8")
    (tmp / "model_broken.py").write_text('VARIANTS = {"broken": {}}\nclass GPT(:\n', encoding="utf-8") # does not parse
    (tmp / "model_fails.py").write_text('VARIANTS = {"fails": {}}\nimport no_such_module\n', encoding="utf-8") # fails when imported
    script = USER.replace("NAMES) <= set(models)", f"{NAMES!r}) <= set(models)")
    script = script.replace("import test_models\n", "import train\ntrain.find_models.cache_clear()\nfails = train.find_models().pop('fails')\nimport test_models\ntrain.find_models()['fails'] = fails\n", 1)
    return subprocess.Popen([sys.executable, "-c", script], cwd=tmp, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),

@pytest.mark.skipif("hc" not in NAMES, reason="needs model_hc.py")
def test_a_file_of_ones_own(early):
    out, err = early[0].communicate(timeout=300)
    assert early[0].returncode == 0 and out.strip().endswith("the others work"), err
    assert "model_broken.py" in err and "model_fails.py" in err
