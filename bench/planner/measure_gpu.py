#!/usr/bin/env python3
"""Times training steps of PyTorch on one GPU, as rows for `bench_planner validate`.

Each row is one model and one micro-batch: the forward and backward passes of
four micro-batches and one AdamW step, with parameters in fp32 and products in
bf16 (autocast), attention by cuDNN, and each layer compiled unless the row says
"no compile". tokens_per_s_per_gpu is from the median of the timed
steps. The peak of the allocator goes to the standard error; the planner's
memory has another convention (bf16 parameters), so it is not a column.

Usage: measure_gpu.py [--seconds N] [--rows N,N...] OUT.csv

Needs PyTorch 2.5 or newer and a CUDA device. A row that does not fit in the
device's memory is reported and left out; so are those that would begin after
`--seconds`.
"""
import argparse
import csv
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ACCUMULATION = 4  # micro-batches of a step
WARM_UP, TIMED = 2, 5  # steps

#          name              arch   layers hidden heads kv  ffn   vocab
MODELS = {
    "llama3-1b": ("llama", 16, 2048, 32, 8, 8192, 128256),
    "llama3-3b": ("llama", 28, 3072, 24, 8, 8192, 128256),
    "llama3-8b, 4 layers": ("llama", 4, 4096, 32, 8, 14336, 128256),
    "llama2-7b, 8 layers": ("llama", 8, 4096, 32, 32, 11008, 32000),
    "llama3-70b, 1 layer": ("llama", 1, 8192, 64, 8, 28672, 32000),
    "gpt-1.3b": ("gpt", 24, 2048, 16, 16, 8192, 50432),
    "gpt-175b, 1 layer": ("gpt", 1, 12288, 96, 96, 49152, 51200),
    "gpt-6.7b, 6 layers": ("gpt", 6, 4096, 32, 32, 16384, 50432),
    "llama2-13b, 5 layers": ("llama", 5, 5120, 40, 40, 13824, 32000),
    "llama-400m": ("llama", 24, 1024, 16, 16, 2816, 32000),
    "llama-110m": ("llama", 12, 768, 12, 12, 2048, 32000),
}

#        model, sequence, micro-batch, recompute, compile
ROWS = [
    ("llama3-1b", 8192, 1, "none", True),
    ("llama3-1b", 8192, 2, "full", True),
    ("llama3-1b", 2048, 4, "none", True),
    ("llama3-1b", 8192, 1, "none", False),
    ("gpt-1.3b", 2048, 4, "none", True),
    ("llama3-8b, 4 layers", 8192, 1, "none", True),
    ("llama2-7b, 8 layers", 4096, 2, "none", True),
    ("llama3-3b", 8192, 1, "full", True),
    ("llama3-3b", 4096, 1, "none", True),
    ("llama3-1b", 32768, 1, "full", True),
    ("llama-110m", 1024, 8, "none", True),
    ("llama3-70b, 1 layer", 4096, 1, "none", True),
    ("gpt-1.3b", 2048, 4, "full", False),
    ("llama-110m", 1024, 8, "none", False),
    ("gpt-175b, 1 layer", 2048, 2, "none", True),
    ("llama3-1b", 2048, 1, "none", True),
    ("llama3-1b", 2048, 1, "none", False),
    ("llama3-8b, 4 layers", 8192, 2, "full", False),
    ("gpt-6.7b, 6 layers", 2048, 4, "none", True),
    ("llama2-13b, 5 layers", 4096, 1, "none", True),
    ("llama3-1b", 16384, 1, "none", True),
    ("llama3-3b", 2048, 2, "full", True),
    ("llama-400m", 2048, 8, "none", True),
    ("llama2-7b, 8 layers", 4096, 1, "full", False),
]


def rotary_table(seq, head_dim, device):
    freq = 500000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.outer(torch.arange(seq, device=device), freq)
    return (torch.cat((angle.cos(), angle.cos()), -1).bfloat16(),
            torch.cat((angle.sin(), angle.sin()), -1).bfloat16())


def rotate(x, table):
    a, b = x.chunk(2, -1)
    return x * table[0] + torch.cat((-b, a), -1) * table[1]


