"""
Manifold-constrained Hyper-Connections (mHC): the streams of model_hc.py, mixed by doubly stochastic matrices.

    h    = sum_i read_i X_i                              X (N, C), the streams of one token, at first N copies of the embedding
    X_j <- sum_i mix_ji X_i + write_j F_k(N(h))          j = 1 .. N, F attention or MLP, N() RMSNorm
    read = sigmoid(z_pre), write = 2 sigmoid(z_post), mix = Sinkhorn(z_res), of mHC-lite sum_r softmax(z_res)_r P_r over all permutations P
    z = alpha (r Phi^T) + b, logits = W N(mean_j X_j)      r = vec(X) / rms(X), Phi (M, N*C), b (M): N pre, N post, N*N res or N!; an alpha each

Read model_preln.py first, then `diff model_preln.py model_mhc.py` or `diff model_hc.py model_mhc.py`.
mHC (Xie et al., 2025), arXiv:2512.24880, initial values and order of Sinkhorn as in DepthBench; mHC-lite (Yang and Gao, 2026), arXiv:2601.05732.
"""
import itertools
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VARIANTS = {"mhc": {"learning_rate": 2e-3}, "mhc_lite": {"sinkhorn_iters": 0, "learning_rate": 2e-3}} # command-line name -> config fields and train flags

# -----------------------------------------------------------------------------
# Building blocks (same text in every model file)

