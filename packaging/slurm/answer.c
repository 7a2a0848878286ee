// SPDX-License-Identifier: GPL-2.0-only
#define _GNU_SOURCE
#include "answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "refusal.h"
#include "settings.h"

static const char *skip(const char *at)
{
	return at + strspn(at, " \t\r\n");
}

/* Read a JSON string into a new string; NULL if it is not a JSON string. */
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

char *member(const char *answer, const char *wanted)
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

bool agreed(const char *answer)
{
	char *ok = member(answer, "ok");
	bool yes = ok && !strcmp(ok, "true");

	free(ok);
	return yes;
}
