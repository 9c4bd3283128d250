"""
HC, mHC, mHC-lite and MGR against the equations of their papers, written out stream by stream.
Every property has a broken twin that its check must fail.
"""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import train

torch.set_num_threads(1) # tiny tensors: a second thread only waits

STREAMS = (1, 2, 3, 4, 8)
CASES = [(name, n) for name in ("hc", "hc_static", "mhc", "mhc_lite", "mgr", "mgr_independent") for n in STREAMS if n <= 4 or name != "mhc_lite"]

def tiny(name, n=4, random=False, **fields):
    torch.manual_seed(0)
    model = train.build(name, **{**dict(n_layer=3, n_head=2, n_embd=16, vocab_size=32, block_size=8), **({} if name == "preln" else dict(n_streams=n)), **fields}).double()
    if random: # the zero and constant starts would hide a fault
        for key, p in model.named_parameters():
            if "hc_" in key or "mgr_" in key:
                torch.nn.init.normal_(p, std=0.5)
            elif key.endswith(model.MATRIX):
                torch.nn.init.normal_(p, std=0.25)
    return model

def tokens(B=2, T=6):
    return torch.randint(32, (B, T), generator=torch.Generator().manual_seed(1))

def module(name):
    return train.load_module(train.find_models()[name][0])

def sublayers(model, skip=()):
    # (routing module, norm, branch) of every sub-layer
    for l, block in enumerate(model.h):
        if l not in skip:
            for part in ("attn", "mlp"):
                yield next(m for key, m in block.named_children() if key.endswith("_" + part) and not key.startswith("norm")), getattr(block, "norm_" + part), getattr(block, part)

def run(model, x, skip=()):
    state = model.begin(x)
    for l, block in enumerate(model.h):
        if l not in skip:
            state = block(state)
    return model.readout(state)

def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

# -----------------------------------------------------------------------------
# The papers, one stream and one coefficient at a time

def hc_literal(model, x, skip):
    n = model.config.n_streams
    h = [x] * n
    for c, norm, branch in sublayers(model, skip):
        a = [[c.A[i, j] for j in range(n + 1)] for i in range(n)]
        b = [c.B[i] for i in range(n)]
        if model.config.dynamic:
            g = [rms(h_i, 1e-8) for h_i in h]
            a = [[a[i][j] + c.s_a * torch.tanh((g[i] * c.W_a[j]).sum(-1, keepdim=True)) for j in range(n + 1)] for i in range(n)]
            b = [b[i] + c.s_b * torch.tanh((g[i] * c.w_b).sum(-1, keepdim=True)) for i in range(n)]
        y = branch(norm(sum(a[i][0] * h[i] for i in range(n))))
        h = [sum(a[i][j + 1] * h[i] for i in range(n)) + b[j] * y for j in range(n)]
    return sum(h)

def sinkhorn_literal(z, iters, order="liger"):
    # z[o][i], softmax of each row + eps, columns; then rows and columns, iters - 1 times. The paper: exp, then columns and rows
    n, eps = len(z), 1e-6 if order == "liger" else 0.0
    M = [[torch.exp(z[o][i]) for i in range(n)] for o in range(n)]
    rows = lambda M: [[M[o][i] / (sum(M[o]) + eps) for i in range(n)] for o in range(n)]
    cols = lambda M: [[M[o][i] / (sum(M[k][i] for k in range(n)) + eps) for i in range(n)] for o in range(n)]
    if order == "paper":
        for _ in range(iters):
            M = rows(cols(M))
        return M
    M = cols([[M[o][i] / sum(M[o]) + eps for i in range(n)] for o in range(n)])
    for _ in range(iters - 1):
        M = cols(rows(M))
    return M

