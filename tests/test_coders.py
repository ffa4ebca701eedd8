"Damage, threads, GPU source: what would be absurd in a notebook. `-m slow` for thousands of cases."
import ctypes, shutil, subprocess
from concurrent.futures import ThreadPoolExecutor
import numpy as np, pytest
from veloxquant_mlx import rans
from veloxquant_mlx.coders import G32Coder, PackedCoder, ZstdCoder, _fit, to_symbols
from veloxquant_mlx.rans import RansModel, g32_decode, g32_encode, quantise_rows, uncodable

CODERS = PackedCoder(), ZstdCoder(), G32Coder()

def gauss(shape, sd, seed=0): return np.rint(np.random.default_rng(seed).normal(size=shape)*sd).astype(np.int32)

def damage(data, rng):
    "One or two random changes: bits, bytes, numbers blown up, cuts, repeats, swaps, splices."
    b = bytearray(data)
    for _ in range(rng.integers(1, 3)):
        if not b: break
        k,front = int(rng.integers(len(b))),int(rng.integers(min(len(b), 40)))
        match rng.integers(8):
            case 0: b[k] ^= 1<<int(rng.integers(8))
            case 1: b[front] = int(rng.integers(256))
            case 2: del b[k:]
            case 3: b[k:k] = b[:int(rng.integers(1, 99))]
            case 4: b[front:front+4] = b'\xff'*4
            case 5: b[front:front+8] = bytes(rng.integers(0, 256, 8, dtype=np.uint8))
            case 6: del b[front:front+int(rng.integers(1, 5))]
            case 7: b += bytes(rng.integers(0, 256, int(rng.integers(1, 300)), dtype=np.uint8))
    return bytes(b)

def cases():
    bank = RansModel(quantise_rows(np.array([[90, 3, 1, 0, 0, 0, 1, 3], [9, 6, 3, 1, 1, 1, 3, 6]]*2), 10), np.arange(37)%2, 1, np.minimum(np.arange(8), 1))
    return [(gauss((2, 64, 40), .7), 16, None), (gauss((1, 256, 64), 2), 16, None), (gauss((3, 50, 37), .4), 8, bank),
            (gauss((1, 128, 33), 20), 64, None), (np.abs(gauss((2, 30, 64), 1)).astype(np.uint8), 4, None),
            (gauss((2, 200, 32), .3), 2, None), (gauss((1, 512, 32), 40), 256, None)]

def fuzz(n, seed):
    rng,refused,wrong = np.random.default_rng(seed),0,0
    for codes,A,model in cases():
        for c in CODERS:
            data = c.encode(codes, A, model)
            for _ in range(n):
                bad,signed = damage(data, rng),codes.dtype.kind=='i'
                try: out = c.decode(bad, codes.shape, A, model, signed)
                except ValueError: refused += 1; continue
                assert out.shape==codes.shape and out.dtype==(np.int32 if signed else np.uint8)
                wrong += c.id!='raw' and not (out==codes).all()
    return refused,wrong

def test_damage():
    refused,wrong = fuzz(40, 0)
    assert refused>500 and wrong<10

@pytest.mark.slow
def test_damage_long():
    refused,wrong = fuzz(1000, 1)
    print(refused, wrong)
    assert wrong<200

def test_random_bytes():
    rng = np.random.default_rng(2)
    for c in CODERS:
        for n in (0, 1, 2, 6, 20, 200, 2000):
            for kind in range(4):
                b = bytes([kind, 4, 2, 64, 40])+bytes(rng.integers(0, 256, n, dtype=np.uint8))
                for data in (b, b[5:]):
                    try: c.decode(data, (2, 64, 40), 16)
                    except ValueError: pass

def test_no_allocation_beyond_the_shape():
    "A head that claims much is refused; a zstd bomb stops at the size that is expected."
    from veloxquant_mlx.coders import zstd
    bomb = zstd.compress(bytes(1<<28), 1)
    good = ZstdCoder().encode(gauss((1, 256, 64), 1), 16)
    with pytest.raises(ValueError, match='zstd'): ZstdCoder().decode(bytes([1, 4, 1, 4, 8, 0])+bomb, (1, 4, 8), 16)
    with pytest.raises(ValueError, match="shape"): ZstdCoder().decode(good, (1, 4, 8), 16, signed=True)
    with pytest.raises(ValueError, match='rows'): # 256 contexts x 16 classes for 32 codes
        G32Coder().decode(bytes([2, 8, 1, 4, 8, 0, 1, 4 | 4<<4, 255])+bytes(999), (1, 4, 8), 256)

