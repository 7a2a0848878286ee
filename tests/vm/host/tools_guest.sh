#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# What tests install leaves a machine's services and its browser as they were; in a container of distributions_lane.py.
set -u
state() {
	systemctl list-unit-files --state=enabled --no-legend --plain
	systemctl list-units --type=service,socket,timer --state=active --no-legend --plain | cut -d' ' -f1 | grep -v '^command'
	readlink -f /etc/alternatives/x-www-browser
}
state >/run/before
sh /run/share/install_tools.sh prometheus podman crun chromium || exit 1
for tool in prometheus podman crun chromium; do command -v "$tool" || exit 1; done
systemctl daemon-reload
state >/run/after
diff /run/before /run/after && echo '{"failed": []}' >/run/share/found.json
