// SPDX-License-Identifier: GPL-2.0-only
#include "settings.h"

#include <string.h>

#define DEFAULT_SOCKET "/run/qgpu/root.sock"

char socket_path[sizeof(((struct sockaddr_un *)0)->sun_path)] = DEFAULT_SOCKET;
char per_card[MOST_TEXT], pod_class[MOST_TEXT], max_memory[MOST_TEXT], drain[MOST_TEXT];
char memory[MOST_TEXT];

bool take(char *into, size_t size, const char *text)
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

struct spank_option memory_option = {
	.name = "qgpu-memory",
	.arginfo = "SIZE",
	.usage = "limit of video memory on each GPU, such as 16GiB; it only lowers what the shards bring",
	.has_arg = 1,
	.cb = take_memory,
};

int set_up(int count, char **arguments)
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
