#!/usr/bin/python3
"""Makes golden files (golden_file.h) for families of models, in NumPy float64.

The model, its gradients and AdamW are written out below, in the order of the
papers, without any code of the trainer.

  make_golden.py FAMILY OUT.h5    llama, mistral, phi3, qwen2 or qwen3
  make_golden.py --check FILE.h5  compute what a file holds again; exit code 1
                                  if it differs (PyTorch made those of llama)
"""
import sys

import h5py
import numpy as np

FAMILIES = {
    # Sizes that tensor parallelism of 2 and pipelines of 2 and 3 divide.
    "llama": {},
    "mistral": {"sliding_window": 7, "head_dim": 6},
    "phi3": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 10},
}
BASE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 64}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "clip_norm": 1.0, "eps": 1e-8,
             "lr": 3e-3, "min_lr_ratio": 0.1, "total_steps": 10,
             "warmup_steps": 2, "weight_decay": 0.1}
STEPS, SEQUENCES, T = 4, 8, 24


def f32(x):
    """Rounded to what a float32 holds."""
    return x.astype(np.float32).astype(np.float64)


def head_dim(c):
    return c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])


def make_weights(c, rng):
    d, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q = c["num_attention_heads"] * head_dim(c)
    kv = c["num_key_value_heads"] * head_dim(c)
    arch = c["model_type"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (d,),
                   p + "post_attention_layernorm.weight": (d,),
                   p + "self_attn.q_proj.weight": (q, d),
                   p + "self_attn.k_proj.weight": (kv, d),
                   p + "self_attn.v_proj.weight": (kv, d),
                   p + "self_attn.o_proj.weight": (d, q),
                   p + "mlp.gate_proj.weight": (f, d),
                   p + "mlp.up_proj.weight": (f, d),
                   p + "mlp.down_proj.weight": (d, f)}
        if arch == "qwen2":
            shapes |= {p + f"self_attn.{x}_proj.bias": (n,)
                       for x, n in (("q", q), ("k", kv), ("v", kv))}
        if arch == "qwen3":
            shapes |= {p + f"self_attn.{x}_norm.weight": (head_dim(c),)
                       for x in "qk"}
    # Larger than at the start of a training, so that every part matters.
    return {n: f32(rng.normal(1.0 if "norm" in n else 0.0, 0.2, s))
            for n, s in shapes.items()}


def rope_tables(c, length):
    n = head_dim(c) // 2
    freq = c["rope_theta"] ** (-np.arange(n) / n)
    if "rope_scaling.factor" in c:  # Llama 3.1
        s = {k[len("rope_scaling."):]: v for k, v in c.items()
             if k.startswith("rope_scaling.")}
        old = s["original_max_position_embeddings"]
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        wave = 2 * np.pi / freq
        smooth = np.clip((old / wave - low) / (high - low), 0, 1)
        freq = (1 - smooth) * freq / s["factor"] + smooth * freq
    angle = np.arange(length)[:, None] * freq
    return np.cos(angle), np.sin(angle)


def rotate(x, cos, sin):  # (B, T, heads, head_dim), half-split order
    a, b = np.split(x, 2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x, w, eps):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * r * w, r


def norm_backward(dy, x, r, w):
    g = dy * w
    dx = r * (g - x * r * r * (g * x).mean(-1, keepdims=True))
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)


def rows(x):
    return x.reshape(-1, x.shape[-1])


