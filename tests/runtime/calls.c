// SPDX-License-Identifier: GPL-2.0
/*
 * What tests run in a container: ioctls on /dev/random, which knows none of them, as a CUDA program makes them.
 *
 *   calls all       every number, with an empty argument; prints "NUMBER ERRNO" for each
 *   calls control N one RM control; prints "RESULT ERRNO STATUS"
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

struct control {
	uint32_t client, object, command, flags;
	uint64_t params;
	uint32_t size, status;
};

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
	}
	return 0;
}
