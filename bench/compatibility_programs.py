"""Ordinary GPU programs, each of a few seconds: ``python bench/compatibility_programs.py NAME``.

They use what users use: frameworks, compilers, several processes, graphics, video, tools. No code here refers to qgpu.
Weights are random. A program exits with 77 if what it needs is not installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NOT_HERE = 77


def torch_matmul() -> None:
    """Multiply in several types and streams."""
    import torch

    streams = [torch.cuda.Stream() for _ in range(4)]
    for number, kind in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.float64)):
        with torch.cuda.stream(streams[number]):
            a = torch.randn(1024, 1024, device="cuda", dtype=torch.float32).to(kind)
            assert torch.isfinite(a @ a).all()
    torch.cuda.synchronize()


def torch_training() -> None:
    """Train a small convolutional network with mixed precision."""
    import torch
    import torchvision

    net = torchvision.models.resnet18().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(5):
        with torch.autocast("cuda"):
            loss = net(torch.randn(16, 3, 64, 64, device="cuda")).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(loss)


def torch_compiled() -> None:
    """Compile by Inductor, which compiles by Triton."""
    import torch

    @torch.compile
    def work(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x.cos()).softmax(-1)

    assert torch.isfinite(work(torch.randn(512, 512, device="cuda"))).all()


def torch_graph() -> None:
    """Capture a CUDA graph and replay it."""
    import torch

    x = torch.randn(256, 256, device="cuda")
    x @ x  # makes cuBLAS's workspace, which cannot be made while capturing
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x @ x
    for _ in range(50):
        graph.replay()
    assert torch.isfinite(y).all()


def torch_loader() -> None:
    """Load by worker processes into pinned memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(512, 1024))
    total = 0
    for (batch,) in DataLoader(data, batch_size=32, num_workers=4, pin_memory=True):
        total += len(batch.to("cuda", non_blocking=True))
    assert total == 512


def _take(queue: object, done: object) -> None:
    tensor = queue.get()  # type: ignore[attr-defined]
    tensor += 1
    done.put(float(tensor.sum()))  # type: ignore[attr-defined]


def torch_ipc() -> None:
    """Hand a tensor to another process by CUDA IPC."""
    import torch
    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    child = context.Process(target=_take, args=(queue, done))
    child.start()
    tensor = torch.zeros(1000, device="cuda")
    queue.put(tensor)
    assert done.get(timeout=60) == 1000
    child.join()


def torch_profiled() -> None:
    """Profile by Kineto, which uses CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        a = torch.randn(512, 512, device="cuda")
        for _ in range(10):
            a = a @ a / 512
        torch.cuda.synchronize()
    assert any(each.device_time_total > 0 for each in found.key_averages())


def torch_solvers() -> None:
    """Use cuSOLVER, cuSPARSE, cuFFT and cuRAND."""
    import torch

    a = torch.randn(128, 128, device="cuda")
    torch.linalg.svd(a)
    torch.linalg.cholesky(a @ a.T + 1000 * torch.eye(128, device="cuda"))
    torch.fft.fft2(a)
    sparse = torch.eye(128, device="cuda").to_sparse_csr()
    assert torch.allclose(sparse @ a, a)


def torch_attention() -> None:
    """Use every kind of fused attention."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.half)
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kind):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.cuda.synchronize()


