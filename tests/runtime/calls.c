// SPDX-License-Identifier: GPL-2.0
/*
 * What tests run in a container: ioctls on /dev/random, which knows none of them, as a CUDA program makes them.
 *
 *   calls all       every number, with an empty argument; prints "NUMBER ERRNO" for each
 *   calls control N one RM control; prints "RESULT ERRNO STATUS"
 *   calls foreign   mappings by the calls of other architectures; prints what became of each
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct control {
	uint32_t client, object, command, flags;
	uint64_t params;
	uint32_t size, status;
};

#ifdef __x86_64__
/* Make a shared, writable mapping at an offset, in a process of its own, and say what became of it. */
static void map_by(const char *name, int number)
{
	static uint32_t arguments[6]; /* below 4 GiB, for this program is static */
	int status;

	arguments[1] = 4096;
	arguments[2] = PROT_READ | PROT_WRITE;
	arguments[3] = MAP_SHARED;
	arguments[4] = open("/tmp/mapped", O_RDWR | O_CREAT, 0600);
	arguments[5] = number == 90 ? 4096 : 1;
	if (ftruncate(arguments[4], 8192))
		exit(1);
	if (!fork()) {
		long result;

		if (number & 0x40000000)
			result = syscall(number, 0, 4096, arguments[2], MAP_SHARED, arguments[4], 4096);
		else if (number == 90)
			asm volatile("int $0x80" : "=a"(result) : "a"(number), "b"(arguments), "c"(0), "d"(0), "S"(0), "D"(0)
				     : "memory", "r8", "r9", "r10", "r11");
		else
			asm volatile("push %%rbp; xor %%ebp, %%ebp; inc %%ebp; int $0x80; pop %%rbp"
				     : "=a"(result)
				     : "a"(number), "b"(0), "c"(4096), "d"(arguments[2]), "S"(MAP_SHARED), "D"(arguments[4])
				     : "memory", "r8", "r9", "r10", "r11");
		_exit((int)result < 0 && (int)result > -4096);
	}
	wait(&status);
	printf("%s %s\n", name, WIFSIGNALED(status) ? "killed" : WEXITSTATUS(status) ? "refused" : "mapped");
	fflush(stdout);
}
#endif

int main(int argc, char **argv)
{
	int fd = open("/dev/random", O_RDWR);

	if (argc == 2 && !strcmp(argv[1], "all")) {
		for (unsigned int number = 0; number < 256; number++) {
			char empty[64] = { 0 };

			errno = 0;
			ioctl(fd, _IOC(3, 'F', number, 32), empty);
			printf("%u %d\n", number, errno);
		}
	} else if (argc == 3 && !strcmp(argv[1], "control")) {
		struct control control = { 7, 0x5c000015, strtoul(argv[2], NULL, 0), 0, 0, 8, 0xffff };
		int result;

		errno = 0;
		result = ioctl(fd, _IOC(3, 'F', 0x2a, sizeof(control)), &control);
		printf("%d %d %u\n", result, errno, control.status);
#ifdef __x86_64__
	} else if (argc == 2 && !strcmp(argv[1], "foreign")) {
		map_by("mmap2", 192);
		map_by("old_mmap", 90);
		map_by("x32", 0x40000000 + 9);
#endif
	}
	return 0;
}
