// SPDX-License-Identifier: GPL-2.0
/*
 * A CUDA driver that runs nothing: one device that works off kernels in order, each taking
 * FAKE_CUDA_NS_PER_ITERATION (100) times its iterations on CLOCK_MONOTONIC.
 *
 * It is as strict as the driver about what the load generator could get wrong: order of calls, arguments,
 * handles. FAKE_CUDA_FAIL=cuInit:100 makes one call fail; FAKE_CUDA_LOG names a file for what was seen.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	INVALID_PTX = 218,
	INVALID_HANDLE = 400,
	ILLEGAL_STATE = 401,
	NOT_FOUND = 500,
	NOT_READY = 600,
	STREAM_CAPTURE_UNSUPPORTED = 900,
};

static const struct {
	int code;
	const char *name;
} names[] = {
	{ INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
	{ 2, "CUDA_ERROR_OUT_OF_MEMORY" },
	{ NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
	{ NO_DEVICE, "CUDA_ERROR_NO_DEVICE" },
	{ INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE" },
	{ INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT" },
	{ INVALID_PTX, "CUDA_ERROR_INVALID_PTX" },
	{ INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE" },
	{ ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE" },
	{ NOT_FOUND, "CUDA_ERROR_NOT_FOUND" },
	{ STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" },
};

enum kind { CONTEXT = 1, MODULE, FUNCTION, STREAM, EVENT, GRAPH, EXEC };

struct object {
	enum kind kind;
	int64_t until;		/* stream: its last kernel ends; event: it completes */
	int64_t length;		/* graph, exec: of all its kernels */
	long kernels;		/* graph, exec: how many */
	struct object *capture;	/* stream: the graph that launches go to */
	int recorded;		/* event */
	int persistent;		/* function: goes on until told to stop */
	pthread_t running;	/* stream: the persistent kernel on it, if busy */
	int busy;
};

/* What a persistent kernel and its host say to each other: words 0 and 32 of host memory. */
struct persistent {
	volatile uint32_t *mailbox;
	int64_t length;
};

static struct object context = { .kind = CONTEXT };
static struct object *current;
static int initialized;
static unsigned int flags;
static int64_t device_until;
static int64_t ends[1 << 16];	/* of kernels, a ring: for the length of the queue */
static long launched, finished, most_queued, streams, graph_launches;

static int64_t now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000LL + ts.tv_nsec;
}

static void wait_until(int64_t ns)
{
	struct timespec ts = { ns / 1000000000LL, ns % 1000000000LL };

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
}

static int64_t ns_per_iteration(void)
{
	const char *text = getenv("FAKE_CUDA_NS_PER_ITERATION");

	return text ? atoll(text) : 100;
}

static int fails(const char *call)
{
	const char *text = getenv("FAKE_CUDA_FAIL");
	size_t length = strlen(call);

	return text && !strncmp(text, call, length) && text[length] == ':' ? atoi(text + length + 1) : 0;
}

/* What every call but the first few checks before it does anything. */
#define ENTER(call)                             \
	do {                                    \
		int failure = fails(call);      \
		if (failure)                    \
			return failure;         \
		if (!initialized)               \
			return NOT_INITIALIZED; \
	} while (0)
#define ENTER_CONTEXT(call)                     \
	do {                                    \
		ENTER(call);                    \
		if (!current)                   \
			return INVALID_CONTEXT; \
	} while (0)
#define NEED(object, is)                                    \
	do {                                                \
		if (!(object) || (object)->kind != (is))    \
			return INVALID_HANDLE;              \
	} while (0)

static int make(struct object **out, enum kind kind)
{
	if (!out)
		return INVALID_VALUE;
	*out = calloc(1, sizeof(**out));
	(*out)->kind = kind;
	return SUCCESS;
}

static void enqueue(struct object *stream, int64_t length)
{
	int64_t t = now();

	device_until = (device_until > t ? device_until : t) + length;
	stream->until = device_until;
	ends[launched++ % (1 << 16)] = device_until;
	while (finished < launched && ends[finished % (1 << 16)] <= t)
		finished++;
	if (launched - finished > most_queued)
		most_queued = launched - finished;
}