def torch_expandable() -> None:
    """Let torch grow segments by the driver's virtual memory management."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    held = [torch.zeros(size << 20, dtype=torch.uint8, device="cuda") for size in (1, 30, 300, 7)]
    del held[1]
    torch.cuda.empty_cache()
    torch.cuda.mem_get_info()
    assert int(held[0].sum()) == 0


def torch_jpeg() -> None:
    """Encode on the CPU and decode by nvJPEG."""
    import torch
    from torchvision.io import decode_jpeg, encode_jpeg

    image = encode_jpeg(torch.randint(255, (3, 256, 256), dtype=torch.uint8))
    assert decode_jpeg(image, device="cuda").shape == (3, 256, 256)


def torch_quantised() -> None:
    """Multiply in FP8 and INT8."""
    import torch

    a = torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    b = torch.randint(-5, 5, (256, 256), device="cuda", dtype=torch.int8)
    torch._int_mm(b, b)
    torch.cuda.synchronize()


def _rank(rank: int, count: int, port: int) -> None:
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=count)
    x = torch.ones(1 << 20, device="cuda")
    distributed.all_reduce(x)
    every = [torch.empty_like(x) for _ in range(count)]
    distributed.all_gather(every, x)
    assert float(x[0]) == count
    distributed.destroy_process_group()


def nccl() -> None:
    """Reduce over every card by NCCL, a process for each."""
    import torch
    from torch import multiprocessing

    count = torch.cuda.device_count()
    multiprocessing.spawn(_rank, args=(count, 29400 + os.getpid() % 500), nprocs=count)


def peer_copies() -> None:
    """Copy between two cards directly."""
    import torch

    if torch.cuda.device_count() < 2:
        sys.exit(NOT_HERE)
    a = torch.randn(1 << 20, device="cuda:0")
    assert torch.equal(a.to("cuda:1").cpu(), a.cpu())


def transformers_generate() -> None:
    """Generate text by a small language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    model = LlamaForCausalLM(config).cuda().half().eval()
    import torch

    out = model.generate(torch.ones(1, 8, dtype=torch.long, device="cuda"), max_new_tokens=16, do_sample=False)
    assert out.shape[1] > 8


def accelerate_training() -> None:
    """Train with Accelerate and PEFT."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = get_peft_model(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4)), LoraConfig(r=4))
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(1000, (2, 32), device=accelerator.device)
    for _ in range(3):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def timm_inference() -> None:
    """Infer by a vision transformer."""
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224").cuda().eval()
    with torch.inference_mode():
        assert model(torch.randn(4, 3, 224, 224, device="cuda")).shape == (4, 1000)


def lightning_training() -> None:
    """Train with Lightning."""
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 32)), batch_size=8)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=1, accelerator="gpu", devices=1, **options).fit(Model(), data)


def geometric() -> None:
    """Convolve over a graph of nodes."""
    import torch
    from torch_geometric.nn import GCNConv

    edges = torch.randint(100, (2, 500), device="cuda")
    assert GCNConv(16, 4).cuda()(torch.randn(100, 16, device="cuda"), edges).shape == (100, 4)


def jax_jit() -> None:
    """Compile and differentiate by XLA."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    import jax
    import jax.numpy as jnp

    assert jax.devices()[0].platform == "gpu"
    step = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).mean()))
    x = jax.random.normal(jax.random.PRNGKey(0), (512, 512))
    for _ in range(10):
        x = x - step(x, x)
    assert bool(jnp.isfinite(x).all())


def flax_training() -> None:
    """Train by Flax and Optax."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import optax
    from flax import linen

    model = linen.Dense(8)
    x = jax.random.normal(jax.random.PRNGKey(0), (32, 16))
    params = model.init(jax.random.PRNGKey(1), x)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    for _ in range(3):
        grads = jax.grad(lambda p: (model.apply(p, x) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)


def cupy_arrays() -> None:
    """Use CuPy's arrays, FFT and own kernels."""
    import cupy

    x = cupy.random.randn(512, 512)
    cupy.fft.fft2(x)
    cupy.linalg.norm(x @ x)
    double = cupy.RawKernel('extern "C" __global__ void d(double *x) { x[threadIdx.x] *= 2; }', "d")
    double((1,), (32,), (x,))
    cupy.cuda.Device().synchronize()


def cupy_managed() -> None:
    """Use CuPy with managed memory, and with the driver's pools."""
    import cupy

    for allocator in (cupy.cuda.malloc_managed, cupy.cuda.malloc_async):
        with cupy.cuda.using_allocator(allocator):
            assert float(cupy.ones(1 << 20).sum()) == 1 << 20


