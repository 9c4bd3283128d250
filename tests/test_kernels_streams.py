"""
The fused stream step against connect of the model files: values and every gradient, for a random cotangent.
"""
import os

import pytest
import torch

import kernels
import train

torch.set_num_threads(1) # tiny tensors: a second thread only waits

NAMES = ("hc", "hc_static", "mhc", "mhc_lite", "mgr", "mgr_independent")

def module(name):
    return train.load_module(train.find_models()[name][0])

def fused(name):
    return getattr(kernels, name.split("_")[0] + "_connect")

def case(name, n, C, rows, dtype=torch.float64, mean=0.0, seed=0):
    # (state, routing module, norm) with everything random; connector 2 of a model, so that MGR gates
    torch.manual_seed(seed)
    m = module(name)
    fields = {k: v for k, v in m.VARIANTS[name].items() if k in m.GPTConfig.__dataclass_fields__}
    config = m.GPTConfig(n_layer=n + 2, n_embd=C, n_head=1 if C % 2 == 0 else C, n_streams=n, **fields) if C % 2 == 0 else m.GPTConfig(n_layer=n + 2, n_embd=2, n_head=1, n_streams=n, **fields)
    config.n_embd = C # an odd width has no head of even size, but kernels take it
    c = (m.HyperConnection if hasattr(m, "HyperConnection") else m.MultiGate)(config, n + 1)
    norm = m.RMSNorm(C, 1e-6)
    for p in (*c.parameters(), *norm.parameters()):
        torch.nn.init.normal_(p, std=C ** -0.5 if p.dim() == 2 or p.numel() == C else 0.5)
    norm.weight.data += 1
    c, norm = c.to(torch.promote_types(dtype, torch.float32)), norm.to(torch.promote_types(dtype, torch.float32))
    state = [mean + torch.randn(1, rows, n, C), mean + torch.randn(1, rows, C)]
    if name.startswith("mgr"):
        coefficients = [torch.rand(1, rows, n) * 0.5]
    else:
        coefficients = [torch.eye(n) + 0.2 * torch.randn(1, rows, n, n), torch.randn(1, rows, n)]
    state = [t.to(dtype).requires_grad_() for t in state] + [t.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for t in coefficients]
    return state, c, norm

def run(connect, state, c, norm):
    # outputs and the gradients of all inputs and parameters
    out = connect(tuple(state), c, norm)
    g = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(t.shape, generator=g).to(t) for t in out]
    inputs = [*state, *c.parameters(), *norm.parameters()]
    return [*out, *torch.autograd.grad(out, inputs, cotangents)]