int cuGetErrorName(int error, const char **name)
{
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (names[i].code == error) {
			*name = names[i].name;
			return SUCCESS;
		}
	}
	*name = NULL;
	return INVALID_VALUE;
}

static void write_log(void)
{
	FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "w");

	if (!log)
		return;
	fprintf(log,
		"{\"flags\": %u, \"launched\": %ld, \"most_queued\": %ld, \"streams\": %ld, \"graphs\": %ld, \"left\": %d}\n",
		flags, launched, most_queued, streams, graph_launches, device_until > now());
	fclose(log);
}

int cuInit(unsigned int zero)
{
	int failure = fails("cuInit");

	if (failure || zero)
		return failure ? failure : INVALID_VALUE;
	initialized = 1;
	if (getenv("FAKE_CUDA_LOG"))
		atexit(write_log);
	return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	ENTER("cuDeviceGet");
	if (ordinal != 0)
		return INVALID_DEVICE;
	*device = 0;
	return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device)
{
	ENTER("cuDeviceGetName");
	if (device != 0)
		return INVALID_DEVICE;
	snprintf(name, length, "Fake GPU");
	return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	ENTER("cuDeviceGetAttribute");
	if (device != 0)
		return INVALID_DEVICE;
	if (attribute == 16)
		*value = 132;
	else if (attribute == 39)
		*value = 2048;
	else
		return INVALID_VALUE;
	return SUCCESS;
}

int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned int value)
{
	ENTER("cuDevicePrimaryCtxSetFlags_v2");
	if (device != 0)
		return INVALID_DEVICE;
	flags = value;
	return SUCCESS;
}

int cuDevicePrimaryCtxRetain(struct object **out, int device)
{
	ENTER("cuDevicePrimaryCtxRetain");
	if (device != 0)
		return INVALID_DEVICE;
	*out = &context;
	return SUCCESS;
}

int cuCtxSetCurrent(struct object *object)
{
	ENTER("cuCtxSetCurrent");
	NEED(object, CONTEXT);
	current = object;
	return SUCCESS;
}

int cuModuleLoadData(struct object **module, const void *image)
{
	ENTER_CONTEXT("cuModuleLoadData");
	if (!strstr(image, ".version") || !strstr(image, ".target"))
		return INVALID_PTX;
	return make(module, MODULE);
}

int cuModuleGetFunction(struct object **function, struct object *module, const char *name)
{
	ENTER_CONTEXT("cuModuleGetFunction");
	NEED(module, MODULE);
	if (strcmp(name, "qgpu_fma") && strcmp(name, "qgpu_persistent"))
		return NOT_FOUND;
	make(function, FUNCTION);
	(*function)->persistent = !strcmp(name, "qgpu_persistent");
	return SUCCESS;
}

int cuMemAlloc_v2(unsigned long long *address, size_t size)
{
	ENTER_CONTEXT("cuMemAlloc_v2");
	if (!size)
		return INVALID_VALUE;
	*address = 0x700000000000ULL;
	return SUCCESS;
}

int cuMemHostAlloc(void **address, size_t size, unsigned int value)
{
	ENTER_CONTEXT("cuMemHostAlloc");
	if (!size || value != 2)
		return INVALID_VALUE;
	*address = malloc(size);
	memset(*address, 0xff, size);
	return SUCCESS;
}

int cuMemHostGetDevicePointer_v2(unsigned long long *device_address, void *address, unsigned int zero)
{
	ENTER_CONTEXT("cuMemHostGetDevicePointer_v2");
	if (zero)
		return INVALID_VALUE;
	*device_address = (uintptr_t)address;
	return SUCCESS;
}

static void *go_round(void *argument)
{
	struct persistent *kernel = argument;

	do {
		wait_until(now() + kernel->length);
		kernel->mailbox[32]++;
	} while (!kernel->mailbox[0]);
	free(kernel);
	return NULL;
}

int cuStreamCreate(struct object **stream, unsigned int value)
{
	ENTER_CONTEXT("cuStreamCreate");
	if (value != 1)
		return INVALID_VALUE;
	streams++;
	return make(stream, STREAM);
}