def triton_kernel() -> None:
    """Compile and run a kernel by Triton."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(
            "import torch, triton, triton.language as tl\n"
            "@triton.jit\n"
            "def add(x, n: tl.constexpr):\n"
            "    at = tl.arange(0, n)\n"
            "    tl.store(x + at, tl.load(x + at) + 1)\n"
            "x = torch.zeros(256, device='cuda')\n"
            "add[(1,)](x, 256)\n"
            "assert float(x.sum()) == 256\n"
        )
        subprocess.run([sys.executable, str(file)], check=True)


def differential_equations() -> None:
    """Solve a differential equation by Diffrax on JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import diffrax
    import jax.numpy as jnp

    term = diffrax.ODETerm(lambda _t, y, _args: -y)
    out = diffrax.diffeqsolve(term, diffrax.Dopri5(), t0=0, t1=1, dt0=0.1, y0=jnp.ones(10))
    assert out.ys is not None


def _check(status: int) -> None:
    assert status == 0, status


def _context() -> ctypes.CDLL:
    """Load the driver's library and make a context."""
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _check(cuda.cuInit(0))
    _check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
    return cuda


def driver_api() -> None:
    """Use what the driver offers beside plain allocations: virtual memory, pools, hosts, contexts, events, IPC."""
    cuda = ctypes.CDLL("libcuda.so.1")

    handle, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGet(ctypes.byref(handle), 0))
    for _ in range(3):
        _check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, handle))
    size = 64 << 20
    for flag in (0, 1):
        _check(cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1 + flag))
        _check(cuda.cuMemFree_v2(pointer))
    host = ctypes.c_void_p()
    _check(cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(size), 3))
    _check(cuda.cuMemFreeHost(host))
    buffer = (ctypes.c_char * (8 << 20))()
    _check(cuda.cuMemHostRegister_v2(buffer, ctypes.c_size_t(8 << 20), 2))
    _check(cuda.cuMemHostUnregister(buffer))
    _check(cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(size), None))
    _check(cuda.cuMemFreeAsync(pointer, None))
    _check(cuda.cuCtxSynchronize())
    event = ctypes.c_void_p()
    for flags in (0, 1, 2, 6):  # 6: for other processes, without times
        _check(cuda.cuEventCreate(ctypes.byref(event), flags))
        _check(cuda.cuEventDestroy_v2(event))
    pitch = ctypes.c_size_t()
    _check(cuda.cuMemAllocPitch_v2(ctypes.byref(pointer), ctypes.byref(pitch), 1000, 1000, 4))
    _check(cuda.cuMemFree_v2(pointer))
    stream = ctypes.c_void_p()
    for priority in (0, -1, -5):
        _check(cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, priority))
    for limit in range(4):
        value = ctypes.c_size_t()
        if cuda.cuCtxGetLimit(ctypes.byref(value), limit) == 0:
            _check(cuda.cuCtxSetLimit(limit, value))
    _check(cuda.cuCtxDestroy_v2(context))


def _sources(name: str, text: str, *options: str) -> None:
    """Compile a CUDA C++ program and run it."""
    if not shutil.which("nvcc"):
        sys.exit(NOT_HERE)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / f"{name}.cu", Path(folder) / name
        source.write_text(text)
        subprocess.run(["nvcc", "-arch=native", *options, "-o", str(program), str(source)], check=True)
        subprocess.run([str(program)], check=True)


def cooperative() -> None:
    """Synchronise a whole grid, print from a kernel, and allocate in a kernel."""
    _sources(
        "grid",
        """
#include <cooperative_groups.h>
#include <cstdio>
__global__ void work(int *x)
{
	cooperative_groups::this_grid().sync();
	int *mine = (int *)malloc(64);
	if (mine) { *mine = 1; atomicAdd(x, *mine); free(mine); }
	if (!blockIdx.x && !threadIdx.x) printf("here\\n");
}
int main()
{
	int *x;
	cudaMallocManaged(&x, 4);
	*x = 0;
	void *arguments[] = { &x };
	cudaLaunchCooperativeKernel((void *)work, dim3(8), dim3(32), arguments);
	cudaDeviceSynchronize();
	return *x == 256 ? 0 : 1;
}
""",
    )


