import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError: # macOS, Windows: all but the kernels themselves still works
    jit, tl = lambda f: f, SimpleNamespace(constexpr=None)

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

# HC and MGR, where W is small: one token at a time, everything about it in registers

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
    i, j, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_C)
    nc, nj = (i < N)[:, None] & (c < C)[None, :], (i < N)[:, None] & (j < J)[None, :]
    w = tl.load(w_ptr + j[:, None] * C + c[None, :], mask=(j < J)[:, None] & (c < C)[None, :], other=0.0) # (J, C)
    base = tl.load(base_ptr + i[:, None] * J + j[None, :], mask=nj, other=0.0)
    extra = tl.load(extra_ptr + j, mask=j < J, other=0.0)
    gain = tl.load(gain_ptr + c, mask=c < C, other=0.0)
    for row in range(tl.program_id(0).to(tl.int64), R, tl.num_programs(0)):
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
    i, j, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_C)
    nc, nj = (i < N)[:, None] & (c < C)[None, :], (i < N)[:, None] & (j < J)[None, :]
    base = tl.load(base_ptr + i[:, None] * J + j[None, :], mask=nj, other=0.0)
    extra = tl.load(extra_ptr + j, mask=j < J, other=0.0)
    dw, dgain = (), tl.zeros((BLOCK_C,), tl.float32)
    for k in tl.static_range(J):
        dw = dw + (tl.zeros((BLOCK_C,), tl.float32),)
    dbase, dextra = tl.zeros((BLOCK_N, BLOCK_J), tl.float32), tl.zeros((BLOCK_J,), tl.float32)
    for row in range(pid, R, tl.num_programs(0)):
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
        g = read[:, None] * ds[None, :] - (r * r * tl.sum(dz * z, axis=1) / C)[:, None] * new
        g += tl.load(dnew_ptr + row * N * C + i[:, None] * C + c[None, :], mask=nc, other=0.0).to(tl.float32)
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
# X' is read once more, from cache: 3n + 2 forward, 4n + 4 backward.