@dataclass
class GPTConfig:
    block_size: int = 2048 # longest sequence, in tokens
    vocab_size: int = 50304 # rows of the embedding and of the head
    n_layer: int = 24 # blocks: attention + MLP
    n_head: int = 16 # query heads
    n_kv_head: int = 0 # key and value heads, 0: as n_head
    n_embd: int = 1024 # width
    d_ff: int = 0 # hidden width of the MLP, 0: 8/3 of n_embd, rounded up to a multiple of 16
    rope_base: float = 10000.0 # base of the rotary frequencies
    norm_eps: float = 1e-6 # added to the mean square in RMSNorm
    n_streams: int = 4 # residual streams
    sinkhorn_iters: int = 20 # normalisations of rows and of columns, 0: mHC-lite, which needs none

    def __post_init__(self):
        for name, least in dict(block_size=1, vocab_size=1, n_layer=1, n_head=1, n_embd=1, n_kv_head=0, d_ff=0, norm_eps=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_ff = self.d_ff or -(-8 * self.n_embd // 48) * 16
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd: {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd: {self.n_embd} / n_head {self.n_head} is a head of odd size, which cannot be rotated in pairs")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head: {self.n_kv_head} does not divide n_head {self.n_head}")
        if self.rope_base <= 1:
            raise ValueError(f"rope_base: {self.rope_base} is not above 1")

class RMSNorm(nn.Module):

    def __init__(self, ndim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.eps = eps

    def forward(self, x):
        y = x.to(torch.promote_types(x.dtype, torch.float32)) # statistics in FP32
        return F.rms_norm(y, self.weight.shape, self.weight, self.eps).to(x.dtype)

@functools.cache # one table for all blocks
def rotary_table(T, D, base):
    t, i = (torch.arange(0, n, s, dtype=torch.float32, device="cpu") for n, s in ((T, 1), (D, 2))) # (T), (D/2)
    angle = torch.outer(t, base ** (-i / D)) # (T, D/2)
    return angle.cos(), angle.sin()

class Rotary(nn.Module):

    def __init__(self, config):
        super().__init__()
        for name, table in zip(("cos", "sin"), rotary_table(config.block_size, config.n_embd // config.n_head, config.rope_base)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x):
        # x: (B, H, T, D), rotated in the pairs (i, i + D/2)
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1) # (B, H, T, D/2)
        cos, sin = self.cos[:x.size(2)], self.sin[:x.size(2)] # (T, D/2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype) # (B, H, T, D)

class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size = config.n_head, config.n_kv_head, config.n_embd // config.n_head
        self.wqkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * self.head_size, bias=False) # rows q, k, v
        self.wo = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, -1, self.head_size).transpose(1, 2).split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1) # (B, H, T, D)
        q, k = self.rotary(q), self.rotary(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_kv_head < self.n_head) # (B, H, T, D)
        return self.wo(y.transpose(1, 2).reshape(B, T, C)) # (B, T, C)

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.w13 = nn.Linear(config.n_embd, 2 * config.d_ff, bias=False) # rows gate w1, up w3
        self.w2 = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.w13(x).chunk(2, dim=-1) # (B, T, d_ff)
        return self.w2(F.silu(gate) * up) # (B, T, C)

def lm_loss(x, w, targets):
    # x: (B, T, C) normed, w: (V, C), targets: (B, T), -1 ignored; mean over the others, in nats
    logits = F.linear(x, w) # (B, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

# -----------------------------------------------------------------------------
# The architecture (this is the part that differs)

class HyperConnection(nn.Module):

    def __init__(self, config, k):
        super().__init__()
        n, eye, self.config = config.n_streams, torch.eye(config.n_streams), config
        read, write, res = 16 * eye[k % n] - 8, torch.zeros(n), 8 * eye.flatten() - 8 # reads almost only stream k mod N
        if config.sinkhorn_iters == 0:
            self.register_buffer("P", torch.stack([eye[list(p)] for p in itertools.permutations(range(n))]).flatten(1), persistent=False) # (N!, N*N)
            read, write, res = 2 * eye[k % n] - 1, 2 * eye[k % n] - 1, 8 * (torch.arange(len(self.P)) == 0) - 8.0 # gates: guess
        self.b = nn.Parameter(torch.cat((read, write, res)))
        self.Phi, self.alpha = nn.Parameter(torch.zeros(len(self.b), n * config.n_embd)), nn.Parameter(torch.full((3,), 0.01))

    def forward(self, X):
        # X: (B, T, N, C) -> read (B, T, N), mix (B, T, N, N) with a row for each stream it writes, write (B, T, N)
        n, iters, f = X.size(2), self.config.sinkhorn_iters, X.flatten(2) # (B, T, N*C)
        z = F.linear(F.rms_norm(f, f.shape[-1:], eps=self.config.norm_eps), self.Phi) # (B, T, M) one norm over all streams, no gain
        pre, post, res = (a * z + b for a, z, b in zip(self.alpha, z.tensor_split((n, 2 * n), dim=-1), self.b.tensor_split((n, 2 * n))))
        mix = (res if iters else res.softmax(dim=-1) @ self.P).unflatten(-1, (n, n)) # (B, T, N, N)
        for i in range(2 * iters): # rows, columns, rows, .., columns
            mix = mix / (mix.sum(dim=-1 - i % 2, keepdim=True) + 1e-6) if i else mix.softmax(dim=-1) + 1e-6
        return pre.sigmoid(), mix, 2 * post.sigmoid()

def settle(X, y=None, mix=None, write=None):
    # the streams of a state: X (B, T, N, C) once the pending branch output y is written
    with torch.autocast(X.device.type, enabled=False): # mixing in FP32
        return X if y is None else (mix @ X.to(mix.dtype) + write.unsqueeze(-1) * y.unsqueeze(-2)).to(X.dtype) # (B, T, N, C)

def connect(state, hc, norm):
    # writes what is pending, then reads: h (B, T, C), X (B, T, N, C), and how to mix and write once F(h) is known
    X = settle(*state) # (B, T, N, C)
    with torch.autocast(X.device.type, enabled=False): # routing in FP32
        x = X.to(torch.promote_types(X.dtype, torch.float32))
        read, *c = hc(x)
        h = norm((read.unsqueeze(-2) @ x).squeeze(-2)).to(X.dtype) # (B, T, C)
    return h, X, *c

class Block(nn.Module):

    def __init__(self, config, l):
        super().__init__()
        self.mhc_attn = HyperConnection(config, 2 * l)
        self.norm_attn = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.mhc_mlp = HyperConnection(config, 2 * l + 1)
        self.norm_mlp = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x):
        h, X, *c = connect(x, self.mhc_attn, self.norm_attn)
        x = (X, self.attn(h), *c)
        h, X, *c = connect(x, self.mhc_mlp, self.norm_mlp)
        x = (X, self.mlp(h), *c)
        return x