class Layer(nn.Module):
    """One decoder layer. x: [batch, tokens, hidden] in bf16."""

    def __init__(self, arch, hidden, heads, kv, ffn):
        super().__init__()
        self.llama, self.heads, self.kv = arch == "llama", heads, kv
        self.head_dim = hidden // heads
        norm = nn.RMSNorm if self.llama else nn.LayerNorm
        bias = not self.llama
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv) * self.head_dim, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.up = nn.Linear(hidden, ffn * (2 if self.llama else 1), bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x, table):
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norm1(x).bfloat16())
        split = [self.heads * self.head_dim] + 2 * [self.kv * self.head_dim]
        q, k, v = (t.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
                   for t in qkv.split(split, -1))
        if self.llama:
            q, k = rotate(q, table), rotate(k, table)
        h = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.out(h.transpose(1, 2).reshape(batch, tokens, hidden))
        h = self.up(self.norm2(x).bfloat16())
        if self.llama:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.down(h)


class Model(nn.Module):
    """A decoder with its embedding used as the output layer as well."""

    def __init__(self, arch, layers, hidden, heads, kv, ffn, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            Layer(arch, hidden, heads, kv, ffn) for _ in range(layers))
        self.norm = (nn.RMSNorm if arch == "llama" else nn.LayerNorm)(hidden)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def head(self, x, target):
        logits = F.linear(self.norm(x).bfloat16(), self.table.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    def forward(self, token, target, rotary, recompute):
        x = self.table(token).bfloat16()
        for layer in self.layers:
            x = (checkpoint(layer, x, rotary, use_reentrant=False)
                 if recompute else layer(x, rotary))
        return self.head(x, target)


def measure(model_name, seq, micro_batch, recompute, compiled):
    """Returns the row's tokens per second and its peak of memory in bytes."""
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    arch, layers, hidden, heads, kv, ffn, vocab = MODELS[model_name]
    with torch.device("cuda"):
        model = Model(arch, layers, hidden, heads, kv, ffn, vocab)
    if compiled:
        for layer in model.layers:
            layer.compile(dynamic=False)
        model.head = torch.compile(model.head, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rotary = rotary_table(seq, hidden // heads, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    times = []
    for step in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(ACCUMULATION):
            tokens = torch.randint(0, vocab, (micro_batch, seq + 1),
                                   device="cuda", generator=generator)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:], rotary,
                             recompute == "full")
            (loss / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    params = sum(p.numel() for p in model.parameters())
    rate = ACCUMULATION * micro_batch * seq / statistics.median(times)
    spread = (max(times) - min(times)) / statistics.median(times)
    return params, rate, torch.cuda.max_memory_allocated(), spread


def main():
    parser = argparse.ArgumentParser(
        description="Times training steps of PyTorch on one GPU.")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--rows", default="", help="numbers, from 0")
    parser.add_argument("out")
    args = parser.parse_args()
    # The fastest on Hopper; a row's note says it, so no other may be chosen.
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    chosen = ([int(n) for n in args.rows.split(",")]
              if args.rows else range(len(ROWS)))
    gpu = torch.cuda.get_device_properties(0)
    name = f"{gpu.name.removeprefix('NVIDIA ').split()[0]}-{gpu.total_memory / 2**30:.0f}GB"
    begin = time.monotonic()
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(
            "source,where_in_source,model,params_b,layers,hidden,heads,kv_heads,"
            "ffn_hidden,vocab,seq,gpu,n_gpus,tp,pp,dp,cp,zero_stage,micro_batch,"
            "global_batch,recompute,dtype,tokens_per_s_per_gpu,tflops_per_gpu,"
            "mfu_pct,verified".split(","))
        for n in chosen:
            model, seq, micro_batch, recompute, compiled = ROWS[n]
            if time.monotonic() - begin > args.seconds:
                print(f"row {n}: left out, no time", file=sys.stderr)
                continue
            try:
                params, rate, peak, spread = measure(*ROWS[n])
            except torch.OutOfMemoryError:
                print(f"row {n}: out of memory", file=sys.stderr)
                torch.cuda.empty_cache()
                continue
            torch.cuda.empty_cache()
            note = f"PyTorch {torch.__version__}, autocast, cuDNN attention, " + (
                "compile" if compiled else "no compile")
            _, layers, hidden, heads, kv, ffn, vocab = MODELS[model]
            out.writerow([
                "measured", note, model, f"{params / 1e9:.3f}", layers, hidden,
                heads, kv, ffn, vocab, seq, name, 1, 1, 1, 1, 1, 0, micro_batch,
                ACCUMULATION * micro_batch, recompute, "bf16", f"{rate:.1f}",
                "", "", "yes"])
            file.flush()
            print(f"row {n}: {model}, {seq} tokens x {micro_batch}, "
                  f"recompute {recompute}, {note}: {rate:.0f} tokens/s, peak "
                  f"{peak / 1e9:.1f} GB, spread {spread:.1%}, "
                  f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
