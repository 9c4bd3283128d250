import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

# -----------------------------------------------------------------------------
# HC, mHC, mHC-lite, MGR: the write of sub-layer k, and the coefficients, the read and the norm of sub-layer k+1
#
#   X' = mix @ X + write * y                 R tokens, N streams: X (R, N, C), y (R, C), mix (R, N, N), write (R, N)
#   z  = (X' @ W.T) * rstd(X')               of each stream, W (J, C), or of all N as one vector, W (J, N*C)
#   read, mix', write' = coefficients(z)     tanh, Sinkhorn or softmax, in FP32
#   s  = read @ X';  h = s * rstd(s) * gain
#
# Plain autograd keeps several FP32 copies of the streams and walks over them a dozen times. Kept here: X and y, in their own type, and
# small tensors; X' is rebuilt. In vectors of one token: kept n + 1, moved 2n + 2 forward and 3n + 3 backward.

def hc_coefficients(z, base, scale): # z (R, N, N+2), columns: read, what goes to each stream, write
    v = base + scale * torch.tanh(z) # (R, N, N+2)
    return v[..., 0], v[..., 1:-1].mT, v[..., -1]

def mhc_coefficients(z, b, alpha, P, n, iters): # z (R, 1, M)
    pre, post, res = (a * z + b for a, z, b in zip(alpha, z[:, 0].tensor_split((n, 2 * n), dim=-1), b.tensor_split((n, 2 * n))))
    if iters == 0: # mHC-lite
        return pre.sigmoid(), (res.softmax(dim=-1) @ P).unflatten(-1, (n, n)), 2 * post.sigmoid()
    M = res.T.unflatten(0, (n, n)).softmax(dim=1) + 1e-6 # (N, N, R) with the tokens innermost
    for i in range(1, 2 * iters):
        M = M / (M.sum(dim=1 - i % 2, keepdim=True) + 1e-6)
    return pre.sigmoid(), M.permute(2, 0, 1), 2 * post.sigmoid()

def mgr_coefficients(z, base, c_0, competitive): # z (R, N, 2), columns: read, gate
    a, q = (z + base).unbind(-1) # (R, N)
    gates = torch.cat((c_0[1:].expand(len(q), 1), q), dim=-1).softmax(dim=-1)[..., 1:] if competitive else q.sigmoid()
    return a.softmax(dim=-1), gates

def rstd(x, eps):
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1) + eps).rsqrt()

def torch_forward(op, X, y, mix, write, W, gain, *small):
    x, y32 = X.to(mix.dtype), y.to(mix.dtype)
    new = torch.bmm(mix, x).addcmul_(write.unsqueeze(-1), y32.unsqueeze(1)).to(X.dtype) # (R, N, C)
    x = new.to(mix.dtype)
    v = x.view(-1, W.size(1)) # (R*N, C) or (R, N*C)
    r = rstd(v, op.eps)
    z = (v @ W.T).mul_(r).view(len(X), -1, len(W)) # (R, N, J) or (R, 1, M)
    read, *c = (t.contiguous() for t in op.coefficients(z, *small))
    s = torch.bmm(read.unsqueeze(1), x).squeeze(1) # (R, C)
    rs = rstd(s, op.norm_eps)
    return ((s * rs * gain).to(X.dtype), new, *c), (z, r, rs)

def torch_backward(op, X, y, mix, write, W, gain, z, r, rs, small, dh, dnew, *dc):
    x, y32, dh = X.to(mix.dtype), y.to(mix.dtype), dh.to(mix.dtype)
    new = torch.bmm(mix, x).addcmul_(write.unsqueeze(-1), y32.unsqueeze(1)).to(X.dtype).to(mix.dtype) # (R, N, C)
    with torch.enable_grad(): # the coefficients are small: autograd does them
        leaves = [t.detach().requires_grad_() for t in (z, *small)]
        read, *c = op.coefficients(*leaves)
    # h = s rs gain, rs = (mean(s^2) + eps)^-1/2: ds = rs (u - s rs^2 mean(u s)) with u = dh gain
    s = torch.bmm(read.detach().unsqueeze(1), new).squeeze(1) # (R, C)
    u = dh * gain # (R, C)
    ds = rs * (u - s * (rs.square() * (u * s).mean(dim=-1, keepdim=True))) # (R, C)
    dread = torch.bmm(new, ds.unsqueeze(-1)).squeeze(-1) # (R, N)
    dz, *dsmall = torch.autograd.grad((read, *c), leaves, (dread, *dc), allow_unused=True)
    # z = (v @ W.T) r, r = (mean(v^2) + eps)^-1/2: dv = (r dz) @ W - v r^2 mean_K(dz z)
    dz, z, v = dz.reshape(-1, len(W)), z.view(-1, len(W)), new.view(-1, W.size(1))
    p = r * dz # (R*N, J) or (R, M)
    g = torch.baddbmm(dnew.to(mix.dtype), read.detach().unsqueeze(-1), ds.unsqueeze(1)) # (R, N, C) the whole gradient of X'
    g.view(v.shape).addmm_(p, W).addcmul_(v, r.square() * (dz * z).sum(dim=-1, keepdim=True), value=-1 / v.size(1))
    # X' = mix @ X + write y
    dmix, dwrite = torch.bmm(g, x.mT), torch.bmm(g, y32.unsqueeze(-1)).squeeze(-1) # (R, N, N), (R, N)
    dX, dy = torch.bmm(mix.mT, g).to(X.dtype), torch.bmm(write.unsqueeze(1), g).squeeze(1).to(y.dtype) # (R, N, C), (R, C)
    return dX, dy, dmix, dwrite, p.T @ v, (dh * s * rs).sum(dim=0), *dsmall

