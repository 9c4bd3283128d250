"""
Depth mixing at the limit of memory and traffic: same functions as in the model files, swapped in by fuse(module).
"""
import ast
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

def blocks(x):
    # rows and columns of one program of a row kernel on x (R, C)
    if triton is None or x.size(-1) > 16384 or x.dtype == torch.float64:
        raise RuntimeError(f"fused: the Triton kernels need triton, at most 16384 columns and no float64, not {x.size(-1)} of {x.dtype}; use --fused off")
    C = triton.next_power_of_2(x.size(-1))
    return dict(ROWS=max(1, 2048 // C), BLOCK_C=C, num_warps=4 if C <= 2048 else 8)

# -----------------------------------------------------------------------------
# Attention Residuals
#
#     s_i = r_i <q, V_i>,  p = softmax_i(s),  O = sum_i p_i V_i,  h = O r_O gain        q = w * g, r = 1/rms, V_i (R, C)
#     dV_i = sum_l p_li dO_l + ds_li r_i (q_l - s_li r_i V_i / C)                       ds_li = p_li (<dO_l, V_i> - <dO_l, O_l>)
#     dq_l = sum_i r_i ds_li V_i                                                        and no gradient is ever pushed into k sources
#
# Pull backward: the backward of mix l leaves dO_l and <dO_l, O_l> in a ledger; that of source i runs after those of all mixes that
# read it and makes dV_i in one pass. Saved per token and sub-layer: V, O, and the scalars lse and <dO, O>; p is made again.
# Off the chip, complete sources are read by the tile of 16, once for a group of 16 mixes: a query is known before it is due.

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
        self.queries, self.eps, self.chip, self.G = queries, queries[0].eps, on_chip(x), 1 if on_chip(x) else 16
        self.Q = torch.stack([(m.w * m.g).detach().to(wide(x)) for m in queries]) # (queries, C)
        self.dQ = torch.zeros_like(self.Q)
        self.V, self.r, self.carry, self.readers = [], [], [], [] # per source: (R, C), (R, 1), gradient of the sum that it is in, [[group, a, b]]
        self.tiles, self.tiled, self.group = [], (), None # [V (R, G, C), r (R, G, 1), dV, c], the sources in them

    def enter(self, res, ids):
        # the group that answers res, the place in it, and the sources that are read one by one
        n = len(self.tiled) if ids[:len(self.tiled)] == self.tiled else 0
        if not self.chip and n == len(self.tiled) and len(ids) - 1 - n >= self.G: # the newest source may still grow
            new = ids[n:n + self.G]
            V, r = torch.stack([self.V[i] for i in new], 1), torch.stack([self.r[i] for i in new], 1) # (R, G, C), (R, G, 1)
            for i, v in zip(new, V.unbind(1)):
                self.V[i] = v
            self.tiles.append([V, r, None, None])
            self.tiled, n = self.tiled + new, n + self.G
        g = self.group
        if g is None or g.n == len(g.q) or self.queries[g.at + g.n] is not res or g.tiles != n // self.G:
            if g is not None:
                g.O = None
            g = self.group = Group(self, self.queries.index(res), n // self.G, ids[n])
        g.n += 1
        for i in ids[n:]:
            if self.readers[i] and self.readers[i][-1][0] is g:
                self.readers[i][-1][2] = g.n
            else:
                self.readers[i].append([g, g.n - 1, g.n])
        return g, g.n - 1, ids[n:]

class Group:
    # up to G successive mixes that read the same tiles

    def __init__(self, led, at, tiles, lowest):
        self.at, self.tiles, self.lowest, self.n = at, tiles, lowest, 0
        self.q, self.dq, R = led.Q[at:at + led.G], led.dQ[at:at + led.G], len(led.V[0]) # (G, C)
        self.lse, self.top, self.Z, self.O, self.dO = self.q.new_empty(R, len(self.q)), None, None, None, None # lse (R, G)
        if tiles: # their part of the mix, for all queries of the group
            s = torch.cat([(V @ self.q.T).mul_(r) for V, r, _, _ in led.tiles[:tiles]], 1) # (R, S, G)
            self.top = s.amax(1) # (R, G)
            e = s.sub_(self.top.unsqueeze(1)).exp_() # (R, S, G)
            self.Z, self.O = e.sum(1), e.new_zeros(R, *self.q.shape) # (R, G), (R, G, C)
            for e, (V, _, _, _) in zip(e.split(led.G, 1), led.tiles):
                self.O.baddbmm_(e.mT, V)

    def mix(self, j, V, r):
        # O (R, C) of query j over the tiles and the sources V, r
        s = torch.stack([v @ self.q[j] for v in V]).mul_(torch.stack(r).squeeze(-1)) # (S, R)
        top = s.amax(0) if self.top is None else torch.maximum(s.amax(0), self.top[:, j]) # (R)
        e = s.sub_(top).exp_() # (S, R)
        Z, e = e.sum(0), e.unsqueeze(-1) # (R), (S, R, 1)
        O = V[0] * e[0] # (R, C)
        for v, e_ in zip(V[1:], e[1:]):
            O.addcmul_(v, e_)
        if self.top is not None:
            scale = (self.top[:, j] - top).exp_() # (R)
            Z.addcmul_(self.Z[:, j], scale)
            O.addcmul_(self.O[:, j], scale.unsqueeze(-1))
            self.O = None if j == len(self.q) - 1 else self.O
        self.lse[:, j] = top + Z.log()
        return O.div_(Z.unsqueeze(-1))

    def pull(self, a, b, V, r, dV, c):
        # what mixes a..b-1 send to sources V (R, S, C), r (R, S, 1): added to dV (R, S, C), to c (R, S, 1) = sum_l ds_l s_l, to dq
        q, dO = self.q[a:b], self.dO[:, a:b] # (M, C), (R, M, C)
        s = (V @ q.T).mul_(r) # (R, S, M)
        p = (s - self.lse[:, None, a:b]).exp_() # (R, S, M)
        ds = (V @ dO.mT).sub_(self.D[:, None, a:b]).mul_(p) # (R, S, M)
        if V.size(1) > 1:
            dV.baddbmm_(p, dO)
        else: # bmm is slow for one row
            for m in range(b - a):
                dV[:, 0].addcmul_(dO[:, m], p[:, 0, m:m + 1])
        c.add_(s.mul_(ds).sum(-1, keepdim=True))
        ds = ds.mul_(r).flatten(0, 1) # (R S, M)
        dV.flatten(0, 1).addmm_(ds, q)
        self.dq[a:b].addmm_(ds.T, V.flatten(0, 1))

def rstd(x, eps):
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_() # (R, 1)

def rowdot(x, y):
    return torch.bmm(x.unsqueeze(1), y.unsqueeze(2)).flatten(1) # (R, 1)

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
        with torch.autocast(led.V[i].device.type, enabled=False):
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
        dV, c = V.new_zeros(V.shape), r.new_zeros(r.shape) # contiguous, or bmm loops over tokens
        for g, a, b in led.readers[i]:
            if g.dO is None: # nothing was asked of it
                continue
            g.pull(a, b, V, r, dV, c)
            if g.lowest == i: # all mixes of the group have been here
                for tile in led.tiles[:g.tiles]:
                    tile[2:] = (torch.zeros_like(x) for x in tile[:2]) if tile[2] is None else tile[2:]
                    g.pull(0, g.n, *tile)
                g.dO = None
        t, j = divmod(led.tiled.index(i), led.G) if i in led.tiled else (None, None)
        if t is not None and led.tiles[t][2] is not None:
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
        g, j, ids = led.enter(res, ids)
        V = [led.V[i] for i in ids] # S of (R, C)
        with torch.autocast(x.device.type, enabled=False):
            if led.chip:
                O, h, g.lse = chip_mix(V, g.q[0], gain, led.eps, eps)
            else:
                O = g.mix(j, V, [led.r[i] for i in ids]) # (R, C)
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
        with torch.autocast(O.device.type, enabled=False):
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
            g.D[:, j:j + 1] = rowdot(dO, O)
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
        k_ptr = tl.multiple_of(tl.load(table + 6 * j).to(q_ptr.dtype), 16) + ((row * tl.load(table + 6 * j + 1) + hk) * D)[:, None] + d[None, :]
        k = tl.load(k_ptr, m_k, 0.0).to(tl.float32)[:, None, :] # (N, 1, D)
        v_ptr = tl.multiple_of(tl.load(table + 6 * j + 2).to(q_ptr.dtype), 16) + ((row * tl.load(table + 6 * j + 3) + hk) * D)[:, None] + d[None, :]
        v = tl.load(v_ptr, m_k, 0.0).to(tl.float32)[:, None, :] # (N, 1, D)
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
        k_ptr = tl.multiple_of(tl.load(table + 6 * j).to(q_ptr.dtype), 16) + ((row * tl.load(table + 6 * j + 1) + hk) * D)[:, None] + d[None, :]
        k = tl.load(k_ptr, m_k, 0.0).to(tl.float32)[:, None, :] # (N, 1, D)
        v_ptr = tl.multiple_of(tl.load(table + 6 * j + 2).to(q_ptr.dtype), 16) + ((row * tl.load(table + 6 * j + 3) + hk) * D)[:, None] + d[None, :]
        v = tl.load(v_ptr, m_k, 0.0).to(tl.float32)[:, None, :] # (N, 1, D)
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
        with torch.autocast(x.device.type, enabled=False):
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
# The swap. A replacement stands for the text of one model file: whoever changes that text in a copy is told so, not given the old function.

FUSED = { # file: the definitions that have to be its text, and what is swapped in their place
    "model_attnres.py": ("push", "mix", "DepthSoftmax", "GPT.begin"),
    "model_moda.py": ("depth_attention",),
    "model_preln.py": ("lm_loss",),
}
SWAPS = {"push": attnres_push, "mix": attnres_mix, "GPT.begin": attnres_begin, "depth_attention": moda_depth_attention, "lm_loss": lm_loss}
HOT = ("connect", "push", "mix", "depth_attention", "lm_loss")

def definitions(path):
    # {name: text} of the functions and classes of a file, members of classes as Class.name
    text = Path(path).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        for n, prefix in [(node, "")] + [(n, f"{node.name}.") for n in (node.body if isinstance(node, ast.ClassDef) else ())]:
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + n.name] = ast.get_source_segment(text, n)
    return found

def fuse(module):
    # swaps the hot functions of a model file for those above, and says so -> undo()
    own, swaps = definitions(module.__file__), {}
    for file, names in FUSED.items():
        if all(own.get(n) == text for n, text in definitions(Path(__file__).with_name(file)).items() if n in names):
            swaps.update({n: SWAPS[n] for n in names if n in SWAPS})
    unknown = [n for n in HOT if n in own and n not in swaps]
    if unknown:
        raise ValueError(f"--fused: {Path(module.__file__).name}: no fused form is known for its own {', '.join(unknown)}; use --fused off")
    old = []
    for name, new in swaps.items():
        owner = module.GPT if name.startswith("GPT.") else module
        old.append((owner, name.split(".")[-1], getattr(owner, name.split(".")[-1])))
        setattr(*old[-1][:2], new)
    print(f"fused: {module.__name__}: {', '.join(swaps)}")

    def undo():
        for owner, name, function in old:
            setattr(owner, name, function)
    return undo
