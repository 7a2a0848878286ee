// SPDX-License-Identifier: GPL-2.0
/*
 * hammer COUNT [cgroup]: as many RM calls as fast as they go (a root client, COUNT controls, free), in a cgroup if
 * one is named. COUNT 0: for ever, allocating and freeing too. Prints ns per control.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

struct alloc { uint32_t root, parent, object, class; uint64_t params, rights; uint32_t size, flags, status, pad; };
struct control { uint32_t client, object, cmd, flags; uint64_t params; uint32_t size, status; };
struct release { uint32_t root, parent, object, status; };

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint32_t client(int fd)
{
	struct alloc a = { .class = 0x41, .status = ~0u };

	if (ioctl(fd, _IOWR('F', 0x2b, struct alloc), &a) || a.status) {
		perror("client");
		exit(1);
	}
	return a.object;
}

static void leave(int fd, uint32_t handle)
{
	struct release r = { handle, handle, handle, ~0u };

	if (ioctl(fd, _IOWR('F', 0x29, struct release), &r) || r.status) {
		perror("free");
		exit(1);
	}
}

static void ask(int fd, uint32_t handle, long count)
{
	uint32_t ids[32];

	while (count--) {	/* GPU_GET_ATTACHED_IDS: the real driver answers it without a GPU too */
		struct control c = { handle, handle, 0x201, 0, (uintptr_t)ids, sizeof(ids), ~0u };

		if (ioctl(fd, _IOWR('F', 0x2a, struct control), &c) || c.status) {
			perror("control");
			exit(1);
		}
	}
}

int main(int argc, char **argv)
{
	long count = atol(argv[1]);
	uint64_t start;
	uint32_t handle;
	int fd;

	if (argc > 2) {
		fd = open(argv[2], O_WRONLY);
		if (fd < 0 || write(fd, "0", 1) != 1) {
			perror(argv[2]);
			return 1;
		}
		close(fd);
	}
	do {
		fd = open("/dev/nvidiactl", O_RDWR);
		if (fd < 0) {
			perror("open");
			return 1;
		}
		handle = client(fd);
		start = now();
		ask(fd, handle, count ? count : 20);
		start = now() - start;
		leave(fd, handle);
		client(fd);	/* left to the file's release */
		close(fd);
	} while (!count);
	printf("%.1f\n", (double)start / count);
	return 0;
}