def test_threads():
    "The kernels release the GIL and share nothing."
    codes = [gauss((2, 128, 64), 1, i) for i in range(16)]
    with ThreadPoolExecutor(4) as ex:
        for c in CODERS:
            datas = list(ex.map(lambda x: c.encode(x, 16), codes))
            assert datas==[c.encode(x, 16) for x in codes]
            for a,b in zip(ex.map(lambda d: c.decode(d, (2, 128, 64), 16, signed=True), datas), codes): assert (a==b).all()

def test_read_only_input():
    x = np.frombuffer(bytes(2*32*32), np.uint8).reshape(2, 32, 32)
    for c in CODERS: assert (c.decode(c.encode(x, 16), x.shape, 16)==x).all()

@pytest.mark.slow
def test_many_models():
    rng = np.random.default_rng(3)
    for k in range(300):
        A,C,prec = 1<<int(rng.integers(1, 9)),int(rng.integers(1, 20)),int(rng.integers(9, 13))
        if 2*A>1<<prec: continue
        order,shape = int(rng.integers(2)),tuple(rng.integers(1, (4, 40, 150)))
        K = int(rng.integers(2, min(A, 16)+1)) if order else 1
        w = rng.dirichlet(np.full(A, 10**rng.uniform(-3, 1)), C*K)*(rng.random((C*K, A))>.1)
        ctx = rng.integers(0, K, A) if order else None
        if order: ctx[0] = K-1
        m = RansModel(quantise_rows(w, prec), rng.integers(0, C, shape[::2] if k%2 else shape[2]), order, ctx)
        codes,pos = uncodable(rng.integers(0, A, shape, dtype=np.uint8), m)
        assert (g32_decode(*g32_encode(codes, m), m, shape)[0]==codes).all()
        v = gauss(shape, A/3, k)
        assert (G32Coder().decode(G32Coder().encode(v, A, m), shape, A, m, True)==v).all()

CONSTS = ''.join(f'constexpr int {k} = {v};\n' for k,v in dict(A=16, PREC=11, STAGED=1, WORDS=8192).items())
ARGS = ('const uint32_t* states, const uint32_t* offs, const uint16_t* words, const uint8_t* cls, const uint8_t* ctx, '
        'const uint32_t* table, const uint32_t* dims, uint8_t* out, uint32_t* fin, uint32_t* pos')
SHIM = '''
typedef unsigned int uint; typedef unsigned long ulong; struct uint3_ { uint x, y, z; };
enum class mem_flags { mem_threadgroup }; void threadgroup_barrier(mem_flags);
struct simd_vote { typedef ulong vote_t; explicit operator vote_t() const; }; simd_vote simd_ballot(bool); uint popcount(uint);
#define threadgroup static
'''

def test_cuda_source(tmp_path):
    if not shutil.which('nvcc'): pytest.skip('no nvcc')
    (tmp_path/'k.cu').write_text(f'#include <cstdint>\n{rans._CUDA[0]}\n{CONSTS}__global__ void k({ARGS}) {{\n{rans._CUDA[1]}{rans._GPU_LANE}{rans._GPU_STEP}\n}}\n')
    subprocess.run(['nvcc', '-std=c++17', '-cubin', '-arch=sm_90', '-o', tmp_path/'k.cubin', tmp_path/'k.cu'], check=True)