def errors(got, want):
    return [((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item() for a, b in zip(got, want, strict=True)]

@pytest.mark.parametrize("name", NAMES)
def test_function_equals_the_model_file(name):
    for n, C, rows, mean in ((1, 48, 7, 0.0), (2, 76, 1, 0.0), (3, 257, 7, 0.0), (4, 640, 64, 0.0), (4, 48, 7, 100.0), (8, 48, 7, 0.0)):
        if name == "mhc_lite" and n > 4:
            continue
        args = case(name, n, C, rows, mean=mean)
        got, again = run(fused(name), *args), run(fused(name), *args)
        worst = errors(got, run(module(name).connect, *args))
        assert max(worst) < 1e-10, (n, C, rows, worst)
        assert all(torch.equal(a, b) for a, b in zip(got, again)) # the same bits

BROKEN = { # what is put in place of a part of the arithmetic
    "mix transposed": ("hc", "torch_forward", lambda right: lambda op, X, y, mix, *args: right(op, X, y, mix.mT.contiguous(), *args)),
    "gradient of X' forgotten": ("mgr", "torch_backward", lambda right: lambda *args: right(*args[:10], 0 * args[10], *args[11:])),
    "read in place of write": ("mgr", "torch_forward", lambda right: lambda op, X, y, mix, write, *args: right(op, X, y, mix, 1 - write, *args)),
    "gradient through the norm forgotten": ("hc", "torch_backward", lambda right: lambda *args: right(*args[:8], (*args[8][:2], 0 * args[8][2], *args[8][3:]), *args[9:])),
    "Sinkhorn's steps forgotten": ("mhc", "mhc_coefficients_bwd", lambda right: lambda kept, *args, **kwargs: right(kept[:5], *args, **kwargs)),
    "gradient of mix transposed": ("hc", "hc_coefficients_bwd", lambda right: lambda *args: right(*args[:4], args[4].mT, args[5])),
    "gradient of c_0 forgotten": ("mgr", "mgr_coefficients_bwd", lambda right: lambda *args, **kwargs: (*right(*args, **kwargs)[:2], 0 * args[2]))}

@pytest.mark.parametrize("twin", BROKEN)
def test_broken_twins_are_caught(twin, monkeypatch):
    name, part, wrap = BROKEN[twin]
    args = case(name, 4, 48, 7)
    want = run(module(name).connect, *args)
    monkeypatch.setattr(kernels, part, wrap(getattr(kernels, part)))
    assert max(errors(run(fused(name), *args), want)) > 1e-3

def tiny(name, n):
    torch.manual_seed(0)
    model = train.build(name, n_layer=3, n_head=2, n_embd=16, vocab_size=32, block_size=8, n_streams=n)
    for key, p in model.named_parameters():
        if "hc_" in key or "mgr_" in key or key.endswith(model.MATRIX):
            torch.nn.init.normal_(p, std=0.25)
    return model

@pytest.mark.parametrize("name", NAMES)
def test_whole_model(name, monkeypatch):
    x, m = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1)), module(name)
    for n in (1, 2, 4, 12): # MGR with 12 streams only appends
        if name == "mhc_lite" and n > 4:
            continue
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, None)):
            model = tiny(name, n).double() if dtype == torch.float64 else tiny(name, n)
            def step(connect):
                with monkeypatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                    patch.setattr(m, "connect", connect)
                    loss = model(x, x)[1]
                    first = torch.autograd.grad(loss, model.parameters(), retain_graph=n == 2)
                    assert n != 2 or all(map(torch.equal, first, torch.autograd.grad(loss, model.parameters()))) # a graph that is kept serves again
                    return [loss, *first]
            plain = step(m.connect)
            worst = errors(step(fused(name)), plain)
            if tolerance is None: # not worse than twice what bf16 costs the plain form
                with torch.autocast("cpu", enabled=False):
                    loss = model(x, x)[1]
                exact = [loss, *torch.autograd.grad(loss, model.parameters())]
                worst, limit = errors(step(fused(name)), exact), errors(plain, exact)
                assert sum(worst) < 2 * sum(limit), (n, worst, limit)
            else:
                assert max(worst) < tolerance, (n, worst)

TRITON_CASES = ((1, 48, 7, 0.0), (2, 76, 1, 0.0), (3, 257, 7, 0.0), (4, 640, 7, 0.0), (4, 48, 7, 100.0), (1, 76, 64, 0.0), (8, 76, 7, 0.0))

def picked(k): # k kinds for each case, every kind for some case; the interpreter is slow: NANODEPTH_SLOW=1 takes all
    kinds = range(6 if os.environ.get("NANODEPTH_SLOW") else k)
    return [(name, *c) for i, c in enumerate(TRITON_CASES) for name in [NAMES[(i + 2 * j + j // 3) % 6] for j in kinds] if name != "mhc_lite" or c[0] <= 4]

def against_fp64(name, n, C, rows, dtype, mean):
    # errors of the fused step and of the plain one
    state, c, norm = case(name, n, C, rows, dtype, mean)
    got, plain = run(fused(name), state, c, norm), run(module(name).connect, state, c, norm)
    exact = run(module(name).connect, [t.detach().double().requires_grad_() for t in state], c.double(), norm.double())
    return errors(got, exact), errors(plain, exact)

@pytest.mark.parametrize("name,n,C,rows,mean", picked(2))
def test_triton_in_fp32(name, n, C, rows, mean, chip):
    worst, plain = against_fp64(name, n, C, rows, torch.float32, mean)
    floor = 1e-4 if mean else 1e-5 # a read that cancels a mean of 100 costs digits, as does a gradient that is almost zero (N = 1)
    assert all(a < max(floor, 3 * b) for a, b in zip(worst, plain)), (worst, plain)

@pytest.mark.parametrize("name,n,C,rows,mean", picked(1))
def test_triton_in_bf16(name, n, C, rows, mean, chip):
    worst, plain = against_fp64(name, n, C, rows, torch.bfloat16, mean)
    assert all(a < max(2 ** -7, 2 * b) for a, b in zip(worst, plain)), [(a, b) for a, b in zip(worst, plain) if a >= max(2 ** -7, 2 * b)]
