#!/usr/bin/env python3
"""Prints on which tokens a job trains and validates, from the documentation alone
(worker/data/sampler.h, token_shard.h, proto/base/rng.h).

usage: batch_order.py DATASET[=WEIGHT],... SEED SEQ_LEN GLOBAL_BATCH STEPS
EVAL_SEQUENCES

One sequence a line, SEQ_LEN + 1 tokens: GLOBAL_BATCH lines for each step, then
those of a validation of each data set.
"""
import glob
import struct
import sys

MASK = 2**64 - 1
SAMPLER = 0x471bccfd945cd765  # XXH3 of "remesh.sampler"


def random_u64(key, stream, index):
    """Philox 4x32-10 (Salmon et al., SC'11)."""
    c = [index & 0xFFFFFFFF, index >> 32, stream & 0xFFFFFFFF, stream >> 32]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF,
             a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[1] << 32 | c[0]


def permuted(key, epoch, n, x):
    """Element x of the permutation of 0 .. n - 1 of that epoch."""
    half = (max(2, (n - 1).bit_length()) + 1) // 2
    while n > 1:
        left, right = x >> half, x & 2**half - 1
        for i in range(8):
            f = random_u64(key, epoch, i << 32 | right)
            left, right = right, left ^ f & 2**half - 1
        x = left << half | right
        if x < n:
            return x
    return 0


def split(folder, name):
    tokens = []
    for path in sorted(glob.glob(f"{folder}/{name}-*.tok")):
        data = open(path, "rb").read()
        width = struct.unpack_from("<I", data, 12)[0]
        tokens += memoryview(data[128:]).cast({2: "H", 4: "I"}[width])
    return tokens


def source_of(n, weights):
    """The source of sequence n of all, and its number there."""
    for k, weight in enumerate(weights):
        share = round(weight / sum(weights[k:]) * 2**32)
        mine, after = (m * share + 2**31 >> 32 for m in (n, n + 1))
        if after > mine:
            return k, mine
        n -= mine


def main():
    seed, length, batch, steps, validation = map(int, sys.argv[2:])
    names = [name.partition("=") for name in sys.argv[1].split(",")]
    weights = [float(weight or 1) for _, _, weight in names]
    trains = [split(name, "train") for name, _, _ in names]
    for n in range(steps * batch):
        k, m = source_of(n, weights)
        key = random_u64(seed & MASK, SAMPLER, k)
        windows = (len(trains[k]) - 1) // length
        w = permuted(key, m // windows, windows, m % windows)
        print(*trains[k][w * length:(w + 1) * length + 1])
    for name, _, _ in names:
        val = split(name, "val")
        windows = (len(val) - 1) // length
        count = min(-(-validation // len(names)), windows)
        for i in range(count):  # the middles of equal parts
            w = (2 * i + 1) * windows // (2 * count)
            print(*val[w * length:(w + 1) * length + 1])


main()
