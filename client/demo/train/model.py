"""The demo's byte-level hybrid language model: Mamba-2, Gated DeltaNet (GDN), Kimi Delta Attention (KDA) and attention.

Eight pre-norm residual blocks, `x += mixer(norm1(x)); x += mlp(norm2(x))`, over a stream of D = 256 channels; the input
is bytes (vocabulary 256) and the embedding is also the output matrix, after a final RMSNorm. No linear layer has a bias
and nothing is dropped out. Every mixer with a recurrent state has two forms that compute the same function:

  chunked      the parallel form used in training. Decays are kept as float32 logs and summed; an exponential is taken
               only of a difference that is <= 0 (a later sum minus an earlier one), so nothing can overflow.
  sequential   one token after another, exactly the recurrence; slow, and the reference that the chunked form and the
               C++ model are checked against.

Shapes: B batch, T tokens, H value heads, G key groups (head h uses group h // (H/G)), N chunks of C tokens, dk and dv
the key and value widths. A state S is [dv, dk]. Arithmetic of the recurrences, norms, gates and decays is float32 (or
float64 where the model is), also under bf16 autocast, which then covers the linear layers and the attention alone.

Causal convolution: weight [channels, 4], tap 3 multiplies the current token, tap 0 the token three before; tokens before
the first are zero. RoPE: base 10000, rotate-half (channel i is paired with i + 32 of a 64-wide head):
out = x * cos + concat(-x[32:], x[:32]) * sin, angle(t, i) = t * 10000^(-(i mod 32)/32), first token t = 0.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

D, HIDDEN, VOCAB, CONV, EPS = 256, 384, 256, 4, 1e-6
BLOCKS = ("mamba2", "gdn", "kda", "attn", "mamba2", "gdn", "kda", "attn")
CHUNK, SUB = 64, 16                      # tokens of a chunk; tokens of a sub-block of KDA's scores


def wide(x):
    """x in the arithmetic of the recurrences: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


# ---------------------------------------------------------------------------------------------- recurrences, sequential

def _heads(x, h):
    """[B, T, G, d] -> [B, T, H, d]: each group's row for each of its value heads."""
    return x.repeat_interleave(h // x.shape[2], dim=2)


def ssd_sequential(q, k, v, log_alpha):
    """Mamba-2: S = alpha S + v k^T, o = S q. q, k [B,T,G,dk]; v [B,T,H,dv]; log_alpha [B,T,H] -> o [B,T,H,dv]."""
    q, k = _heads(q, v.shape[2]), _heads(k, v.shape[2])
    s = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])
    out = []
    for t in range(v.shape[1]):
        s = log_alpha[:, t].exp()[..., None, None] * s + v[:, t, :, :, None] * k[:, t, :, None, :]
        out.append((s * q[:, t, :, None, :]).sum(-1))
    return torch.stack(out, 1)


def delta_sequential(q, k, v, log_alpha, beta):
    """GDN and KDA: S = (S Diag(alpha)) (I - beta k k^T) + beta v k^T, o = S q.

    q, k [B,T,G,dk]; v [B,T,H,dv]; beta [B,T,H]; log_alpha [B,T,H] (GDN, one decay a head) or [B,T,H,dk] (KDA, one a
    key channel) -> o [B,T,H,dv].
    """
    q, k = _heads(q, v.shape[2]), _heads(k, v.shape[2])
    if log_alpha.dim() == 3:
        log_alpha = log_alpha[..., None].expand(k.shape)
    s = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])
    out = []
    for t in range(v.shape[1]):
        kt = k[:, t, :, None, :]
        s = s * log_alpha[:, t, :, None, :].exp()
        u = beta[:, t, :, None] * (v[:, t] - (s * kt).sum(-1))
        s = s + u[..., None] * kt
        out.append((s * q[:, t, :, None, :]).sum(-1))
    return torch.stack(out, 1)


# ------------------------------------------------------------------------------------------------- recurrences, chunked

def _chunks(x):
    """[B, T, H, ...] -> [B, N, H, C, ...], padded with zeros at the end (log 1 for a decay: a pad changes nothing)."""
    pad = -x.shape[1] % CHUNK
    if pad:
        x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], 1)
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).transpose(2, 3)


def _unchunks(x, t):
    """[B, N, H, C, d] -> [B, T, H, d]."""
    return x.transpose(2, 3).flatten(1, 2)[:, :t]


def _pair_decay(cs):
    """cs [..., C], the running sums of log decays -> [..., C, C]: exp(cs_t - cs_s) where s <= t, else 0."""
    later = torch.ones(cs.shape[-1], cs.shape[-1], dtype=torch.bool, device=cs.device).triu(1)
    return (cs[..., :, None] - cs[..., None, :]).masked_fill(later, float("-inf")).exp()


