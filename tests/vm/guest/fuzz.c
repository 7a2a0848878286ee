// SPDX-License-Identifier: GPL-2.0
/*
 * fuzz SEED COUNT qgpu CGROUP...        COUNT random calls on /dev/qgpu; pods are made of the cgroups
 * fuzz SEED COUNT nvidia CORPUS CGROUP  COUNT mutated calls on the driver's files, from inside a cgroup
 *
 * A corpus is records of { u32 nr, size, params size }, the struct, the parameters. Calls are near enough to right
 * ones to come far: handles and ids are mostly real. What the calls answer does not matter; the kernel's log does.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "qgpu.h"

static uint64_t state;

static uint64_t rnd(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static uint64_t below(uint64_t n)
{
	return rnd() % n;
}

static const uint64_t odd[] = {
	0, 1, 2, 3, 49, 50, 100, 101, 255, 256, 257, 1000, 1024, 1025, 1000000, 1000001, 9999999, 10000000, 100000000,
	1000000000, 10000000000, 60000000000, 1ull << 31, 1ull << 32, 1ull << 63, ~0ull, ~0u,
};

static uint64_t value(void)
{
	return below(4) ? odd[below(sizeof(odd) / sizeof(*odd))] : below(8) ? below(64) : rnd();
}

static const unsigned long commands[] = {
	QGPU_IOC_INFO, QGPU_IOC_GPU, QGPU_IOC_POD_ADD, QGPU_IOC_POD_REMOVE, QGPU_IOC_POD_NEXT, QGPU_IOC_GRANT_SET,
	QGPU_IOC_GRANT_GET, QGPU_IOC_USAGE, QGPU_IOC_TSG_NEXT, QGPU_IOC_PLAN, QGPU_IOC_RENEW, QGPU_IOC_IDLE,
	QGPU_IOC_HANDLE_NEXT, QGPU_IOC_POD_JOIN, QGPU_IOC_POD_LEAVE, QGPU_IOC_POD_JOINED_NEXT,
};

static uint64_t last_pod;

static uint64_t some_pod(void)
{
	return last_pod - below(last_pod < 4 ? last_pod + 1 : 4);
}

static void plan(int fd)
{
	static struct qgpu_pod_plan pods[QGPU_MAX_PODS + 1];
	static struct qgpu_window windows[QGPU_MAX_WINDOWS + 1];
	struct qgpu_plan p = { .period_ns = 10000000 * (1 + below(10)), .lease_ns = 10000000 * (1 + below(20)) };
	uint64_t at = 0;
	uint32_t i;

	p.nr_pods = below(5);
	p.nr_windows = below(9);
	for (i = 0; i < p.nr_windows; i++) {
		windows[i] = (struct qgpu_window){ at, at + 1 + below(p.period_ns / 8), below(2) };
		at = windows[i].end_ns;
	}
	for (i = 0; i < p.nr_pods; i++) {
		pods[i] = (struct qgpu_pod_plan){ some_pod() - i, 50 + below(5000), below(2), below(2) };
		pods[i].copy_timeslice_us = below(2) ? 50 + below(5000) : 0;
		if (pods[i].flags) {
			pods[i].flags |= below(2) ? QGPU_POD_PLAN_COPIES : 0;
			pods[i].first_window = below(p.nr_windows + 1);
			pods[i].nr_windows = below(p.nr_windows - pods[i].first_window + 1);
		}
	}
	p.pods = (uintptr_t)pods;
	p.pod_plan_size = below(8) ? sizeof(*pods) : below(300);
	p.windows = (uintptr_t)windows;
	if (!below(3))
		((uint64_t *)&p)[below(sizeof(p) / 8)] = value();
	if (!below(4))
		((uint64_t *)pods)[below(20)] = value();
	if (!below(4))
		((uint64_t *)windows)[below(20)] = value();
	ioctl(fd, QGPU_IOC_PLAN, &p);
}

static void fuzz_qgpu(long count, char **cgroups, int nr)
{
	int fd[3] = { -1, -1, -1 };
	uint64_t arg[32];

	while (count--) {
		int *at = &fd[below(3)];
		unsigned long cmd = commands[below(sizeof(commands) / sizeof(*commands))];
		size_t i, words = _IOC_SIZE(cmd) / 8;

		if (*at < 0 || !below(200)) {
			close(*at);
			*at = open("/dev/qgpu", O_RDWR | O_NONBLOCK);
		}
		if (cmd == QGPU_IOC_PLAN) {
			plan(*at);
			continue;
		}
		memset(arg, 0, sizeof(arg));
		if (cmd == QGPU_IOC_POD_ADD) {
			struct qgpu_pod_add *add = (void *)arg;
			int n = below(nr), dir = open(cgroups[n], O_RDONLY);

			add->cgroup_fd = below(20) ? dir : (int)value();
			snprintf(add->name, sizeof(add->name), "fuzz%d", n);
			if (!below(10))
				arg[below(words)] = value();
			if (!ioctl(*at, cmd, arg) && add->pod > last_pod)
				last_pod = add->pod;
			close(dir);
			continue;
		}
		if (cmd == QGPU_IOC_POD_REMOVE && below(50))
			continue;
		for (i = 0; i < words; i++)
			arg[i] = below(3) ? 0 : value();
		if (cmd != QGPU_IOC_RENEW && cmd != QGPU_IOC_GPU)
			arg[0] = below(8) ? some_pod() : value();
		ioctl(*at, below(100) ? cmd : value(), below(100) ? (uintptr_t)arg : value());
		if (!below(10) && read(*at, arg, below(sizeof(arg))) < 0 && errno == EINVAL)
			continue;
	}
}

#define NR_RECORDS 8192

static void fuzz_nvidia(long count, const char *path)
{
	static uint32_t *records[NR_RECORDS];
	static uint8_t data[16384], params[65536];
	uint32_t clients[8] = { 0 }, *at;
	size_t length, nr = 0;
	int corpus = open(path, O_RDONLY), fd[4], i;

	length = lseek(corpus, 0, SEEK_END);
	at = mmap(NULL, length, PROT_READ, MAP_PRIVATE, corpus, 0);
	for (uint32_t *end = (void *)((char *)at + length); at < end && nr < NR_RECORDS; nr++) {
		records[nr] = at;
		at += 3 + (at[1] + 3) / 4 + (at[2] + 3) / 4;
	}
	for (i = 0; i < 4; i++)
		fd[i] = open(i < 2 ? "/dev/nvidiactl" : "/dev/nvidia0", O_RDWR);
	while (count--) {
		uint32_t *record = records[below(nr)], code = record[0], size = record[1];
		uint32_t *words = (uint32_t *)data;
		int file = below(4), which = below(8);
		unsigned long cmd;

		if (!below(300)) {
			close(fd[file]);
			fd[file] = open(file < 2 ? "/dev/nvidiactl" : "/dev/nvidia0", O_RDWR);
		}
		memcpy(data, record + 3, size);
		memcpy(params, record + 3 + (size + 3) / 4, record[2]);
		for (i = 0; i < 4 && i * 4u < size; i++) {	/* the recorded clients are c1d000xx; the fourth is a source */
			if (words[i] >> 16 == 0xc1d0)
				words[i] = clients[i < 3 ? which : below(8)];
		}
		if ((code == 0x2a || code == 0x2b) && size >= 24 && *(uint64_t *)(data + 16))
			*(uint64_t *)(data + 16) = below(50) ? (uintptr_t)params : value();
		if (!below(3) && size >= 4)
			words[below(size / 4)] = below(2) ? value() : words[below(size / 4)];
		if (!below(5))
			((uint64_t *)params)[below(32)] = value();
		cmd = _IOC(3, 'F', below(50) ? code : below(256), below(50) ? size : below(sizeof(data)));
		if (!below(10)) {
			uint64_t wrapped[2] = { (uint64_t)size << 32 | code, (uintptr_t)data };

			if (!below(5))
				wrapped[below(2)] = value();
			ioctl(fd[file], _IOC(3, 'F', 211, 16), wrapped);
		} else {
			ioctl(fd[file], cmd, below(100) ? (uintptr_t)data : value());
		}
		if (code == 0x2b && words[2] >> 16 == 0xc1d0)
			clients[which] = words[2];
	}
}

int main(int argc, char **argv)
{
	long count = atol(argv[2]);
	char procs[512];

	state = strtoull(argv[1], NULL, 0) * 0x9e3779b97f4a7c15ull | 1;
	if (!strcmp(argv[3], "qgpu")) {
		fuzz_qgpu(count, argv + 4, argc - 4);
	} else {
		int fd;

		snprintf(procs, sizeof(procs), "%s/cgroup.procs", argv[5]);
		fd = open(procs, O_WRONLY);
		if (fd < 0 || write(fd, "0", 1) != 1) {
			perror(procs);
			return 1;
		}
		close(fd);
		fuzz_nvidia(count, argv[4]);
	}
	printf("%ld\n", count);
	return 0;
}