def mhc_literal(model, x, skip):
    n = model.config.n_streams
    X = [x] * n
    for c, norm, branch in sublayers(model, skip):
        z = [(rms(torch.cat(X, -1), model.config.norm_eps) * row).sum(-1, keepdim=True) for row in c.Phi]
        pre = [torch.sigmoid(c.alpha[0] * z[i] + c.b[i]) for i in range(n)]
        post = [2 * torch.sigmoid(c.alpha[1] * z[n + o] + c.b[n + o]) for o in range(n)]
        res = [c.alpha[2] * z[k] + c.b[k] for k in range(2 * n, len(z))]
        if model.config.sinkhorn_iters:
            H = sinkhorn_literal([res[o * n:(o + 1) * n] for o in range(n)], model.config.sinkhorn_iters)
        else:
            total = sum(torch.exp(r) for r in res)
            H = [[sum(torch.exp(r) / total for r, p in zip(res, itertools.permutations(range(n))) if p[o] == i) for i in range(n)] for o in range(n)]
        y = branch(norm(sum(pre[i] * X[i] for i in range(n))))
        X = [sum(H[o][i] * X[i] for i in range(n)) + post[o] * y for o in range(n)]
    return sum(X) / n

def mgr_literal(model, x, skip):
    C, eps = model.config.n_embd, model.config.norm_eps
    dot = lambda w, s: (rms(s, eps) * w).sum(-1, keepdim=True) / math.sqrt(C)
    def pool(s, w):
        if w is None:
            return s[0]
        e = [torch.exp(dot(w, s_i)) for s_i in s]
        return sum(e_i * s_i for e_i, s_i in zip(e, s)) / sum(e)
    s = [x]
    for c, norm, branch in sublayers(model, skip):
        y = branch(norm(pool(s, c.w_a)))
        if c.w_b is None: # one of the first N-1 sub-layers
            s = s + [y]
        elif model.config.competitive:
            e = [torch.exp(dot(c.w_b, s_i) + c.c[i + 1]) for i, s_i in enumerate(s)]
            beta = [e_i / (torch.exp(c.c[0]) + sum(e)) for e_i in e]
            s = [(1 - b) * s_i + b * y for b, s_i in zip(beta, s)]
        else:
            s = [s_i + torch.sigmoid(dot(c.w_b, s_i) + c.c[i]) * (y - s_i) for i, s_i in enumerate(s)]
    return pool(s, model.mgr_f.w_a)

def literal(name):
    return {"hc": hc_literal, "mhc": mhc_literal, "mgr": mgr_literal}[name.split("_")[0]]

def check_literal(name, n, skip=()):
    model = tiny(name, n, random=True, n_layer=2 if n == 8 and name[:3] != "mgr" else 3)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    got, want = run(model, x, skip), literal(name)(model, x, skip)
    assert (got - want).abs().max() < 1e-11 * want.abs().max()

@pytest.mark.parametrize("name,n", CASES)
def test_equals_the_paper(name, n):
    check_literal(name, n)
    check_literal(name, n, skip=(0,)) # MGR: the streams of a skipped block are left out
    check_literal(name, n, skip=(1,))

TWINS = { # what is replaced in the module, by what
    "hc": {"mix transposed": ("settle", lambda f: lambda X, y=None, mix=None, write=None: f(X, y, mix if mix is None else mix.mT, write)),
           "write to the first stream only": ("settle", lambda f: lambda X, y=None, mix=None, write=None: f(X, y, mix, write if y is None else write * torch.eye(4, dtype=write.dtype)[0])),
           "read is a plain mean": ("connect", lambda f: lambda state, hc, norm: (norm(f(state, hc, norm)[1].mean(2)), *f(state, hc, norm)[1:])),
           "mix computed but not used": ("settle", lambda f: lambda X, y=None, mix=None, write=None: f(X, y, mix if mix is None else torch.eye(4, dtype=X.dtype), write))},
    "mgr": {"gates of other streams": ("settle", lambda f: lambda X, y=None, beta=None: f(X, y, beta if beta is None else beta.roll(1, -1))),
            "gates shut": ("settle", lambda f: lambda X, y=None, beta=None: f(X, y, beta if beta is None else 0 * beta))}}
TWINS["mhc"] = TWINS["hc"]

@pytest.mark.parametrize("name,twin", [(name, twin) for name in TWINS for twin in TWINS[name]])
def test_literal_check_has_teeth(name, twin, monkeypatch):
    target, wrap = TWINS[name][twin]
    m = module(name)
    monkeypatch.setattr(m, target, wrap(getattr(m, target)))
    with pytest.raises(AssertionError):
        check_literal(name, 4)

# -----------------------------------------------------------------------------
# Deferred write

