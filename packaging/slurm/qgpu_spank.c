// SPDX-License-Identifier: GPL-2.0-only
/*
 * SPANK plugin: makes a Slurm job that was given GPUs or shards a qgpu pod, before its program starts.
 *
 * Each task does it to itself, as root, between fork and exec: it tells qgpud what Slurm gave the step, and on plane
 * seccomp installs the pods' filter. qgpud decides; this file turns facts into one request. A task that is refused, or
 * gets no answer, does not start, whatever plugstack.conf says about the plugin. What slurmstepd starts by itself after
 * a task (--task-epilog) passes no plugin: on plane seccomp it is denied what the filter would ask qgpu for.
 *
 * The facts are slurmstepd's: it sets these variables from the credential of the job, and removes a user's own, before
 * it calls any plugin (gres_g_step_set_env, gres_g_job_set_env). The gres plugins do that; where they are not loaded,
 * the variables are a user's, and are not looked at.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(qgpu, 1);

#define DEFAULT_SOCKET "/run/qgpu/qgpud.sock"
/* Seconds for an answer, and for asking again if qgpud had no place for another client. */
#define TIMEOUT_S 10
#define BETWEEN_US 25000
#define GRACE_US 2000000

#define MOST_GPUS 1024
#define MOST_ANSWER 65536
#define MOST_TEXT 64

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5)
#endif

/* What the administrator set in plugstack.conf; empty: qgpud's default. */
static char socket_path[sizeof(((struct sockaddr_un *)0)->sun_path)] = DEFAULT_SOCKET;
static char per_card[MOST_TEXT], pod_class[MOST_TEXT], max_memory[MOST_TEXT], drain[MOST_TEXT];

/* What the user asked for: it can only lower the limit. */
static char memory[MOST_TEXT];

/* Take what may stand between quotes in a message: letters, digits, and what sizes and lists have. */
static bool take(char *into, size_t size, const char *text)
{
	size_t length = strspn(text, "0123456789.,"
				     "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz");

	if (!length || text[length] || length >= size)
		return false;
	memcpy(into, text, length + 1);
	return true;
}

static int take_memory(int val, const char *text, int remote)
{
	(void)val;
	(void)remote;
	if (text && take(memory, sizeof(memory), text))
		return ESPANK_SUCCESS;
	slurm_error("qgpu: --qgpu-memory: write a size such as 16GiB");
	return ESPANK_BAD_ARG;
}

static struct spank_option memory_option = {
	.name = "qgpu-memory",
	.arginfo = "SIZE",
	.usage = "limit of video memory on each GPU, such as 16GiB; it only lowers what the shards bring",
	.has_arg = 1,
	.cb = take_memory,
};

static int set_up(int count, char **arguments)
{
	static const struct {
		const char *name;
		char *into;
	} known[] = { { "shards=", per_card }, { "class=", pod_class }, { "max_memory=", max_memory },
		    { "drain=", drain } };

	for (int i = 0; i < count; i++) {
		bool taken = false;

		if (!strncmp(arguments[i], "socket=/", 8) && strlen(arguments[i] + 7) < sizeof(socket_path)) {
			strcpy(socket_path, arguments[i] + 7);
			continue;
		}
		for (size_t k = 0; k < sizeof(known) / sizeof(*known); k++) {
			size_t length = strlen(known[k].name);

			if (!strncmp(arguments[i], known[k].name, length))
				taken = take(known[k].into, MOST_TEXT, arguments[i] + length);
		}
		if (!taken) {
			slurm_error("qgpu: plugstack.conf: %s: use socket=PATH, shards=N, class=NAME, max_memory=SIZE, drain=yes",
				    arguments[i]);
			return -1;
		}
	}
	return 0;
}

/* Whether plugstack.conf was understood. Slurm would go on without an optional plugin whose start failed. */
static bool configured;
static pid_t slurmstepd;

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	slurmstepd = getpid();
	configured = !set_up(count, arguments);
	if (spank_context() == S_CTX_SLURMD)
		return configured ? 0 : -1;
	return spank_option_register(spank, &memory_option) || !configured ? -1 : 0;
}