class Model:
    """Loss and gradients of one batch."""

    def __init__(self, config, weights):
        self.c, self.w, self.g = config, weights, {}

    def linear(self, x, name):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def linear_backward(self, dy, x, name):
        self.g[name + ".weight"] = rows(dy).T @ rows(x)
        if name + ".bias" in self.w:
            self.g[name + ".bias"] = rows(dy).sum(0)
        return dy @ self.w[name + ".weight"]

    def attention(self, x, p, cos, sin):
        c, hd = self.c, head_dim(self.c)
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        B, n = x.shape[:2]
        s = {"x": x}
        q, k, v = (self.linear(x, p + y + "_proj").reshape(B, n, -1, hd)
                   for y in "qkv")
        if p + "q_norm.weight" in self.w:
            s["q_in"], s["k_in"] = q, k
            q, s["q_r"] = norm(q, self.w[p + "q_norm.weight"], c["rms_norm_eps"])
            k, s["k_r"] = norm(k, self.w[p + "k_norm.weight"], c["rms_norm_eps"])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (np.repeat(y, heads // kv, 2) for y in (k, v))
        scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(hd)
        age = np.arange(n)[:, None] - np.arange(n)[None, :]
        window = c.get("sliding_window", 0) or n
        scores = np.where((age >= 0) & (age < window), scores, -np.inf)
        a = np.exp(scores - scores.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        s |= {"q": q, "k": k, "v": v, "a": a}
        s["out"] = np.einsum("bhij,bjhd->bihd", a, v).reshape(B, n, -1)
        return self.linear(s["out"], p + "o_proj"), s

    def attention_backward(self, dy, s, p, cos, sin):
        c, hd = self.c, head_dim(self.c)
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        B, n = dy.shape[:2]
        do = self.linear_backward(dy, s["out"], p + "o_proj")
        do = do.reshape(B, n, heads, hd)
        dv = np.einsum("bhij,bihd->bjhd", s["a"], do)
        da = np.einsum("bihd,bjhd->bhij", do, s["v"])
        ds = s["a"] * (da - (da * s["a"]).sum(-1, keepdims=True)) / np.sqrt(hd)
        dq = np.einsum("bhij,bjhd->bihd", ds, s["k"])
        dk = np.einsum("bhij,bihd->bjhd", ds, s["q"])
        dk, dv = (y.reshape(B, n, kv, heads // kv, hd).sum(3) for y in (dk, dv))
        dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
        if "q_in" in s:
            dq, self.g[p + "q_norm.weight"] = norm_backward(
                dq, s["q_in"], s["q_r"], self.w[p + "q_norm.weight"])
            dk, self.g[p + "k_norm.weight"] = norm_backward(
                dk, s["k_in"], s["k_r"], self.w[p + "k_norm.weight"])
        return sum(self.linear_backward(y.reshape(B, n, -1), s["x"], p + z)
                   for y, z in ((dq, "q_proj"), (dk, "k_proj"), (dv, "v_proj")))

    def mlp(self, x, p):
        gate = self.linear(x, p + "gate_proj")
        up = self.linear(x, p + "up_proj")
        sig = 1 / (1 + np.exp(-gate))
        y = gate * sig * up
        return self.linear(y, p + "down_proj"), (x, gate, up, sig, y)

    def mlp_backward(self, dy, s, p):
        x, gate, up, sig, y = s
        d = self.linear_backward(dy, y, p + "down_proj")
        dgate = d * up * sig * (1 + gate * (1 - sig))
        return (self.linear_backward(dgate, x, p + "gate_proj") +
                self.linear_backward(d * gate * sig, x, p + "up_proj"))

    def run(self, tokens):
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        cos, sin = rope_tables(c, inputs.shape[1])
        embedding = w["model.embed_tokens.weight"]
        x, kept = embedding[inputs], []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h, r1 = norm(x, w[p + "input_layernorm.weight"], eps)
            y, att = self.attention(h, p + "self_attn.", cos, sin)
            x1 = x + y
            h, r2 = norm(x1, w[p + "post_attention_layernorm.weight"], eps)
            y, mlp = self.mlp(h, p + "mlp.")
            kept.append((x, r1, att, x1, r2, mlp))
            x = x1 + y
        tied = c["tie_word_embeddings"]
        head = embedding if tied else w["lm_head.weight"]
        h, r = norm(x, w["model.norm.weight"], eps)
        logits = h @ head.T
        log_p = logits - logits.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_p, targets[..., None], -1)
        loss = -picked.mean()

        d = np.exp(log_p)
        np.put_along_axis(d, targets[..., None], np.exp(picked) - 1, -1)
        d /= targets.size
        dhead = rows(d).T @ rows(h)
        d, self.g["model.norm.weight"] = norm_backward(
            d @ head, x, r, w["model.norm.weight"])
        for i in reversed(range(c["num_hidden_layers"])):
            p = f"model.layers.{i}."
            x, r1, att, x1, r2, mlp = kept[i]
            name = p + "post_attention_layernorm.weight"
            dh, self.g[name] = norm_backward(
                self.mlp_backward(d, mlp, p + "mlp."), x1, r2, w[name])
            d = d + dh
            name = p + "input_layernorm.weight"
            dh, self.g[name] = norm_backward(
                self.attention_backward(d, att, p + "self_attn.", cos, sin),
                x, r1, w[name])
            d = d + dh
        dembedding = np.zeros_like(embedding)
        np.add.at(dembedding, inputs, d)
        if tied:
            dembedding += dhead
        else:
            self.g["lm_head.weight"] = dhead
        self.g["model.embed_tokens.weight"] = dembedding
        return loss, logits


def learning_rate(o, i):
    if i < o["warmup_steps"]:
        return o["lr"] * (i + 1) / o["warmup_steps"]
    u = min(1, (i - o["warmup_steps"]) / (o["total_steps"] - o["warmup_steps"]))
    low = o["min_lr_ratio"]
    return o["lr"] * (low + (1 - low) * 0.5 * (1 + np.cos(np.pi * u)))


def train(c, o, weights, tokens):
    """What a golden file holds, by name."""
    w = dict(weights)
    m = {n: np.zeros_like(x) for n, x in w.items()}
    v = {n: np.zeros_like(x) for n, x in w.items()}
    out = {"train/loss": [], "train/grad_norm": [], "train/lr": []}
    for i, batch in enumerate(tokens):
        model = Model(c, w)
        loss, logits = model.run(batch)
        total = np.sqrt(sum((g * g).sum() for g in model.g.values()))
        lr = learning_rate(o, i)
        for name, value in (("loss", loss), ("grad_norm", total), ("lr", lr)):
            out["train/" + name].append(value)
        if i == 0:
            out |= {"first/loss": loss, "first/logits_row0": logits[0]}
            out |= {"first/grads/" + n: g for n, g in model.g.items()}
        scale = min(1, o["clip_norm"] / (total + 1e-6))
        for n in w:
            g = model.g[n] * scale
            m[n] = o["beta1"] * m[n] + (1 - o["beta1"]) * g
            v[n] = o["beta2"] * v[n] + (1 - o["beta2"]) * g * g
            mh = m[n] / (1 - o["beta1"] ** (i + 1))
            vh = v[n] / (1 - o["beta2"] ** (i + 1))
            decay = lr * o["weight_decay"] if w[n].ndim > 1 else 0
            w[n] = w[n] * (1 - decay) - lr * mh / (np.sqrt(vh) + o["eps"])
    return out | {"train/weights_after/" + n: x for n, x in w.items()}


def make(family, path):
    c = BASE | FAMILIES[family] | {"model_type": family}
    rng = np.random.default_rng(20261124)
    weights = make_weights(c, rng)
    tokens = rng.integers(0, c["vocab_size"], (STEPS, SEQUENCES, T + 1))
    with h5py.File(path, "w") as f:
        for k, x in c.items():
            f.attrs["config." + k] = x
        for k, x in OPTIMIZER.items():
            f.attrs["optimizer." + k] = x
        f.attrs["source"] = "tests/golden/make_golden.py, NumPy, float64"
        f["tokens"] = tokens.astype(np.int32)
        for n, x in weights.items():
            f["weights/" + n] = x.astype(np.float32)
        for n, x in train(c, OPTIMIZER, weights, tokens).items():
            scalar = np.ndim(x) == 0 or n.startswith("train/") and \
                not n.startswith("train/weights_after")
            f[n] = np.asarray(x, np.float64 if scalar else np.float32)


def check(path):
    with h5py.File(path) as f:
        c = {k[7:]: x for k, x in f.attrs.items() if k.startswith("config.")}
        c.setdefault("model_type", "llama")
        o = {k[10:]: x for k, x in f.attrs.items() if k.startswith("optimizer.")}
        weights = {}
        f["weights"].visititems(
            lambda n, x: weights.__setitem__(n, x[()].astype(np.float64))
            if isinstance(x, h5py.Dataset) else None)
        worst = 0
        for n, x in train(c, o, weights, f["tokens"][()]).items():
            want = f[n][()]
            error = np.linalg.norm(x - want) / np.linalg.norm(want)
            if not error <= worst:
                worst, name = error, n
    print(f"{path}: largest relative difference {worst:.2e}, {name}")
    return 0 if worst < 1e-6 else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "--check":
        sys.exit(check(sys.argv[2]))
    make(sys.argv[1], sys.argv[2])