def check_deferred(model, forward, skip=()):
    # the same arithmetic, but every output written at once: to the last bit
    m = module("hc" if "hc_attn" in dict(model.h[0].named_children()) else "mhc" if "mhc_attn" in dict(model.h[0].named_children()) else "mgr")
    X, = model.begin(model.embed(tokens()))
    x, wrote = X, 0
    for c, norm, branch in sublayers(model, skip):
        h, X, *rest = m.connect((X,), c, norm)
        X, wrote = m.settle(X, branch(h), *rest), wrote + 1
    assert wrote and torch.equal(forward(model, skip), model.readout((X,)))

@pytest.mark.parametrize("name", ["hc", "hc_static", "mhc", "mhc_lite", "mgr", "mgr_independent"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_deferred_write(name, dtype):
    model = tiny(name, random=True, n_layer=4)
    model = model if dtype == torch.float64 else model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        forward = lambda model, skip: run(model, model.embed(tokens()), skip)
        for skip in ((), (1,), (0, 2), (3,)):
            check_deferred(model, forward, skip)
        def forgetful(model, skip): # a skipped block drops what is pending
            state = model.begin(model.embed(tokens()))
            for l, block in enumerate(model.h):
                state = state[:1] if l in skip else block(state)
            return model.readout(state)
        with pytest.raises(AssertionError):
            check_deferred(model, forgetful, (2,))

@pytest.mark.parametrize("name", ["hc", "mhc", "mgr"])
def test_state_is_a_value(name):
    model = tiny(name, random=True)
    state = model.h[0](model.begin(model.embed(tokens())))
    before = [t.clone() for t in state]
    first, second = model.h[1](state), model.h[1](state)
    assert all(torch.equal(a, b) for a, b in zip(before, state)) and all(torch.equal(a, b) for a, b in zip(first, second))

def test_streams_in_the_autocast_dtype_routing_in_fp32():
    for name in ("hc", "mhc", "mhc_lite", "mgr"):
        model, seen = tiny(name, random=True).float(), []
        for c, _, _ in sublayers(model):
            c.register_forward_hook(lambda m, args, out: seen.append([t.dtype for t in out]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            X, y, *c = model.h[0](model.begin(model.embed(tokens())))
        assert X.dtype == y.dtype == torch.bfloat16
        assert len(seen) == 2 and all(t == torch.float32 for out in seen for t in out)

# -----------------------------------------------------------------------------
# Start

def preln_twin(name, n, scale):
    # (logits of the model at init, logits of Pre-LN with the same weights and its outputs scaled)
    model, preln = tiny(name, n, norm_eps=0.0, n_layer=6), tiny("preln", norm_eps=0.0, n_layer=6)
    for key, p in preln.named_parameters():
        q, outputs = model.get_parameter(key), key.endswith(("wo.weight", "w2.weight"))
        assert (q - p * n ** -0.5).abs().max() < 1e-8 if outputs else torch.equal(p, q)
        p.data = q.data * n ** 0.5 * scale if outputs else q.data # the rescaling is in FP32
    return model(tokens())[0], preln(tokens())[0]

def check_start(name, n, scale, tolerance):
    a, b = preln_twin(name, n, scale)
    assert (a - b).abs().max() < tolerance

@pytest.mark.parametrize("n", STREAMS)
def test_hc_starts_as_preln(n):
    for name in ("hc", "hc_static"):
        check_start(name, n, n ** -0.5, 1e-12)
    if n > 1:
        with pytest.raises(AssertionError): # outputs not scaled
            check_start("hc", n, 1.0, 1e-12)

def test_hc_start_has_teeth(monkeypatch):
    target, wrap = TWINS["hc"]["write to the first stream only"]
    monkeypatch.setattr(module("hc"), target, wrap(module("hc").settle))
    with pytest.raises(AssertionError):
        check_start("hc", 4, 0.5, 1e-12)

@pytest.mark.parametrize("n", STREAMS)
def test_mhc_starts_near_preln(n):
    check_start("mhc", n, n ** -0.5, 1e-4)
    with pytest.raises(AssertionError): # mHC-lite starts with wide gates, not as Pre-LN
        check_start("mhc_lite", max(2, min(n, 4)), max(2, min(n, 4)) ** -0.5, 1e-4)

def test_mhc_start_coefficients():
    model = tiny("mhc")
    for k, (c, _, _) in enumerate(sublayers(model)):
        read, mix, write = c(torch.randn(2, 3, 4, 16, dtype=torch.float64))
        hot = torch.eye(4, dtype=torch.float64)
        assert (read - (0.000335 + (0.999665 - 0.000335) * hot[k % 4])).abs().max() < 1e-5
        assert (write - 1).abs().max() < 1e-12
        assert (mix - (0.000336 + (0.99899 - 0.000336) * hot)).abs().max() < 1e-5
        assert (mix.sum(-1) - (1 - 1e-6)).abs().max() < 1e-7 and (mix.sum(-2) - (1 - 1e-6)).abs().max() < 1e-7

def test_mhc_lite_start_coefficients():
    for k, (c, _, _) in enumerate(sublayers(tiny("mhc_lite"))):
        read, mix, write = c(torch.randn(2, 3, 4, 16, dtype=torch.float64))
        gate = torch.sigmoid(2 * torch.eye(4, dtype=torch.float64)[k % 4] - 1)
        p = 1 / (1 + 23 * math.exp(-8)) # of the identity; six of the 24 permutations send i to j
        assert (read - gate).abs().max() < 1e-7 and (write - 2 * gate).abs().max() < 1e-7
        assert (mix.diagonal(dim1=-2, dim2=-1) - (p + 5 * math.exp(-8) * p)).abs().max() < 1e-7

# -----------------------------------------------------------------------------
# Doubly stochastic matrices

def residual(z, iters):
    # Sinkhorn of the model file, z (M, N, N): alpha 0 leaves the bias alone, one connector per matrix
    c = module("mhc").HyperConnection(module("mhc").GPTConfig(n_streams=z.size(-1), n_embd=2, n_head=1, sinkhorn_iters=iters), 0).to(z.dtype)
    X = z.new_ones(len(z), 1, z.size(-1), 2) # r = 1
    n, m = z.size(-1), z.size(-1) ** 2
    out = []
    for z_m in z:
        b = torch.cat((z.new_zeros(2 * n), z_m.flatten()))
        out.append(torch.func.functional_call(c, {"b": b, "alpha": z.new_zeros(3)}, (X[:1],))[1][0, 0])
    return torch.stack(out) # (M, N, N)

def test_sinkhorn_order():
    z = 3 * torch.randn(20, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for iters in (1, 2, 20):
        def check(order, transpose=False):
            got = residual(z.mT if transpose else z, iters)
            want = torch.stack([torch.stack([torch.stack(row) for row in sinkhorn_literal(z_m, iters, order)]) for z_m in z])
            assert (got - want).abs().max() < 1e-12
        check("liger")
        for twin in (dict(order="paper"), dict(order="liger", transpose=True)):
            with pytest.raises(AssertionError):
                check(**twin)
    M = residual(z, 20)
    assert (M.sum(1) - 1).abs().max() < 2e-6 # columns, which come last

def check_doubly_stochastic(M, tolerance):
    assert M.isfinite().all() and (M >= 0).all()
    assert (M.sum(-1) - 1).abs().max() < tolerance and (M.sum(-2) - 1).abs().max() < tolerance

@pytest.mark.parametrize("n", STREAMS)
def test_sinkhorn_moderate_and_extreme(n):
    g = torch.Generator().manual_seed(n)
    check_doubly_stochastic(residual(torch.randn(10, n, n, generator=g), 20), 1e-3)
    check_doubly_stochastic(residual(torch.zeros(1, n, n), 20), 1e-5)
    wide = 80 * torch.randn(10, n, n, generator=g).sign()
    row = torch.zeros(1, n, n)
    row[:, 0] = -1e4
    for z in (wide, row, 80 * torch.eye(n).unsqueeze(0), -80 * torch.eye(n).unsqueeze(0)):
        for iters in (1, 20):
            M = residual(z, iters)
            assert M.isfinite().all() and (M >= 0).all() and (M.sum(-2) <= 1).all() # eps takes from columns that are all but empty
    if n == 1:
        assert (residual(torch.randn(10, 1, 1, generator=g), 20) - 1).abs().max() < 1e-5
    z = torch.randn(1, n, n, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.randn(1, n, n, dtype=torch.float64, generator=g) # the plain sum is constant
    assert torch.autograd.gradcheck(lambda z: residual(z, 20 if n < 8 else 4) * w, z)
    assert torch.autograd.gradcheck(lambda z: residual(z, 3) * w, (8 * z.detach()).requires_grad_())
    if n > 1:
        with pytest.raises(AssertionError): # two iterations are not enough
            check_doubly_stochastic(residual(4 * torch.randn(10, n, n, generator=g), 2), 1e-3)

@pytest.mark.parametrize("n", (1, 2, 3, 4))
def test_lite_is_exactly_doubly_stochastic(n):
    model = tiny("mhc_lite", n, random=True)
    for c, _, _ in sublayers(model):
        _, mix, _ = c(torch.randn(2, 3, n, 16, dtype=torch.float64))
        check_doubly_stochastic(mix, 1e-12)
        c.P = c.P[:-1] if n > 1 else 2 * c.P # a permutation is missing
        with pytest.raises((AssertionError, RuntimeError)):
            check_doubly_stochastic(c(torch.randn(2, 3, n, 16, dtype=torch.float64))[1], 1e-12)

# -----------------------------------------------------------------------------
# Read, mix, write

@pytest.mark.parametrize("name", ["hc_static", "hc", "mhc"])
def test_cyclic_matrix_rotates_streams(name):
    # m_j = sum_i a_ij h_i: with a_ij = 1 for j = i + 1, what stream i held is in stream i + 1 afterwards
    n = 3
    model = tiny(name, n)
    cycle = torch.eye(n, dtype=torch.float64).roll(1, dims=1) # (from, to)
    for c, _, branch in sublayers(model):
        (branch.wo if hasattr(branch, "wo") else branch.w2).weight.data.zero_()
        if name == "mhc":
            c.b.data[2 * n:] = (40 * cycle.T - 40).flatten() # (to, from)
        else:
            c.A.data[:, 1:] = cycle
    X = torch.randn(2, 6, n, 16, dtype=torch.float64)
    after = module(name).settle(*model.h[0]((X,))) # two sub-layers
    assert (after - X.roll(2, dims=2)).abs().max() < 1e-4
    assert (after - X.roll(-2, dims=2)).abs().max() > 0.1 # the transpose

@pytest.mark.parametrize("name", ["hc", "hc_static", "mhc", "mhc_lite", "mgr", "mgr_independent"])
def test_read_mix_and_write_matter(name):
    n = 4
    model = tiny(name, random=True)
    before = model(tokens())[0]
    for c in (model.h[1].get_submodule(name.split("_")[0] + "_attn"), model.h[1].get_submodule(name.split("_")[0] + "_mlp")):
        parts = ([c.A[:, 0], c.A[:, 1:], c.B] if name.startswith("hc") else [c.b[:n], c.b[n:2 * n], c.b[2 * n:]] if name.startswith("mhc") else [c.w_a, c.w_b, c.c] if c.w_b is not None else [c.w_a])
        for part in parts:
            kept = part.detach().clone()
            part.data.add_(torch.randn(part.shape, dtype=part.dtype))
            assert (model(tokens())[0] - before).abs().max() > 1e-4
            part.data.copy_(kept)
    assert torch.equal(model(tokens())[0], before)

# -----------------------------------------------------------------------------
# MGR

def test_mgr_start_gates():
    for n_layer, n, b_init, competitive, independent in ((12, 4, 2.838, .0474, .0553), (12, 8, 2.395, .0527, .0835), (24, 4, 3.291, .0324, .0359),
                                                         (24, 8, 3.066, .0339, .0445), (36, 4, 3.533, .0262, .0284), (36, 8, 3.371, .0270, .0332)):
        for name, beta, sign in (("mgr", competitive, 1), ("mgr_independent", independent, -1)):
            model = tiny(name, n, n_layer=n_layer)
            for k, (c, _, _) in enumerate(sublayers(model)):
                _, *gates = c(torch.randn(1, 2, min(k + 1, n), 16, dtype=torch.float64))
                assert len(gates) == (k >= n - 1)
                if gates:
                    assert (gates[0] - beta).abs().max() < 6e-5 and abs(sign * c.c[0].item() - b_init) < 6e-4
    assert tiny("mgr", 8, n_layer=4).h[3].mgr_mlp.c[0] == 0 # no logarithm of less than 1

def attnres_reference(model, x, scale):
    # Full Attention Residuals: every consumer pools all outputs so far, affine-free keys
    v = [x]
    for c, norm, branch in sublayers(model):
        h = v[0]
        if len(v) > 1:
            V = torch.stack(v) # (S, B, T, C)
            h = ((rms(V, model.config.norm_eps) @ c.w_a * scale).softmax(0).unsqueeze(-1) * V).sum(0) # (B, T, C)
        v.append(branch(norm(h)))
    V = torch.stack(v) # (S, B, T, C)
    return ((rms(V, model.config.norm_eps) @ model.mgr_f.w_a * scale).softmax(0).unsqueeze(-1) * V).sum(0) # (B, T, C)

@pytest.mark.parametrize("n", (7, 12))
def test_mgr_that_only_appends_is_attnres(n):
    model = tiny("mgr", n, random=True) # n > 2L = 6
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    assert (run(model, x) - attnres_reference(model, x, 16 ** -0.5)).abs().max() < 1e-12
    assert (run(model, x) - attnres_reference(model, x, 1.0)).abs().max() > 1e-4 # logits not divided

@pytest.mark.parametrize("name", ["mgr", "mgr_independent"])
def test_mgr_norms_are_bounded(name):
    # a stream is a convex combination of what it was and the output
    def check(gain):
        model, outputs, state_norms = tiny(name, random=True, n_layer=6), [], []
        state = model.begin(10 * model.embed(tokens()))
        for block in model.h:
            hooks = [m.register_forward_hook(lambda m, args, out: outputs.append(out.norm(dim=-1))) for m in (block.attn, block.mlp)]
            X, y, *c = block(state)
            state = (X, y, *[gain * b for b in c])
            [h.remove() for h in hooks]
            bound = torch.stack([(10 * model.embed(tokens())).norm(dim=-1), *outputs]).amax(0) # (B, T)
            state_norms.append((module(name).settle(*state).norm(dim=-1).amax(-1), bound))
        assert all((s <= bound * (1 + 1e-12)).all() for s, bound in state_norms)
        alphas = model.mgr_f(module(name).settle(*state))[0]
        assert (alphas.sum(-1) - 1).abs().max() < 1e-12
    check(1)
    with pytest.raises(AssertionError): # gates beyond 1
        check(-5)
    if name == "mgr":
        for c, _, _ in sublayers(tiny(name, random=True)):
            if c.w_b is not None:
                assert (c(torch.randn(2, 3, 4, 16, dtype=torch.float64))[1].sum(-1) < 1).all()

def test_mgr_hidden_is_what_the_next_consumer_reads():
    model, read = tiny("mgr", random=True), []
    for block in model.h:
        block.norm_attn.register_forward_pre_hook(lambda m, args: read.append(args[0]))
    model.norm_f.register_forward_pre_hook(lambda m, args: read.append(args[0]))
    model(tokens())
    state = model.begin(model.embed(tokens()))
    for l in range(len(model.h) + 1):
        assert torch.equal(model.hidden(state, l), read[l])
        state = model.h[l](state) if l < len(model.h) else state

# -----------------------------------------------------------------------------
# Sizes

@pytest.mark.parametrize("name,n", CASES)
def test_added_parameters(name, n):
    for L in (1, 2, 7):
        d, K = 16, 2 * L
        m = 2 * n + (n * n if name == "mhc" else math.factorial(min(n, 4)))
        e = name == "mgr"
        want = {"hc": K * (d * (n + 1) + d + n * (n + 1) + n + 2), "hc_static": K * n * (n + 2), "mhc": K * (n * d * m + m + 3), "mhc_lite": K * (n * d * m + m + 3)}.get(
            name, K * (d + 1 + e) if n == 1 else K * d if n > K else (n - 2) * d + (K - n + 1) * (2 * d + n + e) + d)
        assert tiny(name, n, n_layer=L).num_params() - tiny("preln", n_layer=L).num_params() == want

@pytest.mark.parametrize("name", ["hc", "mhc", "mhc_lite", "mgr"])
def test_refusals_name_the_field(name):
    for n in (0, -1):
        with pytest.raises(ValueError, match="n_streams"):
            tiny(name, n)
    if name == "mhc_lite":
        with pytest.raises(ValueError, match="n_streams"):
            tiny(name, 5)
    if name == "mhc":
        with pytest.raises(ValueError, match="sinkhorn_iters"):
            tiny(name, sinkhorn_iters=-1)