class GPT(nn.Module):
    NO_DECAY = (".b", ".alpha") # endings of the parameter names that weight decay leaves alone
    MATRIX = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight") # what Muon may take

    def __init__(self, config):
        super().__init__()
        if config.n_streams < 1:
            raise ValueError(f"n_streams: {config.n_streams} is not positive")
        if config.sinkhorn_iters < 0 or config.sinkhorn_iters == 0 and config.n_streams > 4:
            raise ValueError(f"n_streams: {config.n_streams} has too many permutations for mHC-lite, which takes 1 to 4" if config.sinkhorn_iters == 0 else f"sinkhorn_iters: {config.sinkhorn_iters} is negative")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, l) for l in range(config.n_layer))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def begin(self, x): # embedding -> state
        return (x.unsqueeze(2).expand(-1, -1, self.config.n_streams, -1),) # (B, T, N, C)

    def readout(self, x): # state -> what the final norm reads
        return settle(*x).mean(dim=2) # (B, T, C)

    def hidden(self, x, l): # state after l blocks -> the representation that analysis looks at
        return settle(*x).flatten(2) # (B, T, N*C)

    def depth_flops(self, T): # what the architecture adds to flops(T)
        c, n = self.config, self.config.n_streams
        return 4 * T * c.n_layer * n * c.n_embd * (len(self.h[0].mhc_attn.b) + 1 + n + 1) # projection, read, mix, write

    def init_depth(self): # rescales or draws, after the shared draw
        for block in self.h:
            for w in (block.attn.wo.weight, block.mlp.w2.weight): # what they give is written to N streams
                w.data.mul_(self.config.n_streams ** -0.5)

    # -------------------------------------------------------------------------
    # Everything below is the same text in every model file

    def embed(self, idx):
        x = self.wte(idx) # (B, T, C)
        if torch.is_autocast_enabled(x.device.type): # residual streams and depth sources live in the autocast dtype
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def trunk(self, idx):
        state = self.begin(self.embed(idx))
        for block in self.h:
            state = block(state)
        return self.readout(state) # (B, T, C)

    def head(self, x, targets=None):
        x = self.norm_f(x) # (B, T, C)
        if targets is None:
            return self.lm_head(x), None # (B, T, V)
        return None, lm_loss(x, self.lm_head.weight, targets)

    def forward(self, idx, targets=None):
        # idx, targets: (B, T) int64 -> (logits (B, T, V), None), or (None, loss) where targets are given
        return self.head(self.trunk(idx), targets)

    def _init_weights(self):
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(m.weight, std=0.02, a=-0.06, b=0.06)
        self.init_depth()

    def param_groups(self):
        # every parameter exactly once, by the meaning that its name gives, never by its shape
        groups = dict(embed=[], head=[], matrix=[], other=[], no_decay=[])
        for name, p in self.named_parameters():
            key = ("embed" if name == "wte.weight" else "head" if name == "lm_head.weight" else "matrix" if name.endswith(self.MATRIX)
                   else "no_decay" if name.endswith(self.NO_DECAY) else "other")
            groups[key].append(p)
        return groups

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops(self, T):
        # forward FLOPs of one sequence of T tokens, logits at every position (DepthBench, Appendix D, extended to GQA)
        c = self.config
        d_kv = c.n_kv_head * c.n_embd // c.n_head
        block = 4 * T * c.n_embd**2 + 4 * T * c.n_embd * d_kv + 6 * T * c.n_embd * c.d_ff + 2 * T**2 * c.n_embd
        return c.n_layer * block + 2 * T * c.n_embd * c.vocab_size + self.depth_flops(T)