def ssd_chunked(q, k, v, log_alpha):
    """The chunked form of ssd_sequential; same arguments and result."""
    t, h = v.shape[1], v.shape[2]
    q, k, v, cs = _chunks(q), _chunks(k), _chunks(v), _chunks(log_alpha).cumsum(-1)
    scores = _pair_decay(cs) * (q @ k.transpose(-1, -2)).repeat_interleave(h // k.shape[2], 2)   # [B,N,H,C,C]
    q, k = q.repeat_interleave(h // q.shape[2], 2), k.repeat_interleave(h // k.shape[2], 2)
    total = cs[..., -1:]
    added = (v * (total - cs).exp()[..., None]).transpose(-1, -2) @ k                            # [B,N,H,dv,dk]
    keep = total.exp()[..., None]
    s, before = torch.zeros_like(added[:, 0]), []
    for n in range(v.shape[1]):                                    # state at the start of each chunk
        before.append(s)
        s = keep[:, n] * s + added[:, n]
    out = scores @ v + cs.exp()[..., None] * (q @ torch.stack(before, 1).transpose(-1, -2))
    return _unchunks(out, t)


def _delta_chunks(kk, qk, k_in, q_in, k_out, keep, v, beta):
    """The part that GDN and KDA share, over chunks; returns o [B,N,H,C,dv].

    kk, qk [B,N,H,C,C]: decayed products of keys s with key t, with query t (qk zero above the diagonal; kk is read below
    it). k_in, q_in [B,N,H,C,dk]: keys, queries decayed from the chunk's start; k_out: keys decayed to its end.
    keep [B,N,H,1,1 or dk]: the whole chunk's decay. The corrections U of a chunk obey (I + diag(beta) tril(kk, -1)) U =
    diag(beta) (V - k_in S^T): one unit lower triangular solve for all chunks at once, then a short loop over chunks.
    """
    lower = (beta[..., None] * kk).tril(-1)
    right = torch.cat([v, k_in], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u_v, u_k = solved.split([v.shape[-1], k_in.shape[-1]], -1)
    s = v.new_zeros(v.shape[0], v.shape[2], v.shape[4], k_in.shape[-1])
    before, corrections = [], []
    for n in range(v.shape[1]):
        u = u_v[:, n] - u_k[:, n] @ s.transpose(-1, -2)
        before.append(s)
        corrections.append(u)
        s = keep[:, n] * s + u.transpose(-1, -2) @ k_out[:, n]
    return q_in @ torch.stack(before, 1).transpose(-1, -2) + qk @ torch.stack(corrections, 1)


def gdn_chunked(q, k, v, log_alpha, beta):
    """The chunked form of delta_sequential with one decay a head; same arguments and result."""
    t, r = v.shape[1], v.shape[2] // k.shape[2]
    q, k, v, beta, cs = _chunks(q), _chunks(k), _chunks(v), _chunks(beta), _chunks(log_alpha).cumsum(-1)
    decay = _pair_decay(cs)
    kk = (k @ k.transpose(-1, -2)).repeat_interleave(r, 2) * decay
    qk = (q @ k.transpose(-1, -2)).repeat_interleave(r, 2) * decay
    q, k = q.repeat_interleave(r, 2), k.repeat_interleave(r, 2)
    grown, total = cs.exp()[..., None], cs[..., -1:]
    out = _delta_chunks(kk, qk, k * grown, q * grown, k * (total - cs).exp()[..., None], total.exp()[..., None], v, beta)
    return _unchunks(out, t)


def _channel_scores(q, k, cs):
    """kk, qk [B,N,H,C,C] with sum_d x_t[d] k_s[d] exp(cs_t[d] - cs_s[d]) for s <= t, else 0; q, k, cs [B,N,H,C,dk].

    Within a sub-block of 16 tokens the difference of the sums is formed for each pair and channel. Across sub-blocks the
    exponential is split at the last token p before t's sub-block, exp(cs_t - cs_p) exp(cs_p - cs_s): s <= p < t, so both
    factors are <= 1, and where one underflows the product is as negligible.
    """
    m = k.shape[3] // SUB
    qs, ks, css = (x.unflatten(3, (m, SUB)) for x in (q, k, cs))                      # [B,N,H,m,16,dk]
    later = torch.ones(SUB, SUB, dtype=torch.bool, device=k.device).triu(1)[..., None]
    pair = (css[..., :, None, :] - css[..., None, :, :]).masked_fill(later, float("-inf")).exp() * ks[..., None, :, :]
    within = pair @ torch.stack([ks, qs], -1)                                         # [B,N,H,m,16(t),16(s),2]
    kk, qk = [], []
    for i in range(m):
        zeros = k.new_zeros(*k.shape[:3], SUB, k.shape[3] - (i + 1) * SUB)
        rows = [[within[..., i, :, :, j], zeros] for j in (0, 1)]
        if i:
            p = cs[..., i * SUB - 1:i * SUB, :]
            grown, past = (css[..., i, :, :] - p).exp(), k[..., :i * SUB, :] * (p - cs[..., :i * SUB, :]).exp()
            across = torch.cat([ks[..., i, :, :] * grown, qs[..., i, :, :] * grown], -2) @ past.transpose(-1, -2)
            rows = [[across[..., j * SUB:(j + 1) * SUB, :]] + rows[j] for j in (0, 1)]
        kk.append(torch.cat(rows[0], -1))
        qk.append(torch.cat(rows[1], -1))
    return torch.cat(kk, -2), torch.cat(qk, -2)


def kda_chunked(q, k, v, log_alpha, beta):
    """The chunked form of delta_sequential with one decay a key channel and G = H; same arguments and result."""
    t = v.shape[1]
    q, k, v, beta, cs = _chunks(q), _chunks(k), _chunks(v), _chunks(beta), _chunks(log_alpha).cumsum(-2)
    kk, qk = _channel_scores(q, k, cs)
    grown, total = cs.exp(), cs[..., -1:, :]
    return _unchunks(_delta_chunks(kk, qk, k * grown, q * grown, k * (total - cs).exp(), total.exp(), v, beta), t)


# --------------------------------------------------------------------------------------------------------------- layers

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight over the last axis, in float32 (or float64)."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        x = wide(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class CausalConv(nn.Module):
    """Depthwise causal convolution of width 4 and SiLU: [B,T,channels] -> the same, in float32 (or float64)."""

    def __init__(self, channels, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, CONV).uniform_(-CONV ** -0.5, CONV ** -0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x):
        x = wide(x)
        padded = F.pad(x, (0, 0, CONV - 1, 0))
        y = sum(padded[:, i:i + x.shape[1]] * self.weight[:, i] for i in range(CONV))
        return F.silu(y if self.bias is None else y + self.bias)


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


def l2norm(x):
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def decay_parameters(heads, channels=None):
    """A_log [heads] with A log-spaced over 1..16, and dt_bias [heads] (or [heads, channels]) such that softplus(dt_bias)
    is log-uniform over 0.001..0.1, as in Mamba-2 and Gated DeltaNet: memories from about one token to a thousand."""
    a_log = torch.linspace(0, math.log(16), heads)
    dt = torch.exp(torch.rand(heads if channels is None else (heads, channels)) * math.log(100) + math.log(1e-3))
    return nn.Parameter(a_log), nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


class Mamba2(nn.Module):
    """4 heads, dv 64, one key group, dk 128. in_proj -> [z 256 | x 256, B 128, C 128 | dt 4]."""

    def __init__(self):
        super().__init__()
        self.in_proj = linear(D, 256 + 512 + 4)
        self.conv = CausalConv(512, bias=True)
        self.A_log, self.dt_bias = decay_parameters(4)
        self.D = nn.Parameter(torch.ones(4))
        self.norm = RMSNorm(256)
        self.out_proj = linear(256, D)

    def forward(self, x, sequential=False):
        z, xbc, dt = self.in_proj(x).split([256, 512, 4], -1)
        x, b, c = self.conv(xbc).split([256, 128, 128], -1)
        x = x.unflatten(-1, (4, 64))
        dt = F.softplus(wide(dt) + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            core = ssd_sequential if sequential else ssd_chunked
            y = core(c.unsqueeze(2), b.unsqueeze(2), dt[..., None] * x, -self.A_log.exp() * dt)
        y = (y + self.D[:, None] * x).flatten(-2)
        return self.out_proj(self.norm(y * F.silu(wide(z))))


class GatedDeltaNet(nn.Module):
    """2 key groups, 4 value heads, dk 128, dv 64. in_proj -> [q 256, k 256, v 256 | z 256 | a 4 | b 4]."""

    def __init__(self):
        super().__init__()
        self.in_proj = linear(D, 768 + 256 + 4 + 4)
        self.conv = CausalConv(768, bias=False)
        self.A_log, self.dt_bias = decay_parameters(4)
        self.norm = RMSNorm(64)
        self.out_proj = linear(256, D)

    def forward(self, x, sequential=False):
        qkv, z, a, b = self.in_proj(x).split([768, 256, 4, 4], -1)
        q, k, v = self.conv(qkv).split(256, -1)
        q, k = l2norm(q.unflatten(-1, (2, 128))) * 128 ** -0.5, l2norm(k.unflatten(-1, (2, 128)))
        log_alpha = -self.A_log.exp() * F.softplus(wide(a) + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            core = delta_sequential if sequential else gdn_chunked
            o = core(q, k, v.unflatten(-1, (4, 64)), log_alpha, wide(b).sigmoid())
        return self.out_proj(self.norm(o).flatten(-2) * F.silu(wide(z)))


class KimiDelta(nn.Module):
    """2 heads, dk = dv = 128, a decay for each key channel. in_proj -> [q 256, k 256, v 256 | z 256 | b 2 | f 32]."""

    def __init__(self):
        super().__init__()
        self.in_proj = linear(D, 768 + 256 + 2 + 32)
        self.f_proj = linear(32, 256)
        self.conv = CausalConv(768, bias=False)
        self.A_log, self.dt_bias = decay_parameters(2, 128)
        self.norm = RMSNorm(128)
        self.out_proj = linear(256, D)

    def forward(self, x, sequential=False):
        qkv, z, b, f = self.in_proj(x).split([768, 256, 2, 32], -1)
        q, k, v = (y.unflatten(-1, (2, 128)) for y in self.conv(qkv).split(256, -1))
        q, k = l2norm(q) * 128 ** -0.5, l2norm(k)
        gate = wide(self.f_proj(f)).unflatten(-1, (2, 128))
        log_alpha = -self.A_log.exp()[:, None] * F.softplus(gate + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            core = delta_sequential if sequential else kda_chunked
            o = core(q, k, v, log_alpha, wide(b).sigmoid())
        return self.out_proj(self.norm(o).flatten(-2) * F.silu(wide(z)))


class Attention(nn.Module):
    """4 heads of 64, causal, scaled by 1/8, RoPE (see the top of the file). qkv_proj -> [q 256, k 256, v 256]."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = linear(D, 768)
        self.out_proj = linear(256, D)

    @staticmethod
    def rope(x):
        """x [B,4,T,64], rotated by position, in x's type."""
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        rate = 10000.0 ** (-torch.arange(32, device=x.device, dtype=torch.float64) / 32)
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float64)[:, None] * torch.cat([rate, rate])
        turned = torch.cat([-x[..., 32:], x[..., :32]], -1)
        return (x * angle.cos().to(kind) + turned * angle.sin().to(kind)).to(x.dtype)

    def forward(self, x, sequential=False):
        q, k, v = (y.unflatten(-1, (4, 64)).transpose(1, 2) for y in self.qkv_proj(x).split(256, -1))
        q, k = self.rope(q), self.rope(k)
        if sequential:
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
            o = ((q @ k.transpose(-1, -2)) / 8).masked_fill(later, float("-inf")).softmax(-1) @ v
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(o.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), 256 -> 384 -> 256."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(D, HIDDEN), linear(D, HIDDEN), linear(HIDDEN, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


MIXERS = {"mamba2": Mamba2, "gdn": GatedDeltaNet, "kda": KimiDelta, "attn": Attention}


class Block(nn.Module):
    """x += mixer(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, kind):
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = RMSNorm(D), MIXERS[kind](), RMSNorm(D), MLP()

    def forward(self, x, sequential=False):
        x = x + self.mixer(self.norm1(x), sequential)
        return x + self.mlp(self.norm2(x))


class HybridModel(nn.Module):
    """tokens [B, T] (integers 0..255) -> logits [B, T, 256]; logits of position t predict byte t + 1."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(kind) for kind in BLOCKS)
        self.norm = RMSNorm(D)
        for name, p in self.named_parameters():
            if p.dim() == 2 and not is_f32(name):
                out = name.endswith(("out_proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.04 / (math.sqrt(2 * len(BLOCKS)) if out else 1))

    def forward(self, tokens, sequential=False, hidden=None):
        """hidden: a list that is given the stream after each block, [B, T, 256] each."""
        x = self.embedding(tokens.long())
        for block in self.blocks:
            x = block(x, sequential)
            if hidden is not None:
                hidden.append(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(self.norm(x), self.embedding.weight)


def is_f32(name):
    """Whether the weights file keeps this tensor as F32: decays, D, norms and convolutions. The rest is BF16."""
    return name.endswith(("A_log", "dt_bias", ".D")) or "norm" in name or ".conv." in name
