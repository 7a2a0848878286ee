// SPDX-License-Identifier: GPL-2.0-only
#define _GNU_SOURCE
#include "qgpud.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "answer.h"
#include "refusal.h"
#include "settings.h"

/* Seconds to wait for an answer, and to ask again while qgpud has no place for another client. */
#define TIMEOUT_S 10
#define BETWEEN_US 25000
#define MOST_ANSWER 65536

/* Why the connection was lost, as text; NULL while it is open. */
static const char *lost;

static bool send_all(int fd, const char *data, size_t size, int passed)
{
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { .iov_base = (void *)data, .iov_len = size };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	ssize_t sent;

	if (passed >= 0) {
		message.msg_control = control;
		message.msg_controllen = sizeof(control);
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(header), &passed, sizeof(int));
	}
	while (part.iov_len) {
		sent = sendmsg(fd, &message, MSG_NOSIGNAL);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0) {
			lost = strerror(errno);
			return false;
		}
		part.iov_base = (char *)part.iov_base + sent;
		part.iov_len -= sent;
		message.msg_control = NULL; /* descriptors go with the first byte */
		message.msg_controllen = 0;
	}
	return true;
}

static bool receive_all(int fd, char *into, size_t size)
{
	while (size) {
		ssize_t got = recv(fd, into, size, 0);

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			lost = !got ? "it hung up" : errno == EAGAIN ? "no answer" : strerror(errno);
			return false;
		}
		into += got;
		size -= got;
	}
	return true;
}

char *ask(int fd, const char *request, int passed)
{
	size_t size = strlen(request);
	char message[4 + size];
	unsigned char head[4];
	char *answer;

	for (int i = 0; i < 4; i++)
		message[i] = size >> 8 * i;
	memcpy(message + 4, request, size);
	/* qgpud may refuse a client and close before the request is sent; its reason can still be read */
	send_all(fd, message, sizeof(message), passed);
	if (!receive_all(fd, (char *)head, sizeof(head)))
		return NULL;
	size = head[0] | head[1] << 8 | head[2] << 16 | (size_t)head[3] << 24;
	answer = size < MOST_ANSWER ? malloc(size + 1) : NULL;
	if (!answer)
		refuse("%s: an answer of %zu bytes; is it qgpud's?", socket_path, size);
	answer[size] = 0;
	if (receive_all(fd, answer, size))
		return answer;
	free(answer);
	return NULL;
}

void pass_on(const char *answer)
{
	char *error = answer ? member(answer, "error") : NULL;

	if (!answer)
		refuse("%s: %s; the task does not start without its limits", socket_path, lost);
	refuse("%s", error ? error : "qgpud refused without a reason");
}

static int connected(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct timeval timeout = { .tv_sec = TIMEOUT_S };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	struct ucred peer = { .uid = -1 };
	socklen_t size = sizeof(peer);

	strcpy(address.sun_path, socket_path);
	if (fd >= 0) {
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	}
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		refuse("%s: %s; the task does not start without its limits; is qgpud running?", socket_path,
		       strerror(errno));
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.uid != 0)
		refuse("%s: user %d listens there; run qgpud as root", socket_path, (int)peer.uid);
	return fd;
}

static time_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec;
}

char *first_answer(int *fd)
{
	for (time_t until = now() + TIMEOUT_S;;) {
		*fd = connected();
		char *answer = ask(*fd, "{\"op\":\"slurm.filter\"}", -1);
		char *error = NULL;

		if (answer && agreed(answer))
			return answer;
		if (answer)
			error = member(answer, "error");
		if (now() >= until || (error && !strstr(error, "too many clients")))
			pass_on(answer);
		free(error);
		free(answer);
		close(*fd);
		usleep(BETWEEN_US);
	}
}