def dynamic_parallelism() -> None:
    """Start kernels from a kernel."""
    _sources(
        "nested",
        """
__global__ void inner(int *x) { atomicAdd(x, 1); }
__global__ void outer(int *x) { inner<<<1, 32>>>(x); }
int main()
{
	int *x, got = 0;
	cudaMalloc(&x, 4);
	cudaMemset(x, 0, 4);
	outer<<<1, 4>>>(x);
	cudaDeviceSynchronize();
	cudaMemcpy(&got, x, 4, cudaMemcpyDeviceToHost);
	return got == 128 ? 0 : 1;
}
""",
        "-rdc=true",
        "-lcudadevrt",
    )


def textures() -> None:
    """Sample a texture of an array."""
    _sources(
        "texture",
        """
__global__ void work(cudaTextureObject_t t, float *out) { out[threadIdx.x] = tex2D<float>(t, threadIdx.x, 0); }
int main()
{
	auto kind = cudaCreateChannelDesc<float>();
	cudaArray_t array;
	cudaMallocArray(&array, &kind, 32, 32);
	cudaResourceDesc resource = {};
	resource.resType = cudaResourceTypeArray;
	resource.res.array.array = array;
	cudaTextureDesc texture = {};
	cudaTextureObject_t object;
	if (cudaCreateTextureObject(&object, &resource, &texture, nullptr)) return 1;
	float *out;
	cudaMalloc(&out, 128);
	work<<<1, 32>>>(object, out);
	return cudaDeviceSynchronize();
}
""",
    )


def managed_prefetch() -> None:
    """Advise and prefetch managed memory, and touch it from both sides."""
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        x = cupy.zeros(8 << 20)
        cupy.cuda.runtime.memAdvise(x.data.ptr, x.nbytes, 1, 0)
        cupy.cuda.runtime.memPrefetchAsync(x.data.ptr, x.nbytes, 0, 0)
        x += 1
        assert float(x.get()[0]) == 1


def host_registered() -> None:
    """Register large memory of the host for the card: private, and shared with other processes."""
    import mmap

    cuda = _context()
    size, pointer = 512 << 20, ctypes.c_uint64()
    for sharing in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
        memory = mmap.mmap(-1, size, sharing | mmap.MAP_ANONYMOUS)
        view = (ctypes.c_char * size).from_buffer(memory)
        _check(cuda.cuMemHostRegister_v2(view, ctypes.c_size_t(size), 2))
        _check(cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), view, 0))
        _check(cuda.cuMemsetD8_v2(pointer, 7, ctypes.c_size_t(size)))
        _check(cuda.cuCtxSynchronize())
        _check(cuda.cuMemHostUnregister(view))
        assert view[size - 1] == b"\7"