int cuStreamSynchronize(struct object *stream)
{
	ENTER_CONTEXT("cuStreamSynchronize");
	NEED(stream, STREAM);
	if (stream->capture)
		return STREAM_CAPTURE_UNSUPPORTED;
	if (stream->busy)
		pthread_join(stream->running, NULL);
	stream->busy = 0;
	wait_until(stream->until);
	return SUCCESS;
}

int cuEventCreate(struct object **event, unsigned int value)
{
	ENTER_CONTEXT("cuEventCreate");
	if (value & ~0x7u)
		return INVALID_VALUE;
	return make(event, EVENT);
}

int cuEventRecord(struct object *event, struct object *stream)
{
	ENTER_CONTEXT("cuEventRecord");
	NEED(event, EVENT);
	NEED(stream, STREAM);
	event->until = stream->until > now() ? stream->until : now();
	event->recorded = 1;
	return SUCCESS;
}

int cuEventQuery(struct object *event)
{
	ENTER_CONTEXT("cuEventQuery");
	NEED(event, EVENT);
	return !event->recorded || event->until <= now() ? SUCCESS : NOT_READY;
}

int cuEventElapsedTime(float *milliseconds, struct object *start, struct object *end)
{
	ENTER_CONTEXT("cuEventElapsedTime");
	NEED(start, EVENT);
	NEED(end, EVENT);
	if (!start->recorded || !end->recorded)
		return INVALID_HANDLE;
	if (start->until > now() || end->until > now())
		return NOT_READY;
	*milliseconds = (end->until - start->until) / 1e6f;
	return SUCCESS;
}

int cuLaunchKernel(struct object *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
		   unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
		   struct object *stream, void **parameters, void **extra)
{
	int64_t length;

	ENTER_CONTEXT("cuLaunchKernel");
	NEED(function, FUNCTION);
	NEED(stream, STREAM);
	if (grid_x != 132 * 8 || grid_y != 1 || grid_z != 1 || block_x != 256 || block_y != 1 || block_z != 1 ||
	    shared_bytes || extra || *(uint64_t *)parameters[0] != 0x700000000000ULL)
		return INVALID_VALUE;
	length = *(uint32_t *)parameters[1] * ns_per_iteration();
	if (function->persistent) {
		struct persistent *kernel = malloc(sizeof(*kernel));

		if (stream->capture || stream->busy)
			return STREAM_CAPTURE_UNSUPPORTED;
		if (*(uint32_t *)parameters[3] > 1)	/* whether all its blocks read host memory */
			return INVALID_VALUE;
		*kernel = (struct persistent){ *(volatile uint32_t **)parameters[2], length };
		stream->busy = !pthread_create(&stream->running, NULL, go_round, kernel);
		launched++;
	} else if (stream->capture) {
		stream->capture->length += length;
		stream->capture->kernels++;
	} else {
		enqueue(stream, length);
	}
	return SUCCESS;
}

int cuStreamBeginCapture_v2(struct object *stream, int mode)
{
	ENTER_CONTEXT("cuStreamBeginCapture_v2");
	NEED(stream, STREAM);
	if (stream->capture)
		return ILLEGAL_STATE;
	if (mode < 0 || mode > 2)
		return INVALID_VALUE;
	return make(&stream->capture, GRAPH);
}

int cuStreamEndCapture(struct object *stream, struct object **graph)
{
	ENTER_CONTEXT("cuStreamEndCapture");
	NEED(stream, STREAM);
	if (!stream->capture)
		return ILLEGAL_STATE;
	*graph = stream->capture;
	stream->capture = NULL;
	return SUCCESS;
}

int cuGraphInstantiateWithFlags(struct object **exec, struct object *graph, unsigned long long value)
{
	ENTER_CONTEXT("cuGraphInstantiateWithFlags");
	NEED(graph, GRAPH);
	if (value)
		return INVALID_VALUE;
	make(exec, EXEC);
	(*exec)->length = graph->length;
	(*exec)->kernels = graph->kernels;
	return SUCCESS;
}

int cuGraphLaunch(struct object *exec, struct object *stream)
{
	ENTER_CONTEXT("cuGraphLaunch");
	NEED(exec, EXEC);
	NEED(stream, STREAM);
	graph_launches++;
	for (long i = 0; i < exec->kernels; i++)
		enqueue(stream, exec->length / exec->kernels);
	return SUCCESS;
}
