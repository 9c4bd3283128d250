"""
Depth mixing at the limit of memory and traffic: same functions as in the model files, swapped in by fuse(module).
"""
import torch
import torch.nn.functional as F

def on_chip(x):
    return x.is_cuda # Triton there; elsewhere plain torch inside the same Functions

def wide(x): # the dtype that all mixing is done in
    return torch.promote_types(x.dtype, torch.float32)

# -----------------------------------------------------------------------------
# Attention Residuals
#
#     s_i = r_i <q, V_i>,  p = softmax_i(s),  O = sum_i p_i V_i,  h = O r_O gain        q = w * g, r = 1/rms, V_i (R, C)
#     dV_i = sum_l p_li dO_l + ds_li r_i (q_l - s_li r_i V_i / C)                        ds_li = p_li (<dO_l, V_i> - <dO_l, O_l>)
#
# Pull backward: the backward of mix l leaves dO_l and <dO_l, O_l> in a ledger; that of source i runs after those of all mixes that
# read it and makes dV_i in one pass. Saved per sub-layer and token: V, O, and the scalars r, r_O, lse; p is made again.
# Off the chip, complete sources are read by the tile of G, once for a group of G mixes: queries are known before they are due.

class Ledger:
    # what one forward leaves for its one backward; every state carries it

    def __init__(self, queries, x):
        self.queries, self.eps, self.G = queries, queries[0].eps, 1 if on_chip(x) else 8
        self.V, self.r, self.carry, self.readers = [], [], [], [] # per source: (R, C), (R, 1), dV of the sum it is part of, [[group, a, b]]
        self.tiles, self.tiled, self.groups = [], (), [] # [V (R, G, C), r (R, G, 1), dV, c], the sources in them

    def enter(self, res, ids):
        # the group that answers res, and the place in it
        n = len(self.tiled) if ids[:len(self.tiled)] == self.tiled else 0
        if self.G > 1 and n == len(self.tiled) and len(ids) - 1 - n >= self.G: # the newest source may still grow
            new = ids[n:n + self.G]
            V, r = torch.stack([self.V[i] for i in new], 1), torch.stack([self.r[i] for i in new], 1) # (R, G, C), (R, G, 1)
            for i, v in zip(new, V.unbind(1)):
                self.V[i] = v
            self.tiles.append([V, r, None, None])
            self.tiled, n = self.tiled + new, n + self.G
        g = self.groups[-1] if self.groups else None
        if g is None or g.n == len(g.res) or g.res[g.n] is not res or g.tiles != n // self.G:
            if g is not None:
                g.O = None
            g = Group(self, res, n // self.G, ids[n])
            self.groups.append(g)
        g.n += 1
        for i in ids[n:]:
            if self.readers[i] and self.readers[i][-1][0] is g:
                self.readers[i][-1][2] = g.n
            else:
                self.readers[i].append([g, g.n - 1, g.n])
        return g, g.n - 1, ids[n:]

class Group:
    # up to G successive mixes that read the same tiles

    def __init__(self, led, res, tiles, lowest):
        r, V = led.queries.index(res), led.V[0]
        self.res, self.tiles, self.lowest, self.n = led.queries[r:r + led.G], tiles, lowest, 0
        self.q = torch.stack([(m.w * m.g).to(V.dtype) for m in self.res]) # (G, C)
        self.lse = V.new_empty(len(V), len(self.res)) # (R, G)
        self.top, self.Z, self.O, self.dO = None, None, None, None
        if tiles: # their part of the mix, for all queries of the group
            s = torch.cat([(V @ self.q.T).mul_(r) for V, r, _, _ in led.tiles[:tiles]], 1) # (R, S, G)
            self.top = s.amax(1) # (R, G)
            e = s.sub_(self.top.unsqueeze(1)).exp_() # (R, S, G)
            self.Z, self.O = e.sum(1), V.new_zeros(len(V), *self.q.shape) # (R, G), (R, G, C)
            for e, (V, _, _, _) in zip(e.split(led.G, 1), led.tiles):
                self.O.baddbmm_(e.mT, V)

    def mix(self, j, V, r):
        # O (R, C) and lse (R) of query j over the tiles and the sources V, r
        s = torch.stack([v @ self.q[j] for v in V]).mul_(torch.stack(r).squeeze(-1)) # (S, R)
        top = s.amax(0) if self.top is None else torch.maximum(s.amax(0), self.top[:, j]) # (R)
        e = s.sub_(top).exp_() # (S, R)
        Z, O, e = e.sum(0), torch.zeros_like(V[0]), e.unsqueeze(-1) # (R), (R, C), (S, R, 1)
        if self.top is not None:
            scale = (self.top[:, j] - top).exp_() # (R)
            Z.addcmul_(self.Z[:, j], scale)
            torch.mul(self.O[:, j], scale.unsqueeze(-1), out=O)
        for i, v in enumerate(V):
            O.addcmul_(v, e[i])
        self.lse[:, j] = top + Z.log()
        return O.div_(Z.unsqueeze(-1))

    def pull(self, a, b, V, r, dV, c):
        # what mixes a..b-1 send to sources V (R, S, C), r (R, S, 1): added to dV (R, S, C), to c (R, S, 1) = sum_l ds_l s_l, to dq
        q, dO = self.q[a:b], self.dO[:, a:b] # (M, C), (R, M, C)
        s = (V @ q.T).mul_(r) # (R, S, M)
        p = (s - self.lse[:, None, a:b]).exp_() # (R, S, M)
        ds = (V @ dO.mT).sub_(self.D[:, None, a:b]).mul_(p) # (R, S, M)
        dV.baddbmm_(p, dO)
        c.add_(s.mul_(ds).sum(-1, keepdim=True))
        ds = ds.mul_(r).flatten(0, 1) # (R S, M)
        dV.flatten(0, 1).addmm_(ds, q)
        self.dq[a:b].addmm_(ds.T, V.flatten(0, 1))

class Tap(torch.autograd.Function):
    # source i, v or x + v: an identity whose backward pulls

    @staticmethod
    def forward(ctx, led, prev, x, v, *params):
        ctx.set_materialize_grads(False)
        ctx.led, ctx.i, ctx.prev, ctx.n, ctx.dtype, ctx.shape = led, len(led.V), prev, len(params), v.dtype, v.shape
        y = v.view_as(v) if prev is None else x + v # (B, T, C)
        V = y.detach().reshape(-1, y.size(-1)).to(wide(y)) # (R, C)
        led.V.append(V)
        led.r.append(torch.linalg.vector_norm(V, dim=-1, keepdim=True).square_().div_(V.size(-1)).add_(led.eps).rsqrt_()) # (R, 1)
        led.carry.append(None)
        led.readers.append([])
        return y

    @staticmethod
    def backward(ctx, grad):
        led, i = ctx.led, ctx.i
        if led.V is None:
            raise RuntimeError("fused AttnRes: one backward per forward, its ledger has been used up")
        V, r = led.V[i].unsqueeze(1), led.r[i].unsqueeze(1) # (R, 1, C), (R, 1, 1)
        dV, c = V.new_zeros(V.shape), r.new_zeros(r.shape) # contiguous, or bmm loops over tokens
        with torch.autocast(V.device.type, enabled=False):
            for g, a, b in led.readers[i]:
                if g.dO is not None: # else nothing was asked of it
                    g.pull(a, b, V, r, dV, c)
                    if g.lowest == i: # all mixes of the group have been here
                        for tile in led.tiles[:g.tiles]:
                            tile[2:] = (torch.zeros_like(x) for x in tile[:2]) if tile[2] is None else tile[2:]
                            g.pull(0, g.n, *tile)
                        g.dO = None
        t, j = divmod(led.tiled.index(i), led.G) if i in led.tiled else (None, None)
        if t is not None and led.tiles[t][2] is not None:
            dV, c = dV.add_(led.tiles[t][2][:, j:j + 1]), c.add_(led.tiles[t][3][:, j:j + 1])
        dV = dV.addcmul_(V, c.mul_(r).mul_(r), value=-1 / V.size(-1)).squeeze(1) # (R, C)
        for more in (led.carry[i], None if grad is None else grad.reshape(V.size(0), -1)):
            if more is not None:
                dV = dV.add_(more)
        led.V[i] = led.carry[i] = None
        if j == 0:
            led.tiles[t] = None
        if ctx.prev is not None:
            led.carry[ctx.prev] = dV
        params = [None] * ctx.n
        if i == 0: # the last to run: the queries are complete
            led.V, n = None, len(led.queries)
            for g in led.groups:
                for res, dq in zip(g.res, () if g.dq is None else g.dq[:g.n]):
                    k = led.queries.index(res)
                    for k, d in ((k, dq * res.g), (n + k, dq * res.w)):
                        params[k] = d.to(res.w.dtype) if params[k] is None else params[k] + d
        return None, None, None, dV.to(ctx.dtype).reshape(ctx.shape), *params

def rowdot(x, y):
    return torch.bmm(x.unsqueeze(1), y.unsqueeze(2)).flatten(1) # (R, 1)

class Mix(torch.autograd.Function):

    @staticmethod
    def forward(ctx, led, ids, x, res, gain, eps):
        # x, the newest source, orders the backward: its gradient is not made here
        with torch.autocast(x.device.type, enabled=False):
            g, j, ids = led.enter(res, ids)
            O = g.mix(j, [led.V[i] for i in ids], [led.r[i] for i in ids]) # (R, C)
            h, r = O, None
            if gain is not None:
                r = torch.linalg.vector_norm(O, dim=-1, keepdim=True).square_().div_(O.size(-1)).add_(eps).rsqrt_() # (R, 1)
                h = (O * r).mul_(gain) # (R, C)
        ctx.led, ctx.g, ctx.j, ctx.eps = led, g, j, eps
        ctx.save_for_backward(O, r, gain)
        return h.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, dh):
        (O, r, gain), g, j, dgain = ctx.saved_tensors, ctx.g, ctx.j, None
        if ctx.led.V is None:
            raise RuntimeError("fused AttnRes: one backward per forward, its ledger has been used up")
        if g.dO is None:
            g.dO, g.D, g.dq = O.new_zeros(len(O), g.n, O.size(-1)), O.new_zeros(len(O), g.n), torch.zeros_like(g.q)
        dh, dO = dh.reshape(O.shape).to(O.dtype), g.dO[:, j] # (R, C)
        with torch.autocast(O.device.type, enabled=False):
            if gain is None:
                dO.copy_(dh)
                g.D[:, j:j + 1] = rowdot(dh, O)
            else: # dO = r (gain dh - r^2 O a / C), a = <gain dh, O>, so that <dO, O> = r^3 a eps
                dgain = (r.T @ (dh * O)).squeeze(0) # (C)
                dh = dh * gain # (R, C)
                a = rowdot(dh, O).mul_(r**3) # (R, 1)
                torch.mul(dh, r, out=dO)
                dO.addcmul_(O, a, value=-1 / O.size(-1))
                g.D[:, j:j + 1] = a * ctx.eps
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