class Connect(torch.autograd.Function):

    @staticmethod
    def forward(ctx, op, X, y, mix, write, W, gain, *small):
        out, saved = torch_forward(op, X, y, mix, write, W, gain, *small)
        ctx.op = op
        ctx.save_for_backward(X, y, mix, write, W, gain, *saved, *small)
        return out

    @staticmethod
    def backward(ctx, *grads):
        X, y, mix, write, W, gain, z, r, rs, *small = ctx.saved_tensors
        with torch.autocast(X.device.type, enabled=False):
            return None, *torch_backward(ctx.op, X, y, mix, write, W, gain, z, r, rs, small, *grads)

def stream_connect(op, state, norm, W, *small):
    X, y, *c = state
    B, T, N, C = X.shape
    mix, write = c if len(c) == 2 else (torch.diag_embed(1 - c[0]), c[0]) # MGR: (1 - gate) X + gate y
    op.norm_eps = norm.eps
    with torch.autocast(X.device.type, enabled=False):
        h, X, *c = Connect.apply(op, X.reshape(-1, N, C), y.reshape(-1, C), mix.reshape(-1, N, N), write.reshape(-1, N), W, norm.weight, *small)
    return h.view(B, T, C), X.view(B, T, N, C), *(t.unflatten(0, (B, T)) for t in c)

def plain_connect(state, m, norm): # nothing to write by coefficients: the first connector, streams that are appended; and MGR's readout
    X = sys.modules[type(m).__module__].settle(*state)
    with torch.autocast(X.device.type, enabled=False):
        x = X.to(torch.promote_types(X.dtype, torch.float32))
        read, *c = m(x)
        return norm((read.unsqueeze(-2) @ x).squeeze(-2)).to(X.dtype), X, *c

def hc_connect(state, hc, norm):
    if len(state) == 1:
        return plain_connect(state, hc, norm)
    op, base = SimpleNamespace(kind="hc", coefficients=hc_coefficients, eps=1e-8), torch.cat((hc.A, hc.B.unsqueeze(-1)), dim=1) # (N, N+2)
    if not hc.config.dynamic:
        return stream_connect(op, state, norm, base.new_zeros(base.size(1), norm.weight.numel()), base, base.new_zeros(base.size(1)))
    W, scale = torch.cat((hc.W_a, hc.w_b.unsqueeze(0))), torch.cat((hc.s_a.expand(len(hc.W_a)), hc.s_b.view(1))) # (N+2, C), (N+2)
    return stream_connect(op, state, norm, W, base, scale)

def mhc_connect(state, hc, norm):
    if len(state) == 1:
        return plain_connect(state, hc, norm)
    n, iters = state[0].size(2), hc.config.sinkhorn_iters
    op = SimpleNamespace(kind="mhc", coefficients=partial(mhc_coefficients, P=None if iters else hc.P, n=n, iters=iters), eps=hc.config.norm_eps)
    return stream_connect(op, state, norm, hc.Phi, hc.b, hc.alpha)

def mgr_connect(state, mgr, norm):
    if len(state) < 3 or isinstance(norm, torch.nn.Identity):
        return plain_connect(state, mgr, norm)
    competitive, n = mgr.config.competitive, state[0].size(2)
    op = SimpleNamespace(kind="mgr" if competitive else "mgr_independent", coefficients=partial(mgr_coefficients, competitive=competitive), eps=mgr.config.norm_eps)
    W = torch.stack((torch.zeros_like(mgr.w_b) if mgr.w_a is None else mgr.w_a, mgr.w_b)) * mgr.w_b.numel() ** -0.5 # (2, C) no query where N = 1
    base, c_0 = F.pad(mgr.c[competitive:n + competitive].unsqueeze(-1), (1, 0)), F.pad(mgr.c[:1] * competitive, (1, 0)) # (N, 2), (2)
    return stream_connect(op, state, norm, W, base, c_0)
