"""
LayerRoPE: every norm gain is one shared vector, scaled and rotated with depth as rotary embedding does with position.

    gamma_l  = gamma (x) exp(r + i theta)        gamma (C) read as C/2 complex numbers, adjacent pairs; one gamma for each of four sites
    r        = alpha + beta ln(l + 1)            l = 0 .. L-1 counts blocks
    theta_j  = exp(alpha_rot + beta_rot ln(l + 1)) b^(-2j/C)
    h <- h + gamma_out,l F(gamma_in,l N(h))      Pre-Norm; Peri-Norm: h <- h + gamma_out,l N(F(gamma_in,l N(h))); N without gain

Read model_preln.py first, then `diff model_preln.py model_layerrope.py`.
LayerRoPE: Dynamic Depth-wise Magnitude & Angular Superposition (Srivastava and Kanan, 2026), arXiv:2610.09179.
"""
import math
import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VARIANTS = { # command-line name -> config fields and train flags; 8e-3 is a guess: four times Pre-LN's
    "layerrope": {"learning_rate": 8e-3}, "layerrope_peri": {"peri": True, "learning_rate": 8e-3},
    # the ablations of the paper's Table 4; the first two are on Peri-Norm there: add --peri
    "layerrope_mag": {"depth_rot": False, "learning_rate": 8e-3}, "layerrope_rot": {"depth_mag": False, "learning_rate": 8e-3},
    "layerrope_free": {"depth_free": True, "learning_rate": 8e-3}, "layerrope_uniform": {"depth_rope_base": 1.0, "learning_rate": 8e-3}}

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
    depth_slope: float = -0.5 # beta at init
    depth_rot_slope: float = -0.5 # beta_rot at init
    depth_rope_base: float = 100.0 # b, base of the rotation's frequencies; 1: every pair turns by the same angle
    depth_mag: bool = True # scale with depth; False: r = 0
    depth_rot: bool = True # rotate with depth; False: theta = 0
    depth_free: bool = False # a gamma for each block instead of a shared one
    peri: bool = False # Peri-Norm: what a sub-layer writes is normed too

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

def norm(x, gain, eps):
    y = x.to(torch.promote_types(x.dtype, torch.float32)) # statistics and gain in FP32
    return F.rms_norm(y, gain.shape, gain, eps).to(x.dtype)

def scale(x, gain, eps): # in the place of a norm, on what a sub-layer writes
    return (gain * x).to(x.dtype)

class DepthGain(nn.Module):

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        scalars = lambda slope: (nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()) + slope))
        self.gamma = nn.Parameter(torch.ones(config.n_layer, C) if config.depth_free else torch.ones(C))
        self.alpha, self.beta = scalars(config.depth_slope) if config.depth_mag else (0.0, 0.0) # constants: r = 0
        self.alpha_rot, self.beta_rot = scalars(config.depth_rot_slope) if config.depth_rot else (-math.inf, 0.0) # theta = 0
        self.register_buffer("freq", config.depth_rope_base ** (-torch.arange(0, C, 2) / C), persistent=False) # (C/2)

    def forward(self, row, log_depth):
        a, b = self.gamma.view(-1, len(self.freq), 2)[row].unbind(-1) # (1, C/2), the pairs (2j, 2j + 1)
        size = (self.alpha + self.beta * log_depth).exp() # ()
        theta = (self.alpha_rot + self.beta_rot * log_depth).exp() * self.freq # (C/2)
        cos, sin = theta.cos(), theta.sin()
        return size * torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten() # (C)

class Block(nn.Module):

    def __init__(self, config, l, depth):
        super().__init__()
        self.depth = (depth,) # shared by all blocks; the tuple keeps it out of their parameters, so that GPT holds it once
        self.register_buffer("log_depth", torch.tensor(math.log(l + 1)), persistent=False)
        self.register_buffer("row", torch.tensor([l if config.depth_free else 0]), persistent=False) # of gamma
        self.attn = CausalSelfAttention(config)
        self.mlp = MLP(config)
        self.write, self.eps = norm if config.peri else scale, config.norm_eps

    def forward(self, x):
        gain = {site: g(self.row, self.log_depth) for site, g in self.depth[0].items()} # (C) each
        x = x + self.write(self.attn(norm(x, gain["attn_in"], self.eps)), gain["attn_out"], self.eps) # (B, T, C)
        x = x + self.write(self.mlp(norm(x, gain["mlp_in"], self.eps)), gain["mlp_out"], self.eps) # (B, T, C)
        return x

class GPT(nn.Module):
    NO_DECAY = (".alpha", ".beta", ".alpha_rot", ".beta_rot") # endings of the parameter names that weight decay leaves alone
    MATRIX = ("attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight") # what Muon may take

    def __init__(self, config):
        super().__init__()
        if config.depth_rope_base < 1:
            raise ValueError(f"depth_rope_base: {config.depth_rope_base} is below 1")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.depth = nn.ModuleDict({site: DepthGain(config) for site in ("attn_in", "mlp_in", "attn_out", "mlp_out")})
        self.h = nn.ModuleList(Block(config, l, self.depth) for l in range(config.n_layer))
        self.norm_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def begin(self, x): # embedding -> state
        return x

    def readout(self, x): # state -> what the final norm reads
        return x # (B, T, C)

    def hidden(self, x, l): # state after l blocks -> the representation that analysis looks at
        return x # (B, T, C)

    def depth_flops(self, T): # what the architecture adds to flops(T)
        return 0

    def init_depth(self): # rescales or draws, after the shared draw
        pass

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