/* Where slurmstepd itself goes on after a refusal; a task has no such place. */
static jmp_buf way_out;
static bool in_slurmstepd;
static const char *why;

/* The task ends here: its one line says why, to the user and in slurmd's log. */
static void __attribute__((noreturn, format(printf, 1, 2))) refuse(const char *format, ...)
{
	static char line[1024];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(line, sizeof(line), format, arguments);
	va_end(arguments);
	if (in_slurmstepd) {
		why = line;
		longjmp(way_out, 1);
	}
	slurm_error("qgpu: %s", line);
	_exit(1);
}

static int is_gres_plugin(struct dl_phdr_info *info, size_t size, void *wanted)
{
	const char *name = strrchr(info->dlpi_name, '/');

	(void)size;
	return name && !strcmp(name + 1, wanted);
}

static bool loaded(const char *plugin)
{
	return dl_iterate_phdr(is_gres_plugin, (void *)plugin);
}

/* Read a variable of slurmstepd's; false if it is not set. */
static bool variable(spank_t spank, const char *name, char *into, size_t size)
{
	char value[1024];
	spank_err_t found = spank_getenv(spank, name, value, sizeof(value));

	if (found == ESPANK_ENV_NOEXIST)
		return false;
	if (found != ESPANK_SUCCESS || !take(into, size, value))
		refuse("%s: it cannot be read; see slurmd's log", name);
	return true;
}

/* Why the connection was lost, for a line; NULL while it stands. */
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

/*
 * Messages are those of qgpu.ipc.wire: four bytes of length, and as much JSON. The caller frees the answer, which is
 * NULL if the connection was lost.
 */
static char *ask(int fd, const char *request, int passed)
{
	size_t size = strlen(request);
	char message[4 + size];
	unsigned char head[4];
	char *answer;

	for (int i = 0; i < 4; i++)
		message[i] = size >> 8 * i;
	memcpy(message + 4, request, size);
	/* who is turned away may find the connection closed before it has asked, and the reason in it all the same */
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

static const char *skip(const char *at)
{
	return at + strspn(at, " \t\r\n");
}

/* Read a JSON string into a new one; NULL if it is none. */
static char *text_of(const char **at)
{
	char *text, *to;
	const char *from = skip(*at);

	if (*from++ != '"' || !(text = to = malloc(strlen(from) + 1)))
		return NULL;
	for (; *from && *from != '"'; from++) {
		static const char escapes[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
		const char *escape;
		unsigned int code;

		if (*from != '\\') {
			*to++ = *from;
		} else if (from[1] == 'u' && sscanf(from + 2, "%4x", &code) == 1 && strlen(from) > 5) {
			if (code >= 0x800)
				*to++ = 0xe0 | code >> 12;
			if (code >= 0x80)
				*to++ = (code >= 0x800 ? 0x80 | (code >> 6 & 0x3f) : 0xc0 | code >> 6);
			*to++ = code >= 0x80 ? 0x80 | (code & 0x3f) : code ? code : '?';
			from += 5;
		} else if (from[1] && (escape = strchr(escapes, from[1]))) {
			*to++ = meant[escape - escapes];
			from++;
		} else {
			break;
		}
	}
	*to = 0;
	if (*from != '"') {
		free(text);
		return NULL;
	}
	*at = from + 1;
	return text;
}

/*
 * Find a member of an answer, an object of strings, numbers and words: a new string, NULL if there is none.
 * Anything else is no answer of qgpud's, and ends the task.
 */
static char *member(const char *answer, const char *wanted)
{
	const char *at = skip(answer);
	char *found = NULL;

	if (*at != '{')
		refuse("%s: no answer of qgpud's", socket_path);
	for (at = skip(at + 1); *at != '}'; at = skip(at)) {
		char *key = text_of(&at), *value;

		at = skip(at);
		if (!key || *at != ':')
			refuse("%s: no answer of qgpud's", socket_path);
		at = skip(at + 1);
		if (*at == '"') {
			value = text_of(&at);
		} else {
			size_t length = strcspn(at, ",}[{\"");

			value = strndup(at, length);
			at += length;
		}
		at = skip(at);
		if (!value || (*at != ',' && *at != '}'))
			refuse("%s: no answer of qgpud's", socket_path);
		if (!strcmp(key, wanted)) {
			free(found);
			found = value;
		} else {
			free(value);
		}
		free(key);
		if (*at == ',')
			at++;
	}
	return found;
}

static bool agreed(const char *answer)
{
	char *ok = member(answer, "ok");
	bool yes = ok && !strcmp(ok, "true");

	free(ok);
	return yes;
}

static void __attribute__((noreturn)) pass_on(const char *answer)
{
	char *error = answer ? member(answer, "error") : NULL;

	if (!answer)
		refuse("%s: %s; the task does not start without its limits", socket_path, lost);
	refuse("%s", error ? error : "qgpud refused without a reason");
}

/* Read the pods' filter, which qgpud sends as hexadecimal digits; the caller frees its code. */
static struct sock_fprog filter_of(const char *digits)
{
	size_t size = strlen(digits) / 2;
	unsigned char *code = malloc(size + 1);
	struct sock_fprog program = { .len = size / sizeof(struct sock_filter), .filter = (struct sock_filter *)code };

	if (!code || strlen(digits) % 16 || size / sizeof(struct sock_filter) > BPF_MAXINSNS)
		refuse("%s: no filter of qgpud's", socket_path);
	for (size_t i = 0; i < size; i++)
		if (sscanf(digits + 2 * i, "%2hhx", &code[i]) != 1)
			refuse("%s: no filter of qgpud's", socket_path);
	return program;
}

/* Install the filter on this task; return its listener. */
static int install(const char *digits)
{
	static const unsigned long flags[] = {
		SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW |
			SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
		SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW, /* before Linux 5.19 */
	};
	struct sock_fprog program = filter_of(digits);

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
		int fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags[i], &program);

		if (fd >= 0) {
			free(program.filter);
			return fd;
		}
	}
	refuse("seccomp user notification: %s; it needs Linux 5.5 or newer, and slurmd outside of any pod",
	       strerror(errno));
}

