/* SPDX-License-Identifier: GPL-2.0 */
/*
 * cu.h - the part of the CUDA driver API that attackers use, found with dlopen, so that no toolkit is needed. The
 * declarations follow NVIDIA's cuda.h. Calls are made as CU(cuInit, 0); they return CUDA's code and nothing is checked.
 */
#ifndef _CU_H
#define _CU_H

#include <dlfcn.h>

#include "attack.h"

typedef unsigned long long CUdeviceptr;

struct cu_location {
	int type, id;
};

/* CUmemAllocationProp */
struct cu_prop {
	int type, handle_types;
	struct cu_location location;
	void *win32;
	unsigned char flags[8];
};

struct cu_access {
	struct cu_location location;
	int flags;
};

/* CUmemPoolProps */
struct cu_pool {
	int type, handle_types;
	struct cu_location location;
	void *security;
	size_t max_size;
	unsigned short usage;
	unsigned char reserved[54];
};

/* CUDA_MEM_ALLOC_NODE_PARAMS */
struct cu_alloc_node {
	struct cu_pool pool;
	const struct cu_access *access;
	size_t nr_access, bytes;
	CUdeviceptr address;
};

#define CU_DEVICE_LOCATION	{ 1, 0 }
#define CU_POSIX_FD		1

static inline void *cu_symbol(const char *name)
{
	static void *library;
	void *found;

	library = library ?: dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	found = library ? dlsym(library, name) : NULL;
	if (!found) {
		report("cannot start: no %s in libcuda.so.1", name);
		exit(4);
	}
	return found;
}

/* On x86-64 a call through int (*)() passes integers and pointers as their own types; write sizes and handles in full. */
#define CU(name, ...) (((int (*)())cu_symbol(#name))(__VA_ARGS__))

static inline void cu_open(void)
{
	void *context;
	int device, code;

	if ((code = CU(cuInit, 0)) || (code = CU(cuDeviceGet, &device, 0)) ||
	    (code = CU(cuCtxCreate_v2, &context, 0, device))) {
		report("cannot start: CUDA says %d", code);
		exit(4);
	}
}

/* Kernels: one spins for so many rounds on every thread, one stores to an address, one never ends, one traps. */
static const char cu_ptx[] =
	".version 7.0\n.target sm_70\n.address_size 64\n"
	".visible .entry spin(.param .u64 rounds) {\n"
	".reg .pred %p; .reg .b64 %r;\n"
	"ld.param.u64 %r, [rounds];\n"
	"LOOP: sub.u64 %r, %r, 1; setp.ne.u64 %p, %r, 0; @%p bra LOOP; ret; }\n"
	".visible .entry forever() { LOOP: membar.gl; bra LOOP; }\n"
	".visible .entry store(.param .u64 at) { .reg .b64 %a; ld.param.u64 %a, [at]; st.global.u64 [%a], %a; ret; }\n"
	".visible .entry assertion() { trap; ret; }\n";

static inline void *cu_kernel(const char *name)
{
	void *module, *function;
	int code = CU(cuModuleLoadData, &module, cu_ptx);

	if (code || (code = CU(cuModuleGetFunction, &function, module, name))) {
		report("cannot start: kernel %s: CUDA says %d", name, code);
		exit(4);
	}
	return function;
}

static inline int cu_launch(void *function, void *parameters[])
{
	return CU(cuLaunchKernel, function, 528, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
}

#endif