def test_metal_source(tmp_path):
    "MSL as plain C++ with its few names stubbed out: slips of syntax and type only."
    if not shutil.which('g++'): pytest.skip('no g++')
    ids = 'uint thread_index_in_simdgroup, uint simdgroup_index_in_threadgroup, uint3_ thread_position_in_threadgroup, uint3_ threads_per_threadgroup, uint3_ threadgroup_position_in_grid'
    (tmp_path/'k.cpp').write_text(f'#include <cstdint>\n{SHIM}{rans._METAL[0]}\n{CONSTS}void k({ARGS}, {ids}) {{\n{rans._METAL[1]}{rans._GPU_LANE}{rans._GPU_STEP}\n}}\n')
    subprocess.run(['g++', '-std=c++17', '-Wall', '-Werror', '-c', '-o', '/dev/null', tmp_path/'k.cpp'], check=True)

EMULATOR = '''
#include <cstdint>
#include <barrier>
#include <thread>
#include <vector>
#include <functional>
typedef unsigned int uint;
static std::barrier<> sync_(32);
static thread_local uint lane_;
static uint bits_;
static uint ballot(bool b) {                         // every lane calls it, as in a warp
  if (lane_ == 0) bits_ = 0;
  sync_.arrive_and_wait();
  if (b) __atomic_fetch_or(&bits_, 1u << lane_, __ATOMIC_SEQ_CST);
  sync_.arrive_and_wait();
  const uint r = bits_;
  sync_.arrive_and_wait();
  return r;
}
#define G32_IDX unsigned long long
#define G32_BARRIER sync_.arrive_and_wait()
#define G32_BALLOT(b) ballot(b)
#define G32_POPC(v) ((uint)__builtin_popcount(v))
#define G32_TAB(i) (STAGED ? smem[i] : table[i])
'''

@pytest.mark.parametrize('case', [0, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3, 4, 5, 6))])
def test_gpu_body_on_the_cpu(tmp_path, case):
    "The kernel body itself, one thread a lane, one block of one warp a segment."
    if not shutil.which('g++'): pytest.skip('no g++')
    codes,A,model = cases()[case]
    sym,*_ = to_symbols(codes, A)
    if model is None: model,_ = _fit(sym, A, codes.dtype.kind=='i')
    sym,_ = uncodable(sym, model)
    (S,T,D),table = sym.shape,model.decode_tables[0].reshape(-1)
    x,offs,buf,cls = rans._open(*g32_encode(sym, model), model, sym.shape)
    consts = ''.join(f'constexpr int {k} = {v};\n' for k,v in dict(A=A, PREC=model.prec, STAGED=int(table.nbytes<=32768), WORDS=8192).items())
    (tmp_path/'e.cpp').write_text(f'''{EMULATOR}{consts}static uint smem[WORDS];
static void lane_main(uint lane, uint blk, {ARGS}) {{
  lane_ = lane; const uint tid = lane, nthr = 32, warp = 0, nwarp = 1;
{rans._GPU_LANE}{rans._GPU_STEP}
}}
extern "C" void run({ARGS}) {{
  for (uint blk = 0; blk < dims[0]; ++blk) {{
    std::vector<std::thread> ts;
    for (uint l = 0; l < 32; ++l) ts.emplace_back(lane_main, l, blk, states, offs, words, cls, ctx, table, dims, out, fin, pos);
    for (auto& t : ts) t.join();
  }}
}}''')
    subprocess.run(['g++', '-O1', '-std=c++20', '-pthread', '-shared', '-fPIC', '-o', tmp_path/'e.so', tmp_path/'e.cpp'], check=True)
    dims = np.array([S, T, D, int(model.ctx.max())+1, table.size], np.uint32)
    out,fin,pos = np.full(sym.shape, 255, np.uint8),np.zeros((S, 32), np.uint32),np.zeros(S, np.uint32)
    args = x,offs.astype(np.uint32),buf,cls,model.ctx,table,dims,out,fin,pos
    ctypes.CDLL(str(tmp_path/'e.so')).run(*(a.ctypes.data_as(ctypes.c_void_p) for a in args))
    assert (out==sym).all() and (fin==rans.LOW).all() and (pos==offs[1:]).all()

def test_gpu():
    if not rans.gpu_ready(): pytest.skip('no GPU')
    for codes,A,model in cases():
        data = G32Coder().encode(codes, A, model)
        got = G32Coder(gpu=True).decode(data, codes.shape, A, model, codes.dtype.kind=='i')
        assert (got==codes).all()