def flash(q, k, v, scale, back=None):
    # causal attention of the library -> y, lse, *rest; with back = (dy, y, lse, *rest) -> dq, dk, dv. Private ops, so all calls are here
    cpu, D = q.device.type == "cpu", q.size(-1)
    name = "_scaled_dot_product_flash_attention" + "_for_cpu" * cpu + "_backward" * (back is not None)
    op = getattr(torch.ops.aten, name, None)
    if op is None or not cpu and q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"fused MoDA needs aten::{name} of torch for {q.dtype} on {q.device.type}, which torch {torch.__version__} does not have")
    if cpu:
        return op(q, k, v, 0.0, True, scale=scale) if back is None else op(back[0], q, k, v, *back[1:], 0.0, True, scale=scale)
    q, k, v, *dyy = (F.pad(x, (0, -D % 8)) for x in (q, k, v, *(back or ())[:2])) # heads in multiples of 8
    if back is None:
        y, lse, *rest = op(q, k, v, 0.0, True, False, scale=scale)
        return y[..., :D], lse, *rest[:6]
    lse, cum_q, cum_k, max_q, max_k, seed, offset = back[2:]
    return [x[..., :D] for x in op(dyy[0], q, k, v, dyy[1], lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale)]

class DepthAttention(torch.autograd.Function):

    @staticmethod
    def forward(ctx, sums, first, q, k, v, *slots):
        ctx.sums, ctx.first, ctx.scale = sums, first, q.size(-1) ** -0.5
        y, lse_seq, *ctx.rest = flash(q, k, v, ctx.scale)
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
        q_, y, dy = (x.to(wide(x)).unflatten(1, (k.size(1), -1)) for x in (q * ctx.scale, y, dy)) # (B, Hkv, G, T, D)
        lse, tmp, dq_ = lse.unflatten(1, q_.shape[1:3]), torch.empty_like(q_), torch.zeros_like(q_)
        D = torch.mul(dy, y, out=tmp).sum(-1) # (B, Hkv, G, T)
        grads = []
        for sums, first, k, v in zip(ctx.sums, ctx.first, slots[::2], slots[1::2]):
            k_, v_ = k.unsqueeze(2), v.unsqueeze(2) # (B, Hkv, 1, T, D)
            p = (torch.mul(q_, k_, out=tmp).sum(-1) - lse).exp_() # (B, Hkv, G, T)
            ds = (torch.mul(dy, v_, out=tmp).sum(-1).sub_(D).mul_(p)).unsqueeze(-1) # (B, Hkv, G, T, 1)
            dq_.addcmul_(ds, k_)
            if not sums:
                sums += [q_.new_zeros(k.shape), q_.new_zeros(k.shape)] # dk_j, dv_j (B, Hkv, T, D)
            for g in range(q_.size(2)): # the query heads that share the key head
                sums[0].addcmul_(ds[:, :, g], q_[:, :, g])
                sums[1].addcmul_(p.unsqueeze(-1)[:, :, g], dy[:, :, g])
            grads += [x.to(k.dtype) for x in sums] if first else [None, None]
            if first:
                sums.clear()
        return None, None, dq + (dq_.flatten(1, 2) * ctx.scale).to(dq.dtype), dk, dv, *grads

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
