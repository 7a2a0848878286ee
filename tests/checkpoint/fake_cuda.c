// SPDX-License-Identifier: GPL-2.0-only
// Stands for the checkpoint calls of libcuda: as there, a call is carried out by a thread of the process that it is
// about (fake_process.py), which goes on with it when the caller dies.
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int ask(int pid, const char *call, const void *arguments, int size, int *state)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int length = snprintf(to.sun_path + 1, sizeof(to.sun_path) - 1, "qgpu-fake-cuda-%d", pid);
	int answer[2] = { 999, 0 }, file = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	char text[256] = { 0 };

	strcpy(text, call);
	if (size)
		memcpy(text + 16, arguments, size);
	if (!connect(file, (void *)&to, sizeof(to.sun_family) + 1 + length) &&
	    send(file, text, 16 + size, MSG_NOSIGNAL) > 0 && recv(file, answer, sizeof(answer), 0) != sizeof(answer))
		answer[0] = 999;
	close(file);
	if (state)
		*state = answer[1];
	return answer[0];
}

int cuInit(unsigned int flags) { return (int)flags; }
int cuGetErrorName(int error, const char **name)
{
	*name = error == 600 ? "CUDA_ERROR_NOT_READY" : "CUDA_ERROR_UNKNOWN";
	return 0;
}
int cuCheckpointProcessGetState(int pid, int *state) { return ask(pid, "state", 0, 0, state); }
int cuCheckpointProcessLock(int pid, void *args) { return ask(pid, "lock", args, 64, 0); }
int cuCheckpointProcessCheckpoint(int pid, void *args) { return ask(pid, "checkpoint", args, 64, 0); }
int cuCheckpointProcessUnlock(int pid, void *args) { return ask(pid, "unlock", args, 64, 0); }
struct restore { unsigned char (*pairs)[32]; unsigned int count; };
int cuCheckpointProcessRestore(int pid, struct restore *args)
{
	return ask(pid, "restore", args->pairs, args->count * 32, 0);
}
