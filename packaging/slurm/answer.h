// SPDX-License-Identifier: GPL-2.0-only
/* Reads qgpud's answers: objects of strings, numbers and words, in JSON. */
#ifndef QGPU_ANSWER_H
#define QGPU_ANSWER_H

#include <stdbool.h>

/*
 * Return a member of an answer as a new string; NULL if there is none. An invalid answer ends the task.
 */
char *member(const char *answer, const char *wanted);

bool agreed(const char *answer);

#endif
