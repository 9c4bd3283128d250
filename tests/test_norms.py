"""
model_norms.py and model_layerrope.py against the equations written out once more, in FP64, and against each other.
Run alone: python -m pytest -q tests/test_norms.py
"""
import math

import pytest
import torch

from train import build, find_models

NORMS = ("postln", "sandwich", "lns", "deepnorm", "keel")
SITES = ("attn_in", "mlp_in", "attn_out", "mlp_out")
TINY = dict(n_layer=3, n_embd=24, n_head=4, n_kv_head=2, vocab_size=64, block_size=8)

@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)

def tiny(name, seed=0, noise=0.3, **fields):
    # a small model in FP64, every parameter off its initial value by noise
    torch.manual_seed(seed)
    m = build(name, **{**TINY, **fields})
    with torch.no_grad():
        for p in m.parameters():
            p.add_(noise * torch.randn_like(p))
    return m

def rms(x, w=1.0, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w # (B, T, C)

def error(a, b):
    return (a - b).abs().max().item()

# -----------------------------------------------------------------------------
# the five placements

def written_out(name, m, h):
    # the trunk, one sub-layer k at a time, from the equations of the docstring
    L = len(m.h)
    for k in range(2 * L):
        l, b = k // 2, m.h[k // 2]
        f, w = (b.mlp, b.norm_mlp.weight) if k % 2 else (b.attn, b.norm_attn.weight)
        out = (b.norm_mlp_out if k % 2 else b.norm_attn_out).weight if name == "sandwich" or name == "keel" and k else None
        if name == "postln":
            h = rms(h + f(h), w)
        elif name == "sandwich":
            h = h + rms(f(rms(h, w)), out)
        elif name == "lns":
            h = h + f(rms(h, w) / math.sqrt(l + 1))
        elif name == "deepnorm":
            y = (2 * L) ** 0.25 * h + f(h) # (B, T, C)
            y = y - y.mean(-1, keepdim=True) # (B, T, C)
            h = rms(y, w)
        elif k == 0:
            h = h + f(rms(h, w))
        else:
            h = rms((1 if k == 1 else 2 * L) * h + f(rms(h, w)), out)
    return h

def check_written_out(name, m):
    torch.manual_seed(1)
    h = torch.randn(2, 8, m.config.n_embd) # (B, T, C)
    got = h
    for block in m.h:
        got = block(got)
    assert error(got, written_out(name, m, h)) < 1e-12

@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("n_layer", [1, 3])
def test_written_out(name, n_layer):
    check_written_out(name, tiny(name, n_layer=n_layer))

@pytest.mark.parametrize("twin", ["deepnorm: alpha on the branch", "deepnorm: not centred", "keel: alpha is L", "keel: block 0 like the others", "lns: counted by sub-layer",
                                  "lns: counted from 2", "sandwich: N_out after the sum", "postln: the norm is never called"])
def test_written_out_broken(twin):
    name = twin.split(":")[0]
    m = tiny(name)
    if "branch" in twin: # LN(h + a F(h)): what BUG-030 reports
        def forward(self, x):
            x = self.norm_attn(x + self.alpha * self.attn(x)) # (B, T, C)
            return self.norm_mlp(x + self.alpha * self.mlp(x)) # (B, T, C)
        for b in m.h:
            b.forward = forward.__get__(b)
    if "centred" in twin:
        for b in m.h:
            n = b.norm_mlp
            n.forward = lambda x, n=n: rms(x, n.weight)
    if "alpha is L" in twin:
        for b in m.h[1:]:
            b.alpha = len(m.h)
    if "block 0" in twin:
        m.h[0].alpha = 2 * len(m.h)
    if "sub-layer" in twin:
        for l, b in enumerate(m.h):
            b.scale.fill_((2 * l + 1) ** -0.5)
    if "from 2" in twin:
        for l, b in enumerate(m.h):
            b.scale.fill_((l + 2) ** -0.5)
    if "N_out" in twin:
        def forward(self, x):
            x = self.norm_attn_out(x + self.attn(self.norm_attn(x))) # (B, T, C)
            return self.norm_mlp_out(x + self.mlp(self.norm_mlp(x))) # (B, T, C)
        for b in m.h:
            b.forward = forward.__get__(b)
    if "never" in twin:
        m.h[1].norm_attn.forward = lambda x: x
    with pytest.raises(AssertionError):
        check_written_out(name, m)

def test_lns_factor_and_first_block():
    m, pre = build("lns", **TINY), build("preln", **TINY)
    assert torch.allclose(torch.cat([b.scale for b in m.h]), torch.tensor([1, 2 ** -0.5, 3 ** -0.5]), atol=0, rtol=1e-15)
    pre.load_state_dict(m.state_dict()) # the factor is no parameter and not in the state_dict
    x = torch.randn(2, 8, 24) # (B, T, C)
    assert torch.equal(m.h[0](x), pre.h[0](x))
    assert error(m.h[1](x), pre.h[1](x)) > 1e-3 # the comparison can fail

def test_lns_factor_under_autocast():
    # the product is FP32 before the branch rounds it: the factor itself is never rounded to BF16
    torch.set_default_dtype(torch.float32)
    b = build("lns", **TINY).h[2]
    x = torch.randn(2, 8, 24).bfloat16() # (B, T, C)
    seen = []
    b.mlp.register_forward_pre_hook(lambda mod, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        y = b(x)
    assert y.dtype == torch.bfloat16 and seen[0].dtype == torch.float32
    assert torch.tensor(3 ** -0.5).bfloat16().item() != pytest.approx(3 ** -0.5, rel=1e-3) # rounding it would be seen

@pytest.mark.parametrize("n_layer", [2, 64])
def test_deepnorm_init(n_layer):
    # q and k as Pre-LN; v, wo, w13, w2 exactly (8L)^(-1/4) times Pre-LN's draw at the same seed (BUG-031, BUG-037)
    shape = {**TINY, "n_layer": n_layer}
    torch.manual_seed(0)
    pre = build("preln", **shape)
    torch.manual_seed(0)
    m = build("deepnorm", **shape)
    beta, d_kv = (8 * n_layer) ** -0.25, 12
    for b, p in zip(m.h, pre.h):
        q, q_pre = b.attn.wqkv.weight, p.attn.wqkv.weight
        assert torch.equal(q[:-d_kv], q_pre[:-d_kv]) and torch.equal(q[-d_kv:], q_pre[-d_kv:] * beta)
        for a, c in ((b.attn.wo, p.attn.wo), (b.mlp.w13, p.mlp.w13), (b.mlp.w2, p.mlp.w2)):
            assert torch.equal(a.weight, c.weight * beta)
    assert torch.equal(m.wte.weight, pre.wte.weight) and torch.equal(m.lm_head.weight, pre.lm_head.weight)
    std = torch.cat([b.attn.wo.weight.flatten() for b in m.h]).std().item()
    assert std == pytest.approx({2: 0.01, 64: 0.0042}[n_layer], rel=0.06) # .02 (8L)^(-1/4), cut at 3 sigma

@pytest.mark.parametrize("name", ["postln", "sandwich", "lns", "keel", "layerrope", "layerrope_peri"])
@pytest.mark.parametrize("n_layer", [4, 64])
def test_no_other_depth_scaled_init(name, n_layer):
    # std .02 in every matrix, at any depth (BUG-037)
    m = build(name, **{**TINY, "n_layer": n_layer})
    for kind in ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight"):
        w = torch.cat([p.flatten() for n, p in m.named_parameters() if n.endswith(kind)])
        assert w.std().item() == pytest.approx(0.02 * 0.9866, rel=0.06) and w.abs().max() <= 0.06 # .9866: std of a normal cut at 3

def test_keel_gains_and_final_norm():
    m = build("keel", **TINY)
    assert [sum(p.dim() == 1 for p in b.parameters()) for b in m.h] == [3, 4, 4]
    for name in NORMS: # the final norm stays, also where the last block already ends with a norm
        m = tiny(name)
        x = torch.randn(2, 8, 24) # (B, T, C)
        assert error(m.head(x)[0], rms(x, m.norm_f.weight) @ m.lm_head.weight.T) < 1e-12

def check_keel_fp32(b):
    # BF16 in and out, the sum in between FP32: at alpha 140 half a BF16 ulp of alpha h is larger than most of the branch
    torch.manual_seed(2)
    x = rms(torch.randn(2, 8, 24)).bfloat16() # (B, T, C)
    y = 0.2 * torch.randn(2, 8, 24) # (B, T, C)
    b.attn.forward = lambda _: y.bfloat16()
    b.mlp.forward = lambda _: torch.zeros_like(x)
    got = []
    hook = b.norm_attn_out.register_forward_pre_hook(lambda mod, args: got.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        out = b(x)
    hook.remove()
    assert out.dtype == torch.bfloat16
    assert error(got[0].double(), b.alpha * x.double() + y.bfloat16().double()) < 1e-4

def test_keel_sums_in_fp32():
    torch.set_default_dtype(torch.float32)
    m = build("keel", **{**TINY, "n_layer": 70})
    assert m.h[1].alpha == 140
    check_keel_fp32(m.h[1])
    def forward(self, x): # the twin: in the stream's dtype
        x = self.norm_attn_out(self.alpha * x + self.attn(self.norm_attn(x))) # (B, T, C)
        return self.norm_mlp_out(self.alpha * x + self.mlp(self.norm_mlp(x))) # (B, T, C)
    m.h[2].forward = forward.__get__(m.h[2])
    with pytest.raises(AssertionError):
        check_keel_fp32(m.h[2])

def test_unknown_norm():
    with pytest.raises(ValueError, match="norm: rms"):
        build("postln", **TINY, norm="rms")

# -----------------------------------------------------------------------------
# LayerRoPE

def complex_gain(g, l, C, base, gamma=None):
    # (gamma_2j + i gamma_2j+1) exp(r + i theta), as complex numbers
    r = g.alpha + g.beta * math.log(l + 1)
    theta = torch.tensor([math.exp(g.alpha_rot.item() + g.beta_rot.item() * math.log(l + 1)) * base ** (-2 * j / C) for j in range(C // 2)]) # (C/2)
    z = torch.view_as_complex((g.gamma if gamma is None else gamma).detach().reshape(-1, 2)) * torch.exp(torch.complex(0 * theta + r.detach(), theta)) # (C/2)
    return torch.view_as_real(z).flatten() # (C)

def check_complex(m):
    C = m.config.n_embd
    for l, b in enumerate(m.h):
        for site in SITES:
            g = m.depth[site]
            assert error(g(b.row, b.log_depth), complex_gain(g, l, C, 100.0)) < 1e-13

def test_gain_is_the_complex_product():
    check_complex(tiny("layerrope"))

@pytest.mark.parametrize("twin", ["pairs half a width apart", "depth counted from 2", "depth counted from 0", "base 10000"])
def test_gain_broken(twin):
    m = tiny("layerrope")
    if "pairs" in twin:
        def forward(self, row, log_depth):
            a, b = self.gamma.chunk(2) # (C/2)
            theta = (self.alpha_rot + self.beta_rot * log_depth).exp() * self.freq # (C/2)
            return (self.alpha + self.beta * log_depth).exp() * torch.cat((a * theta.cos() - b * theta.sin(), b * theta.cos() + a * theta.sin())) # (C)
        for g in m.depth.values():
            g.forward = forward.__get__(g)
    if "from" in twin:
        for l, b in enumerate(m.h):
            b.log_depth.fill_(math.log(l + 2) if "2" in twin else math.log(max(l, 0.5)))
    if "base" in twin:
        for g in m.depth.values():
            g.freq.pow_(2)
    with pytest.raises(AssertionError):
        check_complex(m)

@pytest.mark.parametrize("name", ["layerrope", "layerrope_peri"])
def test_layerrope_written_out(name):
    m = tiny(name)
    h = got = torch.randn(2, 8, 24) # (B, T, C)
    for l, b in enumerate(m.h):
        gain = {site: complex_gain(m.depth[site], l, 24, 100.0) for site in SITES}
        for f, site in ((b.attn, "attn"), (b.mlp, "mlp")):
            y = f(rms(h) * gain[site + "_in"]) # (B, T, C)
            h = h + (rms(y) if name.endswith("peri") else y) * gain[site + "_out"] # (B, T, C)
        got = b(got)
        assert error(got, h) < 1e-11 * h.abs().max()
    assert error(m.head(h)[0], rms(h, m.norm_f.weight) @ m.lm_head.weight.T) < 1e-10 # the final norm has its own gain

def test_first_pair_starts_rotated():
    # not the identity at init: theta(0, 0) is 1 radian
    m = build("layerrope", **TINY)
    g = m.depth["attn_in"](m.h[0].row, m.h[0].log_depth)
    assert error(g[:2], torch.tensor([math.cos(1) - math.sin(1), math.cos(1) + math.sin(1)])) < 1e-15

def as_lns(m):
    with torch.no_grad():
        for g in m.depth.values():
            g.alpha_rot.fill_(-math.inf)
            g.beta_rot.zero_()
        for site in ("attn_out", "mlp_out"):
            m.depth[site].beta.zero_()
    return m

def check_lns(m):
    torch.manual_seed(0)
    lns = build("lns", **TINY)
    idx = torch.randint(64, (2, 8)) # (B, T)
    assert error(m(idx)[0], lns(idx)[0]) < 1e-13

def test_layerrope_without_rotation_is_lns():
    # theta 0, slope -0.5 on what is read, gain 1 on what is written
    torch.manual_seed(0)
    check_lns(as_lns(build("layerrope", **TINY)))
    torch.manual_seed(0)
    m = build("layerrope_mag", **TINY)
    with torch.no_grad():
        m.depth["attn_out"].beta.zero_(), m.depth["mlp_out"].beta.zero_()
    check_lns(m)
    for twin in (dict(depth_slope=-1.0), dict(peri=True), dict(depth_rot_slope=0.0)):
        torch.manual_seed(0)
        m = build("layerrope", **TINY, **twin)
        with pytest.raises(AssertionError):
            check_lns(m if "depth_rot_slope" in twin else as_lns(m))

def test_ablations():
    idx, C = torch.randint(64, (2, 8)), 24 # (B, T)
    names = {n: {k.split(".")[-1] for k in build(n, **TINY).state_dict() if k.startswith("depth.")} for n in find_models() if n.startswith("layerrope")}
    all_four = {"gamma", "alpha", "beta", "alpha_rot", "beta_rot"}
    assert names == {"layerrope": all_four, "layerrope_peri": all_four, "layerrope_free": all_four, "layerrope_uniform": all_four,
                     "layerrope_mag": {"gamma", "alpha", "beta"}, "layerrope_rot": {"gamma", "alpha_rot", "beta_rot"}} # what is inert is not created
    m = tiny("layerrope_mag")
    g, b = m.depth["mlp_in"], m.h[2]
    assert error(g(b.row, b.log_depth), g.gamma * (g.alpha + g.beta * math.log(3)).exp()) < 1e-15
    m = tiny("layerrope_rot") # keeps the length of every pair
    g, b = m.depth["mlp_in"], m.h[2]
    assert error(g(b.row, b.log_depth).view(-1, 2).norm(dim=1), g.gamma.view(-1, 2).norm(dim=1)) < 1e-15
    m = tiny("layerrope_uniform") # one angle for all pairs
    g, b = m.depth["mlp_in"], m.h[2]
    turn = torch.view_as_complex(g(b.row, b.log_depth).detach().view(-1, 2)) / torch.view_as_complex(g.gamma.detach().view(-1, 2)) # (C/2)
    assert error(turn, turn[:1]) < 1e-14 and turn[0].imag.abs() > 1e-3
    m = tiny("layerrope_free") # a gamma of its own for each block, the scalars shared
    for l, b in enumerate(m.h):
        g = m.depth["mlp_in"]
        assert error(g(b.row, b.log_depth), complex_gain(g, l, C, 100.0, g.gamma[l])) < 1e-13
    torch.manual_seed(0)
    free = build("layerrope_free", **TINY)(idx)[0]
    torch.manual_seed(0)
    assert torch.equal(free, build("layerrope", **TINY)(idx)[0]) # equal at init

def test_shared_once():
    m = build("layerrope", **TINY)
    assert not [k for k in m.state_dict() if k.startswith("h.") and "depth" in k] and all(m.depth is b.depth[0] for b in m.h)
    assert {n.split(".")[-1] for n, p in m.named_parameters() if any(p is q for q in m.param_groups()["no_decay"])} == {"alpha", "beta", "alpha_rot", "beta_rot"}
    m.to(torch.float32) # the blocks see what happens to the shared gains
    assert m.h[2].depth[0]["mlp_out"].gamma.dtype == torch.float32

def check_gain_dtype(m):
    b, g = m.h[2], m.depth["attn_in"]
    want = g(b.row, b.log_depth)
    with torch.autocast("cpu", torch.bfloat16):
        got = g(b.row, b.log_depth)
        y = m.trunk(torch.randint(64, (2, 8)))
    assert got.dtype == torch.float32 and torch.equal(got, want) and y.dtype == torch.bfloat16

def test_gains_are_fp32_under_autocast():
    torch.set_default_dtype(torch.float32)
    check_gain_dtype(tiny("layerrope"))
    m = tiny("layerrope")
    for g in m.depth.values(): # the twin: gains in BF16
        g.register_forward_hook(lambda mod, args, out: out.bfloat16().float() if torch.is_autocast_enabled("cpu") else out)
    with pytest.raises(AssertionError):
        check_gain_dtype(m)

# Table 5 of the paper: width, blocks, parameters fewer than Pre-Norm and Peri-Norm
@pytest.mark.parametrize("d, L, pre, peri", [(512, 8, 6128, 14320), (768, 12, 15344, 33776), (896, 20, 32240, 68080), (1280, 24, 56304, 117744), (2048, 24, 90096, 188400)])
def test_parameters_saved(d, L, pre, peri):
    n = {}
    with torch.device("meta"):
        for name in ("preln", "sandwich", "layerrope", "layerrope_peri", "layerrope_free"):
            n[name] = build(name, n_layer=L, n_embd=d, n_head=d // 64, vocab_size=32000).num_params()
    assert n["preln"] - n["layerrope"] == pre and n["sandwich"] - n["layerrope_peri"] == peri
    assert n["layerrope_free"] - n["layerrope"] == 4 * (L - 1) * d # 33,792 at 12 blocks and width 768

def test_rope_base_below_one():
    with pytest.raises(ValueError, match="depth_rope_base: 0.5"):
        build("layerrope", **TINY, depth_rope_base=0.5)
