// SPDX-License-Identifier: GPL-2.0-only
/*
 * SPANK plugin: makes a Slurm job that was given GPUs or shards a qgpu pod, before its program starts.
 *
 * Each task does it to itself, as root, between fork and exec: it tells qgpud what Slurm gave the step, and on plane
 * seccomp installs the pods' filter. qgpud decides; this plugin turns facts into one request. A task that is refused,
 * or gets no answer, does not start, even if plugstack.conf calls the plugin optional. No plugin runs for programs that
 * slurmstepd itself starts after a task (--task-epilog): on plane seccomp their calls that the filter watches fail.
 *
 * The facts come from slurmstepd: it sets these variables from the job's credential, and removes a user's own, before
 * it calls any plugin (gres_g_step_set_env, gres_g_job_set_env). Slurm's gres plugins do that. Where they are not
 * loaded, users could set the variables, so this plugin ignores them.
 */
#define _GNU_SOURCE
#include <link.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* Symbols that Slurm looks up. All others are hidden, because slurmstepd may have the same names. */
#pragma GCC visibility push(default)
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(qgpu, 1);
#pragma GCC visibility pop

#include "answer.h"
#include "filter.h"
#include "qgpud.h"
#include "refusal.h"
#include "settings.h"

/* How long a refused task may take to end, and how often slurmstepd checks it. */
#define GRACE_US 2000000
#define BETWEEN_US 25000

#define MOST_GPUS 1024

/* Whether plugstack.conf was valid. If the plugin failed at its start, Slurm would go on without an optional plugin. */
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

/* Write the request to qgpud; a missing fact is null. */
static void describe(char *into, size_t size, uint32_t job, uid_t user, const char *gpus, const char *shards)
{
	const struct {
		const char *name, *value;
	} facts[] = {
		{ "gpus", gpus },   { "shards", shards },         { "per_card", per_card },
		{ "class", pod_class }, { "max_memory", max_memory }, { "memory", memory },
	};
	size_t at = snprintf(into, size, "{\"op\":\"slurm.bind\",\"job\":%u,\"uid\":%u", job, user);

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
	/* Slurm does not call slurm_spank_init here; if the line has an error, tasks are refused */
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
	if (!loaded("gres_gpu.so")) /* Slurm has no GPUs on this node */
		return false;
	bool whole_job = step == SLURM_BATCH_SCRIPT || step == SLURM_INTERACTIVE_STEP;
	return variable(spank, whole_job ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS", gpus, MOST_GPUS);
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
	char shards[MOST_TEXT] = "", gpus[MOST_GPUS] = "", request[2048];
	char *answer, *filter, *plane, *variables, *rest, *line;
	uint32_t job;
	uid_t user;
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
	if (spank_get_item(spank, S_JOB_UID, &user) != ESPANK_SUCCESS)
		refuse("Slurm does not say whose job %u is", job);

	answer = first_answer(&fd);
	filter = member(answer, "filter");
	if (filter && *filter)
		listener = install(filter);
	free(filter);
	free(answer);
	describe(request, sizeof(request), job, user, gpus, shards);
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

/* Return whether a task ends by itself, most likely for the same reason; slurmstepd reaps it later. */
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

/* Runs in slurmstepd once all tasks are forked. If it fails for a task, that task ends before its program starts. */
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
