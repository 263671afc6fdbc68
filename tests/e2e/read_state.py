#!/usr/bin/python3
"""Reads a training state with nothing but what checkpoint/FORMAT.md says.

  read_state.py CHECKPOINT               a step-* directory
  read_state.py CHECKPOINT SEGMENT...    the newest step in these state-* files, of that model

Prints the step, the number of parameters, the SHA-256 of the weights in the order of the
parameters, and the digest of the state, as metrics.jsonl has it. Not for adapters.
"""
import collections, ctypes, hashlib, io, json, struct, sys
from pathlib import Path
import h5py, numpy as np

xxh = ctypes.CDLL("libxxhash.so.0")
xxh.XXH3_64bits_withSeed.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
xxh.XXH3_64bits_withSeed.restype = ctypes.c_uint64
xxh.XXH3_128bits.argtypes = ctypes.c_char_p, ctypes.c_size_t
xxh.XXH3_128bits.restype = type("Hash", (ctypes.Structure,), {"_fields_": [("half", ctypes.c_uint64 * 2)]})
def xxh64(data, seed=0): return xxh.XXH3_64bits_withSeed(data, len(data), seed)
def xxh128(data): return "%016x%016x" % tuple(xxh.XXH3_128bits(data, len(data)).half)[::-1]

# index: the number in the model of each element of the parameter, in its shape.
Param = collections.namedtuple("Param", "name layer split block index")