@jit
def mhc_write_kernel(
    x_ptr, y_ptr, mix_ptr, write_ptr, phi_ptr, # (R, N, C), (R, C), (R, N, N), (R, N), (M, N*C)
    new_ptr, z_ptr, r_ptr, # (R, N, C), (R, M), (R)
    R, eps, C: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):
    row, m = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_M)
    z, ss = tl.zeros((BLOCK_R, BLOCK_M), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
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
    pid, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    gain, dgain = tl.load(gain_ptr + c, mask=c < C, other=0.0), tl.zeros((BLOCK_C,), tl.float32)
    for row in range(pid, R, tl.num_programs(0)):
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
    c, m = chunk * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
    gain, mc, dphi = tl.load(gain_ptr + c, mask=c < C, other=0.0), (m < M)[:, None] & (c < C)[None, :], ()
    for o in tl.static_range(N):
        dphi = dphi + (tl.zeros((BLOCK_M, BLOCK_C), tl.float32),)
    for block in range(split, tl.cdiv(R, BLOCK_R), tl.num_programs(1)):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        rc, rm = (row < R)[:, None] & (c < C)[None, :], (row < R)[:, None] & (m < M)[None, :]
        y = tl.load(y_ptr + row[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32)
        x, dx, new, s = (), (), (), tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for k in tl.static_range(N):
            x = x + (tl.load(x_ptr + (row * N + k)[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32),)
            dx = dx + (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),)
        for o in tl.static_range(N):
            new_o = tl.load(write_ptr + row * N + o, mask=row < R, other=0.0)[:, None] * y
            for k in tl.static_range(N):
                new_o += tl.load(mix_ptr + (row * N + o) * N + k, mask=row < R, other=0.0)[:, None] * x[k]
            new = new + (new_o.to(x_ptr.dtype.element_ty).to(tl.float32),)
            s += tl.load(read_ptr + row * N + o, mask=row < R, other=0.0)[:, None] * new[o]
        dh = tl.load(dh_ptr + row[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32)
        ds = tl.load(rs_ptr + row, mask=row < R, other=0.0)[:, None] * dh * gain[None, :] - tl.load(a_ptr + row, mask=row < R, other=0.0)[:, None] * s
        p, t, dy = tl.load(p_ptr + row[:, None] * M + m[None, :], mask=rm, other=0.0), tl.load(t_ptr + row, mask=row < R, other=0.0), tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        old, dphi, old_dx = dphi, (), dx
        for o in tl.static_range(N):
            # z = (v @ Phi.T) r over all streams: dX' = (r dz) @ Phi - X' r^2 mean(dz z)
            g = tl.load(dnew_ptr + (row * N + o)[:, None] * C + c[None, :], mask=rc, other=0.0).to(tl.float32) - t[:, None] * new[o]
            g += tl.load(read_ptr + row * N + o, mask=row < R, other=0.0)[:, None] * ds
            phi = tl.load(phi_ptr + m[:, None] * N * C + o * C + c[None, :], mask=mc, other=0.0) # (M, C)
            g = tl.dot(p, phi, g, input_precision="tf32x3") # (R, C)
            dphi = dphi + (tl.dot(tl.trans(p), new[o], old[o], input_precision="tf32x3"),)
            # X' = mix @ X + write y
            part, dx = dpart_ptr + ((chunk * R + row) * N + o) * (N + 1), ()
            for k in tl.static_range(N):
                tl.store(part + k, tl.sum(g * x[k], axis=1), mask=row < R)
                dx = dx + (old_dx[k] + tl.load(mix_ptr + (row * N + o) * N + k, mask=row < R, other=0.0)[:, None] * g,)
            old_dx = dx
            tl.store(part + N, tl.sum(g * y, axis=1), mask=row < R)
            dy += tl.load(write_ptr + row * N + o, mask=row < R, other=0.0)[:, None] * g
        for k in tl.static_range(N):
            tl.store(dx_ptr + (row * N + k)[:, None] * C + c[None, :], dx[k].to(dx_ptr.dtype.element_ty), mask=rc)
        tl.store(dy_ptr + row[:, None] * C + c[None, :], dy.to(dy_ptr.dtype.element_ty), mask=rc)
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
    mhc_write_kernel[(triton.cdiv(R, 32),)](X, y, mix, write, W, new, z, r, R, op.eps, C=C, N=N, M=M, BLOCK_R=32, BLOCK_M=power(M, 16), BLOCK_C=64, num_warps=8)
    mhc_coefficients_kernel[(triton.cdiv(R, 16),)](z, b, alpha, op.P, read, new_mix, new_write, z, R, BACKWARD=False, **mhc_sizes(op, X, W))
    mhc_read_kernel[(programs(X),)](new, read, gain, h, rs, h, read, rs, rs, R, op.norm_eps, C=C, N=N, BACKWARD=False, BLOCK_N=power(N), BLOCK_C=power(C), num_warps=warps(X))
    return (h, new, new_mix, new_write), (z, r, rs, read, new)

def mhc_backward(op, X, y, mix, write, W, gain, small, saved, dh, dnew, dnew_mix, dnew_write):
    (b, alpha), (z, r, rs, read, new), P, R, N, C, M = small, saved, programs(X), *X.shape, len(W)
    chunks, splits = triton.cdiv(C, 128), max(1, P // 2 // triton.cdiv(C, 128))
    dread, a, dgain, dlogit, dh = torch.empty_like(read), mix.new_empty(R), mix.new_empty(P, C), torch.empty_like(z), dh.contiguous()
    mhc_read_kernel[(P,)](new, read, gain, dh, rs, dh, dread, a, dgain, R, op.norm_eps, C=C, N=N, BACKWARD=True, BLOCK_N=power(N), BLOCK_C=power(C), num_warps=warps(X))
    mhc_coefficients_kernel[(triton.cdiv(R, 16),)](z, b, alpha, op.P, dread, dnew_mix.contiguous(), dnew_write.contiguous(), dlogit, R, BACKWARD=True, **mhc_sizes(op, X, W))
    part = torch.arange(M, device=z.device).div(N, rounding_mode="floor").clamp(max=2) # which of the three alphas
    dz = dlogit * alpha[part] # (R, M)
    dX, dy, dpart, dW = torch.empty_like(X), torch.empty_like(y), mix.new_empty(chunks, R, N, N + 1), mix.new_empty(splits, M, N * C)
    mhc_write_bwd_kernel[(chunks, splits)](X, y, mix, write, W, gain, read, rs, a, dz * r.unsqueeze(1), r.square() * (dz * z).sum(1) / (N * C), dh, dnew.contiguous(),
                                           dX, dy, dpart, dW, R, C=C, N=N, M=M, BLOCK_R=16, BLOCK_M=power(M, 16), BLOCK_C=128, num_warps=8)
    dmix, dwrite = dpart.sum(0).split((N, 1), dim=-1) # (R, N, N), (R, N, 1)
    return dX, dy, dmix, dwrite.squeeze(-1), dW.sum(0), dgain.sum(0), dlogit.sum(0), torch.zeros_like(alpha).index_add_(0, part, (dlogit * z).sum(0))

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

def torch_backward(op, X, y, mix, write, W, gain, small, saved, dh, dnew, *dc):
    z, r, rs = saved
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

def on_chip(X):
    return X.is_cuda

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
        with torch.autocast(X.device.type, enabled=False):
            return None, *arithmetic(ctx.op, X, y, mix, write, W, gain, rest[:ctx.small], rest[ctx.small:], *grads)

def stream_connect(op, state, norm, W, *small):
    X, y, *c = state
    B, T, N, C = X.shape
    mix, write = c if len(c) == 2 else (torch.diag_embed(1 - c[0]), c[0]) # MGR: (1 - gate) X + gate y
    op.norm_eps = norm.eps
    with torch.autocast(X.device.type, enabled=False):
        h, X, *c = Connect.apply(op, *(t.flatten(0, 1).contiguous() for t in (X, y, mix, write)), W.contiguous(), norm.weight, *small)
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
    iters, P = hc.config.sinkhorn_iters, getattr(hc, "P", None)
    coefficients = partial(mhc_coefficients, P=P, n=state[0].size(2), iters=iters)
    op = SimpleNamespace(kind="mhc", coefficients=coefficients, eps=hc.config.norm_eps, iters=iters, P=hc.b if P is None else P)
    return stream_connect(op, state, norm, hc.Phi, hc.b, hc.alpha)

def mgr_connect(state, mgr, norm):
    if len(state) < 3 or isinstance(norm, torch.nn.Identity):
        return plain_connect(state, mgr, norm)
    competitive, n = mgr.config.competitive, state[0].size(2)
    op = SimpleNamespace(kind="mgr" if competitive else "mgr_independent", coefficients=partial(mgr_coefficients, competitive=competitive), eps=mgr.config.norm_eps)
    W = torch.stack((torch.zeros_like(mgr.w_b) if mgr.w_a is None else mgr.w_a, mgr.w_b)) * mgr.w_b.numel() ** -0.5 # (2, C) no query where N = 1
    base, c_0 = F.pad(mgr.c[competitive:n + competitive].unsqueeze(-1), (1, 0)), F.pad(mgr.c[:1] * competitive, (1, 0)) # (N, 2), (2)
    return stream_connect(op, state, norm, W, base, c_0)
