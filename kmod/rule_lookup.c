// SPDX-License-Identifier: GPL-2.0
/*
 * rule_lookup.c - finds the row of a control, class, escape or engine in rules.h, the table that the module shares
 * with the guardian. control.c, alloc.c and escape.c act on the row; they look up calls of pods only.
 */
#include <linux/bsearch.h>
#include <linux/kernel.h>

#include "rule_lookup.h"
#include "rules.h"

/* Every row begins with its number. */
static int compare(const void *key, const void *row)
{
	u32 number = *(const u32 *)key, other = *(const u32 *)row;

	return number < other ? -1 : number > other;
}

#define LOOK_UP(rules, number)	bsearch(&(number), rules, ARRAY_SIZE(rules), sizeof(*(rules)), compare)

const struct qgpu_control_rule *qgpu_control_rule(u32 cmd)
{
	return LOOK_UP(control_rules, cmd);
}

const struct qgpu_class_rule *qgpu_class_rule(u32 class)
{
	return LOOK_UP(class_rules, class);
}

enum qgpu_escape_refusal qgpu_escape_refusal(u32 nr)
{
	const struct qgpu_escape_rule *rule = LOOK_UP(escape_rules, nr);

	return rule ? rule->refusal : QGPU_NOT_REFUSED;
}

bool qgpu_engine_allowed(u32 engine)
{
	return engine / 32 < ARRAY_SIZE(engine_bits) && engine_bits[engine / 32] >> engine % 32 & 1;
}
