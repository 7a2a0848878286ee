#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Install Debian packages that tests use, as root: install_tools.sh PACKAGE...
# The machine's services and its browser stay as they were: what the packages would start is not started, what they
# enable is disabled again, and a browser of theirs is not registered as the machine's.
set -eu

units() { find /etc/systemd -type l 2>/dev/null | sort; }
scripts() { find /etc/rc[2-5].d -name 'S*' -printf '%f\n' 2>/dev/null | sed 's/^S..//' | sort -u; }
browsers() { for name in x-www-browser gnome-www-browser; do
	update-alternatives --list "$name" 2>/dev/null | sed "s,^,$name ,"; done | sort; }
added() { comm -13 "$work/$1" - ; }

work=$(mktemp -d)
policy=/usr/sbin/policy-rc.d
[ -e "$policy" ] && ours= || ours=$policy
trap 'rm -rf "$work" $ours' EXIT
for each in units scripts browsers; do "$each" >"$work/$each"; done
[ -z "$ours" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"; }

apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"

units | added units | while read -r link; do
	rm "$link"
	rmdir --ignore-fail-on-non-empty "${link%/*}"
done
scripts | added scripts | while read -r name; do update-rc.d "$name" disable; done
browsers | added browsers | while read -r name path; do update-alternatives --quiet --remove "$name" "$path"; done
[ ! -d /run/systemd/system ] || systemctl daemon-reload