def many_threads() -> None:
    """Make contexts, memory, streams and events in eight threads at once."""
    import threading

    cuda, done = _context(), []

    def work() -> None:
        for _ in range(3):
            context, pointer, stream, event = (ctypes.c_void_p() for _ in range(4))
            _check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
            _check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8 << 20)))
            _check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
            _check(cuda.cuEventCreate(ctypes.byref(event), 0))
            _check(cuda.cuMemsetD8Async(pointer, 1, ctypes.c_size_t(8 << 20), stream))
            _check(cuda.cuStreamSynchronize(stream))
            _check(cuda.cuCtxDestroy_v2(context))
        done.append(True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(threads)


def green_contexts() -> None:
    """Run a kernel in a green context, on a part of the SMs."""
    _sources(
        "green",
        """
#include <cassert>
#include <cuda.h>
__global__ void twice(int *x) { x[threadIdx.x] *= 2; }
int main() {
    CUdevice device; CUdevResource all, part, rest; CUdevResourceDesc desc; CUgreenCtx green; CUcontext context;
    unsigned groups = 1;
    assert(!cuInit(0) && !cuDeviceGet(&device, 0));
    assert(!cuDevicePrimaryCtxRetain(&context, device) && !cuCtxSetCurrent(context));
    assert(!cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
    assert(!cuDevSmResourceSplitByCount(&part, &groups, &all, &rest, 0, 16));
    assert(!cuDevResourceGenerateDesc(&desc, &part, 1));
    assert(!cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
    assert(!cuCtxFromGreenCtx(&context, green) && !cuCtxSetCurrent(context));
    int *x, host = 21;
    assert(!cudaMalloc(&x, 4) && !cudaMemcpy(x, &host, 4, cudaMemcpyHostToDevice));
    twice<<<1, 1>>>(x);
    assert(!cudaMemcpy(&host, x, 4, cudaMemcpyDeviceToHost) && host == 42);
    assert(!cuGreenCtxDestroy(green));
}
""",
        "-lcuda",
    )


def shared_virtual_memory() -> None:
    """Hand memory of the driver's virtual memory management to another process, by a descriptor."""
    _sources(
        "shared",
        """
#include <cassert>
#include <cuda.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
static CUmemGenericAllocationHandle memory;
static void fd_to(int sock, int fd) {
    char byte = 0, space[CMSG_SPACE(4)] = {}; iovec io = {&byte, 1};
    msghdr message = {0, 0, &io, 1, space, sizeof(space), 0}; cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET; head->cmsg_type = SCM_RIGHTS; head->cmsg_len = CMSG_LEN(4);
    *(int *)CMSG_DATA(head) = fd;
    assert(sendmsg(sock, &message, 0) == 1);
}
static int fd_from(int sock) {
    char byte, space[CMSG_SPACE(4)]; iovec io = {&byte, 1};
    msghdr message = {0, 0, &io, 1, space, sizeof(space), 0};
    assert(recvmsg(sock, &message, 0) == 1);
    return *(int *)CMSG_DATA(CMSG_FIRSTHDR(&message));
}
int main() {
    int ends[2], first, fd; size_t size; CUdevice device; CUcontext context; CUdeviceptr at; unsigned got = 0;
    assert(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    first = fork() != 0;
    assert(!cuInit(0) && !cuDeviceGet(&device, 0) && !cuDevicePrimaryCtxRetain(&context, device));
    assert(!cuCtxSetCurrent(context));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED; prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    assert(!cuMemGetAllocationGranularity(&size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (first) {
        assert(!cuMemCreate(&memory, size, &prop, 0));
        assert(!cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    } else {
        fd = fd_from(ends[1]);
        assert(!cuMemImportFromShareableHandle(&memory, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    }
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    assert(!cuMemAddressReserve(&at, size, 0, 0, 0) && !cuMemMap(at, size, 0, memory, 0));
    assert(!cuMemSetAccess(at, size, &access, 1));
    if (first) {
        int status;
        assert(!cuMemsetD32(at, 42, 1) && !cuCtxSynchronize());
        fd_to(ends[0], fd);
        assert(wait(&status) > 0 && !status);
    } else {
        assert(!cuMemcpyDtoH(&got, at, 4) && got == 42);
    }
    assert(!cuMemUnmap(at, size) && !cuMemRelease(memory) && !cuMemAddressFree(at, size));
}
""",
        "-lcuda",
    )


def graph_memory() -> None:
    """Launch a graph that allocates and frees memory, over and over."""
    _sources(
        "graph",
        """
#include <cassert>
__global__ void twice(int *x) { x[threadIdx.x] *= 2; }
int main() {
    cudaStream_t stream; cudaGraph_t graph; cudaGraphExec_t run; void *memory; int *x;
    assert(!cudaStreamCreate(&stream) && !cudaMalloc(&x, 128));
    assert(!cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert(!cudaMallocAsync(&memory, 64 << 20, stream) && !cudaMemsetAsync(memory, 1, 64 << 20, stream));
    twice<<<1, 32, 0, stream>>>(x);
    assert(!cudaFreeAsync(memory, stream) && !cudaStreamEndCapture(stream, &graph));
    assert(!cudaGraphInstantiate(&run, graph, 0));
    for (int i = 0; i < 50; i++)
        assert(!cudaGraphLaunch(run, stream));
    assert(!cudaStreamSynchronize(stream) && !cudaDeviceGraphMemTrim(0));
}
""",
    )


def opencl() -> None:
    """Run a kernel by OpenCL."""
    os.environ.setdefault("OCL_ICD_FILENAMES", "libnvidia-opencl.so.1")
    import numpy
    import pyopencl

    context = pyopencl.Context([each for platform in pyopencl.get_platforms() for each in platform.get_devices()][:1])
    queue = pyopencl.CommandQueue(context)
    host = numpy.ones(1 << 20, dtype=numpy.float32)
    flags = pyopencl.mem_flags
    memory = pyopencl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=host)
    source = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2; }"
    pyopencl.Program(context, source).build().twice(queue, host.shape, None, memory)
    pyopencl.enqueue_copy(queue, host, memory).wait()
    assert host.sum() == 2 << 20