/* Have calls fail here, and in whatever this thread starts from now on, that the filter would ask about. */
static void deny(const char *digits)
{
	struct sock_fprog program = filter_of(digits);

	for (int i = 0; i < program.len; i++)
		if (program.filter[i].code == (BPF_RET | BPF_K) && program.filter[i].k == SECCOMP_RET_USER_NOTIF)
			program.filter[i].k = SECCOMP_RET_ERRNO | EPERM;
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program))
		refuse("seccomp: %s; slurmd needs CAP_SYS_ADMIN", strerror(errno));
	free(program.filter);
}

static int connected(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct timeval patience = { .tv_sec = TIMEOUT_S };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	struct ucred peer = { .uid = -1 };
	socklen_t size = sizeof(peer);

	strcpy(address.sun_path, socket_path);
	if (fd >= 0) {
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
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

/* Connect, and ask for the filter. Where many tasks start at once, qgpud asks some to come again, or hangs up. */
static char *first_answer(int *fd)
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

/* Write what qgpud is told; a fact that is not there is null. */
static void describe(char *into, size_t size, uint32_t job, const char *gpus, const char *shards)
{
	const struct {
		const char *name, *value;
	} facts[] = {
		{ "gpus", gpus },   { "shards", shards },         { "per_card", per_card },
		{ "class", pod_class }, { "max_memory", max_memory }, { "memory", memory },
	};
	size_t at = snprintf(into, size, "{\"op\":\"slurm.bind\",\"job\":%u", job);

	for (size_t i = 0; i < sizeof(facts) / sizeof(*facts) && at < size; i++)
		if (*facts[i].value)
			at += snprintf(into + at, size - at, ",\"%s\":\"%s\"", facts[i].name, facts[i].value);
	if (at < size)
		at += snprintf(into + at, size - at, "}");
	if (at >= size)
		refuse("job %u: too many GPUs to name", job);
}

/* With drain=yes: fail before the job, so that Slurm drains a node whose qgpud does not answer, and requeues the job. */
int slurm_spank_job_prolog(spank_t spank, int count, char **arguments)
{
	int fd;

	(void)spank;
	/* slurm_spank_init is not called there; tasks are refused where the line has an error */
	if (set_up(count, arguments) || strcmp(drain, "yes") || !getenv("SLURM_JOB_GPUS"))
		return 0;
	free(first_answer(&fd));
	close(fd);
	return 0;
}

/* Tell whether a step was given GPUs, and which. */
static bool has_gpus(spank_t spank, uint32_t *job, char gpus[MOST_GPUS])
{
	uint32_t step;

	if (spank_get_item(spank, S_JOB_ID, job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
		refuse("Slurm does not say which job this is");
	if (!loaded("gres_gpu.so")) /* no GPUs here for Slurm to give */
		return false;
	bool whole_job = step == SLURM_BATCH_SCRIPT || step == SLURM_INTERACTIVE_STEP;
	return variable(spank, whole_job ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS", gpus, MOST_GPUS);
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
	char shards[MOST_TEXT] = "", gpus[MOST_GPUS] = "", request[2048];
	char *answer, *filter, *plane, *variables, *rest, *line;
	uint32_t job;
	int fd, listener = -1;

	(void)count;
	(void)arguments;
	bool cards = has_gpus(spank, &job, gpus);
	if (loaded("gres_shard.so") && variable(spank, "SLURM_SHARDS_ON_NODE", shards, sizeof(shards)) && !cards)
		refuse("job %u: it has shards of no GPU; name the GPUs' files in gres.conf", job);
	if (!cards)
		return 0;
	if (!configured)
		refuse("plugstack.conf: the line of this plugin has an error; see slurmd's log");

	answer = first_answer(&fd);
	filter = member(answer, "filter");
	if (filter && *filter)
		listener = install(filter);
	free(filter);
	free(answer);
	describe(request, sizeof(request), job, gpus, shards);
	answer = ask(fd, request, listener);
	if (!answer || !agreed(answer))
		pass_on(answer);
	if (listener >= 0)
		close(listener);
	close(fd);

	plane = member(answer, "plane");
	if (plane && !strcmp(plane, "sim")) { /* a program on a simulated GPU asks the daemon */
		*strrchr(socket_path, '/') = 0;
		spank_setenv(spank, "QGPU_RUNTIME_DIR", socket_path, 1);
	}
	free(plane);
	variables = member(answer, "variables");
	for (line = variables ? strtok_r(variables, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
		char *value = strchr(line, '=');

		if (!value)
			continue;
		*value++ = 0;
		if (spank_setenv(spank, line, value, 1) != ESPANK_SUCCESS)
			refuse("job %u: %s cannot be set", job, line);
	}
	free(variables);
	free(answer);
	return 0;
}

/* Tell whether a task ends by itself, most likely for the same reason; slurmstepd reaps it later. */
static bool ends(pid_t task)
{
	siginfo_t found = { 0 };

	for (int i = 0; i < GRACE_US / BETWEEN_US && !found.si_pid; i++) {
		usleep(BETWEEN_US);
		if (waitid(P_PID, task, &found, WEXITED | WNOHANG | WNOWAIT))
			return true;
	}
	return found.si_pid;
}

/* slurmstepd, once all tasks are forked. A task that it cannot do this for is ended before it starts its program. */
int slurm_spank_task_post_fork(spank_t spank, int count, char **arguments)
{
	static bool done, failed;
	char gpus[MOST_GPUS], *answer, *filter;
	uint32_t job;
	pid_t task;
	int fd;

	(void)count;
	(void)arguments;
	if (done)
		return 0;
	in_slurmstepd = true;
	if (failed || setjmp(way_out)) {
		failed = true;
		if (spank_get_item(spank, S_TASK_PID, &task) == ESPANK_SUCCESS && task > 1 && !ends(task)) {
			slurm_error("qgpu: %s", why);
			kill(task, SIGKILL);
		}
		return 0;
	}
	if (!has_gpus(spank, &job, gpus))
		return 0;
	if (getpid() != slurmstepd)
		refuse("job %u: SlurmdParameters=contain_spank cannot be used with GPUs of qgpu", job);
	answer = first_answer(&fd);
	filter = member(answer, "filter");
	if (filter && *filter)
		deny(filter);
	close(fd);
	free(filter);
	free(answer);
	done = true;
	return 0;
}
