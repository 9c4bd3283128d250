"""
Depth mixing at the limit of memory and traffic. The model file is the specification; fuse(module) swaps its one hot function for the
same-named, same-signature one from here, out loud. Each is an autograd.Function: Triton on CUDA, plain torch elsewhere, with the same
savings in memory and traffic. Imports without triton; only calling a Triton kernel needs it.
"""
import ast
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError: # macOS, Windows: only calling a Triton kernel needs it
    triton, tl, jit = None, SimpleNamespace(constexpr=None), lambda f: f

def on_chip(x):
    return x.is_cuda # Triton there; elsewhere plain torch inside the same Functions

def wide(x): # the dtype that all mixing is done in
    return torch.promote_types(x.dtype, torch.float32)

def without_autocast(x): # the context itself costs as much as a small op
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

def blocks(x):
    # rows and columns of one program of a row kernel on x (R, C)
    if triton is None or x.size(-1) > 16384 or x.dtype == torch.float64:
        raise RuntimeError(f"fused: the Triton kernels need triton, at most 16384 columns and no float64, not {x.size(-1)} of {x.dtype}; use --fused off")
    C = triton.next_power_of_2(x.size(-1))
    return dict(ROWS=max(1, 2048 // C), BLOCK_C=C, num_warps=4 if C <= 2048 else 8)

# -----------------------------------------------------------------------------
# HC, mHC, mHC-lite, MGR: the write of sub-layer k, and the coefficients, the read and the norm of sub-layer k+1
#
#   X' = mix @ X + write * y                 R tokens, N streams: X (R, N, C), y (R, C), mix (R, N, N), write (R, N)
#   z  = (X' @ W.T) * rstd(X')               of each stream, W (J, C), or of all N as one vector, W (J, N*C)
#   read, mix', write' = coefficients(z)     tanh, Sinkhorn or softmax, in FP32
#   s  = read @ X';  h = s * rstd(s) * gain
#
# Plain autograd keeps several FP32 copies of the streams and walks over them a dozen times. Kept here: X and y, in their own type, and
# small tensors (off the chip also Sinkhorn's sums); X' is rebuilt (off the chip and by mHC it is kept: the next sub-layer keeps the same
# tensor, as its X). In vectors of one token: kept n + 1, moved 2n + 2 forward and 3n + 3 backward.

# Off the chip, of every kind: (z, *small) -> (read, mix where there is one, write), what is kept; and back: -> dz and the gradients of small

def hc_coefficients(z, base, scale): # z (R, N, N+2), columns: read, what goes to each stream, write
    v = torch.tanh(z)
    c = torch.addcmul(base, scale, v) # (R, N, N+2)
    return (c[..., 0].contiguous(), c[..., 1:-1].mT.contiguous(), c[..., -1].contiguous()), (v,)

def hc_coefficients_bwd(kept, base, scale, dread, dmix, dwrite):
    (v,), dc = kept, torch.cat((dread.unsqueeze(-1), dmix.mT, dwrite.unsqueeze(-1)), dim=-1) # (R, N, N+2)
    vdc = v * dc
    return torch.addcmul(dc, v, vdc, value=-1).mul_(scale), dc.sum(0), vdc.sum((0, 1))

def which_alpha(b, n): # of every row of Phi: 0 read, 1 write, 2 mix
    return torch.arange(len(b), device=b.device).div(n, rounding_mode="floor").clamp(max=2) # (M)

def mhc_logits_bwd(dlogit, z, b, alpha, n): # logit = alpha z + b, (R, M) -> dz, db, dalpha
    part = which_alpha(b, n)
    return dlogit * alpha[part], dlogit.sum(0), torch.zeros_like(alpha).index_add_(0, part, (dlogit * z).sum(0))

def mhc_coefficients(z, b, alpha, P, n, iters): # z (R, 1, M)
    pre, post, res = torch.addcmul(b, alpha[which_alpha(b, n)], z.squeeze(1)).tensor_split((n, 2 * n), dim=-1)
    read, half, S = pre.sigmoid(), post.sigmoid(), []
    if iters == 0: # mHC-lite
        p = res.softmax(dim=-1) # (R, N!)
        return (read, (p @ P).unflatten(-1, (n, n)), 2 * half), (z, read, half, p)
    p = res.T.unflatten(0, (n, n)).softmax(dim=1) # (N, N, R) with the tokens innermost
    M = p + 1e-6
    for t in range(1, 2 * iters): # M_t = M_{t-1} / S_t, S_t: sums of the columns where t is odd, of the rows where it is even
        S.append(M.sum(dim=1 - t % 2, keepdim=True).add_(1e-6))
        M.div_(S[-1])
    return (read, M.permute(2, 0, 1).contiguous(), 2 * half), (z, read, half, p, M, *S)

def mhc_coefficients_bwd(kept, b, alpha, dread, dmix, dwrite, P, n, iters):
    z, read, half, p, *MS = kept
    if iters == 0:
        dp = dmix.flatten(1) @ P.T # (R, N!)
    else:
        M, S = MS[0].clone(), MS[1:] # the last M walks back
        Q = dmix.permute(1, 2, 0).contiguous() * M # (N, N, R), Q_t = dM_t M_t and dM_{t-1} = (dM_t - <dM_t, M_t>) / S_t: Q_{t-1} = Q_t - <dM_t, M_t> M_t
        for t in range(len(S), 0, -1):
            Q.addcmul_(Q.sum(dim=1 - t % 2, keepdim=True), M, value=-1)
            M.mul_(S[t - 1])
        dp = Q.div_(M)
    dp = dp.sub_((p * dp).sum(dim=1, keepdim=True)).mul_(p) # through the softmax, of both
    dlogit = torch.cat((dread * read * (1 - read), dwrite * 2 * half * (1 - half), dp.flatten(0, 1).T if iters else dp), dim=-1) # (R, M)
    dz, db, dalpha = mhc_logits_bwd(dlogit, z.squeeze(1), b, alpha, n)
    return dz.unsqueeze(1), db, dalpha

def mgr_coefficients(z, base, c_0, competitive): # z (R, N, 2), columns: read, gate
    a, q = (z + base).unbind(-1) # (R, N)
    read = a.softmax(dim=-1)
    gates = torch.cat((c_0[1:].expand(len(q), 1), q), dim=-1).softmax(dim=-1)[:, 1:].contiguous() if competitive else q.sigmoid()
    return (read, gates), (read, gates)

def mgr_coefficients_bwd(kept, base, c_0, dread, dgates, competitive):
    read, gates = kept
    da, dq = read * dread, gates * dgates # through a softmax: read (dread - <read, dread>), also for c_0, whose own gradient is 0
    da.addcmul_(read, da.sum(dim=-1, keepdim=True), value=-1)
    dot = dq.sum(dim=-1, keepdim=True) if competitive else dq # (R, 1), and of a sigmoid an entry's own
    dq = dq.addcmul(gates, dot, value=-1)
    dz = torch.stack((da, dq), dim=-1) # (R, N, 2)
    return dz, dz.sum(0), F.pad(-dq.sum().view(1), (1, 0)) if competitive else torch.zeros_like(c_0) # what softmax gives sums to 0 with c_0's

# HC and MGR, where W is small: one token at a time, everything about it in registers

@jit
def columns(BLOCK_C: tl.constexpr): # loads of one element per thread: wide ones change the layout of every vector, through shared memory
    return tl.max_contiguous(tl.arange(0, BLOCK_C), 1)

@jit
def stream_coefficients(z, base, extra, i, j, N: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr):
    # z (N, J) -> v (N, J), columns 0: read, 1 .. N: what a stream gives to each stream (HC), J-1: write; zero where padded
    if KIND == "hc":
        v = base + extra[None, :] * (2 * tl.sigmoid(2 * z) - 1) # tanh
    else:
        q = z + base + tl.where(i < N, 0.0, float("-inf"))[:, None]
        top = tl.max(q, axis=0)
        if KIND == "mgr":
            top = tl.where(j == 1, tl.maximum(top, extra), top) # c_0 competes with the gates
        e = tl.exp(q - top[None, :])
        total = tl.sum(e, axis=0)
        if KIND == "mgr":
            total += tl.where(j == 1, tl.exp(extra - top), 0.0)
        v = e / total[None, :]
        if KIND == "mgr_independent":
            v = tl.where((j == 1)[None, :], tl.sigmoid(q), v)
    return tl.where((i < N)[:, None] & (j < J)[None, :], v, 0.0)

@jit
def stream_coefficients_bwd(v, dv, z, extra, j, KIND: tl.constexpr):
    # dv (N, J) -> dz (N, J), dbase (N, J), dextra (J)
    if KIND == "hc":
        t = 2 * tl.sigmoid(2 * z) - 1
        return dv * extra[None, :] * (1 - t * t), dv, tl.sum(dv * t, axis=0)
    dot = tl.sum(v * dv, axis=0) # through a softmax: dq = v (dv - <v, dv>), also for c_0, whose own dv is 0
    dz = v * (dv - dot[None, :])
    if KIND == "mgr_independent":
        dz = tl.where((j == 1)[None, :], v * (1 - v) * dv, dz)
    return dz, dz, tl.where(j == 1, (tl.sum(v, axis=0) - 1) * dot, 0.0)

@jit
def stream_fwd_kernel(
    x_ptr, y_ptr, mix_ptr, write_ptr, # (R, N, C), (R, C), (R, N, N), (R, N) the pending write
    w_ptr, base_ptr, extra_ptr, gain_ptr, # (J, C), (N, J), (J), (C)
    new_ptr, h_ptr, # (R, N, C), (R, C)
    z_ptr, r_ptr, rs_ptr, # (R, N, J), (R, N), (R)
    new_mix_ptr, new_write_ptr, # (R, N, N), (R, N)
    R, eps, norm_eps,
    C: tl.constexpr, N: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):
    i, j, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J), columns(BLOCK_C)
    nc, nj = (i < N)[:, None] & (c < C)[None, :], (i < N)[:, None] & (j < J)[None, :]
    w = tl.load(w_ptr + j[:, None] * C + c[None, :], mask=(j < J)[:, None] & (c < C)[None, :], other=0.0) # (J, C)
    base = tl.load(base_ptr + i[:, None] * J + j[None, :], mask=nj, other=0.0)
    extra = tl.load(extra_ptr + j, mask=j < J, other=0.0)
    gain = tl.load(gain_ptr + c, mask=c < C, other=0.0)
    for token in range(tl.program_id(0), R, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        y = tl.load(y_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
        new = tl.load(write_ptr + row * N + i, mask=i < N, other=0.0)[:, None] * y[None, :] # (N, C)
        for k in tl.static_range(N):
            x = tl.load(x_ptr + (row * N + k) * C + c, mask=c < C, other=0.0).to(tl.float32)
            new += tl.load(mix_ptr + row * N * N + i * N + k, mask=i < N, other=0.0)[:, None] * x[None, :]
        new = new.to(new_ptr.dtype.element_ty)
        tl.store(new_ptr + row * N * C + i[:, None] * C + c[None, :], new, mask=nc)
        new = new.to(tl.float32)
        r = tl.rsqrt(tl.sum(new * new, axis=1) / C + eps) # (N)
        z = tl.sum(new[:, None, :] * w[None, :, :], axis=2) * r[:, None] # (N, J)
        v = stream_coefficients(z, base, extra, i, j, N, J, KIND)
        read = tl.sum(tl.where((j == 0)[None, :], v, 0.0), axis=1) # (N)
        s = tl.sum(read[:, None] * new, axis=0) # (C)
        rs = tl.rsqrt(tl.sum(s * s, axis=0) / C + norm_eps)
        tl.store(h_ptr + row * C + c, (s * rs * gain).to(h_ptr.dtype.element_ty), mask=c < C)
        tl.store(z_ptr + row * N * J + i[:, None] * J + j[None, :], z, mask=nj)
        tl.store(r_ptr + row * N + i, r, mask=i < N)
        tl.store(rs_ptr + row, rs)
        if KIND == "hc":
            tl.store(new_mix_ptr + row * N * N + (j[None, :] - 1) * N + i[:, None], v, mask=nj & ((j > 0) & (j < J - 1))[None, :]) # transposed
        tl.store(new_write_ptr + row * N + i, tl.sum(tl.where((j == J - 1)[None, :], v, 0.0), axis=1), mask=i < N)

@jit
def stream_bwd_kernel(
    x_ptr, y_ptr, mix_ptr, write_ptr, w_ptr, base_ptr, extra_ptr, gain_ptr, z_ptr, r_ptr, rs_ptr, # as in the forward kernel
    dh_ptr, dnew_ptr, dnew_mix_ptr, dnew_write_ptr, # (R, C), (R, N, C), (R, N, N), (R, N)
    dx_ptr, dy_ptr, dmix_ptr, dwrite_ptr, # (R, N, C), (R, C), (R, N, N), (R, N)
    dw_ptr, dbase_ptr, dextra_ptr, dgain_ptr, # (programs, J, C), (programs, N, J), (programs, J), (programs, C) to be summed
    R,
    C: tl.constexpr, N: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i, j, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J), columns(BLOCK_C)
    nc, nj = (i < N)[:, None] & (c < C)[None, :], (i < N)[:, None] & (j < J)[None, :]
    base = tl.load(base_ptr + i[:, None] * J + j[None, :], mask=nj, other=0.0)
    extra = tl.load(extra_ptr + j, mask=j < J, other=0.0)
    dw, dgain = (), tl.zeros((BLOCK_C,), tl.float32)
    for k in tl.static_range(J):
        dw = dw + (tl.zeros((BLOCK_C,), tl.float32),)
    dbase, dextra = tl.zeros((BLOCK_N, BLOCK_J), tl.float32), tl.zeros((BLOCK_J,), tl.float32)
    for token in range(tl.program_id(0), R, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        y = tl.load(y_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
        new, x = tl.load(write_ptr + row * N + i, mask=i < N, other=0.0)[:, None] * y[None, :], () # (N, C)
        for k in tl.static_range(N):
            x = x + (tl.load(x_ptr + (row * N + k) * C + c, mask=c < C, other=0.0).to(tl.float32),)
            new += tl.load(mix_ptr + row * N * N + i * N + k, mask=i < N, other=0.0)[:, None] * x[k][None, :]
        new = new.to(x_ptr.dtype.element_ty).to(tl.float32)
        z = tl.load(z_ptr + row * N * J + i[:, None] * J + j[None, :], mask=nj, other=0.0)
        r = tl.load(r_ptr + row * N + i, mask=i < N, other=0.0)
        v = stream_coefficients(z, base, extra, i, j, N, J, KIND)
        read = tl.sum(tl.where((j == 0)[None, :], v, 0.0), axis=1) # (N)
        # h = s rs gain, rs = (mean(s^2) + eps)^-1/2: ds = rs (u - s rs^2 mean(u s)) with u = dh gain
        gain = tl.load(gain_ptr + c, mask=c < C, other=0.0)
        dh = tl.load(dh_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
        rs = tl.load(rs_ptr + row)
        s = tl.sum(read[:, None] * new, axis=0) # (C)
        dgain += dh * s * rs
        dh *= gain
        ds = rs * dh - (rs * rs * rs * tl.sum(dh * s, axis=0) / C) * s # (C)
        # s = read @ X'; the other columns of v have their gradients from the next write
        dv = tl.where((j == 0)[None, :], tl.sum(new * ds[None, :], axis=1)[:, None], 0.0) # (N, J)
        dv += tl.load(dnew_write_ptr + row * N + i[:, None] + 0 * j[None, :], mask=nj & (j == J - 1)[None, :], other=0.0)
        if KIND == "hc":
            dv += tl.load(dnew_mix_ptr + row * N * N + (j[None, :] - 1) * N + i[:, None], mask=nj & ((j > 0) & (j < J - 1))[None, :], other=0.0)
        dz, db, de = stream_coefficients_bwd(v, dv, z, extra, j, KIND)
        dbase += db
        dextra += de
        # z = <X', w> r, r = (mean(X'^2) + eps)^-1/2: dX' = (r dz) @ w - X' r^2 mean_C(dz z)
        p = dz * r[:, None] # (N, J)
        old, dw = dw, ()
        for k in tl.static_range(J): # first all that reads X', then g takes its registers
            dw = dw + (old[k] + tl.sum(tl.sum(tl.where((j == k)[None, :], p, 0.0), axis=1)[:, None] * new, axis=0),) # (C)
        g = tl.load(dnew_ptr + row * N * C + i[:, None] * C + c[None, :], mask=nc, other=0.0).to(tl.float32) + read[:, None] * ds[None, :] - (r * r * tl.sum(dz * z, axis=1) / C)[:, None] * new
        for k in tl.static_range(J):
            w = tl.load(w_ptr + k * C + c, mask=c < C, other=0.0) # (C) from cache: there are no registers to keep it in
            g += tl.sum(tl.where((j == k)[None, :], p, 0.0), axis=1)[:, None] * w[None, :]
        # X' = mix @ X + write y
        tl.store(dwrite_ptr + row * N + i, tl.sum(g * y[None, :], axis=1), mask=i < N)
        for k in tl.static_range(N):
            tl.store(dmix_ptr + row * N * N + i * N + k, tl.sum(g * x[k][None, :], axis=1), mask=i < N)
            mix = tl.load(mix_ptr + row * N * N + i * N + k, mask=i < N, other=0.0) # (N) once more, for want of registers
            tl.store(dx_ptr + (row * N + k) * C + c, tl.sum(mix[:, None] * g, axis=0).to(dx_ptr.dtype.element_ty), mask=c < C)
        write = tl.load(write_ptr + row * N + i, mask=i < N, other=0.0)
        tl.store(dy_ptr + row * C + c, tl.sum(write[:, None] * g, axis=0).to(dy_ptr.dtype.element_ty), mask=c < C)
    for k in tl.static_range(J):
        tl.store(dw_ptr + (pid * J + k) * C + c, dw[k], mask=c < C)
    tl.store(dbase_ptr + pid * N * J + i[:, None] * J + j[None, :], dbase, mask=nj)
    tl.store(dextra_ptr + pid * J + j, dextra, mask=j < J)
    tl.store(dgain_ptr + pid * C + c, dgain, mask=c < C)

# mHC, where W is too large for that: the tokens in blocks. Write and project; coefficients, a thread per stream pair; read and norm.
# X' is read once more: 3n + 2 forward, 4n + 4 backward.

@jit
def mhc_write_kernel(
    x_ptr, y_ptr, mix_ptr, write_ptr, phi_ptr, # (R, N, C), (R, C), (R, N, N), (R, N), (M, N*C)
    new_ptr, z_ptr, r_ptr, # (R, N, C), (R, M), (R)
    R, eps, C: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):
    first, row, m = tl.program_id(0).to(tl.int64) * BLOCK_R, tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_M)
    x_ptr, y_ptr, mix_ptr, write_ptr, new_ptr = x_ptr + first * N * C, y_ptr + first * C, mix_ptr + first * N * N, write_ptr + first * N, new_ptr + first * N * C
    z_ptr, r_ptr, R = z_ptr + first * M, r_ptr + first, R - first
    z, ss = tl.zeros((BLOCK_R, BLOCK_M), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + columns(BLOCK_C)
        mask = (row < R)[:, None] & (c < C)[None, :]
        y = tl.load(y_ptr + row[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = ()
        for k in tl.static_range(N):
            x = x + (tl.load(x_ptr + (row * N + k)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32),)
        for o in tl.static_range(N):
            new = tl.load(write_ptr + row * N + o, mask=row < R, other=0.0)[:, None] * y
            for k in tl.static_range(N):
                new += tl.load(mix_ptr + (row * N + o) * N + k, mask=row < R, other=0.0)[:, None] * x[k]
            new = new.to(new_ptr.dtype.element_ty)
            tl.store(new_ptr + (row * N + o)[:, None] * C + c[None, :], new, mask=mask)
            new = new.to(tl.float32)
            ss += tl.sum(new * new, axis=1)
            phi = tl.load(phi_ptr + m[None, :] * N * C + o * C + c[:, None], mask=(m < M)[None, :] & (c < C)[:, None], other=0.0) # (C, M)
            z = tl.dot(new, phi, z, input_precision="tf32x3")
    r = tl.rsqrt(ss / (N * C) + eps)
    tl.store(z_ptr + row[:, None] * M + m[None, :], z * r[:, None], mask=(row < R)[:, None] & (m < M)[None, :])
    tl.store(r_ptr + row, r, mask=row < R)

@jit
def sinkhorn_scale(M, t): # what step t divides by: column sums where t is odd, row sums where it is even
    return tl.where(t % 2 == 1, tl.sum(M, axis=1)[:, None, :], tl.sum(M, axis=2)[:, :, None]) + 1e-6

@jit
def sinkhorn(z, real, steps): # (R, N, N): softmax of the rows and that many steps
    e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
    M = tl.where(real, e / tl.sum(e, axis=2)[:, :, None] + 1e-6, 0.0)
    for t in range(1, steps + 1):
        M = M / sinkhorn_scale(M, t)
    return M

@jit
def mhc_coefficients_kernel(
    z_ptr, b_ptr, alpha_ptr, p_ptr, # (R, M), (M), (3), (N!, N*N) permutations, of mHC-lite
    read_ptr, mix_ptr, write_ptr, # (R, N), (R, N, N), (R, N), or their gradients
    dlogit_ptr, # (R, M), written by the backward pass
    R, N: tl.constexpr, M: tl.constexpr, ITERS: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):
    row, i, j = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    ri, rj = (row < R)[:, None] & (i < N)[None, :], (row < R)[:, None] & (j < M - 2 * N)[None, :]
    for k in tl.static_range(2): # read = sigmoid, write = 2 sigmoid
        s = tl.sigmoid(tl.load(alpha_ptr + k) * tl.load(z_ptr + row[:, None] * M + k * N + i[None, :], mask=ri, other=0.0) + tl.load(b_ptr + k * N + i, mask=i < N, other=0.0)[None, :])
        out = (read_ptr if k == 0 else write_ptr) + row[:, None] * N + i[None, :]
        if BACKWARD:
            tl.store(dlogit_ptr + row[:, None] * M + k * N + i[None, :], tl.load(out, mask=ri, other=0.0) * (k + 1) * s * (1 - s), mask=ri)
        else:
            tl.store(out, (k + 1) * s, mask=ri)
    if ITERS > 0:
        real = (i < N)[None, :, None] & (i < N)[None, None, :]
        nn, at = ri[:, :, None] & (i < N)[None, None, :], row[:, None, None] * N * N + i[None, :, None] * N + i[None, None, :]
        b = tl.load(b_ptr + 2 * N + i[:, None] * N + i[None, :], mask=(i < N)[:, None] & (i < N)[None, :], other=0.0)
        pair = row[:, None, None] * M + 2 * N + i[None, :, None] * N + i[None, None, :]
        z = tl.where(real, tl.load(alpha_ptr + 2) * tl.load(z_ptr + pair, mask=nn, other=0.0) + b[None, :, :], -1e30)
        if BACKWARD:
            dM = tl.load(mix_ptr + at, mask=nn, other=0.0)
            for t in range(1, 2 * ITERS): # M_t = M_{t-1} / S: dM_{t-1} = (dM_t - <dM_t, M_t>) / S; M_{t-1} is computed anew each time
                M_t, step = sinkhorn(z, real, 2 * ITERS - 1 - t), 2 * ITERS - t
                S = sinkhorn_scale(M_t, step)
                dot = dM * M_t / S
                dM = tl.where(real, dM - tl.where(step % 2 == 1, tl.sum(dot, axis=1)[:, None, :], tl.sum(dot, axis=2)[:, :, None]), 0.0) / S
            p = sinkhorn(z, real, 0) - tl.where(real, 1e-6, 0.0)
            tl.store(dlogit_ptr + pair, p * (dM - tl.sum(p * dM, axis=2)[:, :, None]), mask=nn)
        else:
            tl.store(mix_ptr + at, sinkhorn(z, real, 2 * ITERS - 1), mask=nn)
    else: # a softmax over the permutations
        z = tl.load(alpha_ptr + 2) * tl.load(z_ptr + row[:, None] * M + 2 * N + j[None, :], mask=rj, other=0.0) + tl.load(b_ptr + 2 * N + j, mask=j < M - 2 * N, other=0.0)[None, :]
        z = tl.where((j < M - 2 * N)[None, :], z, -1e30)
        e = tl.exp(z - tl.max(z, axis=1)[:, None])
        p, dp = e / tl.sum(e, axis=1)[:, None], tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for k in tl.static_range(N * N):
            entry = tl.load(p_ptr + j * N * N + k, mask=j < M - 2 * N, other=0.0)[None, :]
            if BACKWARD:
                dp += tl.load(mix_ptr + row * N * N + k, mask=row < R, other=0.0)[:, None] * entry
            else:
                tl.store(mix_ptr + row * N * N + k, tl.sum(p * entry, axis=1), mask=row < R)
        if BACKWARD:
            tl.store(dlogit_ptr + row[:, None] * M + 2 * N + j[None, :], p * (dp - tl.sum(p * dp, axis=1)[:, None]), mask=rj)

@jit
def mhc_read_kernel(
    new_ptr, read_ptr, gain_ptr, h_ptr, rs_ptr, # (R, N, C), (R, N), (C), (R, C), (R)
    dh_ptr, dread_ptr, a_ptr, dgain_ptr, # (R, C), (R, N), (R), (programs, C), of the backward pass
    R, norm_eps, C: tl.constexpr, N: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):
    pid, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N), columns(BLOCK_C)
    gain, dgain = tl.load(gain_ptr + c, mask=c < C, other=0.0), tl.zeros((BLOCK_C,), tl.float32)
    for token in range(tl.program_id(0), R, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        new = tl.load(new_ptr + row * N * C + i[:, None] * C + c[None, :], mask=(i < N)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        s = tl.sum(tl.load(read_ptr + row * N + i, mask=i < N, other=0.0)[:, None] * new, axis=0) # (C)
        if BACKWARD: # ds = rs u - a s with u = dh gain, a = rs^3 mean(u s)
            dh, rs = tl.load(dh_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32), tl.load(rs_ptr + row)
            dgain += dh * s * rs
            a = rs * rs * rs * tl.sum(dh * gain * s, axis=0) / C
            tl.store(dread_ptr + row * N + i, tl.sum(new * (rs * dh * gain - a * s)[None, :], axis=1), mask=i < N)
            tl.store(a_ptr + row, a)
        else:
            rs = tl.rsqrt(tl.sum(s * s, axis=0) / C + norm_eps)
            tl.store(h_ptr + row * C + c, (s * rs * gain).to(h_ptr.dtype.element_ty), mask=c < C)
            tl.store(rs_ptr + row, rs)
    if BACKWARD:
        tl.store(dgain_ptr + pid * C + c, dgain, mask=c < C)

@jit
def mhc_write_bwd_kernel(
    x_ptr, y_ptr, mix_ptr, write_ptr, phi_ptr, gain_ptr, # as in the forward kernels
    read_ptr, rs_ptr, a_ptr, p_ptr, t_ptr, # (R, N), (R), (R), (R, M) r dz, (R) r^2 mean(dz z)
    dh_ptr, dnew_ptr, # (R, C), (R, N, C)
    dx_ptr, dy_ptr, dpart_ptr, dphi_ptr, # (R, N, C), (R, C), (chunks, R, N, N+1) of mix and write, (splits, M, N*C)
    R, C: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # a program has one chunk of the columns, for all of which it keeps dPhi, and every so many blocks of tokens
    chunk, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c, m = chunk * BLOCK_C + columns(BLOCK_C), tl.arange(0, BLOCK_M)
    gain, mc, dphi = tl.load(gain_ptr + c, mask=c < C, other=0.0), (m < M)[:, None] & (c < C)[None, :], ()
    for o in tl.static_range(N):
        dphi = dphi + (tl.zeros((BLOCK_M, BLOCK_C), tl.float32),)
    for block in range(split, tl.cdiv(R, BLOCK_R), tl.num_programs(1)):
        first, row = block * BLOCK_R, tl.arange(0, BLOCK_R)
        here = row < R - first
        rc, rm = here[:, None] & (c < C)[None, :], here[:, None] & (m < M)[None, :]
        y = tl.load(y_ptr + first * C + row[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32)
        x, dx, new, s = (), (), (), tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for k in tl.static_range(N):
            x = x + (tl.load(x_ptr + first * N * C + (row * N + k)[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32),)
            dx = dx + (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),)
        p, old, dphi = tl.load(p_ptr + first * M + row[:, None] * M + m[None, :], mask=rm, other=0.0), dphi, () # (R, M)
        for o in tl.static_range(N):
            new_o = tl.load(write_ptr + first * N + row * N + o, mask=here, other=0.0)[:, None] * y
            for k in tl.static_range(N):
                new_o += tl.load(mix_ptr + first * N * N + (row * N + o) * N + k, mask=here, other=0.0)[:, None] * x[k]
            new = new + (new_o.to(x_ptr.dtype.element_ty).to(tl.float32),)
            dphi = dphi + (tl.dot(tl.trans(p), new[o], old[o], input_precision="tf32"),)
            s += tl.load(read_ptr + first * N + row * N + o, mask=here, other=0.0)[:, None] * new[o]
        dh = tl.load(dh_ptr + first * C + row[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32)
        ds = tl.load(rs_ptr + first + row, mask=here, other=0.0)[:, None] * dh * gain[None, :] - tl.load(a_ptr + first + row, mask=here, other=0.0)[:, None] * s
        t, dy = tl.load(t_ptr + first + row, mask=here, other=0.0), tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for o in tl.static_range(N):
            # z = (v @ Phi.T) r over all streams: dX' = (r dz) @ Phi - X' r^2 mean(dz z)
            g = tl.load(dnew_ptr + first * N * C + (row * N + o)[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32) - t[:, None] * new[o]
            g += tl.load(read_ptr + first * N + row * N + o, mask=here, other=0.0)[:, None] * ds
            phi = tl.load(phi_ptr + m[:, None] * N * C + o * C + c[None, :], mask=mc, other=0.0) # (M, C)
            g = tl.dot(p, phi, g, input_precision="tf32") # (R, C)
            # X' = mix @ X + write y
            part, old_dx, dx = dpart_ptr + (chunk * R + first) * N * (N + 1) + (row * N + o) * (N + 1), dx, ()
            for k in tl.static_range(N):
                tl.store(part + k, tl.sum(g * x[k], axis=1), mask=here)
                dx = dx + (old_dx[k] + tl.load(mix_ptr + first * N * N + (row * N + o) * N + k, mask=here, other=0.0)[:, None] * g,)
            tl.store(part + N, tl.sum(g * y, axis=1), mask=here)
            dy += tl.load(write_ptr + first * N + row * N + o, mask=here, other=0.0)[:, None] * g
        for k in tl.static_range(N):
            tl.store(dx_ptr + first * N * C + (row * N + k)[:, None] * C + c[None, :], dx[k].to(dx_ptr.dtype.element_ty), mask=rc)
        tl.store(dy_ptr + first * C + row[:, None] * C + c[None, :], dy.to(dy_ptr.dtype.element_ty), mask=rc)
    for o in tl.static_range(N):
        tl.store(dphi_ptr + (split * M + m)[:, None] * N * C + o * C + c[None, :], dphi[o], mask=mc)

def programs(X): # that many loops over the tokens; as many partial sums of the parameters' gradients
    return min(len(X), 2 * torch.cuda.get_device_properties(X.device).multi_processor_count if X.is_cuda else 4)

def power(n, least=1):
    return max(least, triton.next_power_of_2(n))

def warps(X): # one token's streams in registers
    return 8 if power(X.size(1)) * power(X.size(2)) <= 8192 else 16

def stream_sizes(op, X, W):
    return dict(C=X.size(2), N=X.size(1), J=len(W), KIND=op.kind, BLOCK_N=power(X.size(1)), BLOCK_J=power(len(W)), BLOCK_C=power(X.size(2)), num_warps=warps(X))

def stream_forward(op, X, y, mix, write, W, gain, base, extra):
    R, N, C, J = *X.shape, len(W)
    new, h, z, r, rs = torch.empty_like(X), torch.empty_like(y, dtype=X.dtype), mix.new_empty(R, N, J), mix.new_empty(R, N), mix.new_empty(R)
    new_mix, new_write = torch.empty_like(mix), torch.empty_like(write)
    stream_fwd_kernel[(programs(X),)](X, y, mix, write, W, base, extra, gain, new, h, z, r, rs, new_mix, new_write, R, op.eps, op.norm_eps, **stream_sizes(op, X, W))
    return (h, new, new_mix, new_write) if op.kind == "hc" else (h, new, new_write), (z, r, rs)

def stream_backward(op, X, y, mix, write, W, gain, small, saved, dh, dnew, *dc):
    P, R, N, C, J = programs(X), *X.shape, len(W)
    dX, dy, dmix, dwrite = (torch.empty_like(t) for t in (X, y, mix, write))
    dW, dbase, dextra, dgain = mix.new_empty(P, J, C), mix.new_empty(P, N, J), mix.new_empty(P, J), mix.new_empty(P, C)
    stream_bwd_kernel[(P,)](X, y, mix, write, W, *small, gain, *saved, dh.contiguous(), dnew.contiguous(), dc[0].contiguous(), dc[-1].contiguous(),
                            dX, dy, dmix, dwrite, dW, dbase, dextra, dgain, R, **stream_sizes(op, X, W))
    return dX, dy, dmix, dwrite, dW.sum(0), dgain.sum(0), dbase.sum(0), dextra.sum(0)

def mhc_sizes(op, X, W): # of the coefficients' kernel
    N, M = X.size(1), len(W)
    return dict(N=N, M=M, ITERS=op.iters, BLOCK_R=16, BLOCK_N=power(N), BLOCK_M=1 if op.iters else power(M - 2 * N), num_warps=4)

def mhc_forward(op, X, y, mix, write, W, gain, b, alpha):
    R, N, C, M = *X.shape, len(W)
    new, h, z, r, rs = torch.empty_like(X), torch.empty_like(y, dtype=X.dtype), mix.new_empty(R, M), mix.new_empty(R), mix.new_empty(R)
    read, new_mix, new_write = torch.empty_like(write), torch.empty_like(mix), torch.empty_like(write)
    mhc_write_kernel[(triton.cdiv(R, 16),)](X, y, mix, write, W, new, z, r, R, op.eps, C=C, N=N, M=M, BLOCK_R=16, BLOCK_M=power(M, 16), BLOCK_C=32, num_warps=4)
    mhc_coefficients_kernel[(triton.cdiv(R, 16),)](z, b, alpha, op.P, read, new_mix, new_write, z, R, BACKWARD=False, **mhc_sizes(op, X, W))
    mhc_read_kernel[(programs(X),)](new, read, gain, h, rs, h, read, rs, rs, R, op.norm_eps, C=C, N=N, BACKWARD=False, BLOCK_N=power(N), BLOCK_C=power(C), num_warps=warps(X))
    return (h, new, new_mix, new_write), (z, r, rs, read, new)

def mhc_backward(op, X, y, mix, write, W, gain, small, saved, dh, dnew, dnew_mix, dnew_write):
    (b, alpha), (z, r, rs, read, new), P, R, N, C, M = small, saved, programs(X), *X.shape, len(W)
    chunks, splits = triton.cdiv(C, 64), max(1, P // triton.cdiv(C, 64))
    dread, a, dgain, dlogit, dh = torch.empty_like(read), mix.new_empty(R), mix.new_empty(P, C), torch.empty_like(z), dh.contiguous()
    mhc_read_kernel[(P,)](new, read, gain, dh, rs, dh, dread, a, dgain, R, op.norm_eps, C=C, N=N, BACKWARD=True, BLOCK_N=power(N), BLOCK_C=power(C), num_warps=warps(X))
    mhc_coefficients_kernel[(triton.cdiv(R, 16),)](z, b, alpha, op.P, dread, dnew_mix.contiguous(), dnew_write.contiguous(), dlogit, R, BACKWARD=True, **mhc_sizes(op, X, W))
    dz, db, dalpha = mhc_logits_bwd(dlogit, z, b, alpha, N)
    dX, dy, dpart, dW = torch.empty_like(X), torch.empty_like(y), mix.new_empty(chunks, R, N, N + 1), mix.new_empty(splits, M, N * C)
    mhc_write_bwd_kernel[(chunks, splits)](X, y, mix, write, W, gain, read, rs, a, dz * r.unsqueeze(1), r.square() * (dz * z).sum(1) / (N * C), dh, dnew.contiguous(),
                                           dX, dy, dpart, dW, R, C=C, N=N, M=M, BLOCK_R=16, BLOCK_M=power(M, 16), BLOCK_C=64, num_warps=8)
    dmix, dwrite = dpart.sum(0).split((N, 1), dim=-1) # (R, N, N), (R, N, 1)
    return dX, dy, dmix, dwrite.squeeze(-1), dW.sum(0), dgain.sum(0), db, dalpha

def torch_forward(op, X, y, mix, write, W, gain, *small):
    K, dtype, new = W.size(1), wide(X), X
    if y is not None:
        x, y = X.to(dtype), y.to(dtype).unsqueeze(1) # (R, N, C), (R, 1, C)
        v = torch.bmm(mix, x).addcmul_(write.unsqueeze(-1), y) if mix.dim() == 3 else torch.lerp(x, y, write.unsqueeze(-1)) # (R, N, C)
        new = v.to(X.dtype)
    v = new.to(dtype) # rounded as it is kept
    r = rstd(v.view(len(X), -1, K), op.eps) # (R, N, 1) or (R, 1, 1)
    z = (v.view(-1, K) @ W.T).view(len(X), -1, len(W)).mul_(r) # (R, N, J) or (R, 1, M)
    (read, *c), kept = op.coefficients(z, *small)
    s = torch.bmm(read.unsqueeze(1), v).squeeze(1) # (R, C)
    rs = rstd(s, op.norm_eps) # (R, 1)
    return (s.mul_(rs).mul_(gain).to(X.dtype), new, *c), (z, r, rs, read, new, *kept) # X' is kept at no cost: it is the X of the next sub-layer

def torch_backward(op, X, y, mix, write, W, gain, small, saved, dh, dnew, *dc):
    (z, r, rs, read, new, *kept), K = saved, W.size(1)
    v, dh = new.to(z.dtype), dh.to(z.dtype) # (R, N, C), (R, C)
    # h = s rs gain, rs = (mean(s^2) + eps)^-1/2: ds = rs (u - s rs^2 mean(u s)) with u = dh gain
    s = torch.bmm(read.unsqueeze(1), v).squeeze(1) # (R, C)
    us = dh * s # (R, C)
    dgain = (rs.T @ us).squeeze(0) # (C)
    ds = (dh * gain).mul_(rs).addcmul_(s, (us @ gain).unsqueeze(-1).mul_(rs**3), value=-1 / s.size(-1)) # (R, C)
    dread = torch.bmm(ds.unsqueeze(1), v.mT).squeeze(1) # (R, N)
    dz, *dsmall = op.coefficients_bwd(kept, *small, dread, *dc)
    # z = (v @ W.T) r, r = (mean(v^2) + eps)^-1/2: dv = (r dz) @ W - v r^2 mean_K(dz z)
    t, p = (dz * z).sum(dim=-1, keepdim=True).mul_(r).mul_(r), (r * dz).flatten(0, 1) # as r, (R*N, J) or (R, M)
    g = torch.addcmul(dnew.to(z.dtype), read.unsqueeze(-1), ds.unsqueeze(1)) # (R, N, C) the whole gradient of X'
    g.view(-1, K).addmm_(p, W)
    g.view(len(X), -1, K).addcmul_(v.view(len(X), -1, K), t, value=-1 / K)
    pieces = math.gcd(len(p), 8) # of the rows, for the threads: BLAS would share out J and K
    dW = torch.bmm(p.reshape(pieces, -1, len(W)).mT, v.view(pieces, -1, K)).sum(0) # p.T @ v
    if y is None: # nothing was pending: X' = X
        return g.to(X.dtype), None, None, None, dW, dgain, *dsmall
    x, y_ = X.to(z.dtype), y.to(z.dtype).unsqueeze(1) # (R, N, C), (R, 1, C)
    if mix.dim() == 3: # X' = mix @ X + write y
        dX, dy = torch.bmm(torch.cat((mix.mT, write.unsqueeze(1)), 1), g).split((X.size(1), 1), dim=1) # (R, N, C), (R, 1, C)
        dmix, dwrite = torch.bmm(g, x.mT), torch.bmm(y_, g.mT).squeeze(1)
    else: # MGR: X' = X + write (y - X), and mix = 1 - write
        dX, dy, dmix, dwrite = g * mix.unsqueeze(-1), torch.bmm(write.unsqueeze(1), g), None, (y_ - x).mul_(g).sum(dim=-1)
    return dX.to(X.dtype), dy.squeeze(1).to(y.dtype), dmix, dwrite, dW, dgain, *dsmall

class Connect(torch.autograd.Function):

    @staticmethod
    def forward(ctx, op, X, y, mix, write, W, gain, *small):
        arithmetic = (mhc_forward if op.kind == "mhc" else stream_forward) if on_chip(X) else torch_forward
        out, saved = arithmetic(op, X, y, mix, write, W, gain, *small)
        ctx.op, ctx.small = op, len(small)
        ctx.save_for_backward(X, y, mix, write, W, gain, *small, *saved)
        return out

    @staticmethod
    def backward(ctx, *grads):
        X, y, mix, write, W, gain, *rest = ctx.saved_tensors
        arithmetic = (mhc_backward if ctx.op.kind == "mhc" else stream_backward) if on_chip(X) else torch_backward
        with without_autocast(X):
            return None, *arithmetic(ctx.op, X, y, mix, write, W, gain, rest[:ctx.small], rest[ctx.small:], *grads)

def stream_connect(op, state, norm, W, *small):
    X, y, *c = state if len(state) > 1 else (state[0], None) # nothing is pending
    B, T, N, C = X.shape
    if y is None and on_chip(X): # there 0 is written
        y, write = torch.zeros_like(X[:, :, 0]), X.new_zeros(B, T, N, dtype=wide(X)) # (B, T, C), (B, T, N)
        c = (write,) if op.kind[:3] == "mgr" else (torch.eye(N, dtype=write.dtype, device=X.device).expand(B, T, N, N), write)
    mix, write = c if len(c) == 2 else (1 - c[0], c[0]) if c else (None, None) # MGR: (1 - gate) X + gate y
    mix = mix.diag_embed() if len(c) == 1 and on_chip(X) else mix
    op.norm_eps = norm.eps
    with without_autocast(X):
        h, X, *c = Connect.apply(op, *(t if t is None else t.flatten(0, 1).contiguous() for t in (X, y, mix, write)), W.contiguous(), norm.weight, *small)
    return h.view(B, T, C), X.view(B, T, N, C), *(t.unflatten(0, (B, T)) for t in c)

def hc_settle(X, y=None, mix=None, write=None):
    if y is None:
        return X
    with without_autocast(X):
        X = (torch.cat((mix, write.unsqueeze(-1)), -1) @ torch.cat((X, y.unsqueeze(-2)), -2).to(mix.dtype)).to(X.dtype) # (B, T, N, C)
    if X.requires_grad: # that of a sum over streams is expanded, for which bmm loops over the tokens
        X.register_hook(lambda dX: dX.contiguous())
    return X

def hc_connect(state, hc, norm):
    op = SimpleNamespace(kind="hc", coefficients=hc_coefficients, coefficients_bwd=hc_coefficients_bwd, eps=1e-8)
    base = torch.cat((hc.A, hc.B.unsqueeze(-1)), dim=1) # (N, N+2)
    if not hc.config.dynamic:
        return stream_connect(op, state, norm, base.new_zeros(base.size(1), norm.weight.numel()), base, base.new_zeros(base.size(1)))
    W, scale = torch.cat((hc.W_a, hc.w_b.unsqueeze(0))), torch.cat((hc.s_a.expand(len(hc.W_a)), hc.s_b.view(1))) # (N+2, C), (N+2)
    return stream_connect(op, state, norm, W, base, scale)

def mhc_connect(state, hc, norm):
    iters, P = hc.config.sinkhorn_iters, getattr(hc, "P", None)
    coefficients, back = (partial(f, P=P, n=state[0].size(2), iters=iters) for f in (mhc_coefficients, mhc_coefficients_bwd))
    op = SimpleNamespace(kind="mhc", coefficients=coefficients, coefficients_bwd=back, eps=hc.config.norm_eps, iters=iters, P=hc.b if P is None else P)
    return stream_connect(op, state, norm, hc.Phi, hc.b, hc.alpha)

def mgr_connect(state, mgr, norm):
    if mgr.w_b is None: # the sub-layers that append a stream, and the readout
        X = sys.modules[type(mgr).__module__].settle(*state) # (B, T, S, C)
        with without_autocast(X):
            x = X.to(wide(X))
            return norm((mgr(x)[0].unsqueeze(-2) @ x).squeeze(-2)).to(X.dtype), X
    competitive = mgr.config.competitive
    X, *c = state if len(state) == 3 or len(state) == 1 else (torch.cat((state[0], state[1].unsqueeze(2)), dim=2),)
    coefficients, back = (partial(f, competitive=competitive) for f in (mgr_coefficients, mgr_coefficients_bwd))
    op = SimpleNamespace(kind="mgr" if competitive else "mgr_independent", coefficients=coefficients, coefficients_bwd=back, eps=mgr.config.norm_eps)
    W = torch.stack((torch.zeros_like(mgr.w_b) if mgr.w_a is None else mgr.w_a, mgr.w_b)) * mgr.w_b.numel() ** -0.5 # (2, C) no query where N = 1
    base, c_0 = F.pad(mgr.c[competitive:X.size(2) + competitive].unsqueeze(-1), (1, 0)), F.pad(mgr.c[:1] * competitive, (1, 0)) # (N, 2), (2)
    return stream_connect(op, (X, *c), norm, W, base, c_0)

# -----------------------------------------------------------------------------
# Attention Residuals
#
#     s_i = r_i <q, V_i>,  p = softmax_i(s),  O = sum_i p_i V_i,  h = O r_O gain        q = w * g, r = 1/rms, V_i (R, C)
#     dV_i = sum_l p_li dO_l + ds_li r_i (q_l - s_li r_i V_i / C)                       ds_li = p_li (<dO_l, V_i> - <dO_l, O_l>)
#     dq_l = sum_i r_i ds_li V_i                                                        and no gradient is ever pushed into k sources
#
# Pull backward: the backward of mix l leaves dO_l and <dO_l, O_l> in a ledger; that of source i runs after those of all mixes that
# read it and makes dV_i in one pass. Saved per token and sub-layer: V, O, and the scalars lse and <dO, O>; p is made again.
# Off the chip, complete sources are read by the tile of 8, once for a group of 8 mixes: a query is known before it is due.

@jit
def attnres_fwd_kernel(
    table, # (S) addresses of V_i (R, C)
    q_ptr, gain_ptr, # (C) fp32
    h_ptr, # (R, C)
    O_ptr, # (R, C) fp32: rounded, <dO, O> would be wrong by what all sources have in common, and dq with it
    lse_ptr, # (R)
    R, C, S, eps, norm_eps, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    row, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_C)
    at, mask = row[:, None] * C + cols[None, :], (row < R)[:, None] & (cols < C)[None, :]
    q = tl.load(q_ptr + cols, cols < C, 0.0)[None, :]
    top, Z, O = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BLOCK_C), tl.float32)
    for i in range(S): # each source is read once
        v = tl.load(tl.multiple_of(tl.load(table + i).to(h_ptr.dtype), 16) + at, mask, 0.0).to(tl.float32)
        s = tl.sum(v * q, 1) / tl.sqrt(tl.sum(v * v, 1) / C + eps)
        new = tl.maximum(top, s)
        scale, e = tl.exp(top - new), tl.exp(s - new)
        top, Z, O = new, Z * scale + e, O * scale[:, None] + e[:, None] * v
    O = O / Z[:, None]
    tl.store(O_ptr + at, O, mask)
    tl.store(lse_ptr + row, top + tl.log(Z), row < R)
    if NORM:
        O = O / tl.sqrt(tl.sum(O * O, 1) / C + norm_eps)[:, None] * tl.load(gain_ptr + cols, cols < C, 0.0)[None, :]
    tl.store(h_ptr + at, O.to(h_ptr.dtype.element_ty), mask)

@jit
def attnres_norm_bwd_kernel(
    dh_ptr, dO_ptr, # (R, C)
    O_ptr, # (R, C) fp32
    gain_ptr, # (C) fp32
    D_ptr, # (R) <dO, O>
    dgain_ptr, # (programs, C) fp32
    R, C, norm_eps, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_C)
    dgain, gain = tl.zeros((BLOCK_C,), tl.float32), tl.load(gain_ptr + cols, cols < C, 0.0)[None, :]
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        at, mask = row[:, None] * C + cols[None, :], (row < R)[:, None] & (cols < C)[None, :]
        dh, O = tl.load(dh_ptr + at, mask, 0.0).to(tl.float32), tl.load(O_ptr + at, mask, 0.0)
        if NORM: # dO = r (gain dh - r^2 O <gain dh, O> / C)
            r = 1 / tl.sqrt(tl.sum(O * O, 1) / C + norm_eps)
            dgain += tl.sum(tl.where(mask, dh * O * r[:, None], 0.0), 0)
            dh = dh * gain * r[:, None] - O * (tl.sum(dh * gain * O, 1) * r * r * r / C)[:, None]
        dO = dh.to(dO_ptr.dtype.element_ty)
        tl.store(dO_ptr + at, dO, mask)
        tl.store(D_ptr + row, tl.sum(dO.to(tl.float32) * O, 1), row < R) # of the dO that is stored: errors along O cancel in ds
    if NORM:
        tl.store(dgain_ptr + tl.program_id(0) * C + cols, dgain, cols < C)

@jit
def attnres_pull_kernel(
    table, # (M, 4) addresses of dO (R, C), lse (R), D (R) of each mix, and the row of its query
    v_ptr, more_ptr, dv_ptr, # (R, C), more: what reaches the source another way
    q_ptr, # (queries, C) fp32
    c_ptr, # (M, R) fp32, r ds: what multiplies V in dq
    R, C, M, eps, MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    row, cols = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_C)
    at, mask = row[:, None] * C + cols[None, :], (row < R)[:, None] & (cols < C)[None, :]
    v = tl.load(v_ptr + at, mask, 0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(v * v, 1) / C + eps)
    sum_ds, dv = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BLOCK_C), tl.float32)
    for l in range(M): # each dO is read once
        dO = tl.load(tl.multiple_of(tl.load(table + 4 * l).to(v_ptr.dtype), 16) + at, mask, 0.0).to(tl.float32)
        lse = tl.load(tl.load(table + 4 * l + 1).to(c_ptr.dtype) + row, row < R, 0.0)
        D = tl.load(tl.load(table + 4 * l + 2).to(c_ptr.dtype) + row, row < R, 0.0)
        q = tl.load(q_ptr + tl.load(table + 4 * l + 3) * C + cols, cols < C, 0.0)[None, :]
        s = tl.sum(v * q, 1) * r
        p = tl.exp(s - lse)
        ds = p * (tl.sum(v * dO, 1) - D)
        dv += p[:, None] * dO + (ds * r)[:, None] * q
        sum_ds += ds * s
        tl.store(c_ptr + l * R + row, ds * r, row < R)
    dv -= (sum_ds * r * r / C)[:, None] * v
    if MORE:
        dv += tl.load(more_ptr + at, mask, 0.0).to(tl.float32)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask)

@jit
def attnres_dq_kernel(
    c_ptr, # (M, R) fp32
    v_ptr, # (R, C)
    dq_ptr, # (programs of axis 2, M, C) fp32: c @ V, summed over rows by the host, in a fixed order
    M, R, C, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):
    cols, m, part = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(2)
    dq = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for first in range(part * BLOCK_R, R, tl.num_programs(2) * BLOCK_R):
        row = first + tl.arange(0, BLOCK_R).to(tl.int64)
        c = tl.load(c_ptr + m[:, None].to(tl.int64) * R + row[None, :], (m < M)[:, None] & (row < R)[None, :], 0.0)
        v = tl.load(v_ptr + row[:, None] * C + cols[None, :], (row < R)[:, None] & (cols < C)[None, :], 0.0).to(tl.float32)
        dq += tl.dot(c, v, input_precision="ieee")
    tl.store(dq_ptr + (part * M + m[:, None]) * C + cols[None, :], dq, (m < M)[:, None] & (cols < C)[None, :])

def chip_mix(V, q, gain, eps, norm_eps):
    h, O, lse = torch.empty_like(V[0]), torch.empty_like(V[0], dtype=torch.float32), torch.empty(len(V[0]), 1, device=q.device) # (R, C), (R, C), (R, 1)
    table, (R, C), b = torch.tensor([v.data_ptr() for v in V], device=q.device), h.shape, blocks(h) # (S)
    attnres_fwd_kernel[(triton.cdiv(R, b["ROWS"]),)](table, q, q if gain is None else gain, h, O, lse, R, C, len(V), eps, norm_eps, gain is not None, **b)
    return O, h, lse

def chip_norm_backward(dh, O, gain, norm_eps):
    (R, C), dO, D, b = O.shape, torch.empty_like(dh), torch.empty(len(O), 1, device=O.device), blocks(O)
    dgain = torch.empty(min(triton.cdiv(R, b["ROWS"]), 512), C, device=O.device) # (programs, C)
    attnres_norm_bwd_kernel[(len(dgain),)](dh, dO, O, O if gain is None else gain, D, dgain, R, C, norm_eps, gain is not None, **b)
    return dO, D, None if gain is None else dgain.sum(0)

def chip_pull(V, table, q, more, eps):
    (R, C), M, dV, b = V.shape, len(table), torch.empty_like(V), blocks(V)
    table, c = torch.tensor(table, dtype=torch.int64, device=q.device).view(M, 4), torch.empty(M, R, device=q.device) # (M, 4), (M, R)
    attnres_pull_kernel[(triton.cdiv(R, b["ROWS"]),)](table, V, V if more is None else more, dV, q, c, R, C, M, eps, more is not None, **b)
    dq = torch.empty(min(triton.cdiv(R, 256), 16), M, C, device=q.device) # (programs, M, C)
    attnres_dq_kernel[(triton.cdiv(C, 64), triton.cdiv(M, 16), len(dq))](c, V, dq, M, R, C, BLOCK_M=16, BLOCK_R=32, BLOCK_C=64)
    return dV, table[:, 3], dq.sum(0)

class Ledger:
    # what one forward leaves for its one backward; every state carries it

    def __init__(self, queries, x):
        self.queries, self.eps, self.chip, self.G = queries, queries[0].eps, on_chip(x), 1 if on_chip(x) else 8
        self.Q = torch.stack([(m.w * m.g).detach().to(wide(x)) for m in queries]) # (queries, C)
        self.dQ = torch.zeros_like(self.Q)
        self.V, self.r, self.carry, self.readers = [], [], [], [] # per source: (R, C), (R, 1), gradient of the sum that it is in, [[group, a, b]]
        self.tiles, self.tiled, self.group = [], (), None # [V (R, G, C), r (R, G, 1), dV, c], the sources in them

    def enter(self, res, ids):
        # the group that answers res, and the place in it
        g, done = self.group, ids[:-1] # the newest source may still grow
        if g is None or g.n == len(g.q) or self.queries[g.at + g.n] is not res or done[:len(g.seen)] != g.seen:
            if not self.chip and len(done) > len(self.tiled) and done[:len(self.tiled)] == self.tiled:
                for t in range(len(self.tiled) // self.G, -(-len(done) // self.G)): # the last tile may have been short
                    new = done[t * self.G:(t + 1) * self.G]
                    V, r = torch.stack([self.V[i] for i in new], 1), torch.stack([self.r[i] for i in new], 1) # (R, G, C), (R, G, 1)
                    for i, v in zip(new, V.unbind(1)):
                        self.V[i] = v
                    self.tiles[t:] = [[V, r, None, None]]
                self.tiled = done
            g = self.group = Group(self, self.queries.index(res), self.tiled if done[:len(self.tiled)] == self.tiled else (), ids)
        for i in ids[g.tiled:]:
            if self.readers[i] and self.readers[i][-1][0] is g:
                self.readers[i][-1][2] = g.n + 1
            else:
                self.readers[i].append([g, g.n, g.n + 1])
        g.n += 1
        return g, g.n - 1

class Group:
    # up to G successive mixes, which read a tile once

    def __init__(self, led, at, tiled, ids):
        self.at, self.n, self.seen, self.tiled, self.tiles, self.lowest = at, 0, tiled, len(tiled), -(-len(tiled) // led.G), ids[len(tiled)]
        self.q, self.dq, self.dO, R = led.Q[at:at + led.G], led.dQ[at:at + led.G], None, len(led.V[0]) # (G, C)
        if led.chip:
            return
        self.O, self.lse = self.q.new_zeros(R, *self.q.shape), self.q.new_full((R, len(self.q)), float("-inf")) # (R, G, C), (R, G) over what is seen
        if tiled:
            tiles = self.prefix(led)
            s = torch.cat([(V @ self.q.T).mul_(r) for V, r in tiles], 1) # (R, S, G)
            self.lse = s.logsumexp(1) # (R, G)
            for p, (V, _) in zip(s.sub_(self.lse.unsqueeze(1)).exp_().split(led.G, 1), tiles):
                self.O.baddbmm_(p.mT, V)

    def prefix(self, led):
        # of the tiles, what this group has read; a tile may have grown since
        return [[x[:, :self.tiled - t * led.G] for x in tile if x is not None] for t, tile in enumerate(led.tiles[:self.tiles])]

    def weigh(self, V, r, a, b):
        # for queries a..b-1: p (R, b-a, 1), the weight of V (R, C) beside what they have seen, and lse (R, b-a) with it
        s, lse = (V @ self.q[a:b].T).mul_(r), self.lse[:, a:b] # (R, b-a)
        return (s - lse).sigmoid_().unsqueeze(-1), torch.logaddexp(lse, s)

    def mix(self, j, ids, led):
        # O (R, C) of query j over the tiles and the sources ids
        for i in ids[len(self.seen):-1]: # complete: all queries that are still to come see them too
            p, self.lse[:, j:] = self.weigh(led.V[i], led.r[i], j, len(self.q))
            self.O[:, j:].lerp_(led.V[i].unsqueeze(1), p)
        p, self.lse[:, j:j + 1] = self.weigh(led.V[ids[-1]], led.r[ids[-1]], j, j + 1)
        O, self.seen = torch.lerp(self.O[:, j], led.V[ids[-1]], p[:, 0]), ids[:-1] # (R, C)
        self.O = None if j == len(self.q) - 1 else self.O
        return O

    def pull(self, a, b, V, r, dV, c):
        # what mixes a..b-1 send to sources V (R, S, C), r (R, S, 1): added to dV (R, S, C), to c (R, S, 1) = sum_l ds_l s_l, to dq
        q, dO = self.q[a:b], self.dO[:, a:b] # (M, C), (R, M, C)
        s = (V @ q.T).mul_(r) # (R, S, M)
        p = (s - self.lse[:, None, a:b]).exp_() # (R, S, M)
        ds = (V @ dO.mT).sub_(self.D[:, None, a:b]).mul_(p) # (R, S, M)
        c.add_(s.mul_(ds).sum(-1, keepdim=True))
        ds = ds.mul_(r).flatten(0, 1) # (R S, M)
        self.dq[a:b].addmm_(ds.T, V.flatten(0, 1))
        add = dV if dV.is_contiguous() else V.new_zeros(V.shape) # or bmm loops over tokens
        if V.size(1) > 1:
            add.baddbmm_(p, dO)
        else: # bmm is slow for one row
            for m in range(b - a):
                add[:, 0].addcmul_(dO[:, m], p[:, 0, m:m + 1])
        add.flatten(0, 1).addmm_(ds, q)
        if add is not dV:
            dV.add_(add)

def rstd(x, eps):
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_() # (R, 1)

def used_up(led):
    if led.V is None:
        raise RuntimeError("fused AttnRes: one backward per forward, its ledger has been used up; use --fused off")

class Tap(torch.autograd.Function):
    # source i, v or x + v: an identity whose backward pulls

    @staticmethod
    def forward(ctx, led, prev, x, v, *params):
        ctx.set_materialize_grads(False)
        ctx.led, ctx.i, ctx.prev, ctx.n, ctx.dtype, ctx.shape = led, len(led.V), prev, len(params), v.dtype, v.shape
        y = v.view_as(v) if prev is None else x + v # (B, T, C)
        V = y.detach().reshape(-1, y.size(-1)).to(y.dtype if led.chip else wide(y)) # (R, C)
        V = V.clone() if V.data_ptr() % 16 else V # the kernels load 16 bytes at once
        led.V.append(V)
        led.r.append(None if led.chip else rstd(V, led.eps)) # (R, 1)
        led.carry.append(None)
        led.readers.append([])
        return y

    @staticmethod
    def backward(ctx, grad):
        led, i = ctx.led, ctx.i
        used_up(led)
        more = [x.reshape(led.V[i].shape) for x in (led.carry[i], grad) if x is not None]
        with without_autocast(led.V[i]):
            dV = (Tap.chip if led.chip else Tap.pull)(led, i, more) # (R, C)
        led.V[i] = led.carry[i] = None
        if ctx.prev is not None:
            led.carry[ctx.prev] = dV
        params = [None] * ctx.n
        if i == 0: # the last to run: the queries are complete
            led.V = None
            params = [dq * m.g for m, dq in zip(led.queries, led.dQ)] + [dq * m.w for m, dq in zip(led.queries, led.dQ)]
        return None, None, None, dV.to(ctx.dtype).reshape(ctx.shape), *params

    @staticmethod
    def chip(led, i, more):
        groups = [g for g, _, _ in led.readers[i] if g.dO is not None]
        table = [(g.dO.data_ptr(), g.lse.data_ptr(), g.D.data_ptr(), g.at) for g in groups]
        dV, at, dq = chip_pull(led.V[i], table, led.Q, sum(more) if more else None, led.eps)
        led.dQ.index_add_(0, at, dq)
        for g in groups:
            g.dO = None if g.lowest == i else g.dO
        return dV

    @staticmethod
    def pull(led, i, more):
        V, r = led.V[i].unsqueeze(1), led.r[i].unsqueeze(1) # (R, 1, C), (R, 1, 1)
        dV, c = V.new_zeros(V.shape), r.new_zeros(r.shape)
        for g, a, b in led.readers[i]:
            if g.dO is None: # nothing was asked of it
                continue
            g.pull(a, b, V, r, dV, c)
            if g.lowest == i: # all mixes of the group have been here
                for tile in led.tiles[:g.tiles]:
                    tile[2:] = (torch.zeros_like(x) for x in tile[:2]) if tile[2] is None else tile[2:]
                for tile in g.prefix(led):
                    g.pull(0, g.n, *tile)
                g.dO = None
        if i in led.tiled:
            t, j = divmod(led.tiled.index(i), led.G)
            if led.tiles[t][2] is not None:
                dV, c = dV.add_(led.tiles[t][2][:, j:j + 1]), c.add_(led.tiles[t][3][:, j:j + 1])
            if j == 0:
                led.tiles[t] = None
        dV = dV.addcmul_(V, c.mul_(r).mul_(r), value=-1 / V.size(-1)).squeeze(1) # (R, C)
        for x in more:
            dV.add_(x)
        return dV

class Mix(torch.autograd.Function):

    @staticmethod
    def forward(ctx, led, ids, x, res, gain, eps):
        # x, the newest source, is here for the order of the backward: no gradient is returned for it
        with without_autocast(x):
            g, j = led.enter(res, ids)
            if led.chip:
                O, h, g.lse = chip_mix([led.V[i] for i in ids], g.q[0], gain, led.eps, eps)
            else:
                O = g.mix(j, ids, led) # (R, C)
                r = None if gain is None else rstd(O, eps) # (R, 1)
                h = O if gain is None else (O * r).mul_(gain) # (R, C)
        ctx.led, ctx.g, ctx.j, ctx.eps = led, g, j, eps
        ctx.save_for_backward(O, None if led.chip else r, gain)
        return h.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, dh):
        (O, r, gain), g, j, dgain = ctx.saved_tensors, ctx.g, ctx.j, None
        used_up(ctx.led)
        dh = dh.reshape(O.shape) # (R, C)
        with without_autocast(O):
            if ctx.led.chip:
                g.dO, g.D, dgain = chip_norm_backward(dh, O, gain, ctx.eps)
                return None, None, None, None, dgain, None
            dh = dh.to(O.dtype) # (R, C)
            if g.dO is None:
                g.dO, g.D = O.new_zeros(len(O), g.n, O.size(-1)), O.new_zeros(len(O), g.n) # (R, G, C), (R, G)
            dO = g.dO[:, j] # (R, C)
            if gain is None:
                dO.copy_(dh)
            else: # dO = r (gain dh - r^2 O <gain dh, O> / C)
                u = dh * O # (R, C)
                dgain = (r.T @ u).squeeze(0) # (C)
                torch.mul(dh, gain, out=dO)
                dO.mul_(r).addcmul_(O, (u @ gain).unsqueeze(-1).mul_(r**3), value=-1 / O.size(-1))
            g.D[:, j] = torch.linalg.vecdot(dO, O)
        return None, None, None, None, dgain, None

def attnres_begin(self, x):
    queries = [m for m in self.modules() if isinstance(m, type(self.res_f))] # in the order of use
    led = Ledger(queries, x)
    return led, (0,), Tap.apply(led, None, None, x, *[m.w for m in queries], *[m.g for m in queries])

def attnres_push(state, v, new):
    led, ids, x = state
    i = len(led.V)
    if new or len(ids) == 1:
        return led, ids + (i,), Tap.apply(led, None, None, v)
    return led, ids[:-1] + (i,), Tap.apply(led, ids[-1], x, v)

def attnres_mix(state, res, norm=None):
    led, ids, x = state
    if res is None:
        return x if norm is None else norm(x)
    return Mix.apply(led, ids, x, res, *(None, 0) if norm is None else (norm.weight, norm.eps))

# -----------------------------------------------------------------------------
# MoDA
#
#     lse = log(exp(lse_seq) + sum_j exp(z_j)),  z_j = <q, k_j>,  y = exp(lse_seq - lse) y_seq + sum_j exp(z_j - lse) v_j
#
# y_seq, lse_seq are the library's flash attention over the sequence. Its backward, called with the merged y and lse, makes the joint
# probabilities exp(s - lse) and the joint <dy, y> of them, so its dq, dk, dv are right, and the depth part is
#     ds_j = p_j (<dy, v_j> - <dy, y>),  dq += ds_j k_j,  dk_j += ds_j q,  dv_j += p_j dy
# Saved: q, k, v, y, lse; p is made again. dk_j, dv_j are summed in place over the layers that read slot j; the first of them, whose
# backward runs last, hands them over.

@jit
def moda_slot(at, q_ptr, row, hk, d, m_k, D: tl.constexpr): # at: an address, heads from token to token -> (N, 1, D)
    ptr = tl.multiple_of(tl.load(at).to(q_ptr.dtype), 16) + ((row * tl.load(at + 1) + hk) * D)[:, None] + d[None, :]
    return tl.load(ptr, m_k, 0.0).to(tl.float32)[:, None, :]

@jit
def moda_fwd_kernel(
    table, # (S, 6) addresses of k_j and v_j, each followed by the heads from token to token, then of dk_j, dv_j
    q_ptr, y_seq_ptr, y_ptr, # (B, Hkv, G, T, D)
    lse_ptr, lse_seq_ptr, # (B, Hkv, G, T) fp32
    N, T, Hkv, S, scale, D: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N) # N = B T Hkv of them, heads innermost, as the slots lie
    row, hk, g, d = n // Hkv, n % Hkv, tl.arange(0, BLOCK_G)[None, :], tl.arange(0, BLOCK_D)
    at_l = ((row // T * Hkv + hk)[:, None] * G + g) * T + (row % T)[:, None] # (N, G)
    at, m_l, m_k = at_l[:, :, None] * D + d[None, None, :], (n < N)[:, None] & (g < G), (n < N)[:, None] & (d < D)[None, :]
    m = m_l[:, :, None] & (d < D)[None, None, :]
    q = tl.load(q_ptr + at, m, 0.0).to(tl.float32) * scale # (N, G, D)
    y, top, Z = tl.load(y_seq_ptr + at, m, 0.0).to(tl.float32), tl.load(lse_seq_ptr + at_l, m_l, 0.0), tl.full((BLOCK_N, BLOCK_G), 1.0, tl.float32)
    for j in range(S):
        k, v = moda_slot(table + 6 * j, q_ptr, row, hk, d, m_k, D), moda_slot(table + 6 * j + 2, q_ptr, row, hk, d, m_k, D) # (N, 1, D)
        z = tl.sum(q * k, 2) # (N, G)
        new = tl.maximum(top, z)
        old, e = tl.exp(top - new), tl.exp(z - new)
        top, Z, y = new, Z * old + e, y * old[:, :, None] + e[:, :, None] * v
    tl.store(y_ptr + at, (y / Z[:, :, None]).to(y_ptr.dtype.element_ty), m)
    tl.store(lse_ptr + at_l, top + tl.log(Z), m_l)

@jit
def moda_bwd_kernel(
    table, # as above
    q_ptr, y_ptr, dy_ptr, dq_ptr, # (B, Hkv, G, T, D), dq holds the part of the sequence
    lse_ptr, # (B, Hkv, G, T) fp32
    N, T, Hkv, S, scale, D: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, hk, g, d = n // Hkv, n % Hkv, tl.arange(0, BLOCK_G)[None, :], tl.arange(0, BLOCK_D)
    at_l = ((row // T * Hkv + hk)[:, None] * G + g) * T + (row % T)[:, None] # (N, G)
    at, m_l, m_k = at_l[:, :, None] * D + d[None, None, :], (n < N)[:, None] & (g < G), (n < N)[:, None] & (d < D)[None, :]
    m = m_l[:, :, None] & (d < D)[None, None, :]
    q, dy = tl.load(q_ptr + at, m, 0.0).to(tl.float32) * scale, tl.load(dy_ptr + at, m, 0.0).to(tl.float32) # (N, G, D)
    dyy, lse, dq = tl.sum(dy * tl.load(y_ptr + at, m, 0.0).to(tl.float32), 2), tl.load(lse_ptr + at_l, m_l, 0.0), tl.zeros_like(q)
    for j in range(S):
        k, v = moda_slot(table + 6 * j, q_ptr, row, hk, d, m_k, D), moda_slot(table + 6 * j + 2, q_ptr, row, hk, d, m_k, D) # (N, 1, D)
        p = tl.exp(tl.sum(q * k, 2) - lse) # (N, G)
        ds = p * (tl.sum(dy * v, 2) - dyy)
        dq += ds[:, :, None] * k
        # dk_j, dv_j (B, T, Hkv, D): one program has each element, so they are added to in place
        dk_ptr = tl.multiple_of(tl.load(table + 6 * j + 4).to(q_ptr.dtype), 16) + (n * D)[:, None] + d[None, :]
        dv_ptr = tl.multiple_of(tl.load(table + 6 * j + 5).to(q_ptr.dtype), 16) + (n * D)[:, None] + d[None, :]
        tl.store(dk_ptr, (tl.load(dk_ptr, m_k, 0.0).to(tl.float32) + tl.sum(ds[:, :, None] * q, 1)).to(q_ptr.dtype.element_ty), m_k)
        tl.store(dv_ptr, (tl.load(dv_ptr, m_k, 0.0).to(tl.float32) + tl.sum(p[:, :, None] * dy, 1)).to(q_ptr.dtype.element_ty), m_k)
    tl.store(dq_ptr + at, (tl.load(dq_ptr + at, m, 0.0).to(tl.float32) + dq * scale).to(q_ptr.dtype.element_ty), m)

def moda_blocks(G, D):
    BG, BD = triton.next_power_of_2(G), triton.next_power_of_2(D)
    return dict(G=G, BLOCK_N=max(1, 1024 // (BG * BD)), BLOCK_G=BG, BLOCK_D=BD)

def chip_moda(kernel, slots, sums, scale, q, *tensors):
    # launches either kernel; slots k_0, v_0, ...: (B, Hkv, T, D) that lie as (B, T, .., D)
    B, Hkv, T, D = slots[0].shape
    slots = [x if x.stride()[1::2] == (D, 1) and x.stride(0) == T * x.stride(2) and x.stride(2) % D == 0 else
             x.transpose(1, 2).contiguous().transpose(1, 2) for x in slots]
    sums = sums or [(k, k) for k in slots[::2]] # the forward leaves that part of the table alone
    table = torch.tensor([(k.data_ptr(), k.stride(2) // D, v.data_ptr(), v.stride(2) // D, dk.data_ptr(), dv.data_ptr())
                          for k, v, (dk, dv) in zip(slots[::2], slots[1::2], sums)], device=q.device) # (S, 6)
    G, N = q.size(1) // Hkv, B * T * Hkv
    b = moda_blocks(G, D)
    kernel[(triton.cdiv(N, b["BLOCK_N"]),)](table, q, *tensors, N, T, Hkv, len(table), scale, D=D, **b)

def flash(q, k, v, scale, back=None):
    # causal attention of the library -> y, lse, *rest; with back = (dy, y, lse, *rest) -> dq, dk, dv. Private ops, so all calls are here
    cpu, D = q.device.type == "cpu", q.size(-1)
    name = "_scaled_dot_product_flash_attention" + "_for_cpu" * cpu + "_backward" * (back is not None)
    op = getattr(torch.ops.aten, name, None)
    if op is None or not cpu and q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"fused MoDA needs aten::{name} of torch for {q.dtype} on {q.device.type}, which torch {torch.__version__} does not have")

    def fit(x): # heads contiguous, on CUDA in multiples of 8
        x = x if x.stride(-1) == 1 else x.contiguous()
        return x if cpu or D % 8 == 0 else F.pad(x, (0, -D % 8))

    q, k, v, *dyy = (fit(x) for x in (q, k, v, *(back or ())[:2]))
    if cpu:
        return op(q, k, v, 0.0, True, scale=scale) if back is None else op(dyy[0], q, k, v, dyy[1], back[2], 0.0, True, scale=scale)
    if back is None:
        y, lse, *rest = op(q, k, v, 0.0, True, False, scale=scale)
        return y[..., :D], lse, *rest[:6]
    lse, cum_q, cum_k, max_q, max_k, seed, offset = back[2:]
    return [x[..., :D] for x in op(dyy[0], q, k, v, dyy[1], lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale)]

class DepthAttention(torch.autograd.Function):

    @staticmethod
    def forward(ctx, sums, first, q, k, v, *slots):
        ctx.sums, ctx.first, ctx.scale = sums, first, q.size(-1) ** -0.5
        y, lse_seq, *ctx.rest = flash(q, k, v, ctx.scale) # (B, H, T, D), (B, H, T)
        if on_chip(q):
            q, y, y_seq, lse_seq = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device), y.contiguous(), lse_seq.contiguous()
            lse = torch.empty_like(lse_seq)
            chip_moda(moda_fwd_kernel, slots, None, ctx.scale, q, y_seq, y, lse, lse_seq)
        else:
            q_, y = (x.to(wide(x)).unflatten(1, (k.size(1), -1)) for x in (q * ctx.scale, y)) # (B, Hkv, G, T, D)
            lse_seq, tmp = lse_seq.unflatten(1, q_.shape[1:3]), torch.empty_like(q_) # (B, Hkv, G, T), (B, Hkv, G, T, D)
            z = torch.stack([torch.mul(q_, k.unsqueeze(2), out=tmp).sum(-1) for k in slots[::2]]) # (S, B, Hkv, G, T)
            lse = torch.logaddexp(lse_seq, z.logsumexp(0)) # (B, Hkv, G, T)
            y = y * (lse_seq - lse).exp_().unsqueeze(-1)
            for p, v_ in zip(z.sub_(lse).exp_().unsqueeze(-1), slots[1::2]):
                y.addcmul_(p, v_.unsqueeze(2))
            y, lse = y.flatten(1, 2).to(q.dtype), lse.flatten(1, 2) # (B, H, T, D), (B, H, T)
        ctx.save_for_backward(q, k, v, y, lse, *slots)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse, *slots = ctx.saved_tensors
        dq, dk, dv = flash(q, k, v, ctx.scale, (dy, y, lse, *ctx.rest))
        for sums, k_ in zip(ctx.sums, slots[::2]):
            if not sums: # dk_j, dv_j (B, Hkv, T, D), which lie as (B, T, Hkv, D)
                sums += [torch.zeros_like(k_.transpose(1, 2), dtype=k_.dtype if on_chip(q) else wide(k_), memory_format=torch.contiguous_format).transpose(1, 2)
                         for _ in range(2)]
        if on_chip(q):
            dq = dq.contiguous()
            chip_moda(moda_bwd_kernel, slots, ctx.sums, ctx.scale, q, y, dy.contiguous(), dq, lse)
        else:
            q_, y, dy = (x.to(wide(x)).unflatten(1, (k.size(1), -1)) for x in (q * ctx.scale, y, dy)) # (B, Hkv, G, T, D)
            lse, tmp, dq_ = lse.unflatten(1, q_.shape[1:3]), torch.empty_like(q_), torch.zeros_like(q_)
            D = torch.mul(dy, y, out=tmp).sum(-1) # (B, Hkv, G, T)
            for sums, k_, v_ in zip(ctx.sums, slots[::2], slots[1::2]):
                k_, v_ = k_.unsqueeze(2), v_.unsqueeze(2) # (B, Hkv, 1, T, D)
                p = (torch.mul(q_, k_, out=tmp).sum(-1) - lse).exp_().unsqueeze(-1) # (B, Hkv, G, T, 1)
                ds = torch.mul(dy, v_, out=tmp).sum(-1).sub_(D).unsqueeze(-1).mul_(p) # (B, Hkv, G, T, 1)
                dq_.addcmul_(ds, k_)
                for g in range(q_.size(2)): # the query heads that share the key head
                    sums[0].addcmul_(ds[:, :, g], q_[:, :, g])
                    sums[1].addcmul_(p[:, :, g], dy[:, :, g])
            dq = dq + (dq_.flatten(1, 2) * ctx.scale).to(dq.dtype)
        grads = [x.to(k.dtype) if first else None for sums, first in zip(ctx.sums, ctx.first) for x in sums]
        for sums, first in zip(ctx.sums, ctx.first):
            if first: # handed over
                sums.clear()
        return None, None, dq, dk, dv, *grads

def moda_depth_attention(q, k, v, slots):
    if not slots:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1)) # (B, H, T, D)
    first = [not hasattr(k, "sums") for k, _ in slots]
    for k_, _ in slots:
        k_.sums = getattr(k_, "sums", []) # the ledger of a slot travels with its key
    return DepthAttention.apply([k.sums for k, _ in slots], first, q, k, v, *(x for slot in slots for x in slot))

# -----------------------------------------------------------------------------
# The loss, without all logits at once: as many rows as make 2^22 of them. The gradients are made in the forward, where the logits are.
# (linear_cross_entropy of torch 2.13 returns the loss in the dtype of x: in bfloat16 that is 3 decimal digits.)

class LMLoss(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, w, targets, grad):
        rows, n, loss, dx = max(1, 2**22 // w.size(0)), (targets != -1).sum(), 0, []
        with without_autocast(x):
            w_, dw = w.to(x.dtype), torch.zeros_like(w) if grad else None # (V, C)
            for x_, t in zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows)):
                s = (x_ @ w_.T).to(wide(x)) # (rows, V)
                lse, keep, t = s.logsumexp(1, keepdim=True), (t != -1).unsqueeze(1), t.clamp(min=0).unsqueeze(1) # (rows, 1)
                loss = loss + ((lse - s.gather(1, t)) * keep).sum()
                if grad: # ds = (softmax(s) - onehot) / n
                    s.sub_(lse).exp_().scatter_add_(1, t, -torch.ones_like(lse)).mul_(keep.to(s.dtype) / n)
                    s = s.to(x.dtype)
                    dx.append(s @ w_) # (rows, C)
                    dw += s.T @ x_
        ctx.save_for_backward(torch.cat(dx).view(x.shape) if grad else None, dw)
        return loss / n

    @staticmethod
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        return dx * dloss.to(dx.dtype), dw * dloss, None, None

def lm_loss(x, w, targets):
    return LMLoss.apply(x, w, targets, torch.is_grad_enabled())

# -----------------------------------------------------------------------------
# The swap. A replacement stands for the text of one model file: a fork that changes that text is told so, never given the old function.

FUSED = { # model file: what is swapped, what the swap takes for granted, the devices on which --fused auto takes it
    "model_hc.py": (dict(connect=hc_connect, settle=hc_settle), ("HyperConnection",), ("cpu", "cuda")),
    "model_mhc.py": (dict(connect=mhc_connect, settle=hc_settle), ("HyperConnection",), ("cpu", "cuda")),
    "model_mgr.py": (dict(connect=mgr_connect), ("MultiGate", "settle"), ("cpu", "cuda")),
    "model_attnres.py": ({"push": attnres_push, "mix": attnres_mix, "GPT.begin": attnres_begin}, ("DepthSoftmax",), ("cpu", "cuda")),
    "model_moda.py": (dict(depth_attention=moda_depth_attention), (), ("cpu", "cuda")),
    "model_preln.py": (dict(lm_loss=lm_loss), (), ("cuda",))}

def definitions(path):
    # {name: lines} of the functions and classes of a file, members of classes as Class.name
    text, found = Path(path).read_text(encoding="utf-8"), {}
    lines = text.splitlines()
    for node in ast.parse(text).body:
        for n, prefix in [(node, "")] + [(n, f"{node.name}.") for n in (node.body if isinstance(node, ast.ClassDef) else ())]:
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + n.name] = lines[n.lineno - 1:n.end_lineno]
    return found

def known(module):
    # {model file: what it swaps} for the files whose hot functions stand in module to the letter
    own, swaps = definitions(module.__file__), {}
    for file, (new, needs, _) in FUSED.items():
        text = definitions(Path(__file__).with_name(file))
        if all(own.get(n) == text[n] for n in (*new, *needs)):
            swaps[file] = new
    return swaps

def gains(module, device):
    # --fused auto
    return any(device in FUSED[file][2] for file in known(module))

def fuse(module, say=print):
    # swaps the hot functions of a model module for those above -> undo()
    swaps = {name: new for file in known(module).values() for name, new in file.items()}
    strange = [n for n in ("connect", "push", "mix", "depth_attention", "lm_loss") if hasattr(module, n) and n not in swaps]
    if strange:
        raise ValueError(f"{Path(module.__file__).name}: no fused form is known for its own {', '.join(strange)}")
    old = []
    for name, new in swaps.items():
        owner, name = (module.GPT, name[4:]) if name.startswith("GPT.") else (module, name)
        old.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)
    say(f"fused: {module.__name__}: {', '.join(swaps)}")

    def undo():
        for owner, name, function in old:
            setattr(owner, name, function)
    return undo

# -----------------------------------------------------------------------------
# The kernels as a GPU would get them, for the compiler alone: bench.py --report

def ahead_of_time(C, n=4, D=64):
    # (name, kernel, signature, constexprs, num_warps) of every kernel for bf16 activations, width C, n streams, heads of D
    bf16 = {f"{k}_ptr" for k in "x y y_seq new h dh dnew dx dy v more dv dO".split()}
    scalar = dict(table="*i64", eps="fp32", norm_eps="fp32", scale="fp32")
    def entry(name, kernel, num_warps=4, more=(), **constants):
        types = {a: "constexpr" if a in constants else scalar.get(a, "*bf16" if a in bf16 or a in more else "*fp32" if a.endswith("_ptr") else "i32") for a in kernel.arg_names}
        return name, kernel, types, constants, num_warps
    X, N, M = torch.empty(1, n, C, dtype=torch.bfloat16, device="meta"), power(n), n * n + 2 * n
    for kind, J in (("hc", n + 2), ("mgr", 2), ("mgr_independent", 2)):
        sizes = dict(C=C, N=n, J=J, KIND=kind, BLOCK_N=N, BLOCK_J=power(J), BLOCK_C=power(C), num_warps=warps(X))
        yield entry(f"{kind}_fwd", stream_fwd_kernel, **sizes)
        yield entry(f"{kind}_bwd", stream_bwd_kernel, **sizes)
    yield entry("mhc_write", mhc_write_kernel, C=C, N=n, M=M, BLOCK_R=16, BLOCK_M=power(M, 16), BLOCK_C=32)
    yield entry("mhc_write_bwd", mhc_write_bwd_kernel, C=C, N=n, M=M, BLOCK_R=16, BLOCK_M=power(M, 16), BLOCK_C=64, num_warps=8)
    for back in (False, True):
        tail = "_bwd" * back
        yield entry("mhc_coefficients" + tail, mhc_coefficients_kernel, N=n, M=M, ITERS=20, BACKWARD=back, BLOCK_R=16, BLOCK_N=N, BLOCK_M=1)
        yield entry("mhc_read" + tail, mhc_read_kernel, C=C, N=n, BACKWARD=back, BLOCK_N=N, BLOCK_C=power(C), num_warps=warps(X))
    for kernel, flag in ((attnres_fwd_kernel, "NORM"), (attnres_norm_bwd_kernel, "NORM"), (attnres_pull_kernel, "MORE")):
        yield entry(kernel.fn.__name__, kernel, **blocks(X[0]), **{flag: True})
    yield entry("attnres_dq_kernel", attnres_dq_kernel, BLOCK_M=16, BLOCK_R=32, BLOCK_C=64)
    for kernel in (moda_fwd_kernel, moda_bwd_kernel):
        yield entry(kernel.fn.__name__, kernel, more=("q_ptr", "dq_ptr"), D=D, **moda_blocks(1, D))