def many_processes() -> None:
    """Use the card from eight processes at once."""
    command = [sys.executable, __file__, "driver-api"]
    running = [subprocess.Popen(command) for _ in range(8)]
    assert [each.wait() for each in running] == [0] * 8


def nvml() -> None:
    """Ask NVML for everything that monitoring tools ask."""
    import pynvml

    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetMemoryInfo(card)
        pynvml.nvmlDeviceGetUtilizationRates(card)
        for name in ("Name", "UUID", "Temperature", "PowerUsage", "ComputeRunningProcesses", "PcieThroughput"):
            with contextlib.suppress(pynvml.NVMLError, TypeError):
                getattr(pynvml, f"nvmlDeviceGet{name}")(card)


def nvidia_smi() -> None:
    """Show what nvidia-smi shows."""
    subprocess.run(["nvidia-smi"], check=True, stdout=subprocess.DEVNULL)


def nvidia_smi_all() -> None:
    """Show all that nvidia-smi knows."""
    for options in (["-q"], ["-L"], ["topo", "-m"], ["dmon", "-c", "1"], ["pmon", "-c", "1"]):
        subprocess.run(["nvidia-smi", *options], check=True, stdout=subprocess.DEVNULL)
    query = "--query-gpu=name,memory.used,utilization.gpu,temperature.gpu,power.draw"
    subprocess.run(["nvidia-smi", query, "--format=csv"], check=True, stdout=subprocess.DEVNULL)


def opengl() -> None:
    """Draw by OpenGL without a screen (EGL)."""
    import moderngl

    context = moderngl.create_standalone_context(backend="egl")
    assert "NVIDIA" in context.info["GL_RENDERER"]
    frame = context.simple_framebuffer((64, 64))
    frame.use()
    frame.clear(1.0, 0.0, 0.0, 1.0)
    assert frame.read()[0] == 255