def parameters(m):
    d, f, v, heads, kv_heads = (int(m[k]) for k in ("dim", "hidden_dim", "vocab_size", "n_heads", "n_kv_heads"))
    h = int(m.get("head_dim", d // heads))
    qkv = ("q", heads * h), ("k", kv_heads * h), ("v", kv_heads * h)
    table = [("model.embed_tokens.weight", "embedding", (v, d), 0, 1)]
    for i in range(int(m["n_layers"])):
        rows = [("input_layernorm.weight", (d,), None, 1)]
        rows += [(f"self_attn.{x}_proj.weight", (n, d), 0, h) for x, n in qkv]
        rows += [(f"self_attn.{x}_proj.bias", (n,), 0, h) for x, n in qkv if m.get("arch") == "qwen2"]
        rows += [(f"self_attn.{x}_norm.weight", (h,), None, 1) for x in "qk" if m.get("arch") == "qwen3"]
        rows += [("self_attn.o_proj.weight", (d, heads * h), 1, h), ("post_attention_layernorm.weight", (d,), None, 1),
                 ("mlp.gate_proj.weight", (f, d), 0, 1), ("mlp.up_proj.weight", (f, d), 0, 1),
                 ("mlp.down_proj.weight", (d, f), 1, 1)]
        table += [(f"model.layers.{i}.{name}", i, *rest) for name, *rest in rows]
    table += [("model.norm.weight", "head", (d,), None, 1), ("lm_head.weight", "head", (v, d), 0, 1)]
    if m.get("tie_embeddings"): table.pop()
    first = np.cumsum([0] + [np.prod(shape) for _, _, shape, _, _ in table])
    return [Param(name, layer, split, block, np.arange(a, b).reshape(shape))
            for (name, layer, shape, split, block), a, b in zip(table, first, first[1:])]

def slice_of(p, tp, t):
    """What tensor-parallel rank t of tp has of a parameter."""
    if p.split is None: return p.index.ravel()
    n = p.index.shape[p.split] // p.block
    first, last = (i * (n // tp) + min(i, n % tp) for i in (t, t + 1))
    if n < tp and (".k_proj." in p.name or ".v_proj." in p.name): first, last = t * n // tp, t * n // tp + 1
    return p.index.take(range(first * p.block, last * p.block), p.split).ravel()

def order(params, tied, rank, dp, pp, tp, cp, chunks, zero, group, bounds):
    """The number of the element at each place of a rank's vectors."""
    t, i, stage = rank % tp, rank // tp % (dp * cp), rank // tp // (dp * cp)
    z, stages, held = (group or dp * cp) if zero else 1, pp * chunks, []
    for s in range(stage, stages, pp):
        units = [["embedding"]] * (s == 0) + [[layer] for layer in range(bounds[s], bounds[s + 1])]
        if s == stages - 1: units += [["head", "embedding"] if tied and stages > 1 else ["head"]]
        for unit in units:
            u = np.concatenate([slice_of(p, tp, t) for x in unit for p in params if p.layer == x])
            length = (-(-len(u) // z) + 15) // 16 * 16
            held.append(u[i % z * length:][:length])
    return np.concatenate(held)

def read_shard(folder, shard, index):
    data, end, block = Path(folder, shard["name"]).read_bytes(), int(shard["data_bytes"]), int(shard["block_bytes"])
    sums = "".join(xxh128(data[at:min(at + block, end)]) for at in range(0, end, block))
    assert (data[end:].hex(), xxh128(data[end:])) == (sums, shard["xxh128"]), shard["name"] + " is damaged"
    hdf5, count = h5py.File(io.BytesIO(data[:end])), collections.Counter()
    for s in shard.get("slices", []):
        name, count[s["param"]] = f"{s['param']}.{count[s['param']]}", count[s["param"]] + 1
        at = index[s["param"]][tuple(slice(int(a), int(a) + int(n)) for a, n in zip(s["start"], s["count"]))]
        yield at.ravel(), [hdf5[x][name][...].ravel().view("<u4") for x in ("weights", "exp_avg", "exp_avg_sq")]

def read_segment(path, params, tied):
    data = Path(path).read_bytes()
    magic, version, _, capacity, size, checksum = struct.unpack_from("<8s5Q", data)
    assert (magic, version, size, checksum) == (b"remStat1", 1, len(data), xxh64(data[:40])), path + ": header"
    model = xxh64("".join(f"{p.name} {','.join(map(str, p.index.shape))}\n" for p in params).encode())
    for at, buffer in (64, 0), (64 + 4416, 0), (64 + 2 * 4416, 1), (64 + 3 * 4416, 1):
        sequence, n, checksum = struct.unpack_from("<3Q", data, at)
        words = data[at + 24:at + 24 + 8 * n]
        if sequence == 0 or xxh64(words, sequence) != checksum: continue
        w = struct.unpack(f"<{n}Q", words)
        begin = [20480 + (3 * buffer + k) * ((4 * capacity + 4095) // 4096 * 4096) for k in range(3)]
        vectors = [np.frombuffer(data, "<u4", w[11], b) for b in begin]
        if Path(path).read_bytes()[at:at + 8] != data[at:at + 8]: continue  # overwritten meanwhile
        assert w[10] == model, path + ": of another model"
        assert not w[14] & 2 or w[15:18] == tuple(xxh64(v.tobytes()) for v in vectors), path + ": content"
        held = order(params, tied, *w[2:10], struct.unpack_from(f"<{w[18]}I", words, 8 * 19))
        yield (w[0], w[1], w[3:10]), held, vectors  # step, generation, sharding

def merge(parts, elements):
    """The complete vectors; None if an element is missing."""
    state, there = np.zeros((3, elements), "<u4"), np.zeros(elements, bool)
    for at, vectors in parts:
        assert all((whole[at] == part)[there[at]].all() for whole, part in zip(state, vectors)), "copies differ"
        state[:, at], there[at] = vectors, True
    return state if there.all() else None

def mix(x):
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
    return x ^ x >> np.uint64(31)

def digest(params, state):
    w, m, v = state.astype(np.uint64)
    words = (w + np.uint64(0xbb67ae8584caa73b) * m + np.uint64(0x3c6ef372fe94f82b) * v + np.uint64(0xa54ff53a5f1d36f1))
    seed = mix(np.repeat(np.arange(len(params), dtype=np.uint64) + np.uint64(1), [p.index.size for p in params]))
    element = np.concatenate([np.arange(p.index.size, dtype=np.uint64) for p in params])
    return "%016x" % ((mix(seed + element * np.uint64(0x9e3779b97f4a7c15)) | np.uint64(1)) * words).sum()

folder, *segments = sys.argv[1:]
head, body = Path(folder, "manifest.json").read_bytes()[:-2].split(b"\n", 1)
assert head == b'{"xxh128":"%s","bytes":%d,"manifest":' % (xxh128(body).encode(), len(body)), "manifest is damaged"
manifest = json.loads(body)
params, tied = parameters(manifest["model"]), bool(manifest["model"].get("tie_embeddings"))
elements, found = sum(p.index.size for p in params), collections.defaultdict(list)
if not segments:
    index = {p.name: p.index for p in params}
    found[int(manifest["step"]),] = [part for shard in manifest["shards"] for part in read_shard(folder, shard, index)]
    assert sum(len(at) for parts in found.values() for at, _ in parts) == elements, "an element is stored twice"
for path in segments:
    for key, *part in read_segment(path, params, tied): found[key].append(part)
step, state = max(((key[0], merge(parts, elements)) for key, parts in found.items()),
                  key=lambda c: (c[1] is not None, c[0]))
assert state is not None, "no step is complete"
print(json.dumps({"step": step, "parameters": elements, "sha256": hashlib.sha256(state[0]).hexdigest(),
                  "digest": digest(params, state)}))
