// SPDX-License-Identifier: GPL-2.0
/*
 * fault.c - a CUDA program that goes wrong in one of the ways programs do. It reports before, since it may not after.
 */
#include <pthread.h>
#include <signal.h>

#include "cu.h"

static uint64_t rounds = 200000;

static void flood(double seconds)
{
	void *function = cu_kernel("spin");
	void *parameters[] = { &rounds };
	double until = now_s() + seconds;

	while (now_s() < until) {
		for (int i = 0; i < 50; i++)
			cu_launch(function, parameters);
		CU(cuCtxSynchronize);
	}
}

static void *allocate(void *context)
{
	CUdeviceptr at;

	CU(cuCtxSetCurrent, context);
	for (;;)
		if (!CU(cuMemAlloc_v2, &at, (size_t)(8 * MIB)))
			CU(cuMemFree_v2, at);
	return context;
}

int main(int argc, char **argv)
{
	const char *mode = start(argc, argv);
	const char *kernel = NULL;
	CUdeviceptr at = 0x700000000000; /* nothing is mapped there */
	void *parameters[] = { &at };
	pthread_t threads[3];

	cu_open();
	if (!strcmp(mode, "misaligned"))
		CU(cuMemAlloc_v2, &at, (size_t)MIB);
	if (!strncmp(mode, "misaligned", 10))
		at++;
	if (!strcmp(mode, "illegal-address") || !strncmp(mode, "misaligned", 10))
		kernel = "store";
	else if (!strcmp(mode, "assert"))
		kernel = "assertion";
	else if (!strcmp(mode, "infinite-kernel") || !strcmp(mode, "infinite-kernel-exit"))
		kernel = "forever";
	if (kernel) {
		void *function = cu_kernel(kernel);
		int code = cu_launch(function, parameters);

		if (!strncmp(mode, "infinite", 8)) {
			report("launched: %d", code);
			if (strstr(mode, "exit")) {
				sleep(1);
				_exit(0);
			}
			CU(cuCtxSynchronize);
		}
		code = CU(cuCtxSynchronize);
		report("CUDA says %d", code);
		abort();
	}
	if (!strcmp(mode, "oom")) {
		CUdeviceptr at;
		unsigned int refused = 0;

		for (int i = 0; i < 2000; i++)
			refused += CU(cuMemAlloc_v2, &at, (size_t)(quota / 4)) == 2;
		report("out of memory %u times", refused);
		flood(1);
		hold();
	}
	if (!strcmp(mode, "abort-mid-allocation")) {
		void *context;

		CU(cuCtxGetCurrent, &context);
		for (int i = 0; i < 3; i++)
			pthread_create(&threads[i], NULL, allocate, context);
		report("allocating");
		sleep(1);
		abort();
	}
	if (!strcmp(mode, "segfault")) {
		report("flooding");
		rounds = 2000000;
		flood(0.5);
		raise(SIGSEGV);
	}
	report("flooding"); /* "flood": until somebody kills it */
	flood(3600);
	return 0;
}