def opengl_cuda() -> None:
    """Let CUDA write a buffer of OpenGL's, as simulators with cameras do."""
    import moderngl

    context = moderngl.create_standalone_context(backend="egl")
    buffer = context.buffer(reserve=1 << 20)
    cuda, resource, pointer, size = _context(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
    _check(cuda.cuGraphicsGLRegisterBuffer(ctypes.byref(resource), buffer.glo, 0))
    _check(cuda.cuGraphicsMapResources(1, ctypes.byref(resource), None))
    _check(cuda.cuGraphicsResourceGetMappedPointer_v2(ctypes.byref(pointer), ctypes.byref(size), resource))
    _check(cuda.cuMemsetD8_v2(pointer, 7, size))
    _check(cuda.cuCtxSynchronize())
    _check(cuda.cuGraphicsUnmapResources(1, ctypes.byref(resource), None))
    assert buffer.read() == b"\7" * (1 << 20)


def vulkan() -> None:
    """Find the card by Vulkan and make a device on it."""
    try:
        library = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        sys.exit(NOT_HERE)
    made = (ctypes.c_uint32 * 16)(1)
    instance, count = ctypes.c_void_p(), ctypes.c_uint32(8)
    assert library.vkCreateInstance(made, None, ctypes.byref(instance)) == 0
    cards = (ctypes.c_void_p * 8)()
    assert library.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), cards) == 0
    assert count.value >= 1
    priority = ctypes.c_float(1.0)

    class Queue(ctypes.Structure):
        _fields_ = [
            ("kind", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("flags", ctypes.c_uint32),
            ("family", ctypes.c_uint32),
            ("count", ctypes.c_uint32),
            ("priorities", ctypes.c_void_p),
        ]

    class Device(ctypes.Structure):
        _fields_ = [
            ("kind", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("flags", ctypes.c_uint32),
            ("queues", ctypes.c_uint32),
            ("queue", ctypes.c_void_p),
            ("rest", ctypes.c_uint64 * 5),
        ]

    queue = Queue(2, None, 0, 0, 1, ctypes.cast(ctypes.byref(priority), ctypes.c_void_p))
    wanted = Device(3, None, 0, 1, ctypes.cast(ctypes.byref(queue), ctypes.c_void_p))
    device = ctypes.c_void_p()
    status = library.vkCreateDevice(ctypes.c_void_p(cards[0]), ctypes.byref(wanted), None, ctypes.byref(device))
    assert status == 0, status
    library.vkDestroyDevice(device, None)


def video() -> None:
    """Decode by NVDEC what a software encoder made; the H200 has no video encoder."""
    import PyNvVideoCodec

    with tempfile.TemporaryDirectory() as folder:
        import cv2
        import numpy

        file = Path(folder) / "a.mp4"
        writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), 25, (320, 240))
        for shade in range(30):
            writer.write(numpy.full((240, 320, 3), shade * 8, numpy.uint8))
        writer.release()
        decoder = PyNvVideoCodec.SimpleDecoder(str(file), gpu_id=0)
        assert len(decoder) >= 25
        assert decoder[3] is not None


def hardware_jpeg() -> None:
    """Decode by the JPEG engine."""
    import cv2
    import numpy
    from nvidia import nvimgcodec

    _, data = cv2.imencode(".jpg", numpy.zeros((512, 512, 3), numpy.uint8))
    backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.HW_GPU_ONLY)]
    decoder = nvimgcodec.Decoder(device_id=0, backends=backends)
    assert decoder.decode(data.tobytes()) is not None


#: Adds one to each number; its threads are those of one block.
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 data)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<5>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [data];
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r2, [%rd4];
    add.s32 %r3, %r2, 1;
    st.global.u32 [%rd4], %r3;
    ret;
}
"""


def ptx_kernel() -> None:
    """Launch a kernel by the driver's functions alone, without an error or a leak."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def check(status: int) -> None:
        assert status == 0, status

    device, count = ctypes.c_int(), 256
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory, size = ctypes.c_uint64(), ctypes.c_size_t(4 * count)
    numbers = (ctypes.c_uint32 * count)(*range(count))
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuModuleLoadData(ctypes.byref(module), _PTX))
    check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"add_one"))
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size))
    check(cuda.cuMemcpyHtoD_v2(memory, numbers, size))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    check(cuda.cuLaunchKernel(kernel, 1, 1, 1, count, 1, 1, 0, None, arguments, None))
    check(cuda.cuCtxSynchronize())
    check(cuda.cuMemcpyDtoH_v2(numbers, memory, size))
    assert list(numbers) == list(range(1, count + 1))
    check(cuda.cuMemFree_v2(memory))
    check(cuda.cuModuleUnload(module))
    check(cuda.cuDevicePrimaryCtxRelease_v2(device))


def _find(name: str, *places: str) -> str:
    """Find a tool on PATH or in these places (glob patterns); end the program if it is not installed."""
    found = shutil.which(name) or next((path for place in places for path in sorted(glob.glob(place))), None)
    if found is None:
        print(f"{name} is not installed", file=sys.stderr)
        sys.exit(NOT_HERE)
    return found


