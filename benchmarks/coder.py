"""Speed and size of the coders against a copy of the same values as float16, on one core: `python benchmarks/coder.py [--megabytes 8]`.

Codes are synthetic: 128 channels, 256 tokens a segment, normal, spread .65 .. 1.6 codes, correlation .15 .. .9 from token to token; or
real ones of the demo model (`--real`). CPU seconds, best of some runs. Where MLX has a GPU whose decoder passes the known answer, that is measured too."""
import argparse
from time import perf_counter, process_time
import numpy as np
from veloxquant_mlx import rans
from veloxquant_mlx.coders import G32Coder, PackedCoder, ZstdCoder, _count, dequantize_half, fit_classes

def synthetic(S, T=256, D=128, seed=0):
    r = np.random.default_rng(seed)
    k = r.integers(0, 16, (S, D))
    sd,rho = 1.3*(.5+.25*(k//4)),.9-.25*(k%4)
    x = np.zeros((S, T, D), np.float32)
    for t in range(1, T): x[:, t] = rho*x[:, t-1]+np.sqrt(1-rho**2)*sd*r.standard_normal((S, D), np.float32)
    return np.clip(np.rint(x), -8, 7).astype(np.int8)

def real(n=2048):
    from veloxquant_mlx.demo import captured_kv
    x = np.concatenate([np.array(k)[0] for k,_ in captured_kv('prose', n)]).astype(np.float32)
    x -= x.mean(1, keepdims=True)
    return np.clip(np.rint(x/(.8*x.std((1, 2), keepdims=True))), -8, 7).astype(np.int8)

def best(f, n=5, clock=process_time):
    f()
    times = []
    for _ in range(n):
        start = clock()
        f()
        times.append(clock()-start)
    return min(times)

def row(name, *xs): print(f'{name:44}'+''.join(f'{x:>11}' for x in xs), flush=True)

def gpu(codes, model, copy):
    "Decode on the GPU, codes left there; wall seconds against an elementwise operation that writes the same float16 bytes."
    import mlx.core as mx
    S,T,D = codes.shape
    args = rans._open(*rans.g32_encode(codes, model), model, codes.shape)
    rans._gpu_kernel()
    ins = [mx.array(a) for a in (args[0], args[1].astype(np.uint32), args[2], args[3])]
    mx.eval(ins)
    for warps in (4, 8, 16, 32):
        run = lambda: mx.eval(rans._gpu_decode(ins[0], args[1], ins[2], ins[3], model, codes.shape, warps))
        out = rans._gpu_decode(ins[0], args[1], ins[2], ins[3], model, codes.shape, warps)
        assert (np.array(out[0])==codes).all()
        t = best(run, 20, perf_counter)
        row(f'g32 on {mx.default_device()}, {warps} warps, order {model.order}, prec {model.prec}', '', '', f'{codes.size/t/1e6:.0f}', f'{copy/t:.3f}')
    a = mx.zeros((codes.size,), mx.float16)
    t = best(lambda: mx.eval(a+1), 20, perf_counter)
    row('a + 1 in float16 on the GPU', '', '', f'{codes.size/t/1e6:.0f}', f'{copy/t:.3f}')

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--megabytes', type=float, default=8, help='millions of codes')
    p.add_argument('--real', action='store_true', help='keys of the demo model in place of synthetic codes')
    a = p.parse_args()
    codes = real() if a.real else synthetic(max(1, round(a.megabytes*1e6/(256*128))))
    (S,T,D),n = codes.shape,codes.size
    src = np.ones(1<<28, np.uint8)
    dst = src.copy()
    copy = best(lambda: np.copyto(dst, src))*2*n/len(src)
    print(f'{n/1e6:.1f} M codes {codes.shape}; memcpy {2*n/copy/1e9:.1f} GB/s, so 1 x memcpy is {n/copy/1e6:.0f} Mcodes/s')
    row('', 'bits', 'encode', 'decode', 'x memcpy', 'to float16', 'x memcpy')
    u = (codes+8).astype(np.uint8)
    one = np.ones((S, -(-T//32), D), np.float32)
    cls,_ = fit_classes(u, np.arange(256.))
    N = np.zeros((16, 16, 16), np.int64)
    _count(u, cls, np.arange(16, dtype=np.uint8), N)
    bank = {prec: rans.RansModel(rans.quantise_rows(N.reshape(-1, 16)+.05, prec), cls, 1) for prec in (10, 11, 12)}
    bank0 = rans.RansModel(rans.quantise_rows(N.sum(1)+.05, 11), cls)
    jobs = [('raw', PackedCoder(), None), ('zstd', ZstdCoder(), None), ('zstd, channels sorted', ZstdCoder(), bank0),
            ('g32, own model', G32Coder(), None), ('g32, given model, order 0, prec 11', G32Coder(), bank0)]
    jobs += [(f'g32, given model, order 1, prec {k}', G32Coder(), m) for k,m in bank.items()]
    for name,c,m in jobs:
        data = c.encode(u, 16, m)
        out = c.decode(data, u.shape, 16, m)
        assert (out==u).all()
        enc,dec = best(lambda: c.encode(u, 16, m), 3),best(lambda: c.decode(data, u.shape, 16, m))
        half = best(lambda: dequantize_half(c.decode(data, u.shape, 16, m), one, one))
        row(name, f'{8*len(data)/n:.3f}', f'{n/enc/1e6:.0f}', f'{n/dec/1e6:.0f}', f'{copy/dec:.3f}', f'{n/half/1e6:.0f}', f'{copy/half:.3f}')
    chunk = u[:1]
    for name,c,m in (('zstd, one segment', ZstdCoder(), None), ('g32, one segment, own model', G32Coder(), None),
                     ('g32, one segment, given model', G32Coder(), bank[11].with_classes(cls[:1]))):
        data,k = c.encode(chunk, 16, m),chunk.size
        enc,dec = best(lambda: c.encode(chunk, 16, m), 50),best(lambda: c.decode(data, chunk.shape, 16, m), 50)
        row(name, f'{8*len(data)/k:.3f}', f'{k/enc/1e6:.0f}', f'{k/dec/1e6:.0f}', f'{copy*k/n/dec:.3f}')
    if rans.gpu_ready():
        for m in (bank[10], bank[11], bank0): gpu(u, m, copy)
    else: print('no GPU here (or its decoder failed the known answer)')

if __name__=='__main__': main()
