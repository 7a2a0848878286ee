// SPDX-License-Identifier: GPL-2.0-only
/* The administrator's settings in plugstack.conf, and the user's options; empty: qgpud's default. */
#ifndef QGPU_SETTINGS_H
#define QGPU_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/un.h>

#include <slurm/spank.h>

#define MOST_TEXT 64

extern char socket_path[sizeof(((struct sockaddr_un *)0)->sun_path)];
extern char per_card[MOST_TEXT], pod_class[MOST_TEXT], max_memory[MOST_TEXT], drain[MOST_TEXT];
/* The user's option: it can only lower the limit. */
extern char memory[MOST_TEXT];
extern struct spank_option memory_option;

/* Copy a text of letters, digits, dots and commas, which needs no escapes in JSON; false for any other text. */
bool take(char *into, size_t size, const char *text);

/* Read the arguments of the plugin's line; -1 if there is an error, which is logged. */
int set_up(int count, char **arguments);

#endif