def _use(tool: str, options: list[str], program: str) -> tuple[int, str]:
    """Run one of these programs under a tool; return its exit code and what was said, which is printed too."""
    command = [tool, *options, sys.executable, __file__, program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    print(done.stdout, flush=True)
    print(f"{Path(tool).name} ended with {done.returncode}", flush=True)
    return done.returncode, done.stdout


def compute_sanitizer() -> None:
    """Check a program by compute-sanitizer."""
    tool = _find("compute-sanitizer", "/usr/local/cuda*/bin/compute-sanitizer")
    code, said = _use(tool, ["--error-exitcode", "9", "--report-api-errors", "no"], "ptx-kernel")
    sys.exit(code if code or "ERROR SUMMARY: 0 errors" in said else 1)


def nsight_compute() -> None:
    """Read hardware counters by ncu."""
    options = ["--clock-control", "none", "--launch-count", "1"]
    code, said = _use(_find("ncu", "/usr/local/cuda*/bin/ncu"), options, "cupy-arrays")
    failed = "==ERROR==" in said or "No kernels were profiled" in said
    sys.exit(code or int(failed))


def nsys() -> None:
    """Record a timeline by nsys; a recording counts even where nsys cannot convert it to a report."""
    tool = _find(
        "nsys", "/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys"
    )
    with tempfile.TemporaryDirectory() as folder:
        options = ["profile", "--trace=cuda", "--sample=none", "--cpuctxsw=none", "--output", f"{folder}/report"]
        _, said = _use(tool, options, "ptx-kernel")
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    print("recorded:", sizes, flush=True)
    failed = "AssertionError" in said or "Traceback" in said  # of the program
    sys.exit(int(failed or max(sizes.values(), default=0) < _RECORDED_BYTES))


def cuda_gdb() -> None:
    """Run a program under cuda-gdb."""
    options = ["--batch", "-ex", "run", "--args"]
    _, said = _use(_find("cuda-gdb", "/usr/local/cuda*/bin/cuda-gdb"), options, "ptx-kernel")
    sys.exit(int("exited normally" not in said))


#: The smallest recording of nsys that holds anything.
_RECORDED_BYTES = 4096
#: Debuggers and profilers. All but the last may be refused, with a line that tells the reason and the remedy.
TOOLS = ("compute-sanitizer", "nsight-compute", "cuda-gdb", "nsys", "torch-profiled")
REFUSABLE = TOOLS[:-1]
#: Programs that map memory by RM instead of UVM: a pod with a memory limit may not, because RM's page tables take
#: memory of the card that cannot be counted.
UNLIMITED = ("opengl", "opengl-cuda", "vulkan", "video", "hardware-jpeg")
#: Programs that draw, for which a pod needs --allow-graphics.
GRAPHICS = ("opengl", "opengl-cuda", "vulkan")

PROGRAMS: dict[str, Callable[[], None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        torch_matmul,
        torch_training,
        torch_compiled,
        torch_graph,
        torch_loader,
        torch_ipc,
        torch_profiled,
        torch_solvers,
        torch_attention,
        torch_expandable,
        torch_jpeg,
        torch_quantised,
        nccl,
        peer_copies,
        transformers_generate,
        accelerate_training,
        timm_inference,
        lightning_training,
        geometric,
        jax_jit,
        flax_training,
        cupy_arrays,
        cupy_managed,
        triton_kernel,
        differential_equations,
        driver_api,
        ptx_kernel,
        cooperative,
        dynamic_parallelism,
        textures,
        managed_prefetch,
        host_registered,
        many_threads,
        green_contexts,
        shared_virtual_memory,
        graph_memory,
        opencl,
        many_processes,
        nvml,
        nvidia_smi,
        nvidia_smi_all,
        opengl,
        opengl_cuda,
        vulkan,
        video,
        hardware_jpeg,
        compute_sanitizer,
        nsight_compute,
        cuda_gdb,
        nsys,
    )
}


def main() -> int:
    """Run the program that is named; return the exit code."""
    try:
        PROGRAMS[sys.argv[1]]()
    except ImportError as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    return 0


if __name__ == "__main__":
    sys.exit(main())
